"""The host process's side of its machines.

`client` is a `podrun.device.connection.Connection`: one host process's part of a job, cut up by `split`, over one of
the `ports` to each machine. `remote` is such a port over gRPC and shared memory, `twin` one to a machine inside the
same process. `partition_config` reads where the machines of a partition are.
"""
