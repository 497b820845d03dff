"""`PoplarExecutor`: a torch module that runs on IPUs. Made by ``poptorch.trainingModel`` and ``inferenceModel``."""

from __future__ import annotations

import copy
import datetime
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from podrun.core.errors import InternalError
from podrun.core.garbage import without_full_collections
from podrun.poptorch.api import user_modules
from podrun.poptorch.api.annotations import module_repr
from podrun.poptorch.api.enums import ConnectionType, OutputMode
from podrun.poptorch.api.logs import logger
from podrun.poptorch.api.optim import SGD, ProgramOptimizer
from podrun.poptorch.api.options import Options
from podrun.poptorch.api.user_modules import ParameterHandle, one_row_each, track, trainer_of, untracked
from podrun.poptorch.capture.graph import CapturedGraph, unflatten
from podrun.poptorch.compile.batches import batch_dimensions
from podrun.poptorch.compile.graph_checks import check_overlap
from podrun.poptorch.compile.module_capture import CompileRequest, ReplicaGroups, capture_module, offer
from podrun.poptorch.compile.popart_options import compiles_engine
from podrun.poptorch.compile.session_optimizers import check_supported, warn_of_subclass
from podrun.poptorch.errors import ArgumentError, Error, translated
from podrun.poptorch.executor import watching
from podrun.poptorch.executor.calls import CallArguments, bind, check_same, mark_returned, same_again
from podrun.poptorch.executor.compiled_model import CompiledModel
from podrun.poptorch.executor.devices import uses_ipu_model
from podrun.poptorch.executor.executor_state import ExecutorState
from podrun.poptorch.executor.host_calls import ChainedModel
from podrun.poptorch.executor.model_builder import compile_model
from podrun.poptorch.executor.saved_models import (
    EXPORT_VERSION,
    ExportedModel,
    checkpoint_state,
    export_path,
    read_export,
    restore_checkpoint,
    write_export,
)
from podrun.poptorch.executor.watching import Latency, latency, no_counters
from podrun.report.model import Profile

DEFAULT_LEARNING_RATE = 0.01


class PoplarExecutor(ExecutorState):
    """A module that is captured and compiled on its first call, and runs on IPUs from then on.

    Attributes that it does not have itself are the module's. Parameters are shared with the user's module: reading one
    first brings its value from the IPU.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options | None,
        training: bool,
        optimizer: ProgramOptimizer | None = None,
    ) -> None:
        options = Options() if options is None else options
        if not isinstance(options, Options):
            raise Error(f"options must be poptorch.Options, not {type(options).__name__}")
        options.freeze()
        self._options = options.clone()
        if self._options.defaultOutputMode():
            self._options.outputMode(OutputMode.Final if training else OutputMode.All)
        self._user_model = model
        self._model = copy.copy(model)
        self._training = training
        self._optimizer = None
        self._compiled: CompiledModel | ChainedModel | None = None
        self._arguments: CallArguments | None = None
        self._executable: bytes | None = None
        self._device_is_newer = False
        self._state_is_newer = False
        self._weights_version = user_modules.weights_version(model)
        self._seconds: float | None = None
        self._detached = False
        self._random_state: list[int] | None = None
        self._groups: dict[str, ReplicaGroups] = {}
        self._attributes: set[str] = set()
        if training:
            user_modules.check_wrappable(model)
            optimizer = optimizer or SGD(model.parameters(), lr=DEFAULT_LEARNING_RATE)
            check_supported(optimizer)
            warn_of_subclass(optimizer)
            self._optimizer = optimizer
            self._choose_mean_strategy(optimizer)
            user_modules.wrap(model, self)
            track(model, self._pull, self._group_parameter)
        self._options.freeze()

    # --- Compiling ----------------------------------------------------------------------------------------------------

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile for inputs like these, without running."""
        if self.isCompiled():
            logger.warning("Call to compile() ignored: model has already been compiled.")
            return
        self._compile(bind(self._model, args, kwargs))

    @without_full_collections()
    def _compile(self, arguments: CallArguments) -> None:
        started = time.monotonic()
        batches = batch_dimensions(self._options, self._training)
        narrowed = {place: batches.narrowed(t) for place, t in arguments.tensors.items()}
        args, kwargs = arguments.replaced(narrowed)
        self._sync_before_compile()
        replicas = self._options.replication_factor * self._options.Distributed.numProcesses
        watching.run_before()
        try:
            with untracked(), one_row_each(self._model, self._groups, replicas):
                captured = capture_module(self._model, args, kwargs, self._options)
        finally:
            watching.run_after()
        self._check_buffers(captured.graph)
        check_overlap(captured.graph, self._options, arguments.names)
        request = CompileRequest(
            self._model, self._options, batches, self._optimizer, dict(self._groups), self._executable
        )
        offer(captured, request, (args, kwargs))
        with untracked():
            self._compiled = compile_model(captured, request)
        self._arguments = arguments
        self._seconds = time.monotonic() - started
        self._detached = False
        self._device_is_newer = False
        self._state_is_newer = True
        if self._training:
            self._connect_optimizer()
        if self._random_state is not None and self._options.connection_type != ConnectionType.Never:
            self._compiled.random_state = self._random_state

    def _check_buffers(self, graph: CapturedGraph) -> None:
        buffers = dict(self._model.named_buffers())
        written = [n for n in graph.updates if n in buffers]
        groups = self._options.replication_factor > self._options.input_group_size
        if written and groups and self._options.broadcast_buffers:
            raise Error(
                "PopTorch does not support broadcasting buffers. If your model is able to tolerate buffers becoming "
                "out of sync between replicas, you can disable buffer broadcasting using "
                "poptorch.Options.broadcastBuffers(False).",
                hint=f"forward writes {', '.join(written)}. Without broadcasting, each of the "
                f"{self._options.replication_factor} replicas has buffers of its own.",
            )
        for name in self._options.updatable_named_buffers:
            if name not in buffers:
                raise Error(f"updatableNamedBuffers names {name!r}, which is no buffer of the model")

    def _sync_before_compile(self) -> None:
        trainer = trainer_of(self._user_model)
        if trainer is not None and trainer is not self:
            trainer.copyWeightsToHostIfNeeded()
        self._weights_version = user_modules.weights_version(self._user_model)

    def isCompiled(self) -> bool:
        """Whether there is an executable: not where ``compileEngine`` is False."""
        return self._compiled is not None and compiles_engine(self._options._Popart.options)

    def compilationTime(self) -> datetime.timedelta:
        """The time that compiling took. Error if the model is not compiled, or the progress bar is off."""
        if not self._options._show_progress:
            raise Error("compilationTime() needs options.showCompilationProgressBar(True)")
        self._need_compiled("compilationTime")
        return datetime.timedelta(seconds=self._seconds or 0.0)

    # --- Running ------------------------------------------------------------------------------------------------------

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run forward (and in training the backward pass and the update) on inputs with all micro-batches.

        Error if the inputs differ in shape, type or structure from those the model was compiled for.
        """
        if self._options.connection_type == ConnectionType.Never:
            raise ArgumentError(
                "Trying to run a model on an offline device (ConnectionType.Never): use model.compile(inputs) instead "
                "of model(inputs)"
            )
        known = self._arguments if self._compiled is not None else None
        arguments = None if known is None else same_again(known, args, kwargs)
        if arguments is None:
            arguments = bind(self._model, args, kwargs)
            if self._compiled is None:
                self._compile(arguments)
            if self._arguments is None:
                raise InternalError("a compiled model has no arguments to compare with")
            arguments = check_same(self._arguments, arguments)
        if self._compiled is None:
            raise InternalError("a model that was compiled is gone")
        if self._detached:
            self.attachToDevice()
        self._bring_up_to_date()
        leaves = self._compiled.run(arguments.tensors)
        if self._options.extra("log_cycle_count"):
            logger.debug("Total number of IPU cycles: %s", self._compiled.cycles())
        self._device_is_newer = self._training or bool(self._compiled.graph.updates)
        self._state_is_newer = self._training
        if self._training:
            user_modules.weights_changed(self._user_model)
        mark_returned(leaves)
        return unflatten(self._compiled.captured.result, leaves)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The same as calling the executor."""
        return self(*args, **kwargs)

    # --- Measuring ----------------------------------------------------------------------------------------------------

    def cycleCount(self) -> int:
        """Modelled cycles of the last run. Error without options.logCycleCount(True), on a model of an IPU, or before a
        run."""
        if not self._options.extra("log_cycle_count"):
            raise Error(
                "Cycle count logging is disabled. Please set option logCycleCount to True to enable.",
                hint="options.logCycleCount(True)",
            )
        if uses_ipu_model(self._options):
            raise Error("cycleCount() needs IPUs: a model of an IPU counts no cycles")
        cycles = None if self._compiled is None else self._compiled.cycles()
        if cycles is None:
            raise Error("Please run the model at least once before obtaining cycle count.")
        return cycles

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """The times, in seconds, at which data of the last call crossed, for each tensor and transfer: ``input``
        (requested), ``input_complete``, ``output`` (ready), ``output_complete``.
        """
        stamps = None if self._compiled is None else self._compiled.stamps
        return no_counters() if stamps is None else stamps.counters()

    def getHostIpuLatency(self) -> Latency:
        """Least, greatest and average seconds from the request for an input to its arrival on the IPUs."""
        return latency(self.getPerfCounters(), "input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """Least, greatest and average seconds from an input's arrival to the result."""
        return latency(self.getPerfCounters(), "input_complete", "output")

    def getIpuHostLatency(self) -> Latency:
        """Least, greatest and average seconds from a result to its arrival on the host."""
        return latency(self.getPerfCounters(), "output", "output_complete")

    def getLatency(self) -> Latency:
        """Least, greatest and average seconds from the request for an input to the result's arrival on the host."""
        return latency(self.getPerfCounters(), "input", "output_complete")

    def getReport(self) -> Profile:
        """The tile model's report of the compiled model: time by operator and module, memory by tile: a
        `podrun.report.Profile`.

        In a notebook ``report.show()`` shows the whole page. Error if the model is not compiled, or calls poptorch.CPU.
        """
        return self._need_compiled("getReport").report()

    # --- Files --------------------------------------------------------------------------------------------------------

    def save(self, filename: str, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the compiled program to a file (``model.poptorch`` in a folder); with ``export_model`` also the module,
        its weights, options and optimizer, so that `poptorch.load` needs nothing else."""
        compiled = self._need_compiled("save")
        if self._arguments is None:
            raise InternalError("a compiled model has no arguments to compare with")
        args, kwargs = self._arguments.replaced({})
        payload: dict[str, Any] = {"args": args, "kwargs": kwargs}
        if export_model:
            payload |= {
                "model": self._user_model,
                "model_training": self._model.training,
                "options": self._options,
                "optimizer": self._optimizer,
            }
        if save_rng_state and self.isAttachedToDevice():
            payload["rng_state"] = compiled.random_state
        self.copyWeightsToHostIfNeeded()
        path = export_path(filename)
        if str(path) != filename:
            logger.warning("%s: the model is saved as %s", filename, path)
        metadata = {"version": EXPORT_VERSION, "training": self._training, "exported_model": export_model}
        write_export(path, ExportedModel(metadata, compiled.executable(), payload))

    def compileAndExport(
        self, filename: str, *args: object, export_model: bool = True, **kwargs: object
    ) -> None:
        """`compile` for these inputs, then `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model=export_model)

    def loadExecutable(self, filename: str) -> None:
        """Use the compiled program of a file for this wrapper's module instead of compiling. Error for a file of
        another version, or of another model.
        """
        if self.isCompiled():
            raise Error("loadExecutable() comes before the model is compiled")
        exported = read_export(filename)
        if exported.metadata.get("version") != EXPORT_VERSION:
            raise Error(
                f"{filename} was written by version {exported.metadata.get('version')!r}; this is {EXPORT_VERSION!r}",
                hint="Compile the model again with compileAndExport.",
            )
        if bool(exported.metadata.get("training")) != self._training:
            raise Error(f"{filename} holds {'an inference' if self._training else 'a training'} model")
        self._take_export(exported)

    def _take_export(self, exported: ExportedModel) -> None:
        self._executable = exported.executable
        self._random_state = exported.payload.get("rng_state")
        self._compile(bind(self._model, exported.payload["args"], exported.payload["kwargs"]))

    def _checkpoint_state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The state that `podrun.checkpoint` saves."""
        with untracked(), translated("saving a checkpoint"):
            return checkpoint_state(self)

    def _restore_checkpoint(self, tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        """Continue from what `_checkpoint_state` returned."""
        with untracked(), translated("resuming from a checkpoint"):
            restore_checkpoint(self, tensors, values)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and files of the wrapper are not compiled."""
        return {
            "model": self._user_model,
            "options": self._options,
            "training": self._training,
            "optimizer": self._optimizer,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # --- Questions ----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """The module of the user."""
        return self._user_model

    @property
    def options(self) -> Options:
        """This wrapper's options, which cannot be changed."""
        return self._options

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self._model.training

    def getTensorNames(self) -> list[str]:
        """The names of all tensors of the compiled model, for `Options.anchorTensor`."""
        if self._compiled is None:
            raise ArgumentError("getTensorNames() needs a compiled model")
        return self._compiled.tensor_names()

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """The last value of a tensor that `Options.anchorTensor` named."""
        if short_name not in self._options.anchored_tensors:
            raise ArgumentError(f"{short_name!r} is no anchored tensor")
        compiled = self._need_compiled("getAnchoredTensor")
        if short_name not in compiled.last_anchors:
            raise Error("getAnchoredTensor() needs a run: call the model first")
        return torch.from_numpy(np.array(compiled.last_anchors[short_name]))

    def _debugGetPopartIR(self) -> str:
        """The compiled forward graph as JSON: ``{"maingraph": [...]}``."""
        graphs = json.loads(self._need_compiled("_debugGetPopartIR").ir_text())
        named = {"maingraph" if len(graphs) == 1 else name: ops for name, ops in graphs.items()}
        return json.dumps(named, separators=(",", ":"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_user_model" not in self.__dict__:
            raise AttributeError(name)
        attribute = getattr(self._user_model, name)
        if isinstance(attribute, torch.nn.Parameter):
            return ParameterHandle(attribute, self._group_parameter)
        return attribute

    def __repr__(self) -> str:
        return module_repr(self._model)
