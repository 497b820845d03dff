"""The host process's side: a connection over ports, one for each machine that holds IPUs of the process.

Calls of `podrun.device.connection.Connection` enter `client`, which gives each machine its part. `ports` passes them
to in-process machines and `remote` over gRPC to a machine's service; `partition_config` asks the partition service
where the machines are.
"""
