"""InferenceSession and TrainingSession: what both add to `podrun.popart.sessions.session_base.Session`."""

from __future__ import annotations

import copy
import os
import warnings

from podrun.popart.devices.device import DeviceInfo
from podrun.popart.optimizers.base import Optimizer
from podrun.popart.options.patterns import Patterns
from podrun.popart.options.session_options import SessionOptions
from podrun.popart.sessions.forward_only import HANDLE, ForwardOnly
from podrun.popart.sessions.session_base import Session as Session
from podrun.popart.sessions.session_ir import Ir, check_for_inference
from podrun.popart.step_data.dataflow import DataFlow
from podrun.popart.step_data.stepio import IStepIO
from podrun.popart.values.exceptions import (
    OutOfMemoryException as OutOfMemoryException,  # Programs look for this name here, too.
)
from podrun.popart.values.exceptions import incompatible, popart_exception, surfacing
from podrun.popart.values.names import takes_former_arguments
from podrun.popart.values.tensor_info import InputShapeInfo
from podrun.runtime.graph import Model


@surfacing
class InferenceSession(Session):
    """A model that runs forward: ``InferenceSession(model, DataFlow(1, {y: art}), device)``."""

    @takes_former_arguments
    def __init__(
        self,
        fnModel: str | bytes | os.PathLike[str] | Model,
        dataFlow: DataFlow,
        deviceInfo: DeviceInfo,
        inputShapeInfo: InputShapeInfo | None = None,
        patterns: Patterns | None = None,
        userOptions: SessionOptions | None = None,
        name: str = "inference",
    ) -> None:
        super().__init__(fnModel, dataFlow, deviceInfo, inputShapeInfo, patterns, userOptions, name)

    def getAllTensorIds(self) -> set[str]:
        """Every tensor of the session."""
        return set(self.parts.model.built.infos)

    def copyDeviceWeightsToHost(self) -> None:
        """Bring the weights from the device into the host's copy."""
        self.weightsToHost()

    def markHostWeightsInSync(self) -> None:
        """Say that the host's weights are those of the device."""
        self.parts.weights.device_is_ahead = False

    def markHostWeightsOutOfSync(self) -> None:
        """Say that the device's weights have changed."""
        self.parts.weights.device_is_ahead = True

    def areHostWeightsInSync(self) -> bool:
        """True iff the host's weights are those of the device."""
        return not self.parts.weights.device_is_ahead

    def setEngineIsLoaded(self, isLoaded: bool) -> None:
        """Say whether the program is on the device; False makes the next call load it again."""
        self.parts.program.on_device = isLoaded

    def checkInplacingAmbiguity(self) -> bool:
        """True iff in-place operators could change results: here nothing works in place."""
        return False

    @staticmethod
    def fromIr(ir: Ir, deviceInfo: DeviceInfo, name: str = "fromIr") -> InferenceSession:
        """A session from what `getIr` returned, on another device. popart_exception for the IR of a training
        session.
        """
        check_for_inference(ir)
        return InferenceSession(ir.model, ir.flow, deviceInfo, ir.shapes, ir.patterns, ir.options, name)

    def _setDeviceInfo(self, deviceInfo: DeviceInfo) -> None:
        """Use another device with as many IPUs; before prepareDevice. popart_exception otherwise."""
        if self.parts.program.executable is not None:
            raise popart_exception("_setDeviceInfo comes before prepareDevice.")
        ipus = self.device.numIpus
        if deviceInfo.numIpus != ipus:
            raise popart_exception(
                f"The session was made for {ipus} IPUs; the device has {deviceInfo.numIpus}."
            )
        self.device, self.parts.program.device = deviceInfo, deviceInfo.device


@surfacing
class TrainingSession(Session):
    """A model that is trained: the loss is the id of a scalar tensor, the optimizer changes the weights."""

    _training = True

    @takes_former_arguments
    def __init__(
        self,
        fnModel: str | bytes | os.PathLike[str] | Model,
        dataFlow: DataFlow,
        loss: str,
        optimizer: Optimizer,
        deviceInfo: DeviceInfo,
        inputShapeInfo: InputShapeInfo | None = None,
        patterns: Patterns | None = None,
        userOptions: SessionOptions | None = None,
        name: str = "training",
    ) -> None:
        self._forward_only: ForwardOnly | None = None
        if not isinstance(optimizer, Optimizer):
            raise incompatible("__init__", f"{optimizer!r} is no optimizer.")
        if not isinstance(loss, str):
            raise incompatible("__init__", f"The loss is a tensor's name, not {loss!r}.")
        super().__init__(
            fnModel, dataFlow, deviceInfo, inputShapeInfo, patterns, userOptions, name, loss, optimizer
        )

    def getTensorIds(self) -> set[str]:
        """Every tensor of the session."""
        return set(self.parts.model.built.infos)

    def updateOptimizerFromHost(self, optimizer: Optimizer) -> None:
        """Change non-constant hyper-parameters from the next run on. popart_exception for any other change."""
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"updateOptimizerFromHost(): incompatible function arguments: {optimizer!r}.")
        if self._optimizer is None:
            raise popart_exception("updateOptimizerFromHost: the session has no optimizer to change.")
        optimizer.check_replaces(self._optimizer)
        self._optimizer = copy.deepcopy(optimizer)
        self.parts.scalars.replace(self._optimizer)

    def updateOptimizer(self, optimizer: Optimizer) -> None:
        """PopART 1's name of `updateOptimizerFromHost`; the values are sent at once."""
        warnings.warn(
            "updateOptimizer is PopART 1's: write session.updateOptimizerFromHost(optimizer)",
            DeprecationWarning,
            stacklevel=3,
        )
        self.updateOptimizerFromHost(optimizer)

    def optimizerFromHost(self) -> None:
        """PopART 1's: sends the optimizer's values, which `weightsFromHost` and `updateOptimizerFromHost` do."""
        warnings.warn(
            "optimizerFromHost is PopART 1's: session.updateOptimizerFromHost(optimizer) sends the values too",
            DeprecationWarning,
            stacklevel=3,
        )

    def _run_program(self, handle: str, io: IStepIO) -> None:
        if handle != HANDLE or not self._options.createImplicitPipeliningFwdOnlyProgram:
            super()._run_program(handle, io)
        self.parts.runner.check(io)
        if self._forward_only is None:
            self._forward_only = ForwardOnly(self)
        self._forward_only.run(io)

    def broadcastWeights(self, rootRank: int = 0) -> None:
        """Give every instance the weights of instance ``rootRank``.

        It is the host's weights and optimizer state that travel; weightsFromHost sends them on. All instances make the
        call. popart_exception for an instance that does not exist, popdist_error if one does not come.
        """
        from podrun import popdist

        count = popdist.getNumInstances() if self._options.enableDistributedReplicatedGraphs else 1
        if not 0 <= rootRank < count:
            raise popart_exception(f"There is no instance {rootRank}: there are {count}, from 0.")
        if count == 1:
            return
        self.parts.transfer.broadcast(rootRank)
