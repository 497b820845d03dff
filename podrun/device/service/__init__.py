"""A machine as a service: its process, its gRPC server, and its session with each host process.

Requests of host processes, of the partition service and of other machines enter through `servicer`, as messages that
`wire` checks. A `host_session` answers one process, also over a `doorbell` in shared memory that came by `handover`.
Requests go on to `podrun.device.machine`, and results return the same way; `server` is the process, and `control` is
the partition service's client.
"""
