"""Executables without the insides of their fusions are read, and compute the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.device.xla.clients import one_thread_device
from podrun.private_apis import find_name, xla_executables
from podrun.private_apis.jax import load_compiled
from podrun.private_apis.xla_executables import _written as written
from podrun.private_apis.xla_executables import is_whole_entry, reduced_entry, reduced_executable


def fusions(x: Any) -> Any:
    y = jnp.tanh(x * 2 + jnp.sin(x).T)
    return jax.nn.softmax(y), jnp.sum(y * x, axis=0), jax.nn.gelu(y @ x)


def loops(x: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        state = jnp.tanh(state + row * 3)
        return state, state * row

    last, rows = jax.lax.scan(step, x[0], x)
    count = jax.lax.while_loop(
        lambda n: (n < 9) & (jnp.sum(last) * n < 7), lambda n: n * 2 + 1, jnp.float32(0)
    )
    return last, jnp.cumsum(rows, 0), count


def choices(x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda v: jnp.exp(v) + v, lambda v: jnp.cos(v) - v.T, x)


def places(x: Any) -> Any:
    """Parts written in place, values that are sorted, found, and added where indices say."""
    moved = jax.lax.dynamic_update_slice(x * 2, x[:3, :4] + 1, (jnp.argmax(x[0]) % 4, 5))
    order = jnp.argsort(x, 1)
    return moved, jnp.sort(jnp.abs(x) + x, 0), jnp.zeros(32).at[order[0]].add(x[1] * 2)


def random(x: Any) -> Any:
    key = jax.random.key(3)
    return jnp.where(jax.random.bernoulli(key, 0.4, x.shape), x / 0.4, 0), jax.random.normal(key, (7,))


def several_types(x: Any) -> Any:
    half = (x * 3).astype(jnp.bfloat16)
    return half @ half.T + 1, (x > 0).sum(1), (x * 99).astype(jnp.int8), jnp.fft.rfft(x)


FUNCTIONS = (fusions, loops, choices, places, random, several_types)


@cache
def compiled(function: Callable[[Any], Any]) -> tuple[bytes, Any, Any]:
    """The entry of a function in XLA's cache, its operand, and what has the shapes of its results."""
    x = np.random.default_rng(5).normal(size=(32, 32)).astype(np.float32)
    device = one_thread_device()
    on = jax.sharding.SingleDeviceSharding(device)
    whole = (
        jax.jit(lambda a: jax.tree.leaves(function(a)), in_shardings=on, out_shardings=on).lower(x).compile()
    )
    code = device.client.serialize_executable(whole.runtime_executable())
    entry = find_name("jax._src.compilation_cache.combine_executable_and_time")(code, 1)
    return find_name("jax._src.compilation_cache.compress_executable")(entry), x, whole.out_info


def executable(entry: bytes) -> bytes:
    plain = find_name("jax._src.compilation_cache.decompress_executable")(entry)
    return bytes(find_name("jax._src.compilation_cache.extract_executable_and_time")(plain)[0])


def results(entry: bytes, x: Any, kinds: Any) -> list[bytes]:
    call = load_compiled(entry, "tested", [x], kinds, one_thread_device())
    assert call is not None
    return [np.asarray(value).tobytes() for value in call(jax.device_put(x, one_thread_device()))]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.sample(2)
def test_the_same_bits_come_from_less(
    function: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla_executables, "WORTH_REDUCING", 0)
    entry, x, kinds = compiled(function)
    smaller = reduced_entry(entry)
    assert smaller is not None
    assert len(executable(smaller)) < 0.95 * len(executable(entry))
    assert results(smaller, x, kinds) == results(entry, x, kinds)
    again = reduced_entry(smaller)  # Nothing is left to leave out.
    assert again is not None
    assert executable(again) == executable(smaller)


def test_a_small_one_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, *_ = compiled(fusions)
    monkeypatch.setattr(xla_executables, "WORTH_REDUCING", len(executable(entry)) + 1)
    assert reduced_entry(entry) is None


def test_those_of_another_jaxlib_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_executables, "WORTH_REDUCING", 0)
    entry, *_ = compiled(fusions)
    monkeypatch.setattr(xla_executables, "installed_version", lambda _: "0.10.99")
    assert reduced_entry(entry) is None


def test_without_functions_for_entries_these_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_executables, "WORTH_REDUCING", 0)
    entry, *_ = compiled(fusions)
    find = xla_executables.find_name
    gone = "jax._src.compilation_cache.compress_executable"
    monkeypatch.setattr(xla_executables, "find_name", lambda name: None if name == gone else find(name))
    assert reduced_entry(entry) is None


def small_executable(*computations: bytes) -> bytes:
    """An executable of such computations, behind options of no length."""
    module = written((3, 2, c) for c in computations)
    for _ in range(3):
        module = written([(1, 2, module)])
    return b"\0" + module


def small_computation(number: int | None, called: int) -> bytes:
    fusion = [(1, 2, b"name"), (2, 2, b"fusion"), (11, 2, b"kLoop"), (35, 0, 7), (38, 0, called)]
    return written([(2, 2, written(fusion)), *([] if number is None else [(5, 0, number)])])


@pytest.mark.parametrize(
    "data",
    [
        small_executable(small_computation(None, 1), small_computation(1, 1)),
        small_executable(small_computation(2, 99)),
    ],
    ids=["without a number", "calls none"],
)
def test_computations_that_do_not_fit_are_left_alone(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_executables, "WORTH_REDUCING", 0)
    assert reduced_executable(data) is None


def test_what_has_another_format_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off at any place, and with any byte another one."""
    monkeypatch.setattr(xla_executables, "WORTH_REDUCING", 0)
    code = small_executable(small_computation(2, 1), written([(5, 0, 1)]))
    whole = reduced_executable(code)
    assert whole is not None
    assert b"custom-call" in whole
    cut = [code[:end] for end in range(2, len(code))]
    assert {reduced_executable(data) for data in cut} == {None}
    random = np.random.default_rng(2)
    noise = [random.bytes(200) for _ in range(50)]
    changed = [
        code[:place] + bytes([byte]) + code[place + 1 :]
        for place in range(len(code))
        for byte in (0, 1, 0x7F, 0xFF, code[place] ^ 1, code[place] ^ 2, code[place] ^ 8)
    ]
    for data in (b"", *noise, *changed):
        assert isinstance(reduced_executable(data), bytes | None)


def test_a_part_of_an_entry_is_not_reduced() -> None:
    entry, *_ = compiled(fusions)
    assert is_whole_entry(entry)
    for part in (b"", entry[:20], entry[:-20]):
        assert reduced_entry(part) is None
        assert not is_whole_entry(part)
