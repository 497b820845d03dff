"""Records about whole networks: rates, step times and memory."""

from __future__ import annotations

from fidelity_kinds.record import NotPredicted, Record


def network(record: Record) -> float:
    """A network's rate or step time."""
    raise NotPredicted("to do")


def memory(record: Record) -> float:
    """Bytes of a compiled network."""
    raise NotPredicted("to do")
