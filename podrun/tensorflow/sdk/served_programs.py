"""Programs for servers: a step with frozen variables, compiled without a device and written to a PopEF file.

``ipu.serving`` writes a folder: `EXECUTABLE`, which ``podrun serve`` and `podrun.serving.runner.ModelRunner` run, and a
SavedModel whose signature computes the same on the host, with the program's own steps before and after.
``application_compile_op`` writes the file alone. Inputs and outputs of the file have the names of the program's
arguments and results.
"""

from __future__ import annotations

import inspect
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from podrun.core.executable import Retrieval
from podrun.core.layout import IpuRange
from podrun.core.names import ASSERTED_ANCHOR
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.assembly import SessionSource, assemble, place_and_build
from podrun.runtime.device import DeviceKind, RunDevice
from podrun.runtime.device_program import DeviceProgram
from podrun.runtime.environment import import_jax
from podrun.runtime.graph import Model, OperatorGraph, TensorType
from podrun.runtime.settings import FixedPlan, Returned, RunSettings
from podrun.tensorflow.capture.markers import mark, marked, reference
from podrun.tensorflow.capture.program_graphs import IpuGraph, trace
from podrun.tensorflow.execution.launching import read_handle
from podrun.tensorflow.execution.step_program import ReadStep, StepSource, read_step
from podrun.tensorflow.graph.structure import ASSERTED, leaving
from podrun.tensorflow.operators.table import TensorFlowOperators
from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

EXECUTABLE = "executable.popef"
"""The file in a folder that `export_single_step` and its like write."""
StatedSignature: TypeAlias = "tf.TensorSpec | Sequence[tf.TensorSpec] | None"
"""A signature as programs state it: None where that of the function or of a dataset holds."""
StepSignature = Sequence[tf.TensorSpec]


@dataclass(frozen=True)
class ServedArguments:
    """The inputs of a served program: a queue to the reader of graphs."""

    flat_specs: Sequence[tf.TensorSpec]
    tensor_names: Sequence[str]


@dataclass(frozen=True, slots=True)
class ServedStep:
    """A step with frozen variables. ``kinds``: its inputs; ``outputs``: names for what goes to its outfeed, in order;
    ``held``: the values of its variables.
    """

    read: ReadStep
    kinds: Mapping[str, TensorType]
    outputs: Sequence[str]
    held: Mapping[str, np.ndarray]
    shards: int = 1

    @property
    def leaving(self) -> tuple[str, ...]:
        """The outputs, and what the step says of its assertions if it has some."""
        return (*self.outputs, *([ASSERTED_ANCHOR] if ASSERTED in self.read.outfeeds else []))

    def graph(self) -> OperatorGraph:
        """The runtime's graph, with the inputs and outputs of the file."""
        renamed = dict(zip(leaving(self.read.outfeeds), self.outputs, strict=True))
        renamed |= dict.fromkeys(self.read.outfeeds.get(ASSERTED, ()), ASSERTED_ANCHOR)
        nodes = tuple(
            replace(node, outputs=tuple(renamed.get(o, o) for o in node.outputs)) for node in self.read.nodes
        )
        return OperatorGraph(
            "served", nodes, tuple(self.kinds), self.leaving, dict(self.held), dict(self.kinds)
        )


def read_served_step(
    step: Callable[..., Any], signature: StepSignature, output_names: Sequence[str] | None = None
) -> ServedStep:
    """Trace ``step`` with its variables as they are. ValueError for another number of ``output_names`` than outputs."""
    import_jax()
    names = [spec.name or f"input_{place}" for place, spec in enumerate(signature)]
    queue = reference(ServedArguments(signature, names))
    graph = IpuGraph("served", 0, automatic=True)

    def served() -> Any:
        tensors = mark("dequeue", [], list(signature), stateful=True, queue=queue)
        results = [tf.convert_to_tensor(t) for t in tf.nest.flatten(step(*tensors))]
        mark("enqueue", results, [tf.TensorSpec([], tf.bool)], stateful=True, queue=reference(None))
        return results

    results = trace(graph, served, [], convert=True)
    outputs = list(output_names or []) or [f"output_{place}" for place in range(len(results))]
    if len(outputs) != len(results):
        raise ValueError(f"There are {len(outputs)} output_names for {len(results)} outputs.")
    graph.inputs = [inner for _, inner in graph.captures]
    keys = {inner.name: f"variable/{place}" for place, (_, inner) in enumerate(graph.captures)}
    resources = frozenset(keys[inner.name] for _, inner in graph.captures if inner.dtype == tf.resource)
    held = {keys[inner.name]: read_handle(outer) for outer, inner in graph.captures}
    source = StepSource("served", graph, keys, resources, [], graph.control_outputs, {})
    kinds = {
        name: TensorType(np.dtype(spec.dtype.as_numpy_dtype), tuple(spec.shape.as_list()))
        for name, spec in zip(names, signature, strict=True)
    }
    return ServedStep(read_step(source), kinds, outputs, held, getattr(graph, "shards", 1))


def write_program_file(
    served: ServedStep, path: str, iterations: int, blobs: Mapping[str, bytes] = MappingProxyType({})
) -> None:
    """Compile a step for as many IPUs as it has shards, and write it with its variables and bytes of the caller."""
    plan = FixedPlan(iterations, {name: Returned(Retrieval.ALL) for name in sorted(served.leaving)})
    model = Model(served.graph(), TensorFlowOperators())
    settings = RunSettings(constant_weights=True)
    source = SessionSource("served", model, plan, settings, training=False)
    device = RunDevice(DeviceKind.OFFLINE, IpuRange(0, 1 << (served.shards - 1).bit_length()))
    built = place_and_build(source, source.request(device, None, None), device.target)
    owner = _Owner()
    parts = assemble(source, built, DeviceProgram(device, owner))
    parts.loader.compile()
    parts.files.save(path, "model", blobs)


class _Owner:
    """Whose program a compiled one is, to the device that is not there."""


# --- Folders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServedSteps:
    """What is exported: the step for the IPU, and steps of the host before and after it, each with its signature."""

    predict: Callable[..., Any]
    signature: StepSignature
    before: Callable[..., Any] | None = None
    before_signature: StepSignature | None = None
    after: Callable[..., Any] | None = None
    output_names: Sequence[str] | None = None


def checked_folder(export_dir: str, purge: bool) -> str:
    """The folder, empty. ValueError for one that is not, unless it is to be purged."""
    if os.path.isdir(export_dir) and os.listdir(export_dir):
        if not purge:
            raise ValueError(
                f"Directory {export_dir} is not empty: use another one, or purge_export_dir=True."
            )
        shutil.rmtree(export_dir)
    os.makedirs(export_dir, exist_ok=True)
    return export_dir


def chosen_signature(
    step: Callable[..., Any],
    signature: StatedSignature,
    dataset: tf.data.Dataset | None,
    what: str = "predict_step",
) -> StepSignature:
    """The signature of a step: as it is given, of a dataset's elements, or of the tf.function. ValueError for two or
    none of these and for open shapes, TypeError for what is no signature or dataset.
    """
    if signature is not None and dataset is not None:
        raise ValueError(f"Both {what}_signature and input_dataset are set: only one can be.")
    if dataset is not None:
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(f"input_dataset must be a tf.data.Dataset, not {type(dataset)}.")
        signature = dataset.element_spec
    if signature is None:
        signature = getattr(step, "input_signature", None)
    if signature is None:
        raise ValueError(
            f"Either {what}_signature or input_dataset must be set, or {what} have an input_signature."
        )
    flat = list(signature) if isinstance(signature, (list, tuple)) else [signature]
    names = list(inspect.signature(getattr(step, "python_function", step)).parameters)
    specs = []
    for place, spec in enumerate(flat):
        if not isinstance(spec, tf.TensorSpec):
            raise TypeError(f"{what}_signature must be a list of tf.TensorSpec, not of {type(spec)}.")
        if not spec.shape.is_fully_defined():
            raise ValueError(f"The shape {spec.shape} of input {place} of {what} is not fully defined.")
        default = names[place] if place < len(names) else f"input_{place}"
        specs.append(tf.TensorSpec(spec.shape, spec.dtype, spec.name or default))
    return specs


def write_folder(steps: ServedSteps, export_dir: str, iterations: int) -> Callable[..., Any] | None:
    """Write the PopEF file and the SavedModel. Returns the function of the SavedModel's signature, or None."""
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, not {iterations}.")
    path = os.path.join(export_dir, EXECUTABLE)
    predict = getattr(steps.predict, "python_function", steps.predict)
    served = read_served_step(predict, steps.signature, steps.output_names)
    write_program_file(served, path, iterations)
    return _write_saved_model(steps, predict, served.outputs, export_dir)


def _write_saved_model(
    steps: ServedSteps, predict: Callable[..., Any], names: Sequence[str], export_dir: str
) -> Callable[..., Any] | None:
    signature = steps.before_signature or steps.signature

    def whole(*inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        values = tf.nest.flatten(steps.before(*inputs)) if steps.before is not None else list(inputs)
        results = tf.nest.flatten(predict(*values))
        if steps.after is not None:
            after = steps.after(*results)
            if isinstance(after, dict):
                return dict(after)
            results = tf.nest.flatten(after)
        keys = list(names) if len(results) == len(names) else [f"output_{i}" for i in range(len(results))]
        return dict(zip(keys, results, strict=True))

    function = tf.function(whole, input_signature=list(signature), autograph=False)
    concrete = function.get_concrete_function()
    if any(marked(operation) for operation in concrete.graph.get_operations()):
        warnings.warn(
            "The step uses operations that only IPUs have: the folder has the executable, and no SavedModel.",
            stacklevel=4,
        )
        return None
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    frozen = convert_variables_to_constants_v2(concrete)
    module = tf.Module()
    module.serve = tf.function(
        lambda *inputs: dict(zip(sorted(concrete.structured_outputs), frozen(*inputs), strict=True)),
        input_signature=list(signature),
        autograph=False,
    )
    tf.saved_model.save(module, export_dir, signatures={"serving_default": module.serve})
    served: Callable[..., Any] = module.serve
    return served


def under_strategy(model: tf.keras.Model) -> None:
    """ValueError for a Keras model that was not made under an IPU strategy."""
    if not isinstance(getattr(model, "distribute_strategy", None), IPUStrategyV1):
        raise ValueError(f"Model {model.name} was not created within an IPUStrategy.scope().")
