"""Device ids: single IPUs first, then pairs, then quads, up to the whole partition."""

from __future__ import annotations

from podrun.errors import NotFoundError


def device_sets(ipus: int, reconfigurable: bool) -> list[tuple[int, ...]]:
    """The IPUs behind each device id of a partition of ``ipus`` IPUs.

    A reconfigurable partition has 2N - 1 devices: N singles, N/2 pairs, ..., the whole. Any other has its
    single IPUs and the whole.
    """
    sets: list[tuple[int, ...]] = [(i,) for i in range(ipus)]
    size = 2 if reconfigurable else ipus
    while 1 < size <= ipus:
        sets += [tuple(range(first, first + size)) for first in range(0, ipus, size)]
        size *= 2
    return sets


def ipus_of_device(device: int, ipus: int, reconfigurable: bool) -> tuple[int, ...]:
    """The IPUs behind one device id. Raises NotFoundError naming the ids there are."""
    sets = device_sets(ipus, reconfigurable)
    if not 0 <= device < len(sets):
        raise NotFoundError(
            f"no such device set id: '{device}'",
            hint=f"Ids of this partition are 0 to {len(sets) - 1}: gc-info -l",
        )
    return sets[device]
