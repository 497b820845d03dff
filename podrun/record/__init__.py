"""What happened in a launch: recorded as events in causal order, compared, replayed, shrunk, told as incidents.

`events` is the record and its file, `recorder` what a process writes down, `merge` brings processes together, `compare`
finds the first difference, `shrinking` the smallest failing plan, `incidents` and `goodput` say what it meant.
"""
