"""A machine as a service: its process, its gRPC server, and its session with each host process.

Requests of host processes, of the partition service and of other machines enter through `servicer`, over messages
that `wire` checks, or through a `doorbell` in shared memory, which `handover` passes on. They go on to
`podrun.device.machine`, and results return the same way; `control` is the partition service's client.
"""
