"""Programs cut at their calls into the library compute what they did, from steps that XLA's cache can hold."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import lax

from podrun.device.xla import cutting, kept_steps, steps
from podrun.device.xla.convolutions import available
from podrun.device.xla.rewrite import rewrite

pytestmark = pytest.mark.skipif(not available(), reason="this jaxlib holds no oneDNN that is known")
IMAGE, CHANNELS, LAYERS = (4, 8, 12, 12), 8, 2


def loss(weights, x):
    """Equal layers of convolution, normalisation by the batch and a cut at zero."""
    for w in weights:
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME")
        mean = y.mean((0, 2, 3), keepdims=True)
        x = x + jax.nn.relu((y - mean) * lax.rsqrt(((y - mean) ** 2).mean((0, 2, 3), keepdims=True) + 1e-5))
    return (x**2).mean()


def step(x, *weights):
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return value, *(w - 0.1 * g for w, g in zip(weights, gradients, strict=True))


def operands():
    random = np.random.default_rng(3)
    weights = [random.normal(size=(CHANNELS, CHANNELS, 3, 3)).astype(np.float32) for _ in range(LAYERS)]
    return [random.normal(size=IMAGE).astype(np.float32), *weights]


def rewritten(function, *arguments):
    lowered = jax.jit(lambda *given: function(*given)).lower(*arguments)  # anew: rewriting is in place
    assert rewrite(lowered) > 0
    return lowered


@pytest.fixture(scope="module")
def found():
    return cutting.cut(rewritten(step, *operands()))


def test_steps_give_what_the_program_gives(found):
    expected = rewritten(step, *operands()).compile()(*operands())
    run = steps.compiled(found, None, steps.compiler(1, None, {}))
    for mine, theirs in zip(run(*operands()), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)


def test_calls_are_steps_of_their_own_and_no_other_step_has_one(found):
    for one in found.steps:
        assert one.text.count("__onednn$") == one.call
    assert sum(one.call for one in found.steps) >= 3 * LAYERS - 1  # an image's gradient is not asked for


def test_equal_steps_are_compiled_once(found):
    compiled = []
    steps.compiled(found, None, lambda one: compiled.append(one))
    assert len(compiled) == len({one.text for one in found.steps}) < len(found.steps)


def test_a_step_reads_only_what_is_there(found):
    there = set(range(found.arguments))
    for one in found.steps:
        assert there.issuperset(one.reads)
        there |= set(one.makes)
    assert there.issuperset(found.results)


def test_from_forward_to_backward_pass_only_what_calls_touch_is_kept(monkeypatch):
    """The normalisation is worked out again from the convolution's result, not kept at every stage of it."""

    def kept():
        made = cutting.cut(rewritten(step, *operands())).steps
        touched = {v for one in made if one.call for v in (*one.reads, *one.makes)}
        sizes = {
            v: np.prod(shape) for one in made for v, (_, shape) in zip(one.makes, one.gives, strict=True)
        }
        return sum(size == np.prod(IMAGE) and v not in touched for v, size in sizes.items())

    everything = kept()
    monkeypatch.setattr(cutting, "SMALL", CHANNELS)
    assert kept() < everything / 2


def test_a_call_inside_a_loop_is_not_cut():
    def looped(x, w):
        return lax.fori_loop(0, 3, lambda _, y: lax.conv_general_dilated(y, w, (1, 1), "SAME"), x)

    assert cutting.cut(rewritten(looped, *operands()[:2])) is None


def test_the_cache_holds_all_steps_but_calls(found, monkeypatch):
    """What XLA cannot write to its cache JAX does not try to write."""
    written = []
    config = jax._src.config

    def compile_or_get_cached(*_):
        written.append(config.persistent_cache_min_compile_time_secs.value)
        return SimpleNamespace(execute=None)

    monkeypatch.setattr(jax._src.compiler, "compile_or_get_cached", compile_or_get_cached)
    steps.compiled(found, None, steps.compiler(1, None, {}))
    distinct = {one.text: one.call for one in found.steps}
    assert [seconds == float("inf") for seconds in written] == list(distinct.values())


def test_kept_steps_are_read_as_they_were_written_and_a_torn_file_is_not(found, tmp_path):
    path = tmp_path / "program.steps"
    assert kept_steps.read(path) is None
    kept_steps.write(found, 2, path)
    assert kept_steps.read(path) == (found, 2)
    path.write_bytes(path.read_bytes()[:-5])
    assert kept_steps.read(path) is None
