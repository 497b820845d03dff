"""Random keys differ for each replica and micro-batch, however the program is folded and laid out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from podrun.compiler import extra_state
from podrun.compiler.compile import CompileOptions, compile_program
from podrun.compiler.program import AnchorSpec, Program, tap
from podrun.core.executable import VariableRole

from .oracle import advanced, train
from .programs import Sgd, inputs_for, mlp, weights_for
from .reference_interpreter import Pod

U64 = st.integers(0, 2**64 - 1)


def noisy(**more: object) -> Program:
    """One dense layer with dropout before it; the mask is a value."""
    plain = mlp(sizes=(6, 3), **more)

    def forward(p: dict, inputs: dict, key: jax.Array) -> dict:
        mask = tap("mask", jax.random.bernoulli(jax.random.fold_in(key, 7), 0.5, (4, 6)).astype(jnp.float32))
        return plain.forward(p, inputs | {"x": inputs["x"] * mask}, key) | {"mask": mask}

    return Program(**{f: getattr(plain, f) for f in plain.__dataclass_fields__} | {"forward": forward})


def run(
    program: Program, seed: int, options: CompileOptions | None = None, batches: int = 3
) -> tuple[Pod, dict]:
    pod = Pod(compile_program(program, options=options))
    words = np.array(extra_state.seed_words(seed), np.uint32)
    pod.write_variables({**weights_for(program), extra_state.SEED_VARIABLE: words})
    return pod, pod.run(batches, inputs_for(program, batches))


def test_masks_do_not_depend_on_folding_or_machines() -> None:
    anchors = [AnchorSpec("mask"), AnchorSpec("loss")]
    program = noisy(anchors=anchors, replicas=8, accumulation_factor=4)
    seed = 2**64 - 5
    pod, folded = run(program, seed)
    tight_pod, tight = run(program, seed, CompileOptions(chunk_bytes=1))
    np.testing.assert_array_equal(folded["mask"], tight["mask"])
    expected = train(program, weights_for(program), inputs_for(program, 3), seed)
    np.testing.assert_allclose(folded["loss"], expected.losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pod.read_variable("w0"), expected.weights["w0"], rtol=1e-5, atol=1e-6)
    masks = folded["mask"].reshape(-1, 24)
    assert len(np.unique(masks, axis=0)) == len(masks) == 3 * 4 * 8
    after = extra_state.seed_words(advanced(seed, 12))
    np.testing.assert_array_equal(pod.read_variable(extra_state.SEED_VARIABLE), after)
    np.testing.assert_array_equal(tight_pod.read_variable(extra_state.SEED_VARIABLE), after)


@pytest.mark.slow
def test_a_seed_read_and_written_back_continues_the_sequence() -> None:
    program = noisy(anchors=[AnchorSpec("mask")], replicas=2)
    _, whole = run(program, 11, batches=4)
    pod, first = run(program, 11, batches=2)
    inputs = {n: v[:2] for n, v in inputs_for(program, 4).items()}
    second = pod.run(2, inputs)
    np.testing.assert_array_equal(whole["mask"], np.concatenate([first["mask"], second["mask"]]))


@pytest.mark.slow
def test_replica_r_uses_the_seed_plus_r() -> None:
    program = noisy(anchors=[AnchorSpec("mask")], replicas=8)
    _, found = run(program, 100, batches=1)
    _, shifted = run(program, 103, batches=1)
    np.testing.assert_array_equal(found["mask"][0, 3:], shifted["mask"][0, :5])


def test_a_seed_exists_only_where_it_is_used() -> None:
    variables = compile_program(noisy()).variables
    assert variables[extra_state.SEED_VARIABLE].role is VariableRole.RANDOM_SEED
    assert variables[extra_state.SEED_VARIABLE].spec.dtype == "uint32"
    assert extra_state.SEED_VARIABLE not in compile_program(mlp(uses_random=True, update=Sgd())).variables


FOLDED = jax.jit(extra_state.folded_keys, static_argnums=(2, 3))
ADVANCED = jax.jit(extra_state.advance, static_argnums=1)


@settings(deadline=None)
@given(seed=U64, offset=st.integers(0, 2**20))
@example(seed=2**32 - 1, offset=1)
@example(seed=2**64 - 1, offset=1)
def test_words_are_64_bit_arithmetic(seed: int, offset: int) -> None:
    words = np.array(extra_state.seed_words(seed), np.uint32)
    keys = np.asarray(FOLDED(words, np.int32(offset), 5, 3)).reshape(5, 3, 2)
    for i in range(5):
        for r in range(3):
            expected = extra_state.seed_words(advanced(seed, i) + offset + r)
            assert tuple(int(word) for word in keys[i, r]) == expected
    assert tuple(int(word) for word in ADVANCED(words, 5)) == extra_state.seed_words(advanced(seed, 5))
