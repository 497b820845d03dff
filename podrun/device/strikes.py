"""How faults strike a machine: what breaks, which error follows, and how long the others wait."""

from __future__ import annotations

import itertools
from dataclasses import replace

from podrun.core.errors import PoplarError, UsageError
from podrun.core.executable import AllReduce, Executable, ReduceScatter, numpy_dtype
from podrun.device.error_messages import batches_in_words, machine_lost
from podrun.device.machine_context import MachineContext
from podrun.faults import FaultSpec, FaultTarget, Strike


def strike_error(context: MachineContext, strike: Strike) -> PoplarError:
    """Break the target of a fault; returns the error to raise. A lost machine ends here, if it has a process to end."""
    if strike.spec.kind != "lost":
        with context.changed:
            return context.health.record(strike.spec, strike.batch)
    context.lost = machine_lost(
        *(context.place.endpoint, context.place.machine, context.place.first_ipu),
        doing=batches_in_words(strike.batch, 1),
        fault=replace(strike.spec, launch=""),
    )
    end = context.on_host_lost if strike.spec.target is FaultTarget.HOST else context.on_lost
    if end is not None:
        end()
    return context.lost


def strike_wait(context: MachineContext, strike: Strike, exchanged: int = 0) -> None:
    """Wait as long as a fault requires. A paused machine answers nobody meanwhile; a machine whose heartbeats are
    dropped does not answer the partition service. ``exchanged``: bytes that go over a network in a batch.
    """
    if strike.spec.kind == "paused":
        with context.changed:
            context.sleep(strike.spec.number("seconds"))
    elif strike.spec.kind == "stream-stall":
        context.sleep(strike.spec.number("seconds"))
    elif strike.spec.kind in ("delayed", "lossy"):
        context.sleep(strike.spec.delay(exchanged))
    elif strike.spec.kind == "heartbeats-dropped":
        context.silent_until = context.clock() + strike.spec.number("seconds")


def strike_machine_event(context: MachineContext, event: str) -> None:
    """Let the faults strike that are planned for an event of the machine itself. Raises the error of a fault that has
    one.
    """
    while (strike := context.faults.ask_event(event, None)) is not None:
        if strike.spec.raises:
            raise strike_error(context, strike)
        strike_wait(context, strike)


def check_lost_host(context: MachineContext, spec: FaultSpec) -> None:
    """Raise UsageError for the loss of a host that does not exist, or of one with podrun's own processes."""
    if spec.target is not FaultTarget.HOST:
        return
    hosts = context.place.hosts
    if spec.indices[0] >= len(hosts):
        raise UsageError(
            f"fault {spec.text}: the partition has no host {spec.indices[0]}, only 0 to {len(hosts) - 1}",
            hint="Hosts count from 0 in the order of the partition's machines.",
        )
    if context.place.leads_host == spec.indices[0] and context.on_host_lost is None:
        raise UsageError(
            f"fault {spec.text}: that host runs the partition service, which would be lost with it",
            hint="Name a host that joined a Ray cluster (--ray-address), or machines: machine:1@batch=17:lost",
        )


def exchanged_bytes(executable: Executable) -> int:
    """Bytes that a machine sends to the others for one batch, according to the program's reductions."""
    work = itertools.chain.from_iterable(executable.instructions)
    names = {i.arena for i in work if isinstance(i, ReduceScatter | AllReduce)}
    arenas = [executable.arenas[name] for name in names]
    return sum(arena.size * numpy_dtype(arena.dtype).itemsize for arena in arenas)
