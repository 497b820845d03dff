"""Who owns which IPUs: values, events, decisions, and the file that keeps them.

What decides is pure: events in, changes and instructions out, no clock, thread or machine. The store writes a change
before it takes effect anywhere. Nothing here knows gRPC or how machines run.
"""
