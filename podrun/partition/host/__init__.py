"""The service's host: processes that run and end, entries in the runtime directory, files in the user's home.

Only what looks at this host or cleans up on it may enter; nothing here knows which partitions there are.
"""
