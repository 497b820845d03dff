"""What a session is made of, for all of its parts, and the questions that need nothing else.

A session holds objects with explicit dependencies: its program and device (`DeviceProgram`), random state, reports,
files and the runner of its steps. What is left here are the questions and the calls that need several of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from podrun.core.executable import Executable
from podrun.onnx_models.light_model import LightModel
from podrun.onnx_models.transformer import ExternalFiles
from podrun.session.dataflow import DataFlow
from podrun.session.device import DeviceInfo
from podrun.session.names import FormerSession
from podrun.session.optimizers.base import Optimizer
from podrun.session.parts.device_program import DeviceProgram
from podrun.session.parts.files import SessionReports
from podrun.session.parts.host_weights import HostWeights
from podrun.session.parts.replica_check import ReplicaCheck
from podrun.session.parts.rng import RandomState
from podrun.session.patterns import Patterns
from podrun.session.program.build import BuiltModel
from podrun.session.session_options import SessionOptions
from podrun.session.tensor_info import InputShapeInfo, TensorInfo


class SessionState(FormerSession):
    """See the module docstring."""

    _training = False
    _name: str
    _options: SessionOptions
    _flow: DataFlow
    _patterns: Patterns
    _optimizer: Optimizer | None
    _shapes: InputShapeInfo
    _model: LightModel
    """As it was given."""
    _placed: LightModel
    """With places, as it was built."""
    _built: BuiltModel
    _external: ExternalFiles
    _weights: HostWeights
    _weights_sent: bool
    _pending_scalars: bool
    """Hyper-parameters have changed since they were last sent."""
    _program: DeviceProgram
    _random: RandomState
    _reports: SessionReports
    _compiled_here = False
    """True iff this session has compiled its program; False if it came from a cache or a file."""
    _check: ReplicaCheck

    @property
    def _executable(self) -> Executable | None:
        return self._program.executable

    @property
    def _device(self) -> DeviceInfo:
        return self._program.device

    def _prepared(self, call: str) -> Executable:
        return self._program.prepared(call)

    def _write(self, values: Mapping[str, np.ndarray]) -> None:
        self._program.write(values)

    @property
    def _constant_weights(self) -> bool:
        return not self._training and self._options.constantWeights

    # -- questions --------------------------------------------------------------------------------

    @property
    def dataFlow(self) -> DataFlow:
        """The session's data flow."""
        return self._flow

    @property
    def replicationFactor(self) -> int:
        """Replicas of this process."""
        return self._options.local_replicas

    @property
    def accumulationFactor(self) -> int:
        """Micro-batches in a batch."""
        return self._options.micro_batches

    def _getDataFlow(self) -> DataFlow:
        return self._flow

    def _replicationFactor(self) -> int:
        return self.replicationFactor

    def _accumulationFactor(self) -> int:
        return self.accumulationFactor

    def getInfo(self, TensorId: str) -> TensorInfo:
        """Type and shape of a tensor on the device. popart_exception for an unknown one."""
        return self._built.info(TensorId)

    def _tensor_ids(self) -> set[str]:
        return set(self._built.infos)

    def initAnchorArrays(self) -> dict[str, np.ndarray]:
        """An array for every anchor, in order of name, of the shape that its return type asks for.

        Zeros: with synthetic data nothing is written into them.
        """
        arrays = {}
        for anchor in self._flow.anchors():
            info = self.getInfo(anchor)
            leading = self._flow.art(anchor).leading_dims(
                self._flow.batchesPerStep(), self.accumulationFactor, self.replicationFactor
            )
            arrays[anchor] = np.zeros((*leading, *info.shape()), info.numpy_dtype())
        return arrays
