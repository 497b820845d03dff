"""Looking at IPUs: `gc-monitor`, `gc-info`, `gc-inventory`, `gc-reset`, test tools, `gcipuinfo`, Prometheus exporter.

Tools may enter that read the reports of the V-IPU service and its machines (`podrun.core.telemetry`), or that run a
test program on IPUs which they attach; only `gc-reset` changes IPUs. Data go from the server through `devices` (which
partition, which values), then to tables, JSON or metrics for people and programs.

The commands start fast: they import neither JAX, NumPy nor Ray at start-up, and gRPC only to talk to the server.
"""
