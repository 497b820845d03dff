"""The V-IPU service: takes requests, lets the state decide, stores it, orders machines, and answers over gRPC.

Only what answers callers or serves those answers may enter.
"""
