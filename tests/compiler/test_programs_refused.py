"""Programs that cannot be right, or cannot be compiled yet, are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

from podrun.compiler.compile import compile_program
from podrun.compiler.program import InputSpec, ParameterSpec, layout_of
from podrun.core.errors import UnimplementedError, UnsupportedError, UsageError
from podrun.core.executable import TensorSpec
from podrun.core.layout import Layout

from .programs import mlp


@pytest.mark.parametrize(
    ("replicas", "ipus", "layout"),
    [
        (1, 1, Layout(1, 1, 1, 1)),
        (2, 1, Layout(2, 1, 1, 2)),
        (3, 1, Layout(3, 1, 1, 3)),
        (16, 1, Layout(16, 1, 4, 4)),
        (2, 2, Layout(2, 2, 1, 2)),
        (8, 2, Layout(8, 2, 4, 2)),
        (16, 4, Layout(16, 4, 16, 1)),
        (2, 8, Layout(2, 8, 4, 1, 2)),
    ],
)
def test_replicas_lie_on_whole_machines(replicas: int, ipus: int, layout: Layout) -> None:
    assert layout_of(mlp(replicas=replicas, ipus_per_replica=ipus)) == layout


@pytest.mark.parametrize(
    ("replicas", "ipus", "kind", "message", "hint"),
    [
        (0, 1, UsageError, "at least one replica", None),
        (6, 1, UsageError, "6 replicas", "4 or 8"),
        (3, 2, UsageError, "3 replicas", "2 or 4"),
        (1, 3, UsageError, "powers of two", "4 IPUs"),
    ],
)
def test_layouts_that_do_not_fill_machines(
    replicas: int, ipus: int, kind: type[Exception], message: str, hint: str | None
) -> None:
    with pytest.raises(kind, match=message) as caught:
        compile_program(mlp(replicas=replicas, ipus_per_replica=ipus))
    if hint:
        assert hint in str(caught.value.hint)


def test_losses_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(UsageError, match=r"the loss 'logits' is float32\[4, 3\]"):
        compile_program(replace(mlp(), loss="logits"))
    with pytest.raises(UsageError, match="'los'") as caught:
        compile_program(replace(mlp(), loss="los"))
    assert "'loss'" in str(caught.value.hint)
    with pytest.raises(UsageError, match="needs an optimizer"):
        compile_program(replace(mlp(), update=None))
    with pytest.raises(UsageError, match="accumulation factor"):
        compile_program(mlp(accumulation_factor=0))


def test_types_of_64_bits_are_refused() -> None:
    program = mlp()
    wide = {**program.inputs, "y": InputSpec(TensorSpec("y", "int64", (4,)))}
    with pytest.raises(UnsupportedError, match="'y' is int64"):
        compile_program(replace(program, inputs=wide))


def test_names_that_clash() -> None:
    program = mlp()
    twice = {**program.inputs, "w0": InputSpec(TensorSpec("w0", "float32", ()))}
    with pytest.raises(UsageError, match="called: w0"):
        compile_program(replace(program, inputs=twice))


def test_placement_beyond_the_replica() -> None:
    program = mlp(ipus_per_replica=2)

    def forward(p: Any, inputs: Any, key: Any) -> dict[str, Any]:
        with jax.named_scope("ipu:1"):
            values = program.forward(p, inputs, key)
        with jax.named_scope("ipu:2"), jax.named_scope("Last"):
            return values | {"loss": values["loss"] * 3}

    with pytest.raises(UsageError, match="mul in 'ipu:2/Last' is placed on IPU 2, but a replica has 2"):
        compile_program(replace(program, forward=forward))
    compile_program(replace(program, forward=forward, ipus_per_replica=4))


def test_a_scalar_and_matrix_mixture_of_states_is_refused() -> None:
    class Odd:
        elementwise = True

        def group_key(self, weight: str) -> tuple[()]:
            return ()

        def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
            return {"Odd___": (TensorSpec("Odd___" + weight.name, "float32", (2,)), 0.0)}

        def scalars(self, weight: str) -> dict[str, float]:
            return {}

        def apply(self, *arguments: Any) -> Any:
            raise AssertionError

    with pytest.raises(UnimplementedError, match="Odd___b0"):
        compile_program(mlp(update=Odd()))


def test_untrained_parameters_are_shared_constants() -> None:
    program = mlp(replicas=8)
    frozen = {**program.parameters, "w0": ParameterSpec(program.parameters["w0"].spec, False)}
    executable = compile_program(replace(program, parameters=frozen))
    assert executable.variables["w0"].arena == "constants.float32"
    assert executable.arenas["constants.float32"].shared
    assert executable.variables["w1"].arena == "weights.0"
