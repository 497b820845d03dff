"""From options to a `LaunchSpec`: PopRun's validation rules and placement. Pure; the environment and the host are
passed in.

Every refusal says which numbers clash and what to type instead.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.environment import (
    GCDA_OPTIONS,
    IPUOF_VIPU_API_PARTITION_ID,
    PODRUN_FAULTS,
    PODRUN_MACHINES_PER_PROCESS,
    PODRUN_TENSORFLOW,
)
from podrun.core.errors import UsageError
from podrun.launcher.mpi_arguments import MpiArguments, parse_instance_arguments, parse_mpi_arguments
from podrun.launcher.option_table import BY_NAME, OPTIONS, ValueKind
from podrun.launcher.options import values_in_effect
from podrun.launcher.placement import plan_layout
from podrun.launcher.program import LaunchContext, interpreter_warning, resolve_program
from podrun.launcher.spec import (
    InstanceSpec,
    LaunchLayout,
    LaunchSpec,
    OutputSpec,
    PartitionSpec,
    ServerSpec,
    own_target_options,
)

if TYPE_CHECKING:
    from podrun.faults import FaultSpec
    from podrun.launcher.recovery import RestartPolicy

_OURS = re.compile("num-|ipus-per|vipu-|mpi-|only-output|print-topology|fault$|offline-mode|.*-partition$")
"""Options whose names programs rarely use themselves. After the program they cause a warning."""


def plan_launch(options: Mapping[str, Any], program: tuple[str, ...], context: LaunchContext) -> LaunchSpec:
    """The launch that options and program describe. Raises UsageError for invalid values.

    `fit_to_pod` checks what depends on the POD (its size, IPU-Link domains), once the POD is known.
    """
    values = values_in_effect(options)
    layout = plan_layout(values)
    offline = values["offline-mode"]
    everywhere = parse_mpi_arguments(values["mpi-global-args"], "--mpi-global-args")
    local = parse_mpi_arguments(values["mpi-local-args"], "--mpi-local-args")
    single = parse_instance_arguments(values["instance-mpi-local-args"], layout.instances)
    chosen = {PODRUN_TENSORFLOW: values["tensorflow"]} if values["tensorflow"] else {}
    for_all = [MpiArguments(chosen), everywhere, local]
    command = resolve_program(program, context, layout)
    only = values["only-output-from-instance"]
    if only is not None and only >= layout.instances:
        raise UsageError(
            f"--only-output-from-instance is {only}; there are {layout.instances} instances",
            hint=f"Instances are numbered 0 to {layout.instances - 1}.",
        )
    if offline and (values["fault"] or values["fault-plan"]):
        raise UsageError("--fault needs IPUs, and --offline-mode has none", hint="Leave one of them out.")
    _check_placement_options(values)
    return LaunchSpec(
        layout=layout,
        instances=tuple(
            _instance(layout, i, command, context, [*for_all, single.get(i, MpiArguments())])
            for i in range(layout.instances)
        ),
        server=_server(values, context),
        partition=None if offline else _partition(values, layout, context),
        output=OutputSpec(only, everywhere.output_directory or local.output_directory),
        cache_path=_cache_directory(values["executable-cache-path"], context),
        print_topology=values["print-topology"] or values["verbose"] >= 2,
        verbosity=-1 if values["quiet"] else values["verbose"],
        debug=values["debug"],
        host_subnet=values["host-subnet"],
        restarts=_restarts(values, context),
        check_replicas=values["check-replicas"] or 0,
        record=values["record"] and str(Path(context.directory, values["record"])),
        warnings=tuple(_warnings(options, [everywhere, local, *single.values()], context, command)),
    )


def _instance(
    layout: LaunchLayout,
    index: int,
    command: tuple[str, ...],
    context: LaunchContext,
    arguments: list[MpiArguments],
) -> InstanceSpec:
    exports: dict[str, str | None] = {}
    directory = context.directory
    for part in arguments:
        exports.update(part.exports)
        if part.working_directory:
            directory = os.path.join(directory, part.working_directory)
    return InstanceSpec(
        index=index,
        host=layout.host_of(index),
        local_index=layout.local_index(index),
        first_replica=index * layout.replicas_per_instance,
        replicas=layout.replicas_per_instance,
        ild=layout.ild_of(index),
        gcd=0,
        command=command,
        directory=directory,
        exports=exports,
        forward_stdin=index == 0,
    )


def _server(values: Mapping[str, Any], context: LaunchContext) -> ServerSpec:
    if values["ray-address"] is not None or context.environ.get(PODRUN_MACHINES_PER_PROCESS):
        from podrun.partition.machines.ray_starts import check_form, own_machines_per_process

        # Wrong ones are refused before anything starts.
        own_machines_per_process(context.environ)
        if values["ray-address"] is not None:
            check_form(values["ray-address"])
    if values["private"] and values["vipu-server-host"] is not None:
        raise UsageError(
            "--private starts a V-IPU server for this run, and --vipu-server-host names one",
            hint="Leave out one of them.",
        )
    return ServerSpec(
        host=values["vipu-server-host"],
        port=values["vipu-server-port"],
        timeout=values["vipu-server-timeout"],
        cluster=values["cluster"],
        ray=values["ray-address"],
        private=values["private"],
    )


def _partition(values: Mapping[str, Any], layout: LaunchLayout, context: LaunchContext) -> PartitionSpec:
    from podrun.partition.state.values import check_name, parse_sync_type

    name = values["vipu-partition"] or context.environ.get(IPUOF_VIPU_API_PARTITION_ID) or None
    if name is not None:
        check_name(name, "a partition")
    own_target_options(context.environ)
    if values["sync-type"] is not None:
        parse_sync_type(values["sync-type"])
    return PartitionSpec(
        size=layout.ipus,
        num_gcds=1,
        name=name,
        allocation=values["vipu-allocation"],
        num_ilds=values["num-ilds"],
        sync_type=values["sync-type"],
        attempts=values["vipu-partition-attempts"],
        wait=values["wait"],
        update=values["update-partition"],
        reset=values["reset-partition"],
        remove=values["remove-partition"],
        faults=_faults(values, context, layout),
    )


def _restarts(values: Mapping[str, Any], context: LaunchContext) -> RestartPolicy | None:
    """The restart policy; None if instances that fail are not started again."""
    path, most = values["restart-policy"], values["max-restarts"]
    if path is None and not most:
        return None
    from podrun.launcher.recovery import RestartPolicy, read_policy

    policy = RestartPolicy() if path is None else read_policy(Path(context.directory, path))
    return policy if most is None else dataclasses.replace(policy, max_restarts=most)


def _faults(values: Mapping[str, Any], context: LaunchContext, layout: LaunchLayout) -> tuple[FaultSpec, ...]:
    """The faults of ``PODRUN_FAULTS``, ``--fault`` and ``--fault-plan``; `fit_to_pod` checks those of links."""
    texts, path, environ = values["fault"], values["fault-plan"], context.environ
    if (
        not texts
        and not path
        and not environ.get(PODRUN_FAULTS)
        and "SOCError" not in environ.get(GCDA_OPTIONS, "")
    ):
        return ()
    from podrun.faults import FaultTarget, parse_fault, parse_faults, simulated_soc_errors, validate

    specs = (*parse_faults(environ.get(PODRUN_FAULTS, "")), *map(parse_fault, texts))
    specs += simulated_soc_errors(environ)
    if path:
        specs += _plan_or_record(Path(context.directory, path))
    twice = next((spec for number, spec in enumerate(specs) if spec in specs[:number]), None)
    if twice is not None:
        raise UsageError(
            f"fault {twice.text} is planned twice", hint="Keep one, or say how often: ...,repeat=2:KIND"
        )
    links = (FaultTarget.LINK, FaultTarget.GW_LINK)
    validate([s for s in specs if s.target not in links], ipus=layout.ipus, instances=layout.instances)
    return tuple(dataclasses.replace(spec, relative=False) for spec in specs)


def begins_with(path: Path, data: bytes) -> bool:
    """True iff a regular file begins with some bytes."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(data)) == data
    except OSError:
        return False


def _plan_or_record(path: Path) -> tuple[FaultSpec, ...]:
    """The faults of a plan, or of a record (``podrun --record``) those that struck in its launch."""
    from podrun.faults import read_plan
    from podrun.record.events import FIRST_BYTES, read_record, struck_faults

    if begins_with(path, FIRST_BYTES):
        return tuple(struck_faults(read_record(path).events))
    return read_plan(path)


def _check_placement_options(values: Mapping[str, Any]) -> None:
    placement, subnet = values["process-placement"], values["host-subnet"]
    if placement != "disabled":
        raise UsageError(
            f"--process-placement={placement} is not available: podrun leaves placement to the operating system",
            hint="Type --process-placement=disabled, or leave it out.",
        )
    if subnet is not None:
        try:
            ipaddress.ip_network(subnet, strict=False)
        except ValueError:
            raise UsageError(
                f"--host-subnet {subnet} is not a network", hint="As in --host-subnet 10.1.0.0/16"
            ) from None


def _warnings(
    options: Mapping[str, Any],
    arguments: list[MpiArguments],
    context: LaunchContext,
    command: tuple[str, ...],
) -> list[str]:
    warnings = [
        f"--{option.name} has no effect: {option.ignored}"
        for option in OPTIONS
        if option.ignored and options.get(option.name) and option.kind is ValueKind.BOOLEAN
    ]
    words = sorted({word for part in arguments for word in part.without_effect})
    if words:
        warnings.append(
            f"options of mpirun without effect here: {', '.join(words)} (podrun does not use mpirun)"
        )
    if options.get("vipu-cluster"):
        warnings.append(
            "--vipu-cluster is deprecated: use --vipu-allocation (or --cluster for the POD to emulate)"
        )
    unset = sorted(
        {v for a in arguments for v, value in a.exports.items() if value is None} - set(context.environ)
    )
    if unset:
        warnings.append(f"-x names variables that are not set: {', '.join(unset)}")
    return warnings + _misplaced(options, command) + interpreter_warning(command, context)


def _misplaced(options: Mapping[str, Any], command: tuple[str, ...]) -> list[str]:
    """Warn of options of podrun that stand after the program and therefore go to the program."""
    names = {word.removeprefix("--").partition("=")[0] for word in command[1:] if word.startswith("--")}
    ours = [f"--{name}" for name in sorted(names - options.keys()) if name in BY_NAME and _OURS.match(name)]
    if not ours:
        return []
    verb = "is an argument" if len(ours) == 1 else "are arguments"
    return [f"{', '.join(ours)} after the program {verb} of the program: podrun's options come before it"]


def _cache_directory(folder: str | None, context: LaunchContext) -> str | None:
    """The absolute path of the executable cache. Raises UsageError if no directory can exist there."""
    if not folder:
        return None
    path = Path(context.directory, folder)
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not there.is_dir():
        raise UsageError(
            f"--executable-cache-path {folder}: {there} is not a directory",
            hint="Name a directory, or leave it out.",
        )
    return str(path)
