"""The smallest front end: five operators in a table of its own, a model from them, and a session over the runtime.

`docs/runtime.md` walks through it. It imports nothing of PopART, ONNX or torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from podrun.core.errors import InputMismatch, UnimplementedError
from podrun.core.executable import Retrieval
from podrun.core.layout import IpuRange
from podrun.runtime.assembly import SessionParts, SessionSource, assemble, place_and_build
from podrun.runtime.device import DeviceKind, RunDevice
from podrun.runtime.device_program import DeviceProgram
from podrun.runtime.environment import import_jax
from podrun.runtime.graph import Model, Node, OperatorGraph, Place, TensorType
from podrun.runtime.operators import Context, Operator, OperatorFunction
from podrun.runtime.optimizers.hyperparameters import Hyperparameter, UpdateContext
from podrun.runtime.optimizers.rules import Rule
from podrun.runtime.optimizers.sgd import SgdForm, SgdRule
from podrun.runtime.settings import FixedPlan, PlacedBy, Returned, RunSettings, StepData, StepTensor

DOMAIN = "tiny"
MOMENTUM = 0.9
"""What a running mean keeps of its old value."""


# --- Operators: JAX functions in a table -----------------------------------------------------------------


def dense(ctx: Context, node: Node, x: Any, w: Any, b: Any) -> Any:
    """``x @ w + b``."""
    import jax.numpy as jnp

    if x.shape[-1] != w.shape[0]:
        raise InputMismatch(f"rows of {w.shape[0]} weights do not fit {x.shape[-1]} columns")
    return jnp.dot(x, w, precision="highest") + b


def tanh(ctx: Context, node: Node, x: Any) -> Any:
    """Hyperbolic tangent."""
    import jax.numpy as jnp

    return jnp.tanh(x)


def square_error(ctx: Context, node: Node, y: Any, target: Any) -> Any:
    """Half the sum of the squared differences."""
    import jax.numpy as jnp

    return 0.5 * jnp.sum((y - target) ** 2)


def normal_noise(ctx: Context, node: Node, x: Any) -> Any:
    """``x`` with normal noise of the attribute ``scale`` in training, ``x`` otherwise."""
    import jax

    return x + node["scale"] * jax.random.normal(ctx.key(), x.shape, x.dtype) if ctx.training else x


def running_mean(ctx: Context, node: Node, x: Any, mean: Any) -> tuple[Any, Any]:
    """``x`` without the running mean of its columns, and that mean's new value, which replaces the variable."""
    ctx.state_update(1, 1)
    return x - mean, MOMENTUM * mean + (1 - MOMENTUM) * x.mean(0)


@dataclass(frozen=True, slots=True)
class TinyOperators:
    """A table: `podrun.runtime.operators.OperatorTable`."""

    functions: Mapping[str, OperatorFunction]

    def lookup(self, node: Node) -> Operator:
        """The operator of a node."""
        if node.op_type not in self.functions:
            raise UnimplementedError(f"{node.describe()}: {DOMAIN} has no operator {node.op_type!r}")
        random = node.op_type == "normal_noise"
        return Operator(DOMAIN, node.op_type, 1, self.functions[node.op_type], random=random)

    def meaning(self, nodes: Iterable[Node]) -> str | None:
        """The table has no functions of users."""
        return "tiny"


FUNCTIONS: Mapping[str, OperatorFunction] = {
    function.__name__: function for function in (dense, tanh, square_error, normal_noise, running_mean)
}
OPERATORS = TinyOperators(FUNCTIONS)


def node_of(name: str, inputs: Sequence[str], *outputs: str, place: Place, **attributes: Any) -> Node:
    """A node of our domain; one output has the node's name."""
    function, _, _ = name.partition(":")
    made = outputs or (name,)
    planned = {"dense": "Gemm", "tanh": "Tanh"}.get(function, "")
    return Node(function, DOMAIN, name, tuple(inputs), made, attributes, place=place, planned_as=planned)


# --- The optimizer: values for a rule of the runtime ------------------------------------------------------


ONE = Hyperparameter(1.0)


@dataclass(frozen=True, slots=True)
class Descent:
    """Plain gradient descent: a `podrun.runtime.model_lowering.UpdateSource`."""

    rate: float
    momentum: float = 0.0
    loss_scaling: Hyperparameter = ONE
    clipping: tuple[Any, ...] = ()

    def hyperparameter(self, name: str, weight: str) -> Hyperparameter:
        """The rate may change between runs; the other values are constants of the program."""
        if name == "learningRate":
            return Hyperparameter(self.rate, constant=False)
        values = {"momentum": self.momentum, "velocityScaling": 1.0}
        return Hyperparameter(values.get(name, 0.0))

    def is_specific(self, name: str, weight: str) -> bool:
        """No weight has values of its own."""
        return False

    def rule(self, context: UpdateContext) -> Rule:
        """The runtime's formula with these values."""
        return SgdRule(self, context, SgdForm(combined=False))


# --- Sessions ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Arrays(StepData):
    """The data of a run, and what came back, by name."""

    inputs: Mapping[str, np.ndarray]
    results: dict[str, np.ndarray] = field(default_factory=dict)

    def input_names(self) -> Sequence[str]:
        return list(self.inputs)

    def fetch(self, tensor: StepTensor) -> np.ndarray:
        return np.ascontiguousarray(self.inputs[tensor.name], np.float32).reshape(tensor.layout)

    def store(self, tensor: StepTensor, value: np.ndarray) -> None:
        self.results[tensor.name] = np.array(value)


SETTINGS = RunSettings()
ALL = Returned(Retrieval.ALL)


class TinySession:
    """A model on IPUs inside this process. ``wanted``: tensors that come back, all their values."""

    def __init__(
        self,
        model: Model,
        wanted: Sequence[str],
        settings: RunSettings = SETTINGS,
        *,
        batches: int = 1,
        loss: str | None = None,
        optimizer: Descent | None = None,
        ipus: int = 1,
        returned: Returned = ALL,
    ) -> None:
        import_jax()
        device = RunDevice(DeviceKind.IPU, IpuRange(0, ipus * settings.replicas))
        plan = FixedPlan(batches, dict.fromkeys(sorted(wanted), returned))
        source = SessionSource("tiny", model, plan, settings, training=loss is not None)
        placed = place_and_build(source, source.request(device, loss, optimizer), device.target)
        self.parts: SessionParts = assemble(source, placed, DeviceProgram(device, self))

    def prepare(self) -> TinySession:
        """Compile, load, and send the weights."""
        self.parts.loader.compile()
        self.parts.loader.load()
        self.parts.transfer.from_host()
        return self

    def run(self, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        """One run; inputs are ``[samples of all batches, ...]``."""
        arrays = Arrays(inputs)
        self.parts.batches.ensure_ready()
        self.parts.batches.run(arrays)
        return arrays.results

    def read(self, name: str) -> np.ndarray:
        """A weight as it stands on the device."""
        self.parts.transfer.to_host()
        held = self.parts.weights.get(name)
        assert held is not None
        value = np.empty_like(held)
        self.parts.transfer.read({name: value})
        return value

    def __enter__(self) -> TinySession:
        return self.prepare()

    def __exit__(self, *_: object) -> None:
        self.parts.program.device.detach()


# --- A network ----------------------------------------------------------------------------------------------

WIDTH = 4


@dataclass(frozen=True, slots=True)
class Network:
    """Layers of dense and tanh, one for each stage, on as many IPUs; before them a running mean, and noise if any.

    ``rows``: samples of a micro-batch.
    """

    layers: int = 2
    rows: int = 4
    stages: int = 1
    noise: float = 0.0
    means: bool = False

    def start(self) -> dict[str, np.ndarray]:
        """Initial values."""
        random = np.random.default_rng(7)
        values = {f"w{i}": random.standard_normal((WIDTH, WIDTH)) / 2 for i in range(self.layers)}
        values |= {f"b{i}": random.standard_normal(WIDTH) / 4 for i in range(self.layers)}
        values |= {"mean": np.zeros(WIDTH)} if self.means else {}
        return {name: value.astype(np.float32) for name, value in values.items()}

    def place(self, layer: int) -> Place:
        """The IPU and stage of a layer."""
        stage = layer * self.stages // self.layers
        return Place(stage, stage) if self.stages > 1 else Place()

    def nodes(self) -> list[Node]:
        """Forward operators; the loss is ``loss``."""
        first, y, nodes = self.place(0), "x", []
        if self.means:
            nodes.append(node_of("running_mean", [y, "mean"], "centred", "mean/new", place=first))
            y = "centred"
        if self.noise:
            nodes.append(node_of("normal_noise", [y], place=first, scale=self.noise))
            y = "normal_noise"
        for i in range(self.layers):
            place = self.place(i)
            nodes.append(node_of(f"dense:{i}", [y, f"w{i}", f"b{i}"], place=place))
            nodes.append(node_of(f"tanh:{i}", [f"dense:{i}"], place=place))
            y = f"tanh:{i}"
        nodes.append(node_of("square_error", [y, "target"], "loss", place=self.place(self.layers - 1)))
        return nodes

    def model(self) -> Model:
        """The model of the forward pass, which the runtime differentiates."""
        kind = TensorType(np.dtype(np.float32), (self.rows, WIDTH))
        graph = OperatorGraph(
            "network",
            tuple(self.nodes()),
            ("x", "target"),
            ("loss",),
            self.start(),
            {"x": kind, "target": kind},
        )
        return Model(graph, OPERATORS, updates=("mean/new",) if self.means else ())

    def settings(self, settings: RunSettings = SETTINGS) -> RunSettings:
        """Settings that place the layers by hand, if they have stages."""
        return replace(settings, placement=PlacedBy.BY_HAND) if self.stages > 1 else settings


def data(samples: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Inputs and targets ``[samples, WIDTH]``."""
    random = np.random.default_rng(seed)
    x, target = random.standard_normal((2, samples, WIDTH)).astype(np.float32)
    return {"x": x, "target": np.tanh(target)}


def forward(network: Network, values: Mapping[str, np.ndarray], x: np.ndarray) -> list[np.ndarray]:
    """The results of all layers in NumPy, the input first."""
    made = [x]
    for i in range(network.layers):
        made.append(np.tanh(made[-1] @ values[f"w{i}"] + values[f"b{i}"]))
    return made


def gradients(
    network: Network, values: Mapping[str, np.ndarray], x: np.ndarray, target: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of a batch and its gradients, in NumPy."""
    made, grads = forward(network, values, x), {}
    delta = made[-1] - target
    loss = 0.5 * float((delta**2).sum())
    for i in reversed(range(network.layers)):
        z = delta * (1 - made[i + 1] ** 2)
        grads[f"w{i}"], grads[f"b{i}"] = made[i].T @ z, z.sum(0)
        delta = z @ values[f"w{i}"].T
    return loss, grads
