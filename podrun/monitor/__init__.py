"""Looking at IPUs: `gc-monitor`, `gc-info`, `gc-inventory`, `gc-reset`, test tools, `gcipuinfo`, Prometheus exporter.

What enters reads the reports of the V-IPU service and its machines (`podrun.core.telemetry`), or runs a test program on
IPUs it attaches; only `gc-reset` changes IPUs. Data go from the server through ``devices`` (which partition, which
values), then to tables, JSON or metrics for people and programs.

The commands start fast: they import neither JAX, NumPy nor Ray at start-up, and gRPC only to talk to the server.
"""
