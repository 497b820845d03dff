"""LAPACK for the pieces that call it, and for no others.

JAX registers its LAPACK calls whenever it lowers an exported program, and asks SciPy for them: 0.15 s of a core in
every machine's process, for calls that next to no program has. A piece that calls LAPACK names it in its StableHLO.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podrun.device.xla.pieces import Piece, PieceCache
from podrun.executable import Computation

_NAME = b"lapack"
"""All of jaxlib's LAPACK calls begin so: ``lapack_sgetrf_ffi``."""


class OwnPieces(PieceCache):
    """The pieces of a process that holds nothing but machines."""

    def __init__(self, directory: Path | None) -> None:
        super().__init__(directory, own_process=True)

    def piece(
        self, computation: Computation, donated: tuple[int, ...], in_place: Mapping[int, int] | None = None
    ) -> Piece:
        """See `PieceCache.piece`."""
        leave_out_unless_asked()
        if _NAME in computation.stablehlo:
            register()
        return super().piece(computation, donated, in_place)


def register() -> None:
    """Let XLA find LAPACK in this process. Idempotent."""
    linalg: Any = importlib.import_module("jax._src.lax.linalg")
    linalg.initialize_lapack()


def leave_out_unless_asked() -> None:
    """Keep JAX from registering LAPACK by itself; where another JAX does that otherwise, it goes on doing it."""
    export: Any = importlib.import_module("jax._src.export._export")
    if hasattr(export, "_ensure_backends_initialized"):
        export._ensure_backends_initialized = _nothing


def _nothing(platforms: tuple[str, ...]) -> None:
    pass
