"""Logs of jobs: read, counted and refused by file and line. `reading.read_trace` knows the formats."""
