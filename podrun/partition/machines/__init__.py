"""Machines of partitions: processes that are started, configured, watched, reset and ended.

Only what acts on machines may enter: the pools (in this process, as Ray actors), the private Ray and its keeper, and
the operations that the service carries out on them. Ray is imported when the first machine starts.
"""
