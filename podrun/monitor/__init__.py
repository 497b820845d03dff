"""Looking at IPUs: `gc-monitor`, `gc-info`, `gc-inventory`, `gc-reset`, and the `gcipuinfo` module.

These tools read what the partition service and its machines report (`podrun.telemetry`) and change nothing,
except for `gc-reset`. They start fast: neither JAX, NumPy nor Ray is imported, and gRPC only to talk to the
server.
"""
