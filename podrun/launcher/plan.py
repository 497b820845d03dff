"""Options -> `LaunchSpec`: PopRun's validation rules and placement. Pure; the environment and the host are
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
from typing import Any

from podrun.errors import NotFoundError, UsageError
from podrun.launcher.hosts import LOCAL_HOST, parse_hosts, read_hostfile
from podrun.launcher.mpi_args import MpiArguments, parse_instance_arguments, parse_mpi_arguments
from podrun.launcher.option_table import BY_NAME, OPTIONS, Kind
from podrun.launcher.options import settle
from podrun.launcher.spec import (
    InstanceSpec,
    LaunchSpec,
    Layout,
    OutputSpec,
    PartitionSpec,
    PodFacts,
    ServerSpec,
)
from podrun.partition.ray_address import check_form

MAX_IPUS_PER_INSTANCE = 64
"""A process drives at most one IPU-POD64's worth of IPUs."""
_OURS = re.compile("num-|ipus-per|vipu-|mpi-|only-output|print-topology|fault$|offline-mode|.*-partition$")
"""Options that a program hardly has itself (as it may have --debug)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Surroundings:
    """What planning reads besides options: the environment, the working directory, the interpreter for .py
    files.
    """

    environ: Mapping[str, str]
    directory: str
    python: str


def plan_launch(given: Mapping[str, Any], program: tuple[str, ...], around: Surroundings) -> LaunchSpec:
    """The launch that options and program describe. Raises UsageError for what cannot be right.

    What depends on the POD (its size, IPU-Link domains) is checked by `fit_to_pod` once the POD is known.
    """
    values = settle(given)
    layout = plan_layout(values)
    offline = values["offline-mode"]
    everywhere = parse_mpi_arguments(values["mpi-global-args"], "--mpi-global-args")
    local = parse_mpi_arguments(values["mpi-local-args"], "--mpi-local-args")
    single = parse_instance_arguments(values["instance-mpi-local-args"], layout.instances)
    command = resolve_program(program, around, layout)
    only = values["only-output-from-instance"]
    if only is not None and only >= layout.instances:
        raise UsageError(
            f"--only-output-from-instance is {only}; there are {layout.instances} instances",
            hint=f"Instances are numbered 0 to {layout.instances - 1}.",
        )
    if offline and values["fault"]:
        raise UsageError("--fault needs IPUs, and --offline-mode has none", hint="Leave one of them out.")
    _check_placement_options(values)
    return LaunchSpec(
        layout=layout,
        instances=tuple(
            _instance(layout, i, command, around, [everywhere, local, single.get(i, MpiArguments())])
            for i in range(layout.instances)
        ),
        server=_server(values),
        partition=None if offline else _partition(values, layout, around.environ),
        output=OutputSpec(only, everywhere.output_directory or local.output_directory),
        cache_path=_cache_directory(values["executable-cache-path"], around),
        print_topology=values["print-topology"] or values["verbose"] >= 2,
        verbosity=-1 if values["quiet"] else values["verbose"],
        debug=values["debug"],
        host_subnet=values["host-subnet"],
        warnings=tuple(_warnings(given, [everywhere, local, *single.values()], around, command)),
    )


def plan_layout(values: Mapping[str, Any]) -> Layout:
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
    layout = Layout(replicas, values["ipus-per-replica"], instances, hosts, values["num-ilds"] or 1)
    if layout.instances % layout.ilds:
        raise UsageError(
            f"{instances} instances cannot be divided evenly among {layout.ilds} IPU-Link domains",
            hint=f"No instance spans IPU-Link domains: type --num-instances {layout.ilds} or a multiple.",
        )
    if not values["offline-mode"]:
        _check_size(layout)
    return layout


def _check_size(layout: Layout) -> None:
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

    Raises UsageError if the POD is too small or its IPU-Link domains do not hold whole instances.
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


def resolve_program(program: tuple[str, ...], around: Surroundings, layout: Layout) -> tuple[str, ...]:
    """The words to execute: a .py file runs with podrun's interpreter. Raises UsageError, NotFoundError.

    A program is looked up here only if instances run on this host.
    """
    if not program:
        raise UsageError("no program to run", hint="Type podrun --num-replicas 16 train.py")
    name, rest = program[0], program[1:]
    if not name:
        raise UsageError("the program's name is empty", hint="Type podrun --num-replicas 16 train.py")
    if not name.endswith(".py"):
        if layout.hosts == (LOCAL_HOST,) and not _command_exists(name, around):
            if Path(around.directory, name).is_dir():
                raise UsageError(f"{name} is a directory", hint="Name the program or the script in it.")
            raise NotFoundError(f"there is no program {name}", hint=_program_hint(name, around))
        return program
    path = Path(around.directory, name)
    if layout.hosts == (LOCAL_HOST,):
        if path.is_dir():
            raise UsageError(f"{name} is a directory", hint="Name the script in it.")
        if not path.is_file():
            raise NotFoundError(f"there is no script {name} in {around.directory}", hint=_script_hint(path))
    return (around.python, name, *rest)


def _command_exists(name: str, around: Surroundings) -> bool:
    import shutil

    if os.sep in name:
        path = Path(around.directory, name)
        return path.is_file() and os.access(path, os.X_OK)
    return shutil.which(name, path=around.environ.get("PATH")) is not None


def _program_hint(name: str, around: Surroundings) -> str:
    if Path(around.directory, name + ".py").is_file():
        return f"Did you mean {name}.py?"
    if Path(around.directory, name).is_file():
        called = name if os.sep in name else f"./{name}"
        return f"{name} is a file but no command: type {called} and make it executable (chmod +x {name})."
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
    layout: Layout, index: int, command: tuple[str, ...], around: Surroundings, arguments: list[MpiArguments]
) -> InstanceSpec:
    exports: dict[str, str | None] = {}
    directory = around.directory
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
    return ServerSpec(
        host=values["vipu-server-host"],
        port=values["vipu-server-port"],
        timeout=values["vipu-server-timeout"],
        cluster=values["cluster"],
        ray=values["ray-address"],
    )


def _partition(values: Mapping[str, Any], layout: Layout, environ: Mapping[str, str]) -> PartitionSpec:
    from podrun.partition.requirements import check_name
    from podrun.partition.types import parse_sync_type

    name = values["vipu-partition"] or environ.get("IPUOF_VIPU_API_PARTITION_ID") or None
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
        update=values["update-partition"],
        reset=values["reset-partition"],
        remove=values["remove-partition"],
        faults=_faults(values["fault"], layout),
    )


def _faults(texts: tuple[str, ...], layout: Layout) -> tuple[str, ...]:
    """The faults, refused here already if they cannot happen on so many IPUs. Which of these are joined by links the
    partition knows.
    """
    if texts:
        from podrun.faults import FaultTarget, parse_fault, validate

        specs = [parse_fault(text) for text in texts]
        pairs = [spec.indices for spec in specs if spec.target is FaultTarget.LINK]
        validate(specs, ipus=layout.ipus, links=[(first, second) for first, second in pairs])
    return tuple(texts)


def _check_placement_options(values: Mapping[str, Any]) -> None:
    placement, subnet = values["process-placement"], values["host-subnet"]
    if placement != "disabled":
        raise UsageError(
            f"--process-placement={placement} is not there: podrun leaves placement to the operating system",
            hint="Type --process-placement=disabled, or leave it out.",
        )
    if subnet is not None:
        try:
            ipaddress.ip_network(subnet, strict=False)
        except ValueError:
            raise UsageError(
                f"--host-subnet {subnet} is no network", hint="As in --host-subnet 10.1.0.0/16"
            ) from None


def _warnings(
    given: Mapping[str, Any], arguments: list[MpiArguments], around: Surroundings, command: tuple[str, ...]
) -> list[str]:
    warnings = [
        f"--{option.name} has no effect: {option.ignored}"
        for option in OPTIONS
        if option.ignored and given.get(option.name) and option.kind is Kind.BOOLEAN
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
        {v for a in arguments for v, value in a.exports.items() if value is None} - set(around.environ)
    )
    if unset:
        warnings.append(f"-x names variables that are not set: {', '.join(unset)}")
    return warnings + _misplaced(given, command) + _interpreter_warning(command, around)


def _misplaced(given: Mapping[str, Any], command: tuple[str, ...]) -> list[str]:
    """Options of podrun's that stand after the program, where they are the program's."""
    names = {word.removeprefix("--").partition("=")[0] for word in command[1:] if word.startswith("--")}
    ours = [f"--{name}" for name in sorted(names - given.keys()) if name in BY_NAME and _OURS.match(name)]
    if not ours:
        return []
    verb = "is an argument" if len(ours) == 1 else "are arguments"
    return [f"{', '.join(ours)} after the program {verb} of the program: podrun's options come before it"]


def _interpreter_warning(command: tuple[str, ...], around: Surroundings) -> list[str]:
    """``podrun python3 train.py`` outside the environment podrun is installed in finds no popart."""
    import shutil

    if os.path.basename(command[0]) not in ("python", "python3") or command[0] == around.python:
        return []
    found = shutil.which(command[0], path=around.environ.get("PATH")) or command[0]
    if os.path.dirname(os.path.abspath(found)) == os.path.dirname(os.path.abspath(around.python)):
        return []
    return [
        f"{command[0]} is {found}, which may not find podrun; without it the script runs with {around.python}"
    ]


def _cache_directory(given: str | None, around: Surroundings) -> str | None:
    """Where instances keep programs, from the root. Raises UsageError for a place where no directory can be."""
    if not given:
        return None
    path = Path(around.directory, given)
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not there.is_dir():
        raise UsageError(
            f"--executable-cache-path {given}: {there} is no directory",
            hint="Name a directory, or leave it out.",
        )
    return str(path)


def _near(values: list[int], wanted: int) -> list[int]:
    """The closest value below and above, those that there are."""
    below = [value for value in values if value < wanted]
    above = [value for value in values if value > wanted]
    return [*below[-1:], *above[:1]]
