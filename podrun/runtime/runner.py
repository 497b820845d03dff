"""One run of a session: data in, a run on the device, anchors out. `podrun.runtime.batches` says when it may be."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from podrun.compiler.program import InputSpec
from podrun.core.errors import CallError, PoplarError, UnsupportedError, UsageError
from podrun.core.executable import Retrieval, numpy_dtype
from podrun.core.names import in_float32
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.building import BuiltModel
from podrun.runtime.label_checks import label_ranges, warn_of_strange_labels
from podrun.runtime.observers import observe
from podrun.runtime.operators import Form
from podrun.runtime.settings import Returned, RunPlan, RunSettings, StepData, StepTensor, SyntheticData
from podrun.runtime.tensor_names import buffer_in_words

if TYPE_CHECKING:
    from podrun.core.executable import TensorSpec
    from podrun.device.connection import Connection, RunResult

_log = logging.getLogger("podrun.runtime")


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


@dataclass(frozen=True, slots=True)
class RunTensors:
    """The tensors that cross between host and device in a run of ``batches`` batches, by name."""

    batches: int
    inputs: Mapping[str, StepTensor]
    outputs: Mapping[str, StepTensor]


class StepRunner:
    """Moves the data of runs between the host and the device. ``model_inputs``: names of the model's inputs.

    A run has the plan's number of batches, or that of a part of a loop (``batches``). What is the same for every run is
    computed once for each number of batches.
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
        self._laid_out_for: tuple[object, ...] = ()
        self._tensors: dict[int, RunTensors] = {}
        self._told: set[str] = set()
        """Inputs of which a run has said that their data do not matter."""

    def check(self, io: StepData, batches: int | None = None) -> None:
        """Raise before anything runs if the data cannot be right."""
        tensors = self.tensors(batches)
        if self._settings.synthetic is not SyntheticData.OFF:
            return
        io.check({n: t for n, t in tensors.inputs.items() if not self._is_replaced(n)}, tensors.outputs)
        self._check_names(io.input_names(), tensors.inputs)

    def run(self, io: StepData, connection: Connection, batches: int | None = None) -> RunResult:
        """Run with data of the host. The result holds the anchors that `store` has to hand over."""
        tensors = self.tensors(batches)
        data = {name: self._input_data(io, tensor) for name, tensor in tensors.inputs.items()}
        warn_of_strange_labels(self._labels, data)
        batches = tensors.batches
        if self._settings.overlaps_batches:
            data = {name: value.reshape(1, batches, *value.shape[2:]) for name, value in data.items()}
            batches = 1
        targets = self._targets(io, tensors)
        try:
            return connection.start(batches, data, targets, depth=1).wait()
        except PoplarError as error:
            tensor = error.cause.tensor if error.cause is not None else ""
            if tensor:  # The machine knows buffers, the host knows the program.
                words = buffer_in_words(tensor, self._built.lowered.graph.nodes)
                error.message = error.message.replace(tensor, words, 1)
            raise

    @property
    def most_batches(self) -> int:
        """Batches of one run, and the most of a part of a loop."""
        return self._plan.batches

    def passes(self, batches: int | None = None) -> int:
        """How often the program runs in one run of the session."""
        if self._settings.overlaps_batches:
            return 1
        return self._plan.batches if batches is None else batches

    def check_loop(self, iterations: int) -> None:
        """UsageError for a number of iterations that the program cannot run in a loop, UnsupportedError for tensors
        whose values in a loop are neither all nor the last ones.
        """
        if iterations < 0:
            raise UsageError(f"A loop has 0 iterations or more, not {iterations}.")
        if self._settings.overlaps_batches and iterations % self._plan.batches:
            raise UsageError(
                f"A loop of {iterations} iterations: the pipeline was compiled for {self._plan.batches} at a time.",
                hint=f"Run a multiple of {self._plan.batches}.",
            )
        for name, kind in self._plan.returned.items():
            if kind.retrieval not in (Retrieval.ALL, Retrieval.FINAL):
                raise UnsupportedError(
                    f"The tensor {name!r} comes back from a run as {kind}: a loop gives all values, or the last one."
                )

    @property
    def crossings(self) -> int:
        """Micro-batches of one batch, of all replicas of this process."""
        return self._settings.micro_batches * self._settings.local_replicas

    def whole(self, batches: int) -> int:
        """The most of ``batches`` batches that the program can run at once: a multiple of those of one run where they
        overlap.
        """
        return (
            batches // self._plan.batches * self._plan.batches if self._settings.overlaps_batches else batches
        )

    def is_final(self, name: str) -> bool:
        """True iff only the last value of a tensor comes back."""
        return self._plan.returned[name].retrieval is Retrieval.FINAL

    def store(self, io: StepData, result: RunResult, batches: int | None = None) -> None:
        """Hand the anchors of a run over to ``io`` and to connected functions."""
        if self._settings.synthetic is not SyntheticData.OFF:
            return
        anchors = self._by_batch(result.anchors)
        for name, tensor in self.tensors(batches).outputs.items():
            value = self._built.anchor(name, anchors)
            self._loss_watch.look(name, value, self.passes(batches), result.batches_done)
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

    def _targets(self, io: StepData, tensors: RunTensors) -> dict[str, np.ndarray]:
        """Arrays of ``io`` that the device may write anchors to: anchors that are returned as the program gives
        them. None if an observer can end the run, which then gives no anchors.
        """
        if self._settings.synthetic is not SyntheticData.OFF or self._settings.overlaps_batches:
            return {}
        if self._built.observers:
            return {}
        specs = {spec.name: spec for spec in self._built.program.anchors}
        targets: dict[str, np.ndarray] = {}
        for name, tensor in tensors.outputs.items():
            spec = self._built.wanted[name]
            if name in self._built.derived or specs.get(spec.name) != spec or spec.name in targets:
                continue
            target = io.target(tensor)
            if target is not None:
                layout = self._device_layout(spec.retrieval, tensor.layout, tensors.batches)
                targets[spec.name] = target.reshape(layout)
        return targets

    def _device_layout(self, retrieval: Retrieval, layout: tuple[int, ...], batches: int) -> tuple[int, ...]:
        """The shape of an anchor's array at the connection, where it begins with (crossings, replicas)."""
        if retrieval is Retrieval.ALL:
            return (batches, self._settings.micro_batches, *layout[1:])
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

    def _check_names(self, names: Iterable[str], inputs: Mapping[str, StepTensor]) -> None:
        for name in names:
            if name in inputs or name in self._told:
                continue
            if name in self._built.weights:
                # A weight may be an input of the model too: data for it are accepted and not used.
                source = self._settings.words.step_data
                _log.warning("%r is a variable: its data come from the model, not from %s.", name, source)
                self._told.add(name)
                continue
            if name not in self._model_inputs:
                what = "not an input of" if name in self._built.infos else "not in"
                raise CallError(
                    f"The tensor '{name}' has been provided as one of the inputs to {self._settings.words.step_data}, "
                    f"but it is {what} the model; its inputs are {sorted(self._model_inputs)}."
                )
            _log.warning("Input %r is not used by the model; its data are ignored.", name)
            self._told.add(name)

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

    def tensors(self, batches: int | None = None) -> RunTensors:
        """The tensors of a run, computed unless that was done for this number of batches and these anchors."""
        if batches is None:
            batches = self._plan.batches
        laid_out_for = (self._plan.batches, tuple(self._plan.returned))
        if laid_out_for != self._laid_out_for:
            self._tensors.clear()
            self._laid_out_for = laid_out_for
        if batches not in self._tensors:
            inputs, outputs = dict(self._step_inputs(batches)), dict(self._step_outputs(batches))
            self._tensors[batches] = RunTensors(batches, inputs, outputs)
        return self._tensors[batches]

    def _step_inputs(self, batches: int) -> Iterable[tuple[str, StepTensor]]:
        accumulation = self._settings.micro_batches
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

    def _step_outputs(self, batches: int) -> Iterable[tuple[str, StepTensor]]:
        accumulation = self._settings.micro_batches
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
