"""The ``podrun`` command: starts the instances of a program on a partition and ends with their exit code.

Command lines, configuration files and environments enter. They become a `spec.LaunchSpec` without starting anything
(``option_table``, ``options``, ``config``, ``hosts``, ``mpi_args``, ``plan``, ``environment``, ``preview``: pure, and
``--dry-run`` ends there); then ``launch`` gets a partition ready (``server``, ``partition``), starts child processes
here (``process``) and on other Ray nodes (``remote``), and supervises them (``supervise``, ``output``, ``stopping``,
``residue``). What instances print goes to the terminal, machine reports to ``summary``.

``cli.main`` is the entry point. Importing ``podrun.launcher.cli`` imports neither Ray, gRPC, JAX nor pydantic.
"""
