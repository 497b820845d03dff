"""Running a session: step data in, a step on the device, anchors out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from podrun.executable import Retrieval
from podrun.popart.enums import ReplicatedStreamMode, SyntheticDataMode
from podrun.popart.errors import popart_runtime_error, poplar_application_runtime_error, surfaced
from podrun.popart.program.observers import observe
from podrun.popart.program.reserved_tensors import info_of
from podrun.popart.sessions.device import SessionDevice
from podrun.popart.step_data.stepio import IStepIO, PyStepIO, StepTensor
from podrun.popart.step_data.streams import TO_DEVICE, TO_HOST

_log = logging.getLogger("podrun.popart.session")


NAMED_RUNS = 2
"""Runs that a report tells apart, as autoReport.executionProfileProgramRunCount has it."""


class SessionRun(SessionDevice):
    """The part of a session that runs steps."""

    def run(self, *args: Any, stepio: IStepIO | None = None, debugName: str = "") -> None:
        """``run(stepio, debugName="")``: one step. Anchors are in the stepio's arrays afterwards.

        ``run(programHandle, stepio, debugName="")``: a program of the session by name.
        """
        rest = list(args)
        handle = rest.pop(0) if rest and isinstance(rest[0], str) else None
        io = rest.pop(0) if rest else stepio
        debugName = rest.pop(0) if rest else debugName
        if not isinstance(io, IStepIO):
            raise TypeError(f"run(): incompatible function arguments. run takes a PyStepIO, not {io!r}.")
        self._ensure_ready()
        if len(self._run_names) < NAMED_RUNS:
            self._run_names.append(debugName or self._name)
        if handle is None:
            self._step(io)
        else:
            self._run_program(handle, io)

    def _run_program(self, handle: str, io: IStepIO) -> None:
        raise popart_runtime_error(f"The session has no custom program {handle!r}.")

    def _ensure_ready(self) -> None:
        """The program is loaded and has its weights. popart_runtime_error if they were not sent."""
        self._ensure_loaded()
        if self._built.weights and not self._weights_sent and not self._constant_weights:
            raise popart_runtime_error(
                "Must call weightsFromHost before run as the model has initializers: they have not been sent to the "
                "device since the program was loaded or the host's weights changed."
            )

    def _step(self, io: IStepIO) -> None:
        inputs, outputs = self._step_inputs(), self._step_outputs()
        self._check_io(io, inputs, outputs)
        data = {name: self._input_data(io, tensor) for name, tensor in inputs.items()}
        if self._pending_scalars:
            self._write(self._scalars())
            self._pending_scalars = False
        result = self._run_on_device(data)
        self._observe(result)
        if self._options.syntheticDataMode is SyntheticDataMode.Off:
            given = self._by_batch(result.anchors)
            for name, tensor in outputs.items():
                value = self._built.anchor(name, given)
                io.store(tensor, value)
                self._streams.show(tensor, value, self.replicationFactor)

    def connectStreamToCallback(
        self, streamHandle: str, callback: Callable[[object], None], index: int = 0
    ) -> None:
        """Let a function fill an input's stream (``h2d_<input>``) or see an anchor's (``anchor_d2h_<anchor>``).

        ``index``: the replica of this process (`popart.step_data.streams`). popart_runtime_error for a stream that is
        not there.
        """
        self._prepared("connectStreamToCallback")
        streams = {TO_DEVICE + name: self._rows(name) for name in self._built.program.inputs}
        streams |= {TO_HOST + name: self.replicationFactor for name in self._flow.anchors()}
        self._streams.connect(streamHandle, callback, index, streams)

    def _rows(self, name: str) -> int:
        """Replicas of this process that have step data of their own."""
        return 1 if self._built.program.inputs[name].broadcast else self.replicationFactor

    def _observe(self, result: Any) -> None:
        """Print and abort as the program says."""
        if not self._built.observers:
            return
        values = self._built.observed(self._by_batch(result.anchors))
        first = self._options.globalReplicaOffset if self._options.enableDistributedReplicatedGraphs else 0
        try:
            observe(self._built.observers, values, first, self._built.program.replicas > 1)
        except poplar_application_runtime_error:
            self._device._loaded = None
            raise

    def _by_batch(self, anchors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Anchors by batch and micro-batch, where the program took a step's batches for micro-batches."""
        if not self._options.overlaps_batches:
            return anchors
        every = {spec.name for spec in self._built.program.anchors if spec.retrieval is Retrieval.ALL}
        return {n: v.swapaxes(0, 1) if n in every else v for n, v in anchors.items()}

    def _run_on_device(self, data: Mapping[str, np.ndarray]) -> Any:
        from podrun.errors import PoplarError

        batches = self._flow.batchesPerStep()
        if self._options.overlaps_batches:
            data = {name: value.reshape(1, batches, *value.shape[2:]) for name, value in data.items()}
            batches = 1
        try:
            with surfaced():
                result = self._device.connection.run(batches, data)
        except PoplarError:
            self._device._loaded = None  # What was on the IPUs cannot be trusted: the next call loads anew.
            raise
        step = self._prepared("run").tile_report.get("step", {})
        self._cycles = int(step.get("cycles") or 0) * batches
        self._weights.device_is_ahead = True
        return result

    def _check_io(
        self, io: IStepIO, inputs: Mapping[str, StepTensor], outputs: Mapping[str, StepTensor]
    ) -> None:
        if self._options.syntheticDataMode is not SyntheticDataMode.Off:
            return
        io.check({n: t for n, t in inputs.items() if not self._is_replaced(n)}, outputs)
        if isinstance(io, PyStepIO):
            model_inputs = {value.name for value in self._model.proto.graph.input} - set(self._built.weights)
            for name in io.input_names():
                if name in inputs:
                    continue
                if name in self._built.weights:
                    # PopART's builder makes a weight an input of the model too: data for it pass, and are not used.
                    _log.warning("%r is a variable: its data come from the model, not from the stepIO.", name)
                    continue
                if name not in model_inputs:
                    what = "not an input of" if name in self._built.infos else "not in"
                    raise popart_runtime_error(
                        f"The tensor '{name}' has been provided as one of the inputs to the stepIO, but it is {what} "
                        f"the model; its inputs are {sorted(model_inputs)}."
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
        """True iff functions fill all of an input's streams."""
        return self._streams.replaces(TO_DEVICE + name, self._rows(name))

    def _step_inputs(self) -> dict[str, StepTensor]:
        found = {}
        batches, accumulation = self._flow.batchesPerStep(), self.accumulationFactor
        for name, item in self._built.program.inputs.items():
            info = self._built.infos.get(name) or info_of(item.spec)
            replicas = () if item.broadcast else (self.replicationFactor,)
            mode = ReplicatedStreamMode.Broadcast if item.broadcast else ReplicatedStreamMode.Replicate
            how = (
                f"{int(np.prod(item.spec.shape))} elements of {info}, times {batches} batches per step, "
                f"accumulation factor {accumulation}, replication factor {self.replicationFactor} "
                f"({mode.name})"
            )
            found[name] = StepTensor(name, info, (batches, accumulation, *replicas, *item.spec.shape), how)
        return found

    def _step_outputs(self) -> dict[str, StepTensor]:
        found = {}
        batches, accumulation = self._flow.batchesPerStep(), self.accumulationFactor
        for name in self._flow.anchors():
            info, kind = self.getInfo(name), self._flow.art(name)
            crossings = kind.fetches(batches, accumulation)
            how = (
                f"{info.nelms()} elements of {info}, {kind!r} of {batches} batches per step with "
                f"accumulation factor {accumulation} is {crossings} per replica, replication factor "
                f"{self.replicationFactor}"
            )
            layout = (crossings, self.replicationFactor, *info.shape())
            found[name] = StepTensor(name, info, layout, how)
        return found
