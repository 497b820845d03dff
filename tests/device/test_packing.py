"""Constant weights are brought into oneDNN's order once: the same bits, and fewer reorders."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest

from podrun.device.xla import convolutions, packing
from podrun.device.xla.convolutions import Kind
from podrun.device.xla.packing import PACKED, WeightRoom, pack_weights
from podrun.device.xla.rewrite import rewrite_convolutions
from tests.quick_programs import (
    programs_of_default_tests_compile_quickly as programs_of_default_tests_compile_quickly,
)
from tests.stress.guarded import GuardedCase, guarded_case

native: Any = importlib.import_module("podrun.device.xla._onednn") if convolutions.available() else None
pytestmark = pytest.mark.skipif(native is None, reason="podrun's C module is not built")
CASES = 400


def _forward_cases() -> list[GuardedCase]:
    cases = (guarded_case(7, number) for number in range(CASES))
    return [
        case for case in cases if case.call.kind is Kind.FORWARD and convolutions.algorithms(case.numbers)
    ]


def test_packed_weights_give_the_same_bits() -> None:
    random = np.random.default_rng(3)
    packed_cases = 0
    for case in _forward_cases():
        *operands, expected = (random.standard_normal(n).astype(np.float32) for n in case.elements)
        native.compute(case.numbers, tuple(operands), expected)
        vector = np.zeros(4 * operands[1].size + 1024, np.float32)
        try:
            native.pack(case.numbers, operands[1], vector)
        except ValueError:
            continue  # The library takes them as they are, or each part wants another order.
        numbers = [*case.numbers]
        numbers[1] |= PACKED
        result = np.empty_like(expected)
        native.compute(numbers, (operands[0], vector, *operands[2:]), result)
        assert result.tobytes() == expected.tobytes(), case
        packed_cases += 1
    assert packed_cases > 20


def test_weights_need_room_and_a_forward_convolution() -> None:
    case = next(c for c in _forward_cases() if c.elements[1] > 64)
    weights = np.zeros(case.elements[1], np.float32)
    with pytest.raises(ValueError, match=r"do not fit|as they are|different orders"):
        native.pack(case.numbers, weights, np.empty(1, np.float32))
    with pytest.raises(ValueError, match="packed are the weights of a forward convolution"):
        native.pack([Kind.OF_IMAGE, *case.numbers[1:]], weights, weights.copy())
    with pytest.raises(ValueError, match="describe no convolution"):
        native.prepare([Kind.OF_IMAGE, PACKED, *case.numbers[2:]])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("channels", [64, 96])
@pytest.mark.sample(2)
def test_a_program_takes_packed_weights_from_then_on(parts: int, channels: int) -> None:
    import jax
    import jax.numpy as jnp

    random = np.random.default_rng(5)
    x = random.standard_normal((1, 14, 14, 32)).astype(np.float32)
    first = random.standard_normal((3, 3, 32, channels)).astype(np.float32)
    second = random.standard_normal((1, 1, channels, 48)).astype(np.float32)
    read_twice = random.standard_normal((3, 3, 48, 48)).astype(np.float32)
    arguments = [first, second, read_twice]
    room = WeightRoom.of(arguments)

    def network(vectors: list[Any], x: Any) -> Any:
        w0, w1, w2 = room.restored(vectors)
        for weights in (w0, w1, w2):
            x = jax.lax.conv_general_dilated(
                x, weights, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        return x + jnp.sum(w2)

    wide = room.widened(arguments)
    plain = jax.jit(lambda *inputs: network(*inputs), keep_unused=True).lower(wide, x)
    packing = jax.jit(network, keep_unused=True).lower(wide, x)  # JAX keeps what one function is lowered to.
    assert rewrite_convolutions(plain, parts=parts) == rewrite_convolutions(packing, parts=parts) == 3
    packed = pack_weights(packing, room, wide)
    assert set(packed) <= {0, 1}, "weights that something else reads stay"
    assert packed
    changed = [packed.get(i, vector) for i, vector in enumerate(wide)]
    expected, result = plain.compile()(wide, x), packing.compile()(changed, x)
    assert np.asarray(result).tobytes() == np.asarray(expected).tobytes()


def test_room_is_for_weights_alone() -> None:
    arrays = [
        np.zeros((3, 3, 16, 16), np.float32),
        np.zeros(16, np.float32),
        np.zeros((1, 1, 2, 2), np.float32),
    ]
    room = WeightRoom.of(arrays)
    assert room.shapes == ((3, 3, 16, 16), None, None)
    wide = room.widened(arrays)
    assert [a.ndim for a in wide] == [1, 1, 4]
    assert [a.shape for a in room.restored(wide)] == [a.shape for a in arrays]
    assert wide[0].size >= math.prod(arrays[0].shape)


def test_without_the_library_no_argument_gets_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "available", lambda: False)
    weights = np.zeros((3, 3, 16, 16), np.float32)
    assert WeightRoom.of([weights]).widened([weights])[0] is weights
