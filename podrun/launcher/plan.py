"""From options to a `LaunchSpec`: PopRun's validation rules and placement. Pure; the environment and the host are
passed in.

Every refusal says which numbers clash and what to type instead.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.errors import NotFoundError, UsageError
from podrun.core.shadowing import check_script_name
from podrun.launcher.config import MpiArguments, parse_instance_arguments, parse_mpi_arguments
from podrun.launcher.option_table import BY_NAME, OPTIONS, ValueKind
from podrun.launcher.options import settle
from podrun.launcher.remote import LOCAL_HOST, parse_hosts, read_hostfile
from podrun.launcher.spec import (
    InstanceSpec,
    LaunchLayout,
    LaunchSpec,
    OutputSpec,
    PartitionSpec,
    PodFacts,
    ServerSpec,
)
from podrun.partition.machines.ray_starts import check_form

if TYPE_CHECKING:
    from podrun.faults import FaultSpec
    from podrun.launcher.recovery import RestartPolicy

MAX_IPUS_PER_INSTANCE = 64
"""The most IPUs that one process drives: those of an IPU-POD64."""
_OURS = re.compile("num-|ipus-per|vipu-|mpi-|only-output|print-topology|fault$|offline-mode|.*-partition$")
"""Options whose names programs rarely use themselves. After the program they cause a warning."""


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchContext:
    """What planning reads apart from options: the environment, the working directory, the interpreter for .py files."""

    environ: Mapping[str, str]
    directory: str
    python: str


def plan_launch(given: Mapping[str, Any], program: tuple[str, ...], context: LaunchContext) -> LaunchSpec:
    """The launch that options and program describe. Raises UsageError for invalid values.

    `fit_to_pod` checks what depends on the POD (its size, IPU-Link domains), once the POD is known.
    """
    values = settle(given)
    layout = plan_layout(values)
    offline = values["offline-mode"]
    everywhere = parse_mpi_arguments(values["mpi-global-args"], "--mpi-global-args")
    local = parse_mpi_arguments(values["mpi-local-args"], "--mpi-local-args")
    single = parse_instance_arguments(values["instance-mpi-local-args"], layout.instances)
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
            _instance(layout, i, command, context, [everywhere, local, single.get(i, MpiArguments())])
            for i in range(layout.instances)
        ),
        server=_server(values),
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
        warnings=tuple(_warnings(given, [everywhere, local, *single.values()], context, command)),
    )


def plan_layout(values: Mapping[str, Any]) -> LaunchLayout:
    """Replicas over instances over hosts. Raises UsageError naming the numbers that do not divide."""
    replicas, instances = values["num-replicas"], values["num-instances"]
    if replicas % instances:
        fitting = _near([n for n in range(1, replicas + 1) if replicas % n == 0], instances)
        raise UsageError(
            f"{replicas} replicas cannot be divided evenly among {instances} instances",
            hint=f"Type --num-instances {' or '.join(map(str, fitting))}.",
        )
    hosts = _hosts(values)
    if instances % len(hosts):
        fitting = _near(
            [n for n in range(1, replicas + 1) if replicas % n == 0 and n % len(hosts) == 0], instances
        )
        choice = f"Type --num-instances {' or '.join(map(str, fitting))}." if fitting else "Name fewer hosts."
        raise UsageError(
            f"{instances} instances cannot be divided evenly among {len(hosts)} hosts", hint=choice
        )
    layout = LaunchLayout(replicas, values["ipus-per-replica"], instances, hosts, values["num-ilds"] or 1)
    if layout.instances % layout.ilds:
        raise UsageError(
            f"{instances} instances cannot be divided evenly among {layout.ilds} IPU-Link domains",
            hint=f"No instance spans IPU-Link domains: type --num-instances {layout.ilds} or a multiple.",
        )
    if not values["offline-mode"]:
        _check_size(layout)
    return layout


def _check_size(layout: LaunchLayout) -> None:
    size, each = layout.ipus, layout.ipus_per_replica
    if size & (size - 1):
        powers = [1 << bit for bit in range(22) if (1 << bit) % each == 0]
        fitting = _near([power // each for power in powers], layout.replicas)
        words = " or ".join(f"--num-replicas {n} ({n * each} IPUs)" for n in fitting)
        raise UsageError(
            f"{layout.replicas} replicas of {each} IPUs need {size} IPUs, and a partition has a power of two",
            hint=f"Type {words}." if fitting else "Make --ipus-per-replica a power of two.",
        )
    if layout.ipus_per_instance > MAX_IPUS_PER_INSTANCE:
        needed = size // MAX_IPUS_PER_INSTANCE
        raise UsageError(
            f"an instance would drive {layout.ipus_per_instance} IPUs; {MAX_IPUS_PER_INSTANCE} is the most",
            hint=f"Type --num-instances {max(needed, 1)} or more.",
        )


def fit_to_pod(
    spec: LaunchSpec, pod: PodFacts, pods: Callable[[], Mapping[str, int]] | None = None
) -> LaunchSpec:
    """The launch with its IPU-Link domains settled on this POD. ``pods``: IPUs of the PODs one could ask for
    instead.

    Raises UsageError if the POD is too small, its IPU-Link domains do not hold whole instances, or it lacks what a
    planned fault hits.
    """
    layout = spec.layout
    if layout.ipus > pod.ipus:
        larger = [name for name, ipus in (pods() if pods else {}).items() if ipus >= layout.ipus]
        raise UsageError(
            f"the run needs {layout.ipus} IPUs; {pod.name} has {pod.ipus}",
            hint=f"Type --cluster {larger[0]}, or fewer replicas." if larger else "Type fewer replicas.",
        )
    least = -(-layout.ipus // pod.ild_ipus)
    asked = spec.partition.num_ilds if spec.partition else None
    ilds = asked or least
    if ilds < least or ilds * pod.ild_ipus > pod.ipus:
        raise UsageError(
            f"{layout.ipus} IPUs do not lie on {ilds} IPU-Link domain{'s' if ilds > 1 else ''} of "
            f"{pod.name}, which has {pod.ipus // pod.ild_ipus} of {pod.ild_ipus} IPUs",
            hint=f"Type --num-ilds {least}, or leave it out.",
        )
    if layout.instances % ilds:
        raise UsageError(
            f"{layout.ipus} IPUs lie on {ilds} IPU-Link domains of {pod.ild_ipus}, which {layout.instances} "
            f"instance{'s' if layout.instances > 1 else ''} cannot share evenly",
            hint=f"No instance spans IPU-Link domains: type --num-instances {ilds} or a multiple.",
        )
    _check_faults(spec, pod, ilds)
    settled = dataclasses.replace(layout, ilds=ilds)
    # A GCD lies in one IPU-Link domain: with several there is one GCD for each instance, as PopRun makes them.
    several = ilds > 1
    instances = tuple(
        dataclasses.replace(i, ild=settled.ild_of(i.index), gcd=i.index if several else 0)
        for i in spec.instances
    )
    partition = spec.partition
    if partition is not None and several:
        partition = dataclasses.replace(partition, num_gcds=layout.instances)
    return dataclasses.replace(spec, layout=settled, instances=instances, partition=partition)


def resolve_program(
    program: tuple[str, ...], context: LaunchContext, layout: LaunchLayout
) -> tuple[str, ...]:
    """The words to execute: a .py file runs with podrun's interpreter. Raises UsageError, NotFoundError.

    A program is looked up here only if instances run on this host.
    """
    if not program:
        raise UsageError("no program to run", hint="Type podrun --num-replicas 16 train.py")
    name, rest = program[0], program[1:]
    if not name:
        raise UsageError("the program's name is empty", hint="Type podrun --num-replicas 16 train.py")
    if not name.endswith(".py"):
        if layout.hosts == (LOCAL_HOST,) and not _command_exists(name, context):
            if Path(context.directory, name).is_dir():
                raise UsageError(f"{name} is a directory", hint="Name the program or the script in it.")
            raise NotFoundError(f"there is no program {name}", hint=_program_hint(name, context))
        return program
    path = Path(context.directory, name)
    if layout.hosts == (LOCAL_HOST,):
        if path.is_dir():
            raise UsageError(f"{name} is a directory", hint="Name the script in it.")
        if not path.is_file():
            raise NotFoundError(f"there is no script {name} in {context.directory}", hint=_script_hint(path))
    check_script_name(Path(name))
    return (context.python, name, *rest)


def _command_exists(name: str, context: LaunchContext) -> bool:
    import shutil

    if os.sep in name:
        path = Path(context.directory, name)
        return path.is_file() and os.access(path, os.X_OK)
    return shutil.which(name, path=context.environ.get("PATH")) is not None


def _program_hint(name: str, context: LaunchContext) -> str:
    if Path(context.directory, name + ".py").is_file():
        return f"Did you mean {name}.py?"
    if Path(context.directory, name).is_file():
        called = name if os.sep in name else f"./{name}"
        return f"{name} is a file but no command: type {called} and make it executable (chmod +x {name})."
    if name.isalnum():
        return "Name a script or a command; podrun --help lists podrun's own commands."
    return "Options of podrun come before the program, its own arguments after it."


def _script_hint(path: Path) -> str:
    import difflib

    there = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, there, n=1)
    return f"Did you mean {close[0]}?" if close else "Check the path; it is relative to where podrun runs."


def _hosts(values: Mapping[str, Any]) -> tuple[str, ...]:
    if values["host"] and values["hostfile"]:
        raise UsageError("--host and --hostfile exclude each other", hint="Keep one of them.")
    if values["host"]:
        return parse_hosts(values["host"])
    if values["hostfile"]:
        return read_hostfile(Path(values["hostfile"]))
    return (LOCAL_HOST,)


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


def _server(values: Mapping[str, Any]) -> ServerSpec:
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
    from podrun.partition.state.requirements import check_name
    from podrun.partition.state.values import parse_sync_type

    name = values["vipu-partition"] or context.environ.get("IPUOF_VIPU_API_PARTITION_ID") or None
    if name is not None:
        check_name(name, "a partition")
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
        and not environ.get("PODRUN_FAULTS")
        and "SOCError" not in environ.get("GCDA_OPTIONS", "")
    ):
        return ()
    from podrun.faults import (
        VARIABLE,
        FaultTarget,
        parse_fault,
        parse_faults,
        simulated_soc_errors,
        validate,
    )

    specs = (*parse_faults(environ.get(VARIABLE, "")), *map(parse_fault, texts))
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
    from podrun.faults import parse_fault, read_plan
    from podrun.record.events import FIRST_BYTES, read_record

    if begins_with(path, FIRST_BYTES):
        struck = [str(event.data.get("fault")) for event in read_record(path).events if event.kind == "fault"]
        return tuple(parse_fault(text) for text in dict.fromkeys(struck))
    return read_plan(path)


def _check_faults(spec: LaunchSpec, pod: PodFacts, ilds: int) -> None:
    """Raise UsageError for a fault whose IPU, machine or IPU-Link the partition does not have."""
    if spec.partition is None or not spec.partition.faults:
        return
    from podrun.core.cluster import LinkTopology
    from podrun.faults import partition_links, validate

    ipus = spec.layout.ipus
    # An IPU-Link domain that the partition does not fill has no links between its ends.
    topology = LinkTopology(pod.topology) if ipus // ilds == pod.ild_ipus else LinkTopology.MESH
    validate(spec.partition.faults, ipus=ipus, links=partition_links(ipus, ilds, topology), ilds=ilds)


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
    given: Mapping[str, Any], arguments: list[MpiArguments], context: LaunchContext, command: tuple[str, ...]
) -> list[str]:
    warnings = [
        f"--{option.name} has no effect: {option.ignored}"
        for option in OPTIONS
        if option.ignored and given.get(option.name) and option.kind is ValueKind.BOOLEAN
    ]
    words = sorted({word for part in arguments for word in part.without_effect})
    if words:
        warnings.append(
            f"options of mpirun without effect here: {', '.join(words)} (podrun does not use mpirun)"
        )
    if given.get("vipu-cluster"):
        warnings.append(
            "--vipu-cluster is deprecated: use --vipu-allocation (or --cluster for the POD to emulate)"
        )
    unset = sorted(
        {v for a in arguments for v, value in a.exports.items() if value is None} - set(context.environ)
    )
    if unset:
        warnings.append(f"-x names variables that are not set: {', '.join(unset)}")
    return warnings + _misplaced(given, command) + _interpreter_warning(command, context)


def _misplaced(given: Mapping[str, Any], command: tuple[str, ...]) -> list[str]:
    """Warn of options of podrun that stand after the program and therefore go to the program."""
    names = {word.removeprefix("--").partition("=")[0] for word in command[1:] if word.startswith("--")}
    ours = [f"--{name}" for name in sorted(names - given.keys()) if name in BY_NAME and _OURS.match(name)]
    if not ours:
        return []
    verb = "is an argument" if len(ours) == 1 else "are arguments"
    return [f"{', '.join(ours)} after the program {verb} of the program: podrun's options come before it"]


def _interpreter_warning(command: tuple[str, ...], context: LaunchContext) -> list[str]:
    """Warn of a Python other than podrun's, which may not find podrun."""
    import shutil

    if os.path.basename(command[0]) not in ("python", "python3") or command[0] == context.python:
        return []
    found = shutil.which(command[0], path=context.environ.get("PATH")) or command[0]
    if os.path.dirname(os.path.abspath(found)) == os.path.dirname(os.path.abspath(context.python)):
        return []
    return [
        f"{command[0]} is {found}, which may not find podrun; without it the script runs with {context.python}"
    ]


def _cache_directory(given: str | None, context: LaunchContext) -> str | None:
    """The absolute path of the executable cache. Raises UsageError if no directory can exist there."""
    if not given:
        return None
    path = Path(context.directory, given)
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not there.is_dir():
        raise UsageError(
            f"--executable-cache-path {given}: {there} is not a directory",
            hint="Name a directory, or leave it out.",
        )
    return str(path)


def _near(values: list[int], wanted: int) -> list[int]:
    """The closest value below and above ``wanted``, if any."""
    below = [value for value in values if value < wanted]
    above = [value for value in values if value > wanted]
    return [*below[-1:], *above[:1]]
