"""ONNX's backend interface on podrun's operators, so that any runner written for it can run them.

    import onnx, podrun.onnx_backend as backend
    backend.run_model(onnx.load("model.onnx"), [x])

Computes on the host with 64-bit types as ONNX has them (a session narrows INT64 to INT32 and refuses DOUBLE, as the
device does). Shapes must be static: an input whose *value* decides a shape (the target of a Reshape, the k of a TopK)
is taken as a compile-time constant, and another value of it compiles anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep

from podrun.core.errors import PodrunError, UnsupportedError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.clients import SHARED_BY, AlignedInputs, device_for, on_one_thread_device, own_settings
from podrun.device.xla.network_programs import network_program
from podrun.device.xla.networks import join_networks
from podrun.device.xla.packing import WeightRoom, pack_weights
from podrun.device.xla.rewrite import available, rewrite_convolutions
from podrun.onnx_models.folding import hoist
from podrun.onnx_models.graph_reader import read_graph
from podrun.onnx_models.lowering import lower
from podrun.onnx_models.model_loader import check_onnx_model
from podrun.onnx_models.ops.registry import GRAPHCORE, find_onnx_operator
from podrun.runtime.graph import OperatorGraph, subgraphs

_ANY_SEED = 0
"""The seed used for tracing; random numbers come from the seed given to ``run``."""

WORTH_DIVIDING = 1 << 24
"""Floating point operations of a model from which on two threads compute its networks of convolutions and what stands
between them. Other operators are divided from `podrun.device.xla.clients.WORTH_SHARING` on only: waking a thread for
each of them takes longer."""
CONVOLUTION_WORTH_DIVIDING = 1 << 17
"""Products of a convolution from which on it is divided. Both threads are awake for the whole network."""
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
"""Round float16 values between operators, as memory does; XLA skips that by default where it can."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """One compiled form: for inputs of certain shapes and types, and for certain values of the specialised ones."""

    fixed: Mapping[str, Any]
    kept: list[Any]
    """Values that depend on the weights alone, computed once."""
    call: Callable[..., dict[str, Any]]
    random: bool
    device: Any
    key: Any
    """A key for models that draw no random numbers; making one takes as long as a small layer."""
    inputs: AlignedInputs = field(default_factory=AlignedInputs)
    direct: bool = False
    """Whether ``call`` takes nothing but the inputs by name, as of a model that is one network."""

    def fits(self, values: Mapping[str, Any]) -> bool:
        return all(_equal(values[name], value) for name, value in self.fixed.items())


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and all(map(_equal, a, b))


def _form(value: Any) -> Any:
    """The properties of an argument on which a compiled form depends: type and shape of an array, or of each element of
    a sequence.
    """
    if isinstance(value, tuple):
        return tuple(_form(v) for v in value)
    return None if value is None else (value.dtype.str, value.dtype.name, value.shape)


def _host_value(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return tuple(_host_value(v) for v in value)
    array = np.asarray(value)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


class PodrunBackendRep(BackendRep):
    """A model that is ready to run. Compiled forms are kept by input shapes and types."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._graph: OperatorGraph = read_graph(model)
        stops = [node for node in self._graph.nodes if node.op_type == "Abort" and node.domain == GRAPHCORE]
        if stops:
            raise UnsupportedError(f"{stops[0].describe()}: only a session can be stopped")
        self._compiled: dict[Any, list[_Compiled]] = {}
        self._lock = threading.Lock()

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Outputs of the model for ``inputs``, a list in the graph's order or a mapping by name.

        Keyword ``seed`` is the seed of random operators. Without it a model that draws numbers is refused: no
        stream is the right one then, and a caller who compares would compare with chance. Raises `PodrunError` for
        what cannot be computed.
        """
        import jax

        values = self._named(inputs)
        compiled = self._find(values)
        if compiled.random and kwargs.get("seed") is None:
            raise UnsupportedError(
                "the model draws random numbers and no seed is given: which numbers are right is not defined",
                hint="run(inputs, seed=0); the same seed gives the same numbers",
            )
        if compiled.direct:
            results = compiled.call(values)
            return tuple(_to_host(results[name]) for name in self._graph.outputs)
        take = compiled.inputs.take
        free = {name: take(name, value) for name, value in values.items() if name not in compiled.fixed}
        with own_settings(), jax.enable_x64(True), jax.default_device(compiled.device):
            key = jax.random.key(kwargs["seed"]) if compiled.random else compiled.key
            results = compiled.call(compiled.kept, free, key)
        return tuple(_to_host(results[name]) for name in self._graph.outputs)

    def _named(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            values = {name: _host_value(value) for name, value in inputs.items()}
        else:
            arrays = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            if len(arrays) > len(self._graph.inputs):
                raise UsageError(f"{len(arrays)} inputs are given; the model has {len(self._graph.inputs)}")
            values = {n: _host_value(v) for n, v in zip(self._graph.inputs, arrays, strict=False)}
        missing = [name for name in self._graph.inputs if name not in values]
        if missing:
            raise UsageError(f"the model's input '{missing[0]}' is not given")
        return values

    def _find(self, values: Mapping[str, Any]) -> _Compiled:
        import jax

        form = tuple((name, _form(value)) for name, value in values.items())
        with self._lock:
            known = self._compiled.setdefault(form, [])
            for candidate in known:
                if candidate.fits(values):
                    return candidate
            with on_one_thread_device():
                lowered = lower(self._model, input_values=values, x64=True, grouped=available())
            fixed = {name: values[name] for name in lowered.specialised}
            free = {name: value for name, value in values.items() if name not in fixed}
            with on_one_thread_device(), jax.enable_x64(True):
                key = jax.random.key(_ANY_SEED)
                split = hoist(lowered.forward, lowered.initial, free, key)
                device = device_for(split.operations)
                key = jax.device_put(key, device)
                one = jax.sharding.SingleDeviceSharding(device)
                shardings: dict[str, Any] = {"in_shardings": one, "out_shardings": one}
                kept = jax.jit(split.prepare, compiler_options=COMPILER_OPTIONS, **shardings)(lowered.initial)
                leaves, structure = jax.tree.flatten(kept)
                room = WeightRoom.of(leaves)
                leaves = room.widened(leaves)

                def run(leaves: list[Any], free: Any, key: Any) -> Any:
                    return split.run(jax.tree.unflatten(structure, room.restored(leaves)), free, key)

                traced = jax.jit(run, keep_unused=True, **shardings).lower(leaves, free, key)
                parts = SHARED_BY if split.operations >= WORTH_DIVIDING else 1
                calls = rewrite_convolutions(traced, parts=parts, worth_dividing=CONVOLUTION_WORTH_DIVIDING)
                packed = pack_weights(traced, room, leaves)
                if calls:
                    join_networks(traced, parts)
                leaves = [jax.device_put(packed.get(i, leaf), device) for i, leaf in enumerate(leaves)]
                network = _network(traced, leaves, free) if calls else None
                call = network or traced.compile(compiler_options=dict(COMPILER_OPTIONS))
            random, direct = lowered.uses_random, network is not None
            compiled = _Compiled(fixed, leaves, call, random, device, key, direct=direct)
            known.append(compiled)
            return compiled


def _network(
    traced: Any, leaves: list[Any], free: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], dict[str, Any]] | None:
    """What computes a traced model from its inputs by name without XLA; None if it is more than one network."""
    import jax

    program = network_program(traced)
    if program is None or not all(isinstance(value, np.ndarray) for value in free.values()):
        return None
    bound = program.bound(dict(enumerate(leaves)))
    outputs = jax.tree.structure(traced.out_info)
    at = {name: len(leaves) + position for position, name in enumerate(sorted(free))}

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        results: dict[str, Any] = jax.tree.unflatten(outputs, bound({at[name]: values[name] for name in at}))
        return results

    return run


def _to_host(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, tuple):
        return [_to_host(v) for v in value]
    return np.asarray(value)


class PodrunBackend(Backend):
    """`onnx.backend.base.Backend` on podrun's operators."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """True iff podrun has every operator of the model, subgraphs included."""
        try:
            return not _missing(read_graph(model))
        except PodrunError:
            return False

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """True for CPU: the operators' numbers are computed on the host."""
        return device.partition(":")[0].upper() == "CPU"

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PodrunBackendRep:
        """Check the model and prepare it. It is compiled at the first run, whose inputs give the shapes.

        Raises `UsageError` for a model that `onnx.checker` refuses, `UnsupportedError` for another device.
        """
        if not cls.supports_device(device):
            raise UnsupportedError(f"device '{device}' is not supported; use CPU")
        check_onnx_model(model)
        return PodrunBackendRep(model)

    @classmethod
    def run_model(
        cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any
    ) -> tuple[Any, ...]:
        """Prepare and run once; keywords (``seed``) go to both."""
        return cls.prepare(model, device, **kwargs).run(inputs, **kwargs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node on arrays given in the order of its (non-empty) inputs. ``opset_version`` picks the opset."""
        version = kwargs.get("opset_version", onnx.defs.onnx_opset_version())
        names = [name for name in dict.fromkeys(node.input) if name]
        arrays = [_host_value(np.asarray(value)) for value in inputs]
        declared = [
            onnx.helper.make_tensor_value_info(
                name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in zip(names, arrays, strict=True)
        ]
        outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
        graph = onnx.helper.make_graph([node], "run_node", declared, outputs)
        imports = [onnx.helper.make_opsetid(node.domain, version)]
        model = onnx.helper.make_model(graph, opset_imports=imports)
        return PodrunBackendRep(model).run(arrays, **kwargs)


def _missing(graph: OperatorGraph) -> list[str]:
    missing = [n.op_type for n in graph.nodes if find_onnx_operator(n.domain, n.op_type, n.opset) is None]
    for node in graph.nodes:
        for inner in subgraphs(node):
            missing += _missing(inner)
    return missing


is_compatible = PodrunBackend.is_compatible
supports_device = PodrunBackend.supports_device
prepare = PodrunBackend.prepare
run_model = PodrunBackend.run_model
run_node = PodrunBackend.run_node
