"""State on the IPUs and its copy on the host: weights, the optimizer's state, random state, the devices.

`ExecutorState` is the part of `PoplarExecutor` that keeps both sides the same: it notes which is newer and copies when
the other one is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from podrun.core.errors import InternalError
from podrun.poptorch.api import user_modules
from podrun.poptorch.api.enums import (
    CommGroupType,
    ConnectionType,
    MeanReductionStrategy,
    VariableRetrievalMode,
)
from podrun.poptorch.api.logs import logger
from podrun.poptorch.api.optim import ProgramOptimizer, TorchOptimizer
from podrun.poptorch.api.options import Options
from podrun.poptorch.api.user_modules import trainer_of, untrack, untracked
from podrun.poptorch.capture.torch_names import to_numpy
from podrun.poptorch.compile.module_capture import ReplicaGroups
from podrun.poptorch.compile.session_optimizers import attributes_of, check_supported, needs_running_mean
from podrun.poptorch.errors import ArgumentError, Error
from podrun.poptorch.executor.calls import CallArguments
from podrun.poptorch.executor.compiled_model import CompiledModel
from podrun.poptorch.executor.host_calls import ChainedModel
from podrun.private_apis import torch as private


class ExecutorState:
    """The module, its optimizer and its compiled model, and the transfer of values between host and IPUs."""

    _options: Options
    _user_model: torch.nn.Module
    _model: torch.nn.Module
    _training: bool
    _optimizer: ProgramOptimizer | None
    _compiled: CompiledModel | ChainedModel | None
    _arguments: CallArguments | None
    _executable: bytes | None
    _device_is_newer: bool
    """Whether training has changed weights on the IPUs since they were copied to the host."""
    _state_is_newer: bool
    """Whether training has changed the optimizer's state on the IPUs since it was copied to the host."""
    _weights_version: int
    _detached: bool
    _random_state: list[int] | None
    _groups: dict[str, ReplicaGroups]
    _attributes: set[str]

    def _need_compiled(self, call: str) -> CompiledModel | ChainedModel:
        if self._compiled is None:
            raise Error(
                "Model has not been compiled or has been destroyed.",
                location=call,
                hint="Call the model or compile() first.",
            )
        return self._compiled

    def _bring_up_to_date(self) -> None:
        """Send weights that the program has changed since the last call, and loaded optimizer state."""
        if self._compiled is None:
            raise InternalError("weights are brought up to date before the model is compiled")
        if not self._training:
            trainer = trainer_of(self._user_model)
            if trainer is not None and trainer is not self:
                trainer.copyWeightsToHostIfNeeded()
            version = user_modules.weights_version(self._user_model)
            if version != self._weights_version:
                self._weights_version = version
                self.copyWeightsToDevice()
        if self._compiled.needs_weights:
            if self._device_is_newer:
                logger.warning(
                    "The IPUs lost their memory: training goes on from the weights that the module has on the host"
                )
            self.copyWeightsToDevice()
        if isinstance(self._optimizer, TorchOptimizer) and self._optimizer._state_dirty:
            self._send_optimizer_state()

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
        """Call `copyWeightsToHost` if the device's values are newer. Returns whether they were."""
        if not self._device_is_newer or self._compiled is None:
            return False
        self.copyWeightsToHost()
        return True

    def copyWeightsToDevice(self) -> None:
        """Send the module's parameters and buffers to the device. Training since the last copy is lost."""
        compiled = self._need_compiled("copyWeightsToDevice")
        self._device_is_newer = False
        with untracked():
            compiled.bring_weights()  # The optimizer's state on the device stays.
            values = {n: to_numpy(t) for n, t in self._tensors().items() if n in compiled.graph.parameters}
            compiled.write_weights(values)
        if self._training:
            user_modules.weights_changed(self._user_model)

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

    def _group_parameter(
        self, parameter: torch.Tensor, kind: CommGroupType, shards: int, retrieval: VariableRetrievalMode
    ) -> None:
        """`ParameterHandle.replicaGrouping`."""
        name = next(n for n, p in self._model.named_parameters() if p is parameter)
        if self._compiled is not None:
            raise Error(f"replicaGrouping of {name!r} comes before the model is compiled")
        with untracked():
            if not parameter.dim():
                raise Error(f"replicaGrouping: {name!r} has no dimension for the groups")
        self._groups[name] = ReplicaGroups(kind, shards, retrieval)

    def _choose_mean_strategy(self, optimizer: ProgramOptimizer) -> None:
        """Average gradients that are accumulated in half precision as they arrive, unless the options choose
        otherwise.
        """
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

    # --- Optimizer ----------------------------------------------------------------------------------------------------

    def setOptimizer(self, optimizer: ProgramOptimizer) -> None:
        """Use another optimizer, or the same one with other attributes (after a scheduler's step)."""
        check_supported(optimizer)
        if not self._training:
            raise ArgumentError("setOptimizer is for training models")
        self._choose_mean_strategy(optimizer)
        before = self._optimizer
        if before is not optimizer and isinstance(before, TorchOptimizer) and self._compiled is not None:
            self._read_optimizer_state()
            before._read_state = None
        self._optimizer = optimizer
        if self._compiled is None:
            return
        self._warn_of_ignored(optimizer)
        if not isinstance(self._compiled, CompiledModel):
            raise InternalError("a model that is trained is one program")
        with untracked():
            self._compiled.change_optimizer(optimizer, self._parameter_names())
        self._connect_optimizer()

    def _warn_of_ignored(self, optimizer: ProgramOptimizer) -> None:
        """Warn that attributes which the optimizer got since the model was compiled have no effect."""
        level = logging.DEBUG if self._options.extra("relax_optimizer_checks") else logging.WARNING
        for name in sorted(attributes_of(optimizer) - self._attributes):
            logger.log(level, "Ignoring unexpected attribute %s of the optimizer", name)
        self._attributes |= attributes_of(optimizer)

    def _parameter_names(self) -> dict[int, str]:
        return {id(p): n for n, p in self._model.named_parameters()}

    def _connect_optimizer(self) -> None:
        """Let the optimizer's ``state_dict`` read the IPU's state, and send state that was loaded before."""
        optimizer = self._optimizer
        if optimizer is None:
            raise InternalError("a model that is trained has no optimizer")
        private.note_step(optimizer)
        self._attributes |= attributes_of(optimizer)
        if not isinstance(optimizer, TorchOptimizer) or self._options.connection_type == ConnectionType.Never:
            return
        if optimizer._state_dirty:
            self._send_optimizer_state()
        optimizer._read_state = self._read_optimizer_state

    def _send_optimizer_state(self) -> None:
        optimizer, compiled = self._optimizer, self._compiled
        if not isinstance(compiled, CompiledModel) or not isinstance(optimizer, TorchOptimizer):
            raise InternalError("only a compiled model with an optimizer of poptorch's has state to send")
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
        optimizer = self._optimizer
        if not isinstance(optimizer, TorchOptimizer):
            raise InternalError("only optimizers of poptorch's hold state of the IPU")
        if self._compiled is None or self._detached or optimizer._state_dirty:
            return
        if self._state_is_newer:
            if not isinstance(self._compiled, CompiledModel):
                raise InternalError("a model that is trained is one program")
            with untracked():
                optimizer.ipu_state, optimizer.ipu_param = self._compiled.optimizer_values()
            self._state_is_newer = False

    # --- Device -------------------------------------------------------------------------------------------------------

    def isAttachedToDevice(self) -> bool:
        """Whether the model holds its IPUs."""
        return self._compiled is not None and not self._detached and self._compiled.attached

    def detachFromDevice(self) -> None:
        """Bring weights, optimizer state and random state back and release the IPUs; the executable stays."""
        compiled = self._need_compiled("detachFromDevice")
        if not self.isAttachedToDevice():
            raise Error("Device is not attached", hint="attachToDevice() takes the IPUs again.")
        self._leave(compiled)

    def _leave(self, compiled: CompiledModel | ChainedModel) -> None:
        self.copyWeightsToHostIfNeeded()
        compiled.bring_weights()
        if isinstance(self._optimizer, TorchOptimizer):
            self._read_optimizer_state()
        self._random_state = compiled.random_state
        compiled.detach()
        self._detached = True

    def attachToDevice(self) -> None:
        """Take IPUs again and send weights, optimizer state and random state."""
        compiled = self._need_compiled("attachToDevice")
        if self._options.connection_type == ConnectionType.Never:
            raise ArgumentError("Trying to attach to an offline device (ConnectionType.Never)")
        if self.isAttachedToDevice():
            raise Error("Device is already attached", hint="detachFromDevice() gives the IPUs back.")
        compiled.attach()
        self._detached = False
        self.copyWeightsToDevice()
        if self._random_state is not None:
            compiled.random_state = self._random_state
        if isinstance(self._optimizer, TorchOptimizer) and self._optimizer._state_dirty:
            self._send_optimizer_state()

    def destroy(self) -> None:
        """Bring weights back, release the IPUs and drop the executable. The module's parameters are torch's again."""
        if self._compiled is not None:
            if self.isAttachedToDevice():
                self._leave(self._compiled)
            self._compiled = None
        if isinstance(self._optimizer, TorchOptimizer) and self._optimizer._read_state is not None:
            self._optimizer._read_state = None
            self._optimizer._state_dirty = self._optimizer.has_state()
        self._arguments, self._executable, self._random_state, self._detached = None, None, None, False
        if self._training and trainer_of(self._user_model) is self:
            untrack(self._user_model)
            user_modules.unwrap(self._user_model)

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


def _fill(tensor: torch.Tensor, value: np.ndarray) -> None:
    """Copy what was read into a tensor's storage; into a new one if all replicas' values were read."""
    source = value.astype(np.float32) if value.dtype.name == "bfloat16" else np.array(value)
    read = torch.from_numpy(source)
    if read.numel() != tensor.numel():
        tensor.data = read.to(tensor.dtype)
        return
    plain = tensor.detach()
    plain.copy_(read.reshape(plain.shape).to(plain.dtype))
