"""How faults strike a machine: what breaks, which error follows, and how long the others wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podrun.core.errors import PoplarError
from podrun.device.error_messages import batches_in_words, machine_lost
from podrun.faults import FaultTarget, Strike

if TYPE_CHECKING:
    from podrun.device.job import MachineContext


def strike_error(context: MachineContext, strike: Strike) -> PoplarError:
    """Break the target of a fault; returns the error to raise. A lost machine ends here, if it has a process to end."""
    if strike.spec.kind != "lost":
        with context.changed:
            return context.health.record(strike.spec, strike.batch)
    context.lost = machine_lost(
        *(context.place.endpoint, context.place.machine, context.place.first_ipu),
        doing=batches_in_words(strike.batch, 1),
        fault=strike.spec.text,
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
