"""V-IPU: who owns which IPUs of the POD, and in what state they are.

In the order data flow: ``types`` (values everyone passes), ``allocator`` (pure state machine: events in,
instructions out), ``store`` (SQLite), ``machine_pool`` (starts and stops machines) and ``ray_pool`` (as Ray actors, on
``ray_session`` or the cluster at a ``ray_address``; ``guardian`` ends what a killed process leaves),
``service`` (does what the allocator says, answers gRPC), ``client``, ``discovery`` (where services run on
this host), and the commands ``cli_user`` (`vipu`), ``cli_admin`` (`vipu-admin`) and ``cli_server``
(`vipu-server`).

Importing this package or its command modules imports neither gRPC nor Ray; they are imported when first used.
"""
