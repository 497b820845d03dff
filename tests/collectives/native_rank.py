"""One rank of a group, a process of its own: ``native_rank.py TOKEN RANK c|python``. Prints a digest of its results.

``python``: the C module cannot be imported, as where podrun was installed without a compiler.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from podrun.collectives import Group

CASES = [(dtype, size) for size in (1, 5, 3001, 40_003) for dtype in ("float32", "int64", "float16")]
ROUNDS = 25


def values(dtype: str, size: int, rank: int, turn: int) -> np.ndarray[Any, Any]:
    """What a rank puts in."""
    return np.random.default_rng([rank, size, turn]).normal(0, 50, size).astype(dtype)


def results(group: Group) -> str:
    """A digest of all-reduces, shared and in place, many times and of several sizes, with other calls in between."""
    digest = hashlib.sha256()
    for dtype, size in CASES:
        name = f"{dtype} {size}"
        mine = group.allocate(name, dtype, size)
        for turn in range(ROUNDS):
            mine[:] = values(dtype, size, group.rank, turn)
            digest.update(group.all_reduce(name).tobytes())
            group.reduce_scatter(name, settle=turn % 2 == 0)
            group.all_gather(name)
            digest.update(group.all_reduce(name, in_place=True).tobytes())
    group.barrier()
    return digest.hexdigest()


def expected(ranks: int) -> str:
    """The digest by plain NumPy: sums in rank order, half types in float32."""
    digest = hashlib.sha256()
    for dtype, size in CASES:
        for turn in range(ROUNDS):
            wide = np.float32 if dtype == "float16" else np.dtype(dtype)
            total = values(dtype, size, 0, turn).astype(wide)
            for rank in range(1, ranks):
                total += values(dtype, size, rank, turn).astype(wide)
            digest.update(total.astype(dtype).tobytes() * 2)
    return digest.hexdigest()


def main() -> None:
    """Join and print."""
    token, rank, path = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if path == "python":
        sys.modules["podrun.collectives._collectives"] = None  # type: ignore[assignment]
    from podrun.collectives import join_group, linux

    assert (linux.c_module is None) == (path == "python")
    group = join_group(token, rank)
    print(results(group))
    group.close()


if __name__ == "__main__":
    main()
