"""Weights and optimizer state of a session: between the host's copy, the device and ONNX files."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from podrun.core.errors import PoplarError
from podrun.core.executable import Executable, VariableRole
from podrun.onnx_models import loader
from podrun.session.exceptions import popart_exception, popart_runtime_error, surfaced
from podrun.session.parts.device import SessionDevice
from podrun.session.parts.rng import WORDS
from podrun.session.stepio import IWeightsIO
from podrun.session.variables import given, retrieved

_log = logging.getLogger("podrun.popart.session")


class SessionWeights(SessionDevice):
    """The part of a session that moves weights."""

    def weightsFromHost(self) -> None:
        """Send the host's weights and optimizer state to the device."""
        self._prepared("Devicex::weightsFromHost()")
        self._ensure_loaded()
        self._write(self._weights.device_values() | self._weights.state_values())
        self._weights.device_is_ahead = False
        self._weights_sent = True

    def weightsToHost(self) -> None:
        """Bring weights and optimizer state from the device into the host's copy."""
        executable = self._prepared("Devicex::weightsToHost()")
        if not self._program.on_device:
            # Another program has the device and what was there is gone: the host keeps its copy.
            return
        if self._constant_weights or not self._weights.device_is_ahead:
            return
        roles = (VariableRole.WEIGHT, VariableRole.OPTIMIZER_STATE)
        wanted = [name for name, variable in executable.variables.items() if variable.role in roles]
        self._weights.take_device(self._program.read(wanted))

    def readWeights(self, weightsIo: IWeightsIO) -> None:
        """Copy the host's weights into the arrays of a PyWeightsIO; names it does not know are left alone."""
        replicas = self._built.program.replicas
        for name, array in weightsIo.weights.items():
            value = self._weights.get(name)
            if value is None:
                continue
            if name not in self._built.kept:
                value = retrieved(self._built.settings, name, value, replicas)
            if array.nbytes != value.nbytes:
                raise popart_runtime_error(
                    f"Differing sizes for weight {name!r}: the array has {array.nbytes} bytes "
                    f"({array.dtype}, shape {list(array.shape)}), the weight {value.nbytes} ({value.dtype}, "
                    f"shape {list(value.shape)})."
                )
            array.reshape(-1).view(value.dtype)[...] = value.reshape(-1)

    def writeWeights(self, weightsIo: IWeightsIO) -> None:
        """Change the host's weights; weightsFromHost sends them.

        As in PopART, names that the session does not have are passed over (programs offer a checkpoint's optimizer
        state whatever the optimizer); a warning says which.
        """
        if self._constant_weights:
            raise _constant("writeWeights")
        replicas = self._built.program.replicas
        strange = [name for name in weightsIo.weights if self._weights.get(name) is None]
        if strange:
            _log.warning(
                "writeWeights: the session has no weight or state %s: passed over", ", ".join(strange)
            )
        for name, array in weightsIo.weights.items():
            held = self._weights.get(name)
            if held is not None:
                if name not in self._built.kept:
                    array = given(self._built.settings, name, array, held, replicas)
                self._weights.put(name, array)

    def modelToHost(self, fn: str | os.PathLike[str]) -> None:
        """Write the model with the current weights and optimizer state as an ONNX file."""
        self.weightsToHost()
        keep = not self._options.disableOptimizerStateTensorStreams
        data = self._weights.model(with_state=keep and not self._options.disableGradAccumulationTensorStreams)
        data = self._external.put_out(data, fn)
        with open(fn, "wb") as file:
            file.write(data.to_bytes())

    def resetHostWeights(
        self,
        modelProtoOrFilename: str | bytes | os.PathLike[str],
        ignoreWeightsInModelWithoutCorrespondingHostWeight: bool = False,
    ) -> None:
        """Take weights by name from another model; weightsFromHost sends them."""
        if self._constant_weights:
            raise _constant("resetHostWeights")
        source = loader.read_light_model(modelProtoOrFilename)
        self._weights.reset(source, ignoreWeightsInModelWithoutCorrespondingHostWeight)
        self._weights_sent = False

    # -- checkpoints (`podrun.checkpoint.Checkpointed`) ---------------------------------------------------

    def _checkpoint_state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Weights and optimizer state as the program has them, with what each replica keeps for itself, and the states
        of the random numbers. The arrays are the caller's.
        """
        executable = self._prepared("a checkpoint's save")
        self._compare_replicas(executable)
        held = self._weights.device_values() | self._weights.state_values()
        values = {name: np.array(value) for name, value in held.items()}
        roles = (VariableRole.WEIGHT, VariableRole.OPTIMIZER_STATE)
        if self._program.on_device and self._weights.device_is_ahead and not self._constant_weights:
            wanted = [name for name, variable in executable.variables.items() if variable.role in roles]
            values |= self._program.read(wanted)
        return values, {"seed": self._random.seed(), "rng": self._random.read_rng()}

    def _compare_replicas(self, executable: Executable) -> None:
        """Where replicas are compared, no checkpoint is saved of replicas that differ."""
        if self._program.on_device and self._weights.device_is_ahead:
            try:
                with surfaced():
                    self._check.before_save(executable, self._device, self._built.program.replicas)
            except PoplarError:
                self._program.on_device = False
                raise

    def _restore_checkpoint(self, tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        """Continue from what `_checkpoint_state` gave. popart_exception for the state of another program."""
        self._prepared("a checkpoint's resume")
        if self._constant_weights:
            raise _constant("a checkpoint's resume")
        _check_same(self._weights.device_values() | self._weights.state_values(), tensors)
        self._weights.take_device(tensors)
        seed, rng = values.get("seed"), values.get("rng")
        if not isinstance(seed, int) or not isinstance(rng, list) or len(rng) != WORDS:
            raise popart_exception("The checkpoint was not saved by a session: it has no random state.")
        self._random.restore(seed, rng)
        self._ensure_loaded()
        self._write(dict(tensors) | self._random.values())
        self._weights_sent = True


def _check_same(held: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray]) -> None:
    """popart_exception that names the first tensor that is not in both, or has another type or shape."""
    for name in sorted({*held, *given}):
        ours, theirs = (
            None if n not in m else f"{m[n].dtype}{list(m[n].shape)}"
            for n, m in ((name, held), (name, given))
        )
        if ours != theirs:
            raise popart_exception(
                f"The checkpoint is of another program: {name!r} is {theirs or 'not'} in the checkpoint and "
                f"{ours or 'not'} in this session.",
                hint="Use the model, optimizer and replication that the checkpoint was saved with.",
            )


def _constant(call: str) -> popart_exception:
    return popart_exception(
        f"Cannot call {call} when constantWeights is set. Set `constantWeights` to False in the `SessionOption`s when "
        "initialising the session to enable this behaviour."
    )
