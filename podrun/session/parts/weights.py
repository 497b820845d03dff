"""Weights and optimizer state of a session: the host's copy, and its ways to the device and ONNX files."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from podrun.core.errors import PoplarError
from podrun.core.executable import Executable, VariableRole
from podrun.onnx_models import loader as model_loader
from podrun.onnx_models.light_model import LightModel
from podrun.session.exceptions import popart_exception, popart_runtime_error, surfaced
from podrun.session.parts.device_program import ProgramLoader
from podrun.session.parts.host_weights import HostWeights
from podrun.session.parts.replica_check import ReplicaCheck
from podrun.session.parts.rng import WORDS, RandomState
from podrun.session.session_options import SessionOptions
from podrun.session.stepio import IWeightsIO
from podrun.session.variables import given, retrieved

_log = logging.getLogger("podrun.popart.session")


class WeightTransfer:
    """Moves weights and optimizer state between a session's host copy, its device and ONNX files."""

    def __init__(
        self,
        loader: ProgramLoader,
        weights: HostWeights,
        random: RandomState,
        check: ReplicaCheck,
        options: SessionOptions,
    ) -> None:
        self._program, self._loader, self._weights = loader.program, loader, weights
        self._random, self._check, self._options = random, check, options

    def from_host(self) -> None:
        """`Session.weightsFromHost`."""
        self._program.prepared("Devicex::weightsFromHost()")
        self._loader.ensure_loaded()
        self._program.write(self._weights.device_values() | self._weights.state_values())
        self._weights.device_is_ahead = False
        self._loader.weights_sent = True

    def to_host(self) -> None:
        """`Session.weightsToHost`."""
        executable = self._program.prepared("Devicex::weightsToHost()")
        if not self._program.on_device:
            # Another program has the device and what was there is gone: the host keeps its copy.
            return
        if self._weights.constant or not self._weights.device_is_ahead:
            return
        self._weights.take_device(self._program.read(_of_training(executable)))

    def read(self, weights_io: IWeightsIO) -> None:
        """`Session.readWeights`."""
        built = self._weights.built
        for name, array in weights_io.weights.items():
            value = self._weights.get(name)
            if value is None:
                continue
            if name not in built.kept:
                value = retrieved(built.settings, name, value, built.program.replicas)
            if array.nbytes != value.nbytes:
                raise popart_runtime_error(
                    f"Differing sizes for weight {name!r}: the array has {array.nbytes} bytes "
                    f"({array.dtype}, shape {list(array.shape)}), the weight {value.nbytes} ({value.dtype}, "
                    f"shape {list(value.shape)})."
                )
            array.reshape(-1).view(value.dtype)[...] = value.reshape(-1)

    def write(self, weights_io: IWeightsIO) -> None:
        """`Session.writeWeights`."""
        if self._weights.constant:
            raise _constant("writeWeights")
        built = self._weights.built
        strange = [name for name in weights_io.weights if self._weights.get(name) is None]
        if strange:
            _log.warning(
                "writeWeights: the session has no weight or state %s: passed over", ", ".join(strange)
            )
        for name, array in weights_io.weights.items():
            held = self._weights.get(name)
            if held is not None:
                if name not in built.kept:
                    array = given(built.settings, name, array, held, built.program.replicas)
                self._weights.put(name, array)

    def model(self) -> LightModel:
        """The model with the current weights, and optimizer state unless an option leaves it out."""
        self.to_host()
        keep = not self._options.disableOptimizerStateTensorStreams
        return self._weights.model(with_state=keep and not self._options.disableGradAccumulationTensorStreams)

    def reset(self, model: str | bytes | os.PathLike[str], ignore_unknown: bool) -> None:
        """`Session.resetHostWeights`."""
        if self._weights.constant:
            raise _constant("resetHostWeights")
        self._weights.reset(model_loader.read_light_model(model), ignore_unknown)
        self._loader.weights_sent = False

    def broadcast(self, root: int) -> None:
        """Give the host's copies of all instances the weights and optimizer state of one."""
        from podrun import popdist

        popdist.init()
        for name, value in sorted(self._weights.get_all().items()):
            self._weights.put(name, popdist.broadcast(np.array(value, order="C"), root))
        self._loader.weights_sent = False

    def checkpoint(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Weights and optimizer state as the program has them, with the replica state, and the states of the random
        numbers. The arrays are the caller's.
        """
        executable = self._program.prepared("a checkpoint's save")
        self._compare_replicas(executable)
        held = self._weights.device_values() | self._weights.state_values()
        values = {name: np.array(value) for name, value in held.items()}
        if self._program.on_device and self._weights.device_is_ahead and not self._weights.constant:
            values |= self._program.read(_of_training(executable))
        return values, {"seed": self._random.seed(), "rng": self._random.read_rng()}

    def _compare_replicas(self, executable: Executable) -> None:
        """Where replicas are compared, no checkpoint is saved of replicas that differ."""
        if self._program.on_device and self._weights.device_is_ahead:
            replicas = self._weights.built.program.replicas
            try:
                with surfaced():
                    self._check.before_save(executable, self._program.device, replicas)
            except PoplarError:
                self._program.on_device = False
                raise

    def restore(self, tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        """Continue from what `checkpoint` gave. popart_exception for the state of another program."""
        self._program.prepared("a checkpoint's resume")
        if self._weights.constant:
            raise _constant("a checkpoint's resume")
        _check_same(self._weights.device_values() | self._weights.state_values(), tensors)
        self._weights.take_device(tensors)
        seed, rng = values.get("seed"), values.get("rng")
        if not isinstance(seed, int) or not isinstance(rng, list) or len(rng) != WORDS:
            raise popart_exception("The checkpoint was not saved by a session: it has no random state.")
        self._random.restore(seed, rng)
        self._loader.ensure_loaded()
        self._program.write(dict(tensors) | self._random.values())
        self._loader.weights_sent = True


def _of_training(executable: Executable) -> list[str]:
    """The variables that training changes: weights and optimizer state."""
    roles = (VariableRole.WEIGHT, VariableRole.OPTIMIZER_STATE)
    return [name for name, variable in executable.variables.items() if variable.role in roles]


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
