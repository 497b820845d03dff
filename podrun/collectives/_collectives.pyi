"""Types of the C module; what its calls mean stands in ``_collectives.c``."""

from collections.abc import Callable
from typing import Any

from podrun.core.executable import Array

PROTOCOL: int

class Counts:
    count: int
    spins: int
    quick_looks: int
    spin: float

class Barrier:
    def __new__(
        cls,
        counts: Counts,
        shared: Any,
        failed_at: int,
        rank: int,
        ranks: int,
        label: bytes,
        wait: Callable[[bytes, float], None],
        turns: tuple[tuple[int, int, int, bytes], ...],
        /,
    ) -> Barrier: ...
    def __call__(self, timeout: float, /) -> None: ...

_Sum = tuple[str, str, list[Array], list[Array]]
_Set = tuple[list[tuple[Array, Array]], _Sum | Callable[[], None]]

def plan(
    begin: Barrier, end: Barrier | None, timeout: float, result: Array, shift: int, sets: tuple[_Set, ...], /
) -> Callable[[], Array]: ...
def reduce(what: _Sum, /) -> None: ...
def fence() -> None: ...
