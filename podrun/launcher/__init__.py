"""The ``podrun`` command: starts the instances of a program on a partition and ends with their exit code.

Command lines, configuration files and environments enter. `options` (the grammar over `option_table`), `config_file`,
`mpi_arguments`, `host_names`, `program` and `placement` are pure, and `plan` makes a `spec.LaunchSpec` of them;
``--dry-run`` ends there. Then `launch` gets a partition ready (`server`, `partition`), starts child processes on this
host (`process`) and on other Ray nodes (`remote`), supervises them (`supervise`), writes what they print (`output`) and
decides what follows a failure (`recovery`, `repair`). What instances print goes to the terminal, the machines' reports
to `summary`, events to `recording`. `commands` has the verbs, one a file.

`cli.main` is the entry point. Importing `podrun.launcher.cli` imports neither Ray, gRPC, JAX nor pydantic.
"""
