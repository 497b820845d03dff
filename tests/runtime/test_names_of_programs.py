"""Sessions of equal names in the cache have equal programs: no setting that changes one is missing from its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from podrun.compiler.cache import CompileOptions, executable_digest
from podrun.compiler.compile import compile_program
from podrun.compiler.program import Locations, PipelineOrder
from podrun.core import executable_file
from podrun.core.errors import UsageError
from podrun.costmodel.settings import Location
from podrun.runtime.building import BuiltModel
from podrun.runtime.device_program import fingerprint
from podrun.runtime.graph import Model, Node, OperatorGraph, TensorType
from podrun.runtime.lowering import LoweringOptions
from podrun.runtime.operators import Context
from podrun.runtime.settings import (
    AdaptiveLossScale,
    PhaseSettings,
    PlacedBy,
    Recomputation,
    RunSettings,
    SyntheticData,
)
from podrun.runtime.words import Words

from .tiny import DOMAIN, FUNCTIONS, Descent, Network, TinyOperators, TinySession


@dataclass(frozen=True)
class OtherMeaning:
    """A dialect by which the operator ``moved`` adds another number."""

    step: int = 1

    def has(self, node: Node) -> bool:
        return True

    def check(self, node: Node, forms: Sequence[Any]) -> None:
        """Takes anything."""

    def check_training(self, nodes: Iterable[Node], differentiated: set[str]) -> None:
        """Takes anything."""

    def unknown_value(self, node: Node, index: int) -> None:
        """No words of its own."""


class Unnamed(OtherMeaning):
    """One whose text is no name."""

    __repr__ = object.__repr__


def moved(ctx: Context, node: Node, x: Any) -> Any:
    """``x``, and what the dialect says."""
    return x + (0 if ctx.sdk is None else ctx.sdk.step)  # type: ignore[attr-defined]


def halves() -> Model:
    """An operator on halves."""
    kind = TensorType(np.dtype(np.float16), (2, 3))
    nodes = (Node("moved", DOMAIN, "y", ("x",), ("y",)), Node("tanh", DOMAIN, "z", ("y",), ("z",)))
    graph = OperatorGraph("halves", nodes, ("x",), ("z",), {}, {"x": kind})
    return Model(graph, TinyOperators({**FUNCTIONS, "moved": moved}))


def inference(settings: RunSettings) -> BuiltModel:
    return TinySession(halves(), ["z"], settings).parts.model.built


def training(settings: RunSettings) -> BuiltModel:
    network = Network(layers=2, stages=2)
    session = TinySession(
        network.model(), ["loss"], network.settings(settings), loss="loss", optimizer=Descent(0.1), ipus=2
    )
    return session.parts.model.built


def name(built: BuiltModel) -> str:
    """The name of a program in the cache."""
    identity = fingerprint(built)
    assert identity is not None
    return executable_digest(built.program, "gc200", CompileOptions(), [identity.encode()])


def content(built: BuiltModel) -> bytes:
    return executable_file.dumps(compile_program(built.program))


PIPELINE = RunSettings(accumulates=True, accumulation=4, pipelined=True)
APART = {"local_replicas", "rewrite"}
"""Of a launch of several processes; and a function, whose result counts."""
OFF_CHIP = Locations(weights=Location(off_chip=True))
VALUES: dict[str, list[Any]] = {
    "replicas": [2],
    "first_replica": [1],
    "accumulates": [False],
    "accumulation": [2],
    "mean": [True],
    "running_mean": [True],
    "placement": [PlacedBy.ONE_IPU, PlacedBy.BY_HAND, PlacedBy.AUTOMATIC],
    "split_ratios": [(0.3,)],
    "phases": [PhaseSettings(preload=False)],
    "pipelined": [False],
    "order": [PipelineOrder.INTERLEAVED, None],
    "checks_restores": [False],
    "clips_serially": [True],
    "recomputation": list(Recomputation),
    "outlining": [False],
    "locations": [OFF_CHIP],
    "io_tiles": [32],
    "partials": ["float16"],
    "convolution_partials": ["float16"],
    "constant_weights": [True],
    "synthetic": [SyntheticData.ZEROS, SyntheticData.NORMAL],
    "unsent": [("x",)],
    "stochastic_rounding": [True],
    "floating_point_checks": [True],
    "keeps_random_state": [False],
    "keeps_replica_state": [True],
    "casting": [False],
    "casting_hint": ["an option"],
    "loss_scale": [AdaptiveLossScale()],
    "wide_loss_scale": [True],
    "cache_directory": ["elsewhere"],
    "cache_suffix": [".other"],
    "engine_options": [{"debug.retainDebugInformation": "false"}],
    "planner_options": [{"matmul": {"availableMemoryProportion": "0.1"}}],
    "cycle_counters": [frozenset({"outer"})],
    "dialect": [OtherMeaning(), OtherMeaning(2)],
    "words": [Words(compile_first="first compile")],
}


@pytest.mark.parametrize(
    ("build", "base", "refused"),
    [
        pytest.param(inference, RunSettings(), ["placement"], id="inference"),
        pytest.param(
            training,
            PIPELINE,
            ["accumulates", "accumulation", "loss_scale"],
            id="training",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_settings_that_change_a_program_change_its_name(
    build: Callable[[RunSettings], BuiltModel], base: RunSettings, refused: list[str]
) -> None:
    """Where a name is that of the program without the setting, so is the program, to the byte."""
    assert {item.name for item in fields(RunSettings)} == {*VALUES, *APART}
    first = build(base)
    known, whole, errors = name(first), content(first), []
    assert name(build(base)) == known
    for setting, values in VALUES.items():
        for value in values:
            try:
                built = build(replace(base, **{setting: value}))
            except UsageError:
                errors.append(setting)
                continue
            assert name(built) != known or content(built) == whole, setting
    assert errors == refused


@pytest.mark.parametrize(
    "changes",
    [{"stochastic_rounding": True}, {"dialect": OtherMeaning()}, {"dialect": OtherMeaning(2)}],
    ids=["stochastic rounding", "dialect", "another dialect"],
)
def test_these_settings_change_the_program_of_inference(changes: dict[str, Any]) -> None:
    first, other = inference(RunSettings()), inference(replace(RunSettings(), **changes))
    assert name(first) != name(other)
    assert content(first) != content(other)


def test_options_of_a_trace_count_but_for_those_of_messages() -> None:
    first = LoweringOptions()
    others: dict[str, Any] = {"training": True, "x64": True, "replicas": 2, "grouped": True}
    others |= {"dialect": OtherMeaning()}
    messages: dict[str, Any] = {
        "casting": False,
        "casting_hint": "an option",
        "words": Words(compile_first="first"),
    }
    assert {item.name for item in fields(LoweringOptions)} == {*others, *messages}
    meanings = {replace(first, **{option: value}).meaning() for option, value in others.items()}
    assert len({first.meaning(), *meanings}) == len(others) + 1
    assert {replace(first, **{n: v}).meaning() for n, v in messages.items()} == {first.meaning()}
    assert replace(first, dialect=Unnamed()).meaning() is None


def constants(number: float) -> Model:
    """An operator with a constant in a type that NumPy does not know by itself."""
    value = np.full((2, 3), number, ml_dtypes.bfloat16)
    node = Node("moved", DOMAIN, "y", ("x",), ("y",), {"value": value})
    kind = TensorType(np.dtype(np.float32), (2, 3))
    table = TinyOperators({**FUNCTIONS, "moved": moved})
    return Model(OperatorGraph("constants", (node,), ("x",), ("y",), {}, {"x": kind}), table)


def test_a_constant_of_a_type_of_ml_dtypes_has_a_digest() -> None:
    digests = [fingerprint(TinySession(constants(n), ["y"]).parts.model.built) for n in (1, 2, 1)]
    assert digests[0] == digests[2] != digests[1]
    assert None not in digests


def test_a_program_without_a_digest_is_compiled() -> None:
    """As any program was before programs had names."""
    model = constants(1)
    (node,) = model.graph.nodes
    nodes = (replace(node, attributes={"value": object()}),)
    with TinySession(model.with_graph(replace(model.graph, nodes=nodes)), ["y"]) as session:
        assert fingerprint(session.parts.model.built) is None
        assert session.run(x=np.ones((2, 3), np.float32))["y"].sum() == 6
