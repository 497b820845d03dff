"""The ``podrun`` command: options -> launch spec -> placement -> instances -> output -> exit code.

In the order data flow: ``option_table`` (every option, once), ``options`` (the command line's grammar),
``config`` (options from and to a file), ``hosts``, ``mpi_args`` (what mpirun's arguments mean here), ``spec``
(plain values), ``plan`` (validation and placement), ``environment`` (what instances find in theirs),
``topology`` (the table), ``partition`` (finds or starts the service, gets the partition ready), ``process``
(child processes of one host), ``remote`` (the same on other Ray nodes), ``output`` (tags, whole lines),
``supervise`` (the first failure, signals, the end), ``summary``, ``cli`` (`main`).

Everything up to ``topology`` is pure: values in, values out, nothing started. ``--dry-run`` ends there.
Importing ``podrun.launcher.cli`` imports neither Ray, gRPC, JAX nor pydantic.
"""
