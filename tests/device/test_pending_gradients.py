"""Pending gradients stay where XLA put them until their arena is read: the same numbers with one copy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from podrun.collectives.rendezvous import SoloGroup
from podrun.core.errors import InternalError
from podrun.core.executable import Computation
from podrun.device.host.client import InProcessMachines
from podrun.device.program import xla_memory
from podrun.device.program.buffers import Buffers
from podrun.device.program.program_memory import Frame
from podrun.device.program.xla_memory import PendingGradients
from podrun.device.xla.clients import one_thread_device, two_thread_device
from podrun.device.xla.pieces import Piece, PieceCache

from .conftest import owners, together
from .programs import data, first_weights, linear

pytestmark = pytest.mark.usefixtures("no_threads_left")


def pending_gradients(memory: np.ndarray) -> PendingGradients:
    """Members ``a`` and ``b``, of 4 elements each, of an arena ``g``."""
    return PendingGradients({"g": {"a": lambda: memory[:4], "b": lambda: memory[4:8].reshape(2, 2)}})


def on(device: Any, value: Any) -> Any:
    import jax

    return jax.device_put(np.asarray(value, np.float32), device)


def test_pending_values_are_copied_into_the_arena_when_it_is_read() -> None:
    memory = np.zeros(8, np.float32)
    pending = pending_gradients(memory)
    assert "a" in pending
    assert "g" not in pending
    assert pending.has_arena("g")
    pending.store("b", on(one_thread_device(), [[1, 2], [3, 4]]))
    assert pending.operand("a") is None
    np.testing.assert_array_equal(pending.operand("b"), [[1, 2], [3, 4]])
    assert not memory.any()
    pending.flush("g")
    np.testing.assert_array_equal(memory, [0, 0, 0, 0, 1, 2, 3, 4])
    assert pending.operand("b") is None


def test_writing_the_whole_arena_discards_pending_values() -> None:
    memory = np.zeros(8, np.float32)
    pending = pending_gradients(memory)
    pending.store("a", on(one_thread_device(), [1, 2, 3, 4]))
    pending.discard("g")
    pending.flush("g")
    assert not memory.any()


@pytest.mark.parametrize("source", ["arena", "here", "elsewhere"])
def test_a_donated_value_belongs_to_the_piece_alone(source: str) -> None:
    memory = np.arange(8, dtype=np.float32)
    pending = pending_gradients(memory)
    if source != "arena":
        pending.store("a", on(one_thread_device() if source == "here" else two_thread_device(), [7, 7, 7, 7]))
    donated = pending.donate("a", memory[:4], one_thread_device())
    assert donated.device == one_thread_device()
    np.testing.assert_array_equal(donated, [0, 1, 2, 3] if source == "arena" else [7] * 4)
    memory[:4] = -1
    assert donated[0] != -1
    assert pending.operand("a") is None


def test_what_is_cleared_is_zero_where_it_is_read_and_not_written_before() -> None:
    memory = np.arange(1, 9, dtype=np.float32)
    pending = pending_gradients(memory)
    pending.store("a", on(one_thread_device(), [7, 7, 7, 7]))
    pending.clear("g")
    np.testing.assert_array_equal(pending.donate("a", memory[:4], one_thread_device()), [0, 0, 0, 0])
    np.testing.assert_array_equal(memory, np.arange(1, 9))
    assert pending.operand("b") is None
    np.testing.assert_array_equal(memory, [1, 2, 3, 4, 0, 0, 0, 0])
    pending.clear("g")
    pending.store("b", on(one_thread_device(), [[1, 2], [3, 4]]))
    pending.flush("g")
    np.testing.assert_array_equal(memory, [0, 0, 0, 0, 1, 2, 3, 4])


@pytest.mark.parametrize("cleared", [True, False])
def test_the_memory_that_a_piece_wrote_over_is_used_for_the_next_batch(cleared: bool) -> None:
    memory = np.arange(8, dtype=np.float32)
    pending = pending_gradients(memory)
    value = pending.donate("b", memory[4:].reshape(2, 2), two_thread_device())
    address = value.unsafe_buffer_pointer()
    pending.store("b", value, in_place=True)
    memory[:] = -1
    pending.flush("g")
    np.testing.assert_array_equal(memory, [-1, -1, -1, -1, 4, 5, 6, 7])
    memory[:] = 9
    if cleared:
        pending.clear("g")
    again = pending.donate("b", memory[4:].reshape(2, 2), two_thread_device())
    assert again.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(again, np.full((2, 2), 0 if cleared else 9))
    np.testing.assert_array_equal(memory, np.full(8, 9))


def test_memory_is_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for one member: the other's memory is kept once the first has been lent."""
    monkeypatch.setattr(xla_memory, "MOST_KEPT", 16)
    memory, device = np.zeros(8, np.float32), two_thread_device()
    pending, places = pending_gradients(memory), {"a": memory[:4], "b": memory[4:].reshape(2, 2)}
    values = {name: pending.donate(name, place, device) for name, place in places.items()}
    for name, value in values.items():
        pending.store(name, value, in_place=True)
    pending.flush("g")
    assert pending.donate("b", places["b"], device) is not values["b"]
    for turn in range(2):
        assert pending.donate("a", places["a"], device) is values["a"], turn
        pending.store("a", values["a"], in_place=True)
        pending.flush("g")
    assert pending.donate("a", places["a"], device) is values["a"]
    pending.store("b", values["b"], in_place=True)
    pending.flush("g")
    assert pending.donate("b", places["b"], device) is values["b"]


class Sized:
    """An array of XLA's, for what `PendingGradients` asks of it; counts how often it is asked for its size."""

    def __init__(self) -> None:
        self._values, self.asked = np.ones(4, np.float32), 0
        self.dtype, self.shape = self._values.dtype, self._values.shape

    def unsafe_buffer_pointer(self) -> int:
        return self._values.ctypes.data

    @property
    def nbytes(self) -> int:
        self.asked += 1
        return self._values.nbytes


def test_keeping_memory_looks_at_no_other_member() -> None:
    memory, values = np.zeros((40, 4), np.float32), [Sized() for _ in range(40)]
    pending = PendingGradients({"g": {str(i): partial(memory.__getitem__, i) for i in range(40)}})
    for i, value in enumerate(values):
        pending.store(str(i), value, in_place=True)
    pending.flush("g")
    assert memory.all()
    assert max(value.asked for value in values) <= 2


def test_memory_of_a_result_that_may_be_another_s_is_not_written() -> None:
    memory = np.zeros(8, np.float32)
    pending, weight = pending_gradients(memory), on(one_thread_device(), [1, 2, 3, 4])
    pending.store("a", weight)
    pending.flush("g")
    pending.clear("g")
    np.testing.assert_array_equal(pending.donate("a", memory[:4], one_thread_device()), [0, 0, 0, 0])
    np.testing.assert_array_equal(weight, [1, 2, 3, 4])


def test_a_piece_that_clears_arenas_is_known_by_its_results() -> None:
    buffers = Buffers(linear(4), SoloGroup())
    own = buffers.arenas["gradients"].own
    clears, weights = (Computation("c", b"", (), (f"arena:{name}",)) for name in ("gradients", "weights"))
    zeros, negative = np.zeros(own.size, np.float32), np.zeros(own.size, np.float32)
    negative[-1] = -0.0
    assert buffers.clearing(clears, [negative]) is None
    assert buffers.clearing(weights, [zeros]) is None
    assert buffers.clearing(Computation("none", b"", (), ()), []) is None
    clear = buffers.clearing(clears, [zeros])
    assert clear is not None
    own[:] = np.nan
    clear()
    assert np.isnan(own).any(), "members are written where something reads them"
    np.testing.assert_array_equal(buffers.operand("arena:gradients", Frame()), zeros)


@pytest.mark.parametrize("cleared", [True, False])
def test_a_slice_is_written_over_pending_values(cleared: bool) -> None:
    buffers = Buffers(linear(4), SoloGroup())
    own = buffers.arenas["gradients"].own
    own[:] = 9
    if cleared:
        clear = buffers.clearing(Computation("c", b"", (), ("arena:gradients",)), [np.zeros_like(own)])
        assert clear is not None
        clear()
    else:
        buffers.writer("gradient:w")(Frame(), on(one_thread_device(), np.full((4, 1), 7)))
    buffers.writer("arena_slice:gradients")(Frame(), np.full(own.size, 5, np.float32))
    np.testing.assert_array_equal(buffers.operand("arena:gradients", Frame()), np.full(own.size, 5))


def test_what_a_reduction_left_is_lent() -> None:
    executable = linear(4)
    buffers = Buffers(executable, SoloGroup())
    gradients = buffers.arenas["gradients"]
    gradients.own[:] = 1
    gradients.whole_result = np.full(gradients.own.shape, 5, np.float32)
    donate, store = buffers.donor("gradient:w", None, one_thread_device())
    np.testing.assert_array_equal(donate(Frame()), np.full((4, 1), 5))
    np.testing.assert_array_equal(buffers.operand("gradient:w", Frame()), np.full((4, 1), 5))
    store(Frame(), on(one_thread_device(), np.full((4, 1), 6)))
    np.testing.assert_array_equal(donate(Frame()), np.full((4, 1), 6))


def test_a_value_of_the_two_thread_client_is_read_on_one_thread() -> None:
    pending = pending_gradients(np.zeros(8, np.float32))
    pending.store("a", on(two_thread_device(), [1, 2, 3, 4]))
    assert pending.operand("a").device == one_thread_device()
    np.testing.assert_array_equal(pending.operand("a"), [1, 2, 3, 4])


@pytest.mark.parametrize("sliced", [True, False])
@pytest.mark.parametrize("replicas", [4, 8])
def test_an_arena_gets_gradients_once_a_batch(
    replicas: int, sliced: bool, pieces: PieceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    flush = PendingGradients.flush

    def counted(self: PendingGradients, arena: str) -> None:
        copied.extend(name for name in ("gradient:w", "gradient:b") if self.operand(name) is not None)
        flush(self, arena)

    monkeypatch.setattr(PendingGradients, "flush", counted)
    executable = linear(replicas, sliced=sliced)
    inputs = data(executable, 3)
    twin = InProcessMachines(executable.layout.ipus, pieces)

    def work(connection: Any, owned: Any) -> None:
        connection.load(executable)
        connection.write_variables(first_weights())
        connection.run(3, inputs)
        connection.close()

    (outcome,) = together(
        [partial(work, *pair) for pair in owners(lambda: twin.connect(threaded=True), replicas, 1)]
    )
    assert outcome is None
    machines = replicas // 4
    assert sorted(copied) == sorted(["gradient:b", "gradient:w"] * 3 * machines)


KINDS = ((1024, np.dtype(np.float32)),)


def test_a_temporary_moves_to_the_client_of_the_piece_that_reads_it() -> None:
    """Where a piece is shared by two threads; the memory is the same."""

    def reads(device: Any) -> Piece:
        return Piece(Computation("reads", b"", ("t",), ()), lambda value: [], [(1024,)], {}, device, KINDS)

    shared, alone = reads(two_thread_device()), reads(one_thread_device())
    buffers, value = Buffers(linear(4), SoloGroup()), on(two_thread_device(), np.arange(1024))
    frame = Frame(values={"t": value})
    assert (shared.is_shared, alone.is_shared) == (True, False)
    (read,) = buffers.readers(alone, mixed=False)
    assert read(frame) is value
    (read,), (keep,) = (buffers.readers(piece, mixed=True) for piece in (alone, shared))
    assert keep(frame) is value
    assert read(frame).device == one_thread_device()
    assert read(frame).unsafe_buffer_pointer() == value.unsafe_buffer_pointer()
    np.testing.assert_array_equal(read(frame), np.arange(1024))
    frame.values["t"] = np.ones(1024, np.float32)
    assert read(frame) is frame.values["t"]
    with pytest.raises(InternalError, match="before anything wrote it"):
        read(Frame())


def test_a_part_of_an_arena_is_looked_up_again_only_where_the_arena_moved() -> None:
    buffers = Buffers(linear(4), SoloGroup())
    read, arena = buffers.reader("gradient:w"), buffers.arenas["gradients"]
    first = read(Frame())
    assert read(Frame()) is first
    arena.whole_result = np.full_like(arena.own, 3)
    np.testing.assert_array_equal(np.asarray(read(Frame())), 3)
    arena.forget()
    arena.own[:] = 5
    np.testing.assert_array_equal(np.asarray(read(Frame())), 5)
