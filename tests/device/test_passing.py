"""Gradients stay where XLA put them until somebody wants their arena: the same numbers, and one copy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from podrun.collectives.solo import SoloGroup
from podrun.device.host.twin import Twin
from podrun.device.program.buffers import Buffers, Frame
from podrun.device.program.passing import Passing
from podrun.device.xla.clients import home, two_threads
from podrun.device.xla.pieces import PieceCache

from .conftest import owners, together
from .programs import data, first_weights, linear

pytestmark = pytest.mark.usefixtures("no_threads_left")


def passing(memory: np.ndarray) -> Passing:
    """Members ``a`` and ``b``, of 4 elements each, of an arena ``g``."""
    return Passing({"g": {"a": lambda: memory[:4], "b": lambda: memory[4:8].reshape(2, 2)}})


def on(device: Any, value: Any) -> Any:
    import jax

    return jax.device_put(np.asarray(value, np.float32), device)


def test_what_is_held_goes_into_the_arena_once_it_is_wanted() -> None:
    memory = np.zeros(8, np.float32)
    held = passing(memory)
    assert "a" in held
    assert "g" not in held
    assert held.is_of("g")
    held.hold("b", on(home(), [[1, 2], [3, 4]]))
    assert held.held("a") is None
    np.testing.assert_array_equal(held.held("b"), [[1, 2], [3, 4]])
    assert not memory.any()
    held.put("g")
    np.testing.assert_array_equal(memory, [0, 0, 0, 0, 1, 2, 3, 4])
    assert held.held("b") is None


def test_an_arena_written_as_a_whole_drops_what_was_held() -> None:
    memory = np.zeros(8, np.float32)
    held = passing(memory)
    held.hold("a", on(home(), [1, 2, 3, 4]))
    held.drop("g")
    held.put("g")
    assert not memory.any()


@pytest.mark.parametrize("lender", ["arena", "here", "elsewhere"])
def test_what_is_lent_is_the_borrowers_alone(lender: str) -> None:
    memory = np.arange(8, dtype=np.float32)
    held = passing(memory)
    if lender != "arena":
        held.hold("a", on(home() if lender == "here" else two_threads(), [7, 7, 7, 7]))
    lent = held.lend("a", memory[:4], home())
    assert lent.device == home()
    np.testing.assert_array_equal(lent, [0, 1, 2, 3] if lender == "arena" else [7] * 4)
    memory[:4] = -1
    assert lent[0] != -1
    assert held.held("a") is None


def test_what_a_reduction_left_is_lent() -> None:
    executable = linear(4)
    buffers = Buffers(executable, SoloGroup())
    gradients = buffers.arenas["gradients"]
    gradients.own[:] = 1
    gradients.whole_result = np.full(gradients.own.shape, 5, np.float32)
    lend, hold = buffers.lender("gradient:w", None, home())
    np.testing.assert_array_equal(lend(Frame()), np.full((4, 1), 5))
    np.testing.assert_array_equal(buffers.operand("gradient:w", Frame()), np.full((4, 1), 5))
    hold(Frame(), on(home(), np.full((4, 1), 6)))
    np.testing.assert_array_equal(lend(Frame()), np.full((4, 1), 6))


def test_what_another_client_holds_is_read_by_jaxs_own() -> None:
    held = passing(np.zeros(8, np.float32))
    held.hold("a", on(two_threads(), [1, 2, 3, 4]))
    assert held.held("a").device == home()
    np.testing.assert_array_equal(held.held("a"), [1, 2, 3, 4])


@pytest.mark.parametrize("sliced", [True, False])
@pytest.mark.parametrize("replicas", [4, 8])
def test_an_arena_gets_gradients_once_a_batch(
    replicas: int, sliced: bool, pieces: PieceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    put = Passing.put

    def counted(self: Passing, arena: str) -> None:
        copied.extend(name for name in ("gradient:w", "gradient:b") if self.held(name) is not None)
        put(self, arena)

    monkeypatch.setattr(Passing, "put", counted)
    executable = linear(replicas, sliced=sliced)
    inputs = data(executable, 3)
    twin = Twin(executable.layout.ipus, pieces)

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
