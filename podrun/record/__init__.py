"""What happened in a launch: recorded as events in causal order, compared, replayed, shrunk, told as incidents.

`events` is the record, its file, and how those of several processes become one; `recorder` what a process writes down;
`compare` finds the first difference and the smallest failing plan; `incidents` and `goodput` say what it meant.
"""
