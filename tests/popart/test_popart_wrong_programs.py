"""Programs drawn at random, most of them wrong: every error is PopART's kind, names the operator, and says what is
wrong in words of podrun, never in those of a library under it.
"""

from __future__ import annotations

import inspect
import random
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import podrun.popart as popart
from podrun.core.errors import PodrunError

KINDS = {
    "FLOAT": np.float32,
    "FLOAT16": np.float16,
    "INT32": np.int32,
    "BOOL": np.bool_,
    "UINT32": np.uint32,
    "INT8": np.int8,
}
SHAPES = ([], [2], [4], [2, 4], [4, 2], [2, 4, 6], [2, 4, 6, 6], [3, 2, 5, 7], [0], [2, 0], [2, 4, 6, 6, 3])
CONSTANTS = ([0], [1], [2, 2], [-1], [1, 0], [0, 1, 2, 3], [3, 4], [100])
SUBGRAPHS = ("then_branch", "else_branch", "body", "callee")
FEW = 15
"""Programs that are drawn by default."""
LEAVE_OUT = ("abort", "printtensor", "version", "domain")
WORDS_OF_LIBRARIES = (
    *(
        "jax",
        "XLA",
        "numpy.",
        "Traceback",
        "PyTreeDef",
        "aval",
        "lax.",
        "ShapedArray",
        "onnx.onnx_cpp",
        "Traced<",
    ),
    *("broadcast_shapes", "inhomogeneous", "tracer", "ufunc", "dot_general", "INTERNAL", "zip()", "NoneType"),
    *(
        "list index",
        "unpack",
        "not subscriptable",
        "has no attribute",
        "division by zero",
        "Executable is not",
    ),
)


@dataclass
class Drawn:
    """One program: the operator it is about, its inputs, and what makes them."""

    dice: random.Random
    builder: popart.Builder = field(default_factory=popart.Builder)
    operator: str = ""
    data: dict[str, np.ndarray] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)

    def input(self) -> str:
        """An input, a weight or a constant, of any type and shape; rarely a name that nothing makes."""
        kind, shape = self.dice.choice([*["FLOAT"] * 6, *KINDS]), self.dice.choice(SHAPES)
        value = np.asarray(np.random.default_rng(self.dice.randrange(99)).normal(size=shape) * 3)
        value = value.astype(KINDS[kind])
        how = self.dice.random()
        if how < 0.6:
            name = self.builder.addInputTensor(popart.TensorInfo(kind, shape))
            self.data[name] = value
        elif how < 0.85:
            name = self.builder.addInitializedInputTensor(value, f"w{len(self.weights)}")
            self.weights.append(name)
        elif how < 0.98:
            dtype = self.dice.choice([np.int64, np.int32, np.float32])
            name = self.builder.aiOnnx.constant(np.array(self.dice.choice(CONSTANTS), dtype))
        else:
            name = self.dice.choice(["", "nothing"])
        return name

    def attribute(self, parameter: inspect.Parameter) -> Any:
        """A value for an argument, of its own type more often than not."""
        if parameter.name in SUBGRAPHS:
            return self.builder.createSubgraphBuilder()
        if parameter.name in ("num_outputs", "numOutputs"):
            return self.dice.choice([1, 1, 2, 3])
        default = parameter.default
        if isinstance(default, float):
            return self.dice.choice([0.5, 0.0, -2.0])
        if isinstance(default, str) and self.dice.random() < 0.8:
            return self.dice.choice(["SAME_UPPER", "constant", "linear", "nearest", "bogus"])
        if isinstance(default, list | tuple) or "equence" in str(parameter.annotation):
            return [self.dice.choice([0, 1, 1, 2, 3, -1]) for _ in range(self.dice.choice([1, 2, 2, 4]))]
        return self.dice.choice([0, 1, 2, 3, -1, 7, 100, [0, 1], 0.5, "bogus", None])

    def outputs(self) -> list[str]:
        """Call an operator of the builder."""
        spaces = [self.builder.aiOnnx] * 3 + [self.builder.aiGraphcore] * 2
        space = self.dice.choice(spaces)
        self.operator = self.dice.choice([m for m in dir(space) if m[0] != "_" and m not in LEAVE_OUT])
        call = getattr(space, self.operator)
        parameters = list(inspect.signature(call).parameters.values())
        inputs = [self.input() for _ in range(self.dice.choice([0, 1, 1, 1, 2, 2, 3, 4]))]
        chosen = {
            p.name: self.attribute(p)
            for p in parameters
            if p.name not in ("args", "debugContext", "debugPrefix")
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            and (p.default is p.empty or self.dice.random() < 0.15)
        }
        made = call(inputs, **chosen) if any(p.name == "args" for p in parameters) else call(**chosen)
        return [made] if isinstance(made, str) else list(made)

    def session(self, outputs: list[str]) -> Any:
        """A session that trains on the mean of the first output, or computes all of them."""
        device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1})
        every = popart.AnchorReturnType("All")
        anchors = dict.fromkeys(outputs, every)
        if self.dice.random() < 0.5:
            return popart.InferenceSession(
                self.builder.getModelProto(), popart.DataFlow(1, anchors), deviceInfo=device
            )
        loss = self.builder.aiGraphcore.identityloss([outputs[0]])
        options = popart.SessionOptions()
        options.enableStochasticRounding = self.dice.random() < 0.3
        return popart.TrainingSession(
            self.builder.getModelProto(),
            popart.DataFlow(1, anchors | {loss: every}),
            loss,
            popart.ConstSGD(0.01),
            deviceInfo=device,
            userOptions=options,
        )

    def fed(self) -> dict[str, Any]:
        """The inputs' data, sometimes without one or with one of another form."""
        if self.data and self.dice.random() < 0.2:
            name = self.dice.choice(sorted(self.data))
            other = self.data[name].astype(np.float64), self.data[name].reshape(-1)[:1], np.zeros((3, 3, 3))
            return self.data | {name: self.dice.choice(other)} if self.dice.random() < 0.7 else {}
        return self.data


def objection(drawn: Drawn, stage: str, error: Exception) -> str | None:
    """What is wrong with an error; None if nothing is."""
    said = str(error).partition("\n")[0]
    whole = " ".join(map(str, (said, getattr(error, "hint", ""))))
    if any(word in said for word in WORDS_OF_LIBRARIES) or "inside a library" in said:
        return f"speaks of a library: {said}"
    if stage == "build" and isinstance(error, TypeError):  # As pybind11 raises it, for a wrong argument.
        return None
    if not isinstance(error, (PodrunError, popart.popart_exception)):
        return f"is {type(error).__name__}: {said}"
    if stage in ("build", "run") or drawn.operator == "nop":
        return None
    plain = drawn.operator.lower().replace("_", "").replace("logical", "").removesuffix("loss")
    about_others = (
        "the loss 'Ident",
        "Anchor tensor",
        "The label tensor",
        "anchor Gradient",
        "tensor 'input",
    )
    if plain not in whole.lower() and not any(words in whole for words in about_others):
        return f"does not name {drawn.operator}: {whole}"
    return None


def wrong(seed: int, folder: Path) -> str | None:
    """What is wrong with the error of the program of a seed, if it has one."""
    drawn, stage = Drawn(random.Random(seed)), "build"
    try:
        outputs = drawn.outputs()
        if not outputs:
            return None
        stage = "session"
        session = drawn.session(outputs)
        session.prepareDevice()
        stage = "run"
        session.weightsFromHost()
        session.run(popart.PyStepIO(drawn.fed(), session.initAnchorArrays()))
        session.modelToHost(str(folder / "model.onnx"))
    except Exception as error:
        found = objection(drawn, stage, error)
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            found
            and f"seed {seed}, {drawn.operator} while {stage}: {found} ({place.filename}:{place.lineno})"
        )
    return None


def test_errors_of_a_few_wrong_programs(tmp_path: Path) -> None:
    assert [found for seed in range(FEW) if (found := wrong(seed, tmp_path))] == []


@pytest.mark.slow
def test_errors_of_many_wrong_programs(tmp_path: Path) -> None:
    assert [found for seed in range(FEW, 1000) if (found := wrong(seed, tmp_path))] == []
