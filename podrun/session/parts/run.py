"""Running a session: step data in, a run on the device, anchors out.

`StepRunner` moves the data of runs between a stepIO and a device; `BatchRunner` decides when a session may run.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.compiler.program import InputSpec
from podrun.core.errors import PoplarError
from podrun.core.executable import Retrieval
from podrun.core.names import in_float32
from podrun.session.dataflow import AnchorReturnType, DataFlow
from podrun.session.enums import ReplicatedStreamMode, SyntheticDataMode
from podrun.session.exceptions import popart_runtime_error, poplar_application_runtime_error, surfaced
from podrun.session.parts.device_program import Hyperparameters, ProgramLoader
from podrun.session.parts.files import SessionReports
from podrun.session.parts.replica_check import ReplicaCheck
from podrun.session.parts.weights import HostWeights
from podrun.session.program.build import BuiltModel, info_of
from podrun.session.program.observers import observe
from podrun.session.session_options import SessionOptions
from podrun.session.stepio import TO_DEVICE, TO_HOST, IStepIO, PyStepIO, StepTensor, StreamCallbacks
from podrun.session.tensor_info import TensorInfo

if TYPE_CHECKING:
    from podrun.core.executable import TensorSpec
    from podrun.device.connection import Connection, RunResult
    from podrun.runtime.graph import Node

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
_LOSSES = {"Nll": -1, "SoftmaxCrossEntropyLoss": 1, "NegativeLogLikelihoodLoss": 1}
"""Losses that have labels, and the axis of their first input that counts classes."""
_LOOKUPS = {"Gather": 1, "GroupedGather": 1, "GatherElements": 1, "Scatter": 1, "ScatterElements": 1,
            "ScatterReduce": 1, "OneHot": 0}  # fmt: skip
"""Operators with indices along their attribute ``axis``, and the input that holds the indices."""
_NO_GRADIENT = (
    "such a sample has a loss without a gradient, as in PopART. ignoreIndex leaves samples out on purpose"
)
_REFUSED = "PyTorch on a CPU refuses it, and what is computed here has no meaning"
_EFFECTS = {
    "Gather": "podrun reads the nearest row, and what an IPU reads is not defined",
    "Scatter": "podrun leaves the update out, and where an IPU writes it is not defined",
    "OneHot": "its row has the off value everywhere",
}
"""The effect of an index that is out of range, by a part of the operator's name."""
_LABEL_PRESERVING = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast", "Transpose", "Expand"}
"""Operators that pass labels and indices on unchanged."""


@dataclass(frozen=True, slots=True)
class LabelRange:
    """Integers that an input may have: ``lowest`` to ``classes`` - 1, and ``ignored``.

    ``effect``: what another integer does. ``reader``: the operator that takes them as indices; empty for labels.
    """

    classes: int
    ignored: int | None
    lowest: int = 0
    reader: str = ""
    effect: str = _NO_GRADIENT

    def strange(self, labels: np.ndarray) -> int | None:
        """A label that is not a class, or None."""
        if labels.dtype.kind not in "iu" or not labels.size:
            return None
        if int(labels.min()) >= self.lowest and int(labels.max()) < self.classes:
            return None
        wrong = labels[(labels < self.lowest) | (labels >= self.classes)]
        wrong = wrong if self.ignored is None else wrong[wrong != self.ignored]
        return int(wrong.reshape(-1)[0]) if wrong.size else None

    def warning(self, name: str, label: int) -> str:
        """The warning of a label of an input that is not a class."""
        is_index = f"the index {label}, but {self.reader} has {self.classes} places"
        found = is_index if self.reader else f"the label {label}, but there are {self.classes} classes"
        return f"Input {name!r} has {found} (0 to {self.classes - 1}): {self.effect}."


def label_ranges(
    nodes: Iterable[Node], tensors: Mapping[str, TensorSpec | Any], inputs: Iterable[str]
) -> dict[str, LabelRange]:
    """The inputs of a graph that are labels of a loss or indices, and the integers that each may have: those of the
    narrowest range, if several operators read an input.
    """
    known = set(inputs)
    found: dict[str, LabelRange] = {}
    makers: dict[str, Node] = {}
    for node in nodes:
        makers |= dict.fromkeys(node.outputs, node)
        source = (
            1 if node.hints.indices is not None or node.op_type in _LOSSES else _LOOKUPS.get(node.op_type)
        )
        if source is None or len(node.inputs) <= source:
            continue
        name = node.inputs[source]
        while name in makers and makers[name].kind in _LABEL_PRESERVING:
            name = makers[name].inputs[0]
        allowed = _range_of(node, tensors) if name in known else None
        if allowed is not None and (name not in found or allowed.classes < found[name].classes):
            found[name] = allowed
    return found


def _range_of(node: Node, tensors: Mapping[str, TensorSpec | Any]) -> LabelRange | None:
    """The labels or indices that an operator may read, or None if that is not known."""
    if node.hints.indices is not None:
        classes, *ignored = node.hints.indices
        reader = "" if ignored else node.op_type.split(".")[1]
        return LabelRange(classes, ignored[0] if ignored else None, 0, reader, _REFUSED)
    loss = node.op_type in _LOSSES
    spec = tensors.get(node.outputs[0] if node.op_type == "OneHot" else node.inputs[0])
    if spec is None:
        return None
    axis = _LOSSES[node.op_type] if loss else node.get("axis", -1 if node.op_type == "OneHot" else 0)
    if not -len(spec.shape) <= axis < len(spec.shape):
        return None
    classes = int(node.get("axis_size", spec.shape[axis]))
    if not loss:
        effect = next(said for part, said in _EFFECTS.items() if part in node.op_type)
        return LabelRange(classes, None, -classes, node.op_type, effect)
    ignored = node.get("ignoreIndex", node.get("ignore_index"))
    return LabelRange(classes, None if ignored is None else int(ignored))


def warn_of_strange_labels(ranges: dict[str, LabelRange], data: Mapping[str, np.ndarray]) -> None:
    """Warn of labels and indices that are out of range, once for each input, which is then removed from ``ranges``."""
    for name, allowed in list(ranges.items()):
        label = allowed.strange(data[name]) if name in data else None
        if label is not None:
            del ranges[name]
            warnings.warn(allowed.warning(name, label), stacklevel=_levels_to_program())


def _levels_to_program() -> int:
    """The ``stacklevel`` at which the caller's warning shows the program's line: the first outside podrun."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, levels = frame.f_back, levels + 1
    return levels


_log = logging.getLogger("podrun.popart.session")


class LossWatch:
    """Says once that a loss has become NaN: what is trained on after that is lost, and nothing else would say so."""

    def __init__(self, losses: Iterable[str]) -> None:
        self._losses = set(losses)

    def look(self, name: str, value: np.ndarray, batches: int, batches_done: int) -> None:
        """Look at an anchor of a run of so many ``batches``, after which ``batches_done`` are done since the load.

        ``value``: ``[results, ...]``, in the batches' order.
        """
        if name not in self._losses or not np.isnan(value).any():
            return
        self._losses.clear()
        first = int(np.isnan(value.reshape(len(value), -1)).any(axis=1).argmax())
        batch = batches_done - batches + ((first + 1) * batches - 1) // len(value)
        _log.warning(
            "the loss is NaN in batch %d (from 0, since the program was loaded): try a smaller learning rate or loss "
            "scaling, and look for NaN in the inputs",
            batch,
        )


class StepRunner:
    """Moves the data of runs between a stepIO and the device. ``model_inputs``: names of the model's inputs.

    What is the same for every run is computed once for each number of batches.
    """

    def __init__(
        self, built: BuiltModel, flow: DataFlow, options: SessionOptions, model_inputs: Iterable[str]
    ) -> None:
        self._built, self._flow, self._options = built, flow, options
        self._model_inputs = frozenset(model_inputs) - set(built.weights)
        lowered = built.lowered
        self._labels = label_ranges(lowered.graph.nodes, lowered.tensors, lowered.inputs)
        self._streams = StreamCallbacks()
        self._loss_watch = LossWatch(
            name for name in flow.anchors() if built.program.loss in (name, in_float32(name))
        )
        self._made_for: tuple[object, ...] = ()
        self._inputs: dict[str, StepTensor] = {}
        self._outputs: dict[str, StepTensor] = {}

    def check(self, io: IStepIO) -> None:
        """Raise before anything runs if a stepIO's data cannot be right."""
        self._lay_out()
        if self._options.syntheticDataMode is not SyntheticDataMode.Off:
            return
        io.check({n: t for n, t in self._inputs.items() if not self._is_replaced(n)}, self._outputs)
        if isinstance(io, PyStepIO):
            self._check_names(io.input_names())

    def run(self, io: IStepIO, connection: Connection) -> RunResult:
        """Run with a stepIO's data. The result holds the anchors that `store` has to hand over."""
        self._lay_out()
        data = {name: self._input_data(io, tensor) for name, tensor in self._inputs.items()}
        warn_of_strange_labels(self._labels, data)
        batches = self._flow.batchesPerStep()
        if self._options.overlaps_batches:
            data = {name: value.reshape(1, batches, *value.shape[2:]) for name, value in data.items()}
            batches = 1
        targets = self._targets(io)
        with surfaced():
            if targets:
                return connection.run(batches, data, targets)
            return connection.run(batches, data)

    @property
    def passes(self) -> int:
        """How often the program runs in one run of the session."""
        return 1 if self._options.overlaps_batches else self._flow.batchesPerStep()

    def store(self, io: IStepIO, result: RunResult) -> None:
        """Hand the anchors of a run over to a stepIO and to connected functions."""
        if self._options.syntheticDataMode is not SyntheticDataMode.Off:
            return
        given = self._by_batch(result.anchors)
        for name, tensor in self._outputs.items():
            value = self._built.anchor(name, given)
            self._loss_watch.look(name, value, self.passes, result.batches_done)
            target = io.target(tensor)
            if target is None or not _same_memory(value, target):
                io.store(tensor, value)
            self._streams.show(tensor, value, self._options.local_replicas)

    def observe(self, result: RunResult) -> None:
        """Print and abort as the program's observers say."""
        if not self._built.observers:
            return
        first = self._options.globalReplicaOffset if self._options.enableDistributedReplicatedGraphs else 0
        observed = self._built.observed(self._by_batch(result.anchors))
        observe(self._built.observers, observed, first, self._built.program.replicas > 1)

    def connect(self, handle: str, callback: Callable[[object], None], index: int) -> None:
        """See `Session.connectStreamToCallback`."""
        streams = {TO_DEVICE + name: self._rows(name) for name in self._built.program.inputs}
        streams |= {TO_HOST + name: self._options.local_replicas for name in self._flow.anchors()}
        self._streams.connect(handle, callback, index, streams)

    def _targets(self, io: IStepIO) -> dict[str, np.ndarray]:
        """Arrays of the stepIO that the device may write anchors to: anchors that are returned as the program gives
        them. None if an observer can end the run, which then gives no anchors.
        """
        if self._options.syntheticDataMode is not SyntheticDataMode.Off or self._options.overlaps_batches:
            return {}
        if self._built.observers:
            return {}
        given = {spec.name: spec for spec in self._built.program.anchors}
        found: dict[str, np.ndarray] = {}
        for name, tensor in self._outputs.items():
            spec = self._built.wanted[name]
            if name in self._built.derived or given.get(spec.name) != spec or spec.name in found:
                continue
            target = io.target(tensor)
            if target is not None:
                found[spec.name] = target.reshape(self._device_layout(spec.retrieval, tensor.layout))
        return found

    def _device_layout(self, retrieval: Retrieval, layout: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an anchor's array at the connection, where it begins with (crossings, replicas)."""
        if retrieval is Retrieval.ALL:
            return (self._flow.batchesPerStep(), self._options.micro_batches, *layout[1:])
        return layout if retrieval is Retrieval.EVERY_N else layout[1:]

    def _rows(self, name: str) -> int:
        """Replicas of this process that have step data of their own."""
        return 1 if self._built.program.inputs[name].broadcast else self._options.local_replicas

    def _by_batch(self, anchors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Anchors by batch and micro-batch, where the program ran a step's batches as micro-batches."""
        if not self._options.overlaps_batches:
            return anchors
        every = {spec.name for spec in self._built.program.anchors if spec.retrieval is Retrieval.ALL}
        return {n: v.swapaxes(0, 1) if n in every else v for n, v in anchors.items()}

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._inputs:
                continue
            if name in self._built.weights:
                # PopART's builder makes a weight an input of the model too: data for it are accepted and not used.
                _log.warning("%r is a variable: its data come from the model, not from the stepIO.", name)
                continue
            if name not in self._model_inputs:
                what = "not an input of" if name in self._built.infos else "not in"
                raise popart_runtime_error(
                    f"The tensor '{name}' has been provided as one of the inputs to the stepIO, but it is {what} "
                    f"the model; its inputs are {sorted(self._model_inputs)}."
                )
            _log.warning("Input %r is not used by the model; its data are ignored.", name)

    def _input_data(self, io: IStepIO, tensor: StepTensor) -> np.ndarray:
        mode = self._options.syntheticDataMode
        dtype = tensor.info.numpy_dtype()
        if mode is SyntheticDataMode.Off:
            replaced = self._is_replaced(tensor.name)
            data = np.zeros(tensor.layout, dtype) if replaced else io.fetch(tensor)
            return self._streams.fill(tensor, data, self._rows(tensor.name))
        if mode is SyntheticDataMode.Zeros or dtype.kind in "iub":
            return np.zeros(tensor.layout, dtype)
        random = np.random.default_rng(0)
        draw = random.standard_normal if mode is SyntheticDataMode.RandomNormal else random.random
        return draw(tensor.layout, np.float32).astype(dtype)

    def _is_replaced(self, name: str) -> bool:
        """True iff functions fill all streams of an input."""
        return self._streams.replaces(TO_DEVICE + name, self._rows(name))

    def _lay_out(self) -> None:
        """Compute the tensors of a run, unless that was done for this number of batches and these anchors."""
        made_for = (self._flow.batchesPerStep(), tuple(self._flow.anchors()))
        if made_for != self._made_for:
            self._inputs, self._outputs = dict(self._step_inputs()), dict(self._step_outputs())
            self._made_for = made_for

    def _step_inputs(self) -> Iterable[tuple[str, StepTensor]]:
        batches, accumulation = self._flow.batchesPerStep(), self._options.micro_batches
        local = self._options.local_replicas
        for name, item in self._built.program.inputs.items():
            info = self._built.infos.get(name) or info_of(item.spec)
            replicas = () if item.broadcast else (local,)

            def explain(item: InputSpec = item, info: TensorInfo = info) -> str:
                mode = ReplicatedStreamMode.Broadcast if item.broadcast else ReplicatedStreamMode.Replicate
                return (
                    f"{int(np.prod(item.spec.shape))} elements of {info}, times {batches} batches per step, "
                    f"accumulation factor {accumulation}, replication factor {local} ({mode.name})"
                )

            yield name, StepTensor(name, info, (batches, accumulation, *replicas, *item.spec.shape), explain)

    def _step_outputs(self) -> Iterable[tuple[str, StepTensor]]:
        batches, accumulation = self._flow.batchesPerStep(), self._options.micro_batches
        replicas = self._options.local_replicas
        for name in self._flow.anchors():
            info, kind = self._built.info(name), self._flow.art(name)
            crossings = kind.fetches(batches, accumulation)

            def explain(
                info: TensorInfo = info, kind: AnchorReturnType = kind, crossings: int = crossings
            ) -> str:
                return (
                    f"{info.nelms()} elements of {info}, {kind!r} of {batches} batches per step with "
                    f"accumulation factor {accumulation} is {crossings} per replica, replication factor {replicas}"
                )

            yield name, StepTensor(name, info, (crossings, replicas, *info.shape()), explain)


def _same_memory(value: np.ndarray, target: np.ndarray) -> bool:
    """Whether a value is a target that was filled in place."""
    return value.nbytes == target.nbytes and value.ctypes.data == target.ctypes.data


class BatchRunner:
    """Runs the batches of a session, with the checks before and the work after a run."""

    def __init__(
        self,
        runner: StepRunner,
        loader: ProgramLoader,
        weights: HostWeights,
        scalars: Hyperparameters,
        check: ReplicaCheck,
        reports: SessionReports,
    ) -> None:
        self._runner, self._loader, self._program = runner, loader, loader.program
        self._weights, self._scalars, self._check = weights, scalars, check
        self._reports = reports

    def ensure_ready(self) -> None:
        """Make sure that the program is loaded and has its weights. popart_runtime_error if they were not sent."""
        self._loader.ensure_loaded()
        if self._weights.built.weights and not self._loader.weights_sent and not self._weights.constant:
            raise popart_runtime_error(
                "Must call weightsFromHost before run as the model has initializers: they have not been sent to the "
                "device since the program was loaded or the host's weights changed."
            )

    def run(self, io: IStepIO) -> None:
        """One run of the session."""
        self._runner.check(io)
        executable, replicas = self._program.prepared("run"), self._weights.built.program.replicas
        if self._scalars.changed:
            self._program.write(self._scalars.values(executable))
            self._scalars.changed = False
        try:
            result = self._runner.run(io, self._program.device.connection)
            with surfaced():
                self._check.after_run(executable, self._program.device, result.batches_done, replicas)
        except PoplarError:
            self._program.on_device = (
                False  # The memory of the IPUs cannot be trusted: the next call loads anew.
            )
            raise
        step = executable.tile_report.get("step", {})
        self._reports.cycles = int(step.get("cycles") or 0) * self._runner.passes
        self._weights.device_is_ahead = True
        try:
            self._runner.observe(result)
        except poplar_application_runtime_error:
            self._program.on_device = False
            raise
        self._runner.store(io, result)
