"""Updates that stay with their pieces: those whose memory something else reads or writes, or that are too large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from podrun.core.executable import Reduction
from podrun.device.program import fused_updates
from podrun.device.xla.clients import two_thread_device
from podrun.device.xla.pieces import PieceCache
from podrun.device.xla.update_steps import has_updates

from .test_fused_updates import F32, SIZE, descent, piece_of

pytestmark = pytest.mark.skipif(not has_updates(), reason="podrun's C module is not built")


def test_more_arrays_than_the_module_holds_stay_with_the_piece(
    pieces: PieceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = piece_of(pieces, descent, "wg")
    buffers: Any = SimpleNamespace(group_size=2, scatter_by=lambda *_: (print, print))
    operands = {0: np.zeros(SIZE, F32), 2: np.zeros((), F32)}
    monkeypatch.setattr(fused_updates, "_operands", lambda *_: operands)

    def prepared() -> object:
        return fused_updates._prepared(piece, "g", Reduction.SUM, buffers)

    assert prepared() is not None
    buffers.group_size = 510
    assert prepared() is not None
    buffers.group_size = 511
    assert prepared() is None


def test_a_piece_that_two_threads_share_is_left_to_xla(
    pieces: PieceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = piece_of(pieces, descent, "wg")
    buffers: Any = SimpleNamespace(group_size=2, scatter_by=lambda *_: (print, print))
    monkeypatch.setattr(fused_updates, "_operands", lambda *_: {})
    assert fused_updates._prepared(piece, "g", Reduction.SUM, buffers) is not None
    for other in (replace(piece, device=two_thread_device()), replace(piece, in_place={0: 0})):
        assert fused_updates._prepared(other, "g", Reduction.SUM, buffers) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda memory: memory.changing.add("w"),
        lambda memory: memory.copied.add("w"),
        lambda memory: memory.gradients.add("w"),
        lambda memory: memory.gradients.remove("g"),
        lambda memory: memory.arrays.update({"rate": np.zeros(1, F32)}),
        lambda memory: memory.arrays.update({"rate": np.zeros((), np.float64)}),
        lambda memory: memory.arrays.update({"arena_slice:w": np.zeros(9, F32)}),
        lambda memory: memory.arrays.pop("arena_slice:w"),
        lambda memory: setattr(memory, "outputs", ("arena_slice:g",)),
        lambda memory: setattr(memory, "outputs", ("rate",)),
        lambda memory: setattr(memory, "outputs", ("arena_slice:w", "arena_slice:w")),
    ],
)
def test_operands_that_something_else_may_change_stay_with_the_piece(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object]
) -> None:
    monkeypatch.setattr(fused_updates, "LEAST_ELEMENTS", 0)
    assert operands_of(lambda memory: None) is not None
    assert operands_of(change) is None
    monkeypatch.setattr(fused_updates, "LEAST_ELEMENTS", 5)
    assert operands_of(lambda memory: None) is None


def operands_of(change: Callable[[Any], object]) -> object:
    """What `fused_updates` takes of an update of four numbers, after a change to the memory that it finds."""
    names = ("arena_slice:w", "arena_slice:g", "rate")
    memory = SimpleNamespace(
        arrays=dict(zip(names, [np.zeros(4, F32), np.zeros(4, F32), np.zeros((), F32)], strict=True)),
        gradients={"g"},
        changing=set(),
        copied=set(),
        outputs=names[:1],
    )
    change(memory)
    arena = SimpleNamespace(own=np.zeros(8, F32), mine=slice(4))
    buffers: Any = SimpleNamespace(
        arena_behind=lambda name: name[-1] if name.startswith("arena_slice") else None,
        memory_behind=memory.arrays.get,
        changing=memory.changing,
        own_copies=SimpleNamespace(may_hold=memory.copied.__contains__),
        holds_gradients=memory.gradients.__contains__,
        arenas={"g": arena},
    )
    computation: Any = SimpleNamespace(inputs=names, outputs=memory.outputs)
    return fused_updates._operands(computation, "arena_slice:g", buffers)
