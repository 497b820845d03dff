"""What happened in a launch: recorded as events in causal order, compared, replayed, shrunk, reported as incidents.

Processes write events (`recorder`), which become one record and its file (`events`). `compare` finds the first
difference of two records and the smallest failing plan; `incidents` and `goodput` explain a record. Only plain data
enter, and nothing here starts a launch: `podrun.launcher.recording` does that, and prints the results.
"""
