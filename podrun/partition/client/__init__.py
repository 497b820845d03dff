"""The V-IPU service as Python calls, for commands, launcher and monitor: `vipu_client.VipuClient`.

Only what asks the service, or shows its answers as the real tools do, may enter. gRPC is imported with
the first client.
"""
