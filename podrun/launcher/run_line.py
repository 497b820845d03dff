"""Carries out a command line of ``podrun`` without a verb: help, version, or a launch.

Start-up stays fast: modules that talk to servers or start processes are imported when they are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.environment import PODRUN_FAULTS
from podrun.launcher.options import CommandLine, values_in_effect
from podrun.launcher.own_streams import Log

if TYPE_CHECKING:
    from podrun.launcher.spec import LaunchSpec

MACHINES_ELSEWHERE = ("dry-run", "host", "hostfile", "offline-mode", "ray-address", "vipu-server-host")
"""Options of launches that start no machines in processes of their own."""


def run_command_line(line: CommandLine, environ: Mapping[str, str]) -> int:
    """Carry out a command line. Raises PodrunError."""
    if line.options.get("help"):
        from podrun.launcher.help_text import help_text

        sys.stdout.write(help_text())
        return 0
    if line.options.get("version") or "version-format" in line.options:
        from podrun.launcher.help_text import version_text

        sys.stdout.write(version_text(line.options.get("version-format", "text")))
        return 0
    options = _configured(line)
    if not line.program or any(options.get(name) for name in MACHINES_ELSEWHERE):
        return _launch(options, line.program, environ)
    from podrun.partition.machines.ray_template import early_template

    with early_template(environ, options.get("vipu-server-port")):  # It imports while this process does.
        return _launch(options, line.program, environ)


def _configured(line: CommandLine) -> Mapping[str, Any]:
    """The given options over those of --import-config, written to a file if --export-config asks for it."""
    if not {"import-config", "export-config"} & line.options.keys():
        return line.options
    from podrun.launcher.config_file import current_directory, merge_config, write_options_file

    here = Path(current_directory())
    options = merge_config(line.options, here)
    if path := options.get("export-config"):
        overwrite = bool(options.get("overwrite-config", False))
        write_options_file(here / path, values_in_effect(options), overwrite=overwrite)
    return options


def _launch(options: Mapping[str, Any], program: tuple[str, ...], environ: Mapping[str, str]) -> int:
    from podrun.launcher.config_file import current_directory
    from podrun.launcher.plan import plan_launch
    from podrun.launcher.program import LaunchContext

    if not program and options.get("export-config"):
        return 0
    spec = plan_launch(options, program, LaunchContext(environ, current_directory(), sys.executable))
    if options.get("dry-run"):
        from podrun.launcher.dry_run import preview

        for warning in spec.warnings:
            Log(spec.verbosity).warning(warning)
        sys.stdout.write(preview(spec, environ))
        return 0
    from podrun.launcher.launch import launch

    if spec.record or spec.restarts or (spec.partition is not None and spec.partition.faults):
        from podrun.launcher.recording import with_header

        spec = with_header(spec, options, program, current_directory())

    def with_replicas(replicas: int) -> LaunchSpec:
        instances = gcd(replicas, spec.layout.instances)
        fewer = {
            **options,
            "num-replicas": replicas,
            "num-instances": instances,
            "fault": (),
            "fault-plan": None,
        }
        bare = {name: value for name, value in environ.items() if name != PODRUN_FAULTS}
        return plan_launch(fewer, program, LaunchContext(bare, current_directory(), sys.executable))

    return launch(spec, environ, with_replicas)
