"""`PoplarExecutor`: a torch module that runs on IPUs. Made by ``poptorch.trainingModel`` and ``inferenceModel``."""

from __future__ import annotations

import copy
import datetime
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from podrun.poptorch import compile_hooks, wrapped_modules
from podrun.poptorch.annotations import module_repr
from podrun.poptorch.arguments import CallArguments, bind, check_same
from podrun.poptorch.batches import batch_dimensions
from podrun.poptorch.capture.structure import unflatten
from podrun.poptorch.capture.torch_names import to_numpy
from podrun.poptorch.checkpoints import checkpoint_state, restore_checkpoint
from podrun.poptorch.compiled_model import CompiledModel
from podrun.poptorch.enums import ConnectionType, MeanReductionStrategy, OutputMode
from podrun.poptorch.errors import Error
from podrun.poptorch.export_file import EXPORT_VERSION, ExportedModel, export_path, read_export, write_export
from podrun.poptorch.model_compiler import (
    CompileRequest,
    ReplicaGroups,
    capture_module,
    compile_model,
    uses_ipu_model,
)
from podrun.poptorch.optim import SGD, Optimizer
from podrun.poptorch.options import Options
from podrun.poptorch.parameter_groups import ParameterHandle, one_row_each
from podrun.poptorch.perf_counters import Latency, latency, no_counters
from podrun.poptorch.poptorch_log import logger
from podrun.poptorch.returned_tensors import mark_returned
from podrun.poptorch.session_errors import translated
from podrun.poptorch.session_optimizers import (
    attributes_of,
    check_supported,
    needs_running_mean,
    warn_of_subclass,
)
from podrun.poptorch.tracked_parameters import track, untrack, untracked
from podrun.poptorch.wrapped_modules import trainer_of
from podrun.private_apis import torch as private

DEFAULT_LEARNING_RATE = 0.01


class PoplarExecutor:
    """A module that is captured and compiled on its first call, and runs on IPUs from then on.

    Attributes that it does not have itself are the module's. Parameters are shared with the module of the user: they
    bring their values from the IPU when they are read.
    """

    def __init__(
        self, model: torch.nn.Module, options: Options | None, training: bool, optimizer: Any = None
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
        self._optimizer: Any = None
        self._compiled: CompiledModel | None = None
        self._arguments: CallArguments | None = None
        self._executable: bytes | None = None
        self._device_is_newer = False
        self._state_is_newer = False
        self._weights_version = wrapped_modules.weights_version(model)
        self._seconds: float | None = None
        self._detached = False
        self._random_state: list[int] | None = None
        self._groups: dict[str, ReplicaGroups] = {}
        self._attributes: set[str] = set()
        if training:
            wrapped_modules.check_wrappable(model)
            optimizer = optimizer or SGD(model.parameters(), lr=DEFAULT_LEARNING_RATE)
            check_supported(optimizer)
            warn_of_subclass(optimizer)
            self._optimizer = optimizer
            self._choose_mean_strategy(optimizer)
            wrapped_modules.wrap(model, self)
            track(model, self._pull, self._group_parameter)
        self._options.freeze()

    def _choose_mean_strategy(self, optimizer: Any) -> None:
        """Gradients that are accumulated in half precision are averaged as they come, unless the options say else."""
        training = self._options.Training
        if not needs_running_mean(optimizer) or training._mean_strategy_chosen:
            return
        strategy = MeanReductionStrategy.Running
        if training.meanAccumulationAndReplicationReductionStrategy == strategy:
            return
        if self._compiled is not None:
            raise ValueError(
                "The optimizer accumulates in half precision, which needs "
                "options.Training.setMeanAccumulationAndReplicationReductionStrategy(Running) before the model is "
                "compiled."
            )
        frozen = self._options._is_frozen
        self._options.unfreeze()
        training.set(meanAccumulationAndReplicationReductionStrategy=strategy)
        if frozen:
            self._options.freeze()

    # --- Compiling ----------------------------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for inputs like these, without running."""
        if self.isCompiled():
            logger.warning("Call to compile() ignored: model has already been compiled.")
            return
        self._compile(bind(self._model, args, kwargs))

    def _compile(self, arguments: CallArguments) -> None:
        started = time.monotonic()
        batches = batch_dimensions(self._options, self._training)
        narrowed = {place: batches.narrowed(t) for place, t in arguments.tensors.items()}
        args, kwargs = arguments.replaced(narrowed)
        self._sync_before_compile()
        replicas = self._options.replication_factor * self._options.Distributed.numProcesses
        compile_hooks.run_before()
        try:
            with untracked(), one_row_each(self._model, self._groups, replicas):
                captured = capture_module(self._model, args, kwargs, self._options)
        finally:
            compile_hooks.run_after()
        self._check_buffers(captured.graph)
        asked = CompileRequest(
            self._model, self._options, batches, self._optimizer, dict(self._groups), self._executable
        )
        with untracked():
            self._compiled = compile_model(captured, asked)
        self._arguments = arguments
        self._seconds = time.monotonic() - started
        self._detached = False
        self._device_is_newer = False
        self._state_is_newer = True
        if self._training:
            self._connect_optimizer()
        if self._random_state is not None and self._options.connection_type != ConnectionType.Never:
            self._compiled.random_state = self._random_state

    def _check_buffers(self, graph: Any) -> None:
        buffers = dict(self._model.named_buffers())
        written = [n for n in graph.updates if n in buffers]
        groups = self._options.replication_factor > self._options.input_group_size
        if written and groups and self._options.broadcast_buffers:
            raise Error(
                f"buffers are written in forward ({', '.join(written)}) while options.broadcastBuffers is True and "
                f"the model has {self._options.replication_factor} replicas",
                hint="Use options.broadcastBuffers(False): every replica then has buffers of its own.",
            )
        for name in self._options.updatable_named_buffers:
            if name not in buffers:
                raise Error(f"updatableNamedBuffers names {name!r}, which is no buffer of the model")

    def _sync_before_compile(self) -> None:
        trainer = trainer_of(self._user_model)
        if trainer is not None and trainer is not self:
            trainer.copyWeightsToHostIfNeeded()
        self._weights_version = wrapped_modules.weights_version(self._user_model)

    def isCompiled(self) -> bool:
        """Whether there is an executable."""
        return self._compiled is not None

    def compilationTime(self) -> datetime.timedelta:
        """How long compiling took. Error if the model is not compiled, or the progress bar is off."""
        if not self._options._show_progress:
            raise Error("compilationTime() needs options.showCompilationProgressBar(True)")
        self._need_compiled("compilationTime")
        return datetime.timedelta(seconds=self._seconds or 0.0)

    def _need_compiled(self, call: str) -> CompiledModel:
        if self._compiled is None:
            raise Error(f"{call}() needs a compiled model: call the model or compile() first")
        return self._compiled

    # --- Running ------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward (and in training the backward pass and the update) on inputs with all micro-batches.

        Error if the inputs differ in shape, type or structure from those the model was compiled for.
        """
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to run a model on an offline device (ConnectionType.Never): use model.compile() instead of "
            "calling the model"
        )
        arguments = bind(self._model, args, kwargs)
        if self._compiled is None:
            self._compile(arguments)
        assert self._compiled is not None
        assert self._arguments is not None
        check_same(self._arguments, arguments)
        if self._detached:
            self.attachToDevice()
        self._bring_up_to_date()
        leaves = self._compiled.run(arguments.tensors)
        self._device_is_newer = self._training or bool(self._compiled.graph.updates)
        self._state_is_newer = self._training
        if self._training:
            wrapped_modules.weights_changed(self._user_model)
        mark_returned(leaves)
        return unflatten(self._compiled.captured.result, leaves)

    def _bring_up_to_date(self) -> None:
        """Send weights that training has changed since; optimizer state that was loaded."""
        assert self._compiled is not None
        if not self._training:
            trainer = trainer_of(self._user_model)
            if trainer is not None and trainer is not self:
                trainer.copyWeightsToHostIfNeeded()
            version = wrapped_modules.weights_version(self._user_model)
            if version != self._weights_version:
                self._weights_version = version
                self.copyWeightsToDevice()
        if self._compiled.needs_weights:
            self.copyWeightsToDevice()
        if isinstance(self._optimizer, Optimizer) and self._optimizer._state_dirty:
            self._send_optimizer_state()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling the executor."""
        return self(*args, **kwargs)

    # --- Measuring ----------------------------------------------------------------------------------------------------

    def cycleCount(self) -> int:
        """Modelled cycles of the last run. Error without options.logCycleCount(True), on a model of an IPU, or before a
        run."""
        if not self._options.extra("log_cycle_count"):
            raise Error("cycleCount() needs options.logCycleCount(True)")
        if uses_ipu_model(self._options):
            raise Error("cycleCount() needs IPUs: a model of an IPU counts no cycles")
        cycles = None if self._compiled is None else self._compiled.cycles()
        if cycles is None:
            raise Error("cycleCount() needs a run: call the model first")
        return cycles

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """When the data of the last call crossed: seconds, for each tensor and transfer, by ``input`` (asked for),
        ``input_complete``, ``output`` (ready), ``output_complete``."""
        stamps = None if self._compiled is None else self._compiled.stamps
        return no_counters() if stamps is None else stamps.counters()

    def getHostIpuLatency(self) -> Latency:
        """Least, greatest and average seconds from asking for an input to its arrival on the IPUs."""
        return latency(self.getPerfCounters(), "input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """Least, greatest and average seconds from an input's arrival to the result."""
        return latency(self.getPerfCounters(), "input_complete", "output")

    def getIpuHostLatency(self) -> Latency:
        """Least, greatest and average seconds from a result to its arrival on the host."""
        return latency(self.getPerfCounters(), "output", "output_complete")

    def getLatency(self) -> Latency:
        """Least, greatest and average seconds from asking for an input to the result's arrival on the host."""
        return latency(self.getPerfCounters(), "input", "output_complete")

    # --- Weights ------------------------------------------------------------------------------------------------------

    def _pull(self) -> None:
        if self._device_is_newer and self._compiled is not None and not self._detached:
            self.copyWeightsToHost()

    def copyWeightsToHost(self) -> None:
        """Bring parameters and buffers from the device into the module."""
        compiled = self._need_compiled("copyWeightsToHost")
        self._device_is_newer = False
        with untracked(), torch.no_grad():
            values = compiled.read_weights(list(compiled.graph.parameters))
            for name, tensor in self._tensors().items():
                if name in values:
                    _fill(tensor, values[name])

    def copyWeightsToHostIfNeeded(self) -> bool:
        """`copyWeightsToHost` if the device's values are newer; whether they were."""
        if not self._device_is_newer or self._compiled is None:
            return False
        self.copyWeightsToHost()
        return True

    def copyWeightsToDevice(self) -> None:
        """Send the module's parameters and buffers to the device; what was trained since the last copy is lost."""
        compiled = self._need_compiled("copyWeightsToDevice")
        self._device_is_newer = False
        with untracked():
            compiled.bring_weights()  # The optimizer's state stays as the device has it.
            values = {n: to_numpy(t) for n, t in self._tensors().items() if n in compiled.graph.parameters}
            compiled.write_weights(values)
        if self._training:
            wrapped_modules.weights_changed(self._user_model)

    def copyNamedBuffersToDevice(self) -> None:
        """Send the buffers that options.updatableNamedBuffers names."""
        compiled = self._need_compiled("copyNamedBuffersToDevice")
        if not self._options.updatable_named_buffers:
            raise Error("copyNamedBuffersToDevice() needs options.updatableNamedBuffers([...])")
        with untracked():
            buffers = dict(self._model.named_buffers())
            chosen = {n: to_numpy(buffers[n]) for n in self._options.updatable_named_buffers}
            compiled.bring_weights()
            compiled.write_weights(chosen)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load values into the module and send them to the device."""
        with untracked():
            result = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return result

    def _group_parameter(self, parameter: torch.Tensor, *settings: Any) -> None:
        """`ParameterHandle.replicaGrouping`."""
        name = next(n for n, p in self._model.named_parameters() if p is parameter)
        if self._compiled is not None:
            raise Error(f"replicaGrouping of {name!r} comes before the model is compiled")
        with untracked():
            if not parameter.dim():
                raise Error(f"replicaGrouping: {name!r} has no dimension for the groups")
        self._groups[name] = ReplicaGroups(*settings)

    # --- Optimizer ----------------------------------------------------------------------------------------------------

    def setOptimizer(self, optimizer: Any) -> None:
        """Use another optimizer, or the same one with other attributes (after a scheduler's step)."""
        check_supported(optimizer)
        assert self._training, "setOptimizer is for training models"
        self._choose_mean_strategy(optimizer)
        before = self._optimizer
        if before is not optimizer and isinstance(before, Optimizer) and self._compiled is not None:
            self._read_optimizer_state()
            before._read_state = None
        self._optimizer = optimizer
        if self._compiled is None:
            return
        self._warn_of_ignored(optimizer)
        with untracked():
            self._compiled.change_optimizer(optimizer, self._parameter_names())
        self._connect_optimizer()

    def _warn_of_ignored(self, optimizer: Any) -> None:
        """Say of attributes that the optimizer got since the model was compiled that they have no effect."""
        level = logging.DEBUG if self._options.extra("relax_optimizer_checks") else logging.WARNING
        for name in sorted(attributes_of(optimizer) - self._attributes):
            logger.log(level, "Ignoring unexpected attribute %s of the optimizer", name)
        self._attributes |= attributes_of(optimizer)

    def _parameter_names(self) -> dict[int, str]:
        return {id(p): n for n, p in self._model.named_parameters()}

    def _connect_optimizer(self) -> None:
        """Let the optimizer's ``state_dict`` read the IPU's state; send it what was loaded before."""
        private.note_step(self._optimizer)
        self._attributes |= attributes_of(self._optimizer)
        if (
            not isinstance(self._optimizer, Optimizer)
            or self._options.connection_type == ConnectionType.Never
        ):
            return
        if self._optimizer._state_dirty:
            self._send_optimizer_state()
        self._optimizer._read_state = self._read_optimizer_state

    def _send_optimizer_state(self) -> None:
        optimizer, compiled = self._optimizer, self._compiled
        assert compiled is not None
        optimizer._state_dirty = False
        if optimizer.ipu_state is None:
            return
        with untracked():
            compiled.bring_weights()
            compiled.write_weights({name: to_numpy(t) for name, t in optimizer.ipu_state.items()})
            compiled.change_optimizer(optimizer, self._parameter_names())
        self._state_is_newer = True

    def _read_optimizer_state(self) -> None:
        """Put the IPU's state into the optimizer, unless it has it already."""
        if self._compiled is None or self._detached or self._optimizer._state_dirty:
            return
        if self._state_is_newer:
            with untracked():
                self._optimizer.ipu_state, self._optimizer.ipu_param = self._compiled.optimizer_values()
            self._state_is_newer = False

    # --- Device -------------------------------------------------------------------------------------------------------

    def isAttachedToDevice(self) -> bool:
        """Whether the model holds its IPUs."""
        return self._compiled is not None and not self._detached and self._compiled.attached

    def detachFromDevice(self) -> None:
        """Bring weights, optimizer state and random state back and let the IPUs go; the executable stays."""
        compiled = self._need_compiled("detachFromDevice")
        if not self.isAttachedToDevice():
            raise Error("detachFromDevice(): the model is not attached to a device")
        self._leave(compiled)

    def _leave(self, compiled: CompiledModel) -> None:
        self.copyWeightsToHostIfNeeded()
        compiled.bring_weights()
        if isinstance(self._optimizer, Optimizer):
            self._read_optimizer_state()
        self._random_state = compiled.random_state
        compiled.detach()
        self._detached = True

    def attachToDevice(self) -> None:
        """Take IPUs again and send weights, optimizer state and random state."""
        compiled = self._need_compiled("attachToDevice")
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to attach to an offline device (ConnectionType.Never)"
        )
        if self.isAttachedToDevice():
            raise Error("attachToDevice(): the model is attached to a device already")
        compiled.attach()
        self._detached = False
        self.copyWeightsToDevice()
        if self._random_state is not None:
            compiled.random_state = self._random_state
        if isinstance(self._optimizer, Optimizer) and self._optimizer._state_dirty:
            self._send_optimizer_state()

    def destroy(self) -> None:
        """Bring weights back, let the IPUs go and drop the executable. The module's parameters are torch's again."""
        if self._compiled is not None:
            if self.isAttachedToDevice():
                self._leave(self._compiled)
            self._compiled = None
        if isinstance(self._optimizer, Optimizer) and self._optimizer._read_state is not None:
            self._optimizer._read_state = None
            self._optimizer._state_dirty = self._optimizer.has_state()
        self._arguments, self._executable, self._random_state, self._detached = None, None, None, False
        if self._training and trainer_of(self._user_model) is self:
            untrack(self._user_model)
            wrapped_modules.unwrap(self._user_model)

    @property
    def rng_state(self) -> list[int]:
        """The state of the IPU's random numbers: the seed, then the generator's words."""
        return self._need_compiled("rng_state").random_state

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        compiled = self._need_compiled("rng_state")
        self._random_state = list(state)
        if self.isAttachedToDevice():
            compiled.random_state = state

    # --- Files --------------------------------------------------------------------------------------------------------

    def save(self, filename: str, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the compiled program to a file (``model.poptorch`` in a folder); with ``export_model`` also the module,
        its weights, options and optimizer, so that `poptorch.load` needs nothing else."""
        compiled = self._need_compiled("save")
        assert self._arguments is not None
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

    def compileAndExport(self, filename: str, *args: Any, export_model: bool = True, **kwargs: Any) -> None:
        """`compile` for these inputs, then `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model=export_model)

    def loadExecutable(self, filename: str) -> None:
        """Take the compiled program of a file for this wrapper's module instead of compiling. Error for a file of
        another version, or of another model."""
        if self.isCompiled():
            raise Error("loadExecutable() comes before the model is compiled")
        found = read_export(filename)
        if found.metadata.get("version") != EXPORT_VERSION:
            raise Error(
                f"{filename} was written by version {found.metadata.get('version')!r}; this is {EXPORT_VERSION!r}",
                hint="Compile the model again with compileAndExport.",
            )
        if bool(found.metadata.get("training")) != self._training:
            raise Error(f"{filename} holds {'an inference' if self._training else 'a training'} model")
        self._take_export(found)

    def _take_export(self, found: ExportedModel) -> None:
        self._executable = found.executable
        self._random_state = found.payload.get("rng_state")
        self._compile(bind(self._model, found.payload["args"], found.payload["kwargs"]))

    def _checkpoint_state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """What `podrun.checkpoint` saves."""
        with untracked(), translated("saving a checkpoint"):
            return checkpoint_state(self)

    def _restore_checkpoint(self, tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        """Continue from what `_checkpoint_state` gave."""
        with untracked(), translated("resuming from a checkpoint"):
            restore_checkpoint(self, tensors, values)

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a file of the wrapper is not compiled."""
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
        assert self._compiled is not None, "getTensorNames() needs a compiled model"
        return self._compiled.tensor_names()

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """The last value of a tensor that `Options.anchorTensor` named."""
        assert short_name in self._options.anchored_tensors, f"{short_name!r} is no anchored tensor"
        compiled = self._need_compiled("getAnchoredTensor")
        if short_name not in compiled.last_anchors:
            raise Error("getAnchoredTensor() needs a run: call the model first")
        return torch.from_numpy(np.array(compiled.last_anchors[short_name]))

    def _debugGetPopartIR(self) -> str:
        """The compiled forward graph as JSON: ``{"maingraph": [...]}``."""
        found = json.loads(self._need_compiled("_debugGetPopartIR").ir_text())
        return json.dumps({"maingraph" if len(found) == 1 else name: ops for name, ops in found.items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_user_model" not in self.__dict__:
            raise AttributeError(name)
        found = getattr(self._user_model, name)
        if isinstance(found, torch.nn.Parameter):
            return ParameterHandle(found, self._group_parameter)
        return found

    def __repr__(self) -> str:
        return module_repr(self._model)


def _fill(tensor: torch.Tensor, value: np.ndarray) -> None:
    """Copy what was read into a tensor's storage; into a new one if all replicas' values were read."""
    source = value.astype(np.float32) if value.dtype.name == "bfloat16" else np.array(value)
    found = torch.from_numpy(source)
    if found.numel() != tensor.numel():
        tensor.data = found.to(tensor.dtype)
        return
    plain = tensor.detach()
    plain.copy_(found.reshape(plain.shape).to(plain.dtype))
