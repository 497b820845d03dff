"""The V-IPU service as Python calls, for commands, launcher and monitor. gRPC is imported with the first client."""
