"""What a session is made of, for all of its parts, and the questions that need nothing else.

The parts build on each other: state, then reports and random numbers, the device, and on it runs, weights and files.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from podrun.executable import Executable
from podrun.popart.devices.device import DeviceInfo
from podrun.popart.errors import popart_exception, surfaced
from podrun.popart.models.external import ExternalFiles
from podrun.popart.models.light_model import LightModel
from podrun.popart.optimizers.base import Optimizer
from podrun.popart.options.session_options import SessionOptions
from podrun.popart.patterns import Patterns
from podrun.popart.program.build import BuiltModel
from podrun.popart.retired import FormerSession
from podrun.popart.step_data.dataflow import DataFlow
from podrun.popart.step_data.streams import StreamCallbacks
from podrun.popart.tensor_info import InputShapeInfo, TensorInfo
from podrun.popart.weights.host_weights import HostWeights


class SessionState(FormerSession):
    """See the module docstring."""

    _training = False
    _name: str
    _options: SessionOptions
    _flow: DataFlow
    _device: DeviceInfo
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
    _executable: Executable | None
    """None before prepareDevice."""
    _weights_sent: bool
    _pending_scalars: bool
    """Hyper-parameters have changed since they were last sent."""
    _seed: int | None
    _rng: list[int]
    _compiled_here = False
    """True iff this session has compiled its program; False if it came from a cache or a file."""
    _run_names: list[str]
    """Of the first runs, by ``debugName``."""
    _cycles: int | None
    _streams: StreamCallbacks

    def _prepared(self, call: str) -> Executable:
        if self._executable is None:
            raise popart_exception(
                f"Devicex::prepare() must be called before {call} is called.", hint="session.prepareDevice()"
            )
        return self._executable

    def _write(self, values: Mapping[str, np.ndarray]) -> None:
        if values:
            with surfaced():
                self._device.connection.write_variables(values)

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
        if TensorId not in self._built.infos:
            raise popart_exception(f"The session has no tensor {TensorId!r}.")
        return self._built.infos[TensorId]

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
