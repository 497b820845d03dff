"""Generated layouts: replicas x stages x accumulation x schedule x IPUs; the same bits wherever the work is the same.

A layout is a chain of layers on places. Run in sequence, grouped, interleaved, in execution phases, and on replicas
that span machines, it must give equal anchors and variables, and except for rounding the results of a plain loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from podrun.compiler.compile import compile_program
from podrun.compiler.program import AnchorSpec, PipelineOrder, Program

from .oracle import train
from .programs import Adam, Momentum, Sgd, inputs_for, weights_for
from .reference_interpreter import Pod
from .test_sharding import chain

ANCHORS = (AnchorSpec("loss"), AnchorSpec("h0"), AnchorSpec("Gradient___w0"), AnchorSpec("w1"))


@dataclass(frozen=True)
class Drawn:
    """A generated layout: the IPU of each layer, and the program's other properties."""

    places: tuple[int, ...]
    replicas: int
    accumulation: int
    skip: bool
    dropout: bool
    tied: bool
    rule: str

    def program(self, **more: Any) -> Program:
        rules = {"sgd": Sgd(), "momentum": Momentum(), "adam": Adam()}
        fields: dict[str, Any] = {
            "replicas": self.replicas,
            "accumulation_factor": self.accumulation,
            "skip": self.skip,
            "dropout": self.dropout,
            "tied": self.tied and len(self.places) > 2,
            "update": rules[self.rule],
            "anchors": ANCHORS,
            "ipus": 4,
        }
        return chain(list(more.pop("places", self.places)), **(fields | more))


@st.composite
def layouts(draw: st.DrawFn) -> Drawn:
    """Two to four layers, in order of stages on IPUs in any order; more than one IPU."""
    count = draw(st.integers(2, 4))
    places = draw(
        st.lists(st.integers(0, 3), min_size=count, max_size=count).filter(lambda p: len(set(p)) > 1)
    )
    return Drawn(
        tuple(places),
        draw(st.sampled_from([1, 2, 3])),
        draw(st.integers(1, 9)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(["sgd", "momentum", "adam"])),
    )


def run(program: Program) -> tuple[Pod, dict[str, np.ndarray]]:
    pod = Pod(compile_program(program))
    pod.write_variables(weights_for(program))
    return pod, pod.run(1, inputs_for(program, 1))


def check(layout: Drawn) -> None:
    program = layout.program()
    pod, anchors = run(program)
    others = [replace(program, pipelined=True, pipeline_schedule=schedule) for schedule in PipelineOrder]
    others.append(layout.program(places=[4 * place for place in layout.places], ipus=16))
    for other in others:
        found, values = run(other)
        for name, value in anchors.items():
            np.testing.assert_array_equal(values[name], value, err_msg=name)
        for name in pod.executable.variables:
            np.testing.assert_array_equal(found.read_variable(name), pod.read_variable(name), err_msg=name)
    expected = train(program, weights_for(program), inputs_for(program, 1))
    np.testing.assert_allclose(anchors["loss"], expected.losses, rtol=1e-5, atol=1e-6)
    if layout.rule != "adam":  # Adam divides by gradients that may be next to nothing.
        for name, weight in expected.weights.items():
            np.testing.assert_allclose(pod.read_variable(name), weight, rtol=1e-4, atol=2e-6, err_msg=name)


QUICK = settings(
    max_examples=1,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.slow  # By default `test_sharding.py` compares schedules of chains of its own.
@QUICK
@given(layouts())
def test_generated_layouts(layout: Drawn) -> None:
    check(layout)


@pytest.mark.slow
@settings(QUICK, max_examples=40, derandomize=False, phases=[Phase.generate, Phase.shrink])
@given(layouts())
def test_many_generated_layouts(layout: Drawn) -> None:
    check(layout)
