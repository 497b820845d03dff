"""V-IPU: who owns which IPUs of the POD, and in what state they are.

Only V-IPU's own things may enter: the inventory, the allocator's decisions, their store, the gRPC service and its
client, the start and end of machines, and the commands ``vipu``, ``vipu-admin`` and ``vipu-server``. Requests go from
`client` through `service` to `allocator` (pure: events in, decisions out), then to `store` and on to machines
(`machine_pool`, as Ray actors `ray_pool`); launcher and monitor read the answers.

Importing this package or its command modules imports neither gRPC nor Ray; they are imported when first used.
"""
