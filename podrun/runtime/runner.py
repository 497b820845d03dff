"""Running a session: step data in, a run on the device, anchors out.

`StepRunner` moves the data of runs between a stepIO and a device; `BatchRunner` decides when a session may run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from podrun.compiler.program import InputSpec
from podrun.core.errors import ApplicationRuntimeError, CallError, PoplarError
from podrun.core.executable import Retrieval, numpy_dtype
from podrun.core.names import in_float32
from podrun.runtime.building import BuiltModel
from podrun.runtime.device_program import ProgramLoader, StreamedScalars
from podrun.runtime.label_checks import label_ranges, warn_of_strange_labels
from podrun.runtime.observers import observe
from podrun.runtime.operators import Form
from podrun.runtime.replica_check import ReplicaCheck
from podrun.runtime.session_reports import SessionReports
from podrun.runtime.settings import Returned, RunPlan, RunSettings, StepData, StepTensor, SyntheticData
from podrun.runtime.weights import HostWeights

if TYPE_CHECKING:
    from podrun.core.executable import TensorSpec
    from podrun.device.connection import Connection, RunResult

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


class StreamTaps(Protocol):
    """Functions of the user's program in the way of streams, instead of or beside a run's data."""

    def replaces(self, name: str, replicas: int) -> bool:
        """True iff functions fill all streams of an input."""

    def fill(self, tensor: StepTensor, data: np.ndarray, replicas: int) -> np.ndarray:
        """An input's data of a run, with what the functions fill in."""

    def show(self, tensor: StepTensor, value: np.ndarray, replicas: int) -> None:
        """Let the functions see the values of a tensor that comes back."""


class StepRunner:
    """Moves the data of runs between a stepIO and the device. ``model_inputs``: names of the model's inputs.

    What is the same for every run is computed once for each number of batches.
    """

    def __init__(
        self,
        built: BuiltModel,
        plan: RunPlan,
        settings: RunSettings,
        model_inputs: Iterable[str],
        taps: StreamTaps | None,
    ) -> None:
        self._built, self._plan, self._settings, self._taps = built, plan, settings, taps
        self._model_inputs = frozenset(model_inputs) - set(built.weights)
        lowered = built.lowered
        self._labels = label_ranges(lowered.graph.nodes, lowered.tensors, lowered.inputs)
        self._loss_watch = LossWatch(
            name for name in plan.returned if built.program.loss in (name, in_float32(name))
        )
        self._made_for: tuple[object, ...] = ()
        self._inputs: dict[str, StepTensor] = {}
        self._outputs: dict[str, StepTensor] = {}

    def check(self, io: StepData) -> None:
        """Raise before anything runs if a stepIO's data cannot be right."""
        self._lay_out()
        if self._settings.synthetic is not SyntheticData.OFF:
            return
        io.check({n: t for n, t in self._inputs.items() if not self._is_replaced(n)}, self._outputs)
        self._check_names(io.input_names())

    def run(self, io: StepData, connection: Connection) -> RunResult:
        """Run with a stepIO's data. The result holds the anchors that `store` has to hand over."""
        self._lay_out()
        data = {name: self._input_data(io, tensor) for name, tensor in self._inputs.items()}
        warn_of_strange_labels(self._labels, data)
        batches = self._plan.batches
        if self._settings.overlaps_batches:
            data = {name: value.reshape(1, batches, *value.shape[2:]) for name, value in data.items()}
            batches = 1
        targets = self._targets(io)
        if targets:
            return connection.run(batches, data, targets)
        return connection.run(batches, data)

    @property
    def passes(self) -> int:
        """How often the program runs in one run of the session."""
        return 1 if self._settings.overlaps_batches else self._plan.batches

    def store(self, io: StepData, result: RunResult) -> None:
        """Hand the anchors of a run over to a stepIO and to connected functions."""
        if self._settings.synthetic is not SyntheticData.OFF:
            return
        given = self._by_batch(result.anchors)
        for name, tensor in self._outputs.items():
            value = self._built.anchor(name, given)
            self._loss_watch.look(name, value, self.passes, result.batches_done)
            target = io.target(tensor)
            if target is None or not _same_memory(value, target):
                io.store(tensor, value)
            if self._taps is not None:
                self._taps.show(tensor, value, self._settings.local_replicas)

    def observe(self, result: RunResult) -> None:
        """Print and abort as the program's observers say."""
        if not self._built.observers:
            return
        observed = self._built.observed(self._by_batch(result.anchors))
        observe(
            self._built.observers, observed, self._settings.first_replica, self._built.program.replicas > 1
        )

    def stream_rows(self) -> tuple[dict[str, int], dict[str, int]]:
        """Replicas of this process that have a stream of their own, by input and by tensor that comes back."""
        inputs = {name: self._rows(name) for name in self._built.program.inputs}
        return inputs, dict.fromkeys(self._plan.returned, self._settings.local_replicas)

    def _targets(self, io: StepData) -> dict[str, np.ndarray]:
        """Arrays of the stepIO that the device may write anchors to: anchors that are returned as the program gives
        them. None if an observer can end the run, which then gives no anchors.
        """
        if self._settings.synthetic is not SyntheticData.OFF or self._settings.overlaps_batches:
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
            return (self._plan.batches, self._settings.micro_batches, *layout[1:])
        return layout if retrieval is Retrieval.EVERY_N else layout[1:]

    def _rows(self, name: str) -> int:
        """Replicas of this process that have step data of their own."""
        return 1 if self._built.program.inputs[name].broadcast else self._settings.local_replicas

    def _by_batch(self, anchors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Anchors by batch and micro-batch, where the program ran a step's batches as micro-batches."""
        if not self._settings.overlaps_batches:
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
                raise CallError(
                    f"The tensor '{name}' has been provided as one of the inputs to the stepIO, but it is {what} "
                    f"the model; its inputs are {sorted(self._model_inputs)}."
                )
            _log.warning("Input %r is not used by the model; its data are ignored.", name)

    def _input_data(self, io: StepData, tensor: StepTensor) -> np.ndarray:
        mode = self._settings.synthetic
        dtype = numpy_dtype(tensor.spec.dtype)
        if mode is SyntheticData.OFF:
            replaced = self._is_replaced(tensor.name)
            data = np.zeros(tensor.layout, dtype) if replaced else io.fetch(tensor)
            return data if self._taps is None else self._taps.fill(tensor, data, self._rows(tensor.name))
        if mode is SyntheticData.ZEROS or dtype.kind in "iub":
            return np.zeros(tensor.layout, dtype)
        random = np.random.default_rng(0)
        draw = random.standard_normal if mode is SyntheticData.NORMAL else random.random
        return draw(tensor.layout, np.float32).astype(dtype)

    def _is_replaced(self, name: str) -> bool:
        """True iff functions fill all streams of an input."""
        return self._taps is not None and self._taps.replaces(name, self._rows(name))

    def _lay_out(self) -> None:
        """Compute the tensors of a run, unless that was done for this number of batches and these anchors."""
        made_for = (self._plan.batches, tuple(self._plan.returned))
        if made_for != self._made_for:
            self._inputs, self._outputs = dict(self._step_inputs()), dict(self._step_outputs())
            self._made_for = made_for

    def _step_inputs(self) -> Iterable[tuple[str, StepTensor]]:
        batches, accumulation = self._plan.batches, self._settings.micro_batches
        local = self._settings.local_replicas
        for name, item in self._built.program.inputs.items():
            spec = self._built.infos.get(name) or item.spec
            replicas = () if item.broadcast else (local,)

            def explain(item: InputSpec = item, spec: TensorSpec = spec) -> str:
                mode = "Broadcast" if item.broadcast else "Replicate"
                return (
                    f"{item.spec.size} elements of {Form.of(spec).described}, times {batches} batches per step, "
                    f"accumulation factor {accumulation}, replication factor {local} ({mode})"
                )

            yield name, StepTensor(name, spec, (batches, accumulation, *replicas, *item.spec.shape), explain)

    def _step_outputs(self) -> Iterable[tuple[str, StepTensor]]:
        batches, accumulation = self._plan.batches, self._settings.micro_batches
        replicas = self._settings.local_replicas
        for name, kind in self._plan.returned.items():
            spec = self._built.info(name)
            crossings = kind.crossings(batches, accumulation)

            def explain(spec: TensorSpec = spec, kind: Returned = kind, crossings: int = crossings) -> str:
                return (
                    f"{spec.size} elements of {Form.of(spec).described}, {kind} of {batches} batches per step with "
                    f"accumulation factor {accumulation} is {crossings} per replica, replication factor {replicas}"
                )

            yield name, StepTensor(name, spec, (crossings, replicas, *spec.shape), explain)


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
        scalars: StreamedScalars,
        check: ReplicaCheck,
        reports: SessionReports,
    ) -> None:
        self._runner, self._loader, self._program = runner, loader, loader.program
        self._weights, self._scalars, self._check = weights, scalars, check
        self._reports = reports

    def ensure_ready(self) -> None:
        """Make sure that the program is loaded and has its weights. CallError if they were not sent."""
        self._loader.ensure_loaded()
        if self._weights.built.weights and not self._loader.weights_sent and not self._weights.constant:
            raise CallError(
                "Must call weightsFromHost before run as the model has initializers: they have not been sent to the "
                "device since the program was loaded or the host's weights changed."
            )

    def run(self, io: StepData) -> None:
        """One run of the session."""
        self._runner.check(io)
        executable, replicas = self._program.prepared("run"), self._weights.built.program.replicas
        if self._scalars.changed:
            self._program.write(self._scalars.values(executable))
            self._scalars.changed = False
        try:
            result = self._runner.run(io, self._program.device.connection)
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
        except ApplicationRuntimeError:
            self._program.on_device = False
            raise
        self._runner.store(io, result)
