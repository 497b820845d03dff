"""Weights and optimizer state of a session: between the host's copy, the device and ONNX files."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from podrun.executable import VariableRole
from podrun.popart.errors import popart_exception, popart_runtime_error, surfaced
from podrun.popart.models import loader
from podrun.popart.sessions.device import SessionDevice
from podrun.popart.step_data.stepio import IWeightsIO
from podrun.popart.weights.variable_settings import given, retrieved

if TYPE_CHECKING:
    pass


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
        if self._device._loaded is not self:
            # Another program has the device and what was there is gone: the host keeps its copy.
            return
        if self._constant_weights or not self._weights.device_is_ahead:
            return
        roles = (VariableRole.WEIGHT, VariableRole.OPTIMIZER_STATE)
        wanted = [name for name, variable in executable.variables.items() if variable.role in roles]
        with surfaced():
            values = self._device.connection.read_variables(wanted)
        self._weights.take_device(values)

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


def _constant(call: str) -> popart_exception:
    return popart_exception(
        f"Cannot call {call} when constantWeights is set. Set `constantWeights` to False in the `SessionOption`s when "
        "initialising the session to enable this behaviour."
    )
