"""InferenceSession and TrainingSession: a model on a device.

Source: graphcore/popart, willow/src/session.cpp and popx/devicex.cpp, and the wrapper around it in Python.

Order of calls: construct (checks everything), ``prepareDevice`` (compiles and loads), ``weightsFromHost``,
``run`` any number of times, ``weightsToHost`` and ``readWeights``, or ``modelToHost``.
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

import numpy as np

from podrun.popart.devices.device import DeviceInfo
from podrun.popart.enums import VirtualGraphMode
from podrun.popart.errors import (
    OutOfMemoryException as OutOfMemoryException,  # Programs look for it here, too.
)
from podrun.popart.errors import popart_exception, surfaced
from podrun.popart.models import loader
from podrun.popart.models.external import ExternalFiles
from podrun.popart.models.light_model import LightModel
from podrun.popart.optimizers.base import Optimizer
from podrun.popart.options import checks
from podrun.popart.options.session_options import SessionOptions
from podrun.popart.patterns import Patterns
from podrun.popart.placing import placement
from podrun.popart.placing.pipelining import check_pipeline
from podrun.popart.program.build import BuiltModel, build
from podrun.popart.program.request import Request
from podrun.popart.sessions.dot import write_dots
from podrun.popart.sessions.files import SessionFiles
from podrun.popart.sessions.ir import Ir, SessionIr, inference_from
from podrun.popart.sessions.rng import WORDS
from podrun.popart.sessions.run import SessionRun
from podrun.popart.sessions.weights import SessionWeights
from podrun.popart.step_data.dataflow import DataFlow
from podrun.popart.step_data.stepio import IStepIO
from podrun.popart.step_data.streams import StreamCallbacks
from podrun.popart.tensor_info import InputShapeInfo
from podrun.popart.weights.host_weights import HostWeights

if TYPE_CHECKING:
    from onnx import ModelProto

    from podrun.popart.models.model_loader import ExternalPlace
    from podrun.popart.sessions.forward_only import ForwardOnly


class Session(SessionRun, SessionWeights, SessionFiles, SessionIr):
    """What both kinds of session are. Made through InferenceSession or TrainingSession."""

    def __init__(
        self,
        fnModel: str | bytes | os.PathLike[str],
        dataFlow: DataFlow,
        deviceInfo: DeviceInfo,
        inputShapeInfo: InputShapeInfo | None,
        patterns: Patterns | None,
        userOptions: SessionOptions | None,
        name: str,
        loss: str | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        if not isinstance(deviceInfo, DeviceInfo):
            raise popart_exception(
                "A session needs a device: deviceInfo=DeviceManager().acquireAvailableDevice(1)."
            )
        self._options = (userOptions or SessionOptions()).copy()
        self._flow = copy.copy(dataFlow)
        self._device = deviceInfo
        self._patterns = patterns or Patterns()
        self._name = name
        self._optimizer = copy.deepcopy(optimizer)
        places: dict[str, ExternalPlace] = {}
        self._model = loader.read_light_model(fnModel, places)
        checks.check_options(self._options, dataFlow, deviceInfo, training=self._training)
        shapes = inputShapeInfo or InputShapeInfo()
        loader.check_model(self._model, shapes)
        self._shapes, self._external = shapes, ExternalFiles(places)
        with surfaced():
            self._built = self._build(shapes, loss)
        write_dots(self._built.lowered.graph, self._options)
        self._weights = HostWeights(self._model, self._built)
        self._executable = None
        self._weights_sent = False
        self._pending_scalars = False
        self._seed = None
        self._rng = [0] * WORDS
        self._cycles = None
        self._run_names = []
        self._streams = StreamCallbacks()

    def _build(self, shapes: InputShapeInfo, loss: str | None) -> BuiltModel:
        self._placed = self._model.copy()
        placed, options = self._placed.proto, self._options
        checks.check_recomputation(options, placement.recompute_annotated(placed))
        asked = self._request(shapes, loss)
        if options.virtualGraphMode is VirtualGraphMode.Auto:
            self._place_automatically(asked)
        placement.place(placed, options, asked.ipus_per_replica)
        check_pipeline(placed, options, self._flow.batchesPerStep(), training=self._training)
        return build(self._placed, asked)

    def _request(self, shapes: InputShapeInfo, loss: str | None) -> Request:
        per_replica = self._device.numIpus // self._options.local_replicas
        return Request(self._name, self._flow, self._options, shapes, per_replica, loss, self._optimizer)

    def _place_automatically(self, asked: Request) -> None:
        from podrun.popart.placing.auto_placement import place_automatically

        model, options = self._placed, self._options

        def without_places(plain: ModelProto) -> BuiltModel:
            return build(LightModel(plain, model.values), asked)

        place_automatically(
            model.proto,
            without_places,
            asked.ipus_per_replica,
            options.virtualGraphSplitRatios,
            self._device.target,
            pipelined=options.overlaps,
        )


class InferenceSession(Session):
    """A model that runs forward: ``InferenceSession(model, DataFlow(1, {y: art}), device)``."""

    def __init__(
        self,
        fnModel: str | bytes | os.PathLike[str],
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
        return self._tensor_ids()

    def copyDeviceWeightsToHost(self) -> None:
        """Bring the weights from the device into the host's copy."""
        self.weightsToHost()

    def markHostWeightsInSync(self) -> None:
        """Say that the host's weights are those of the device."""
        self._weights.device_is_ahead = False

    def markHostWeightsOutOfSync(self) -> None:
        """Say that the device's weights have moved on."""
        self._weights.device_is_ahead = True

    def areHostWeightsInSync(self) -> bool:
        """True iff the host's weights are those of the device."""
        return not self._weights.device_is_ahead

    def setEngineIsLoaded(self, isLoaded: bool) -> None:
        """Say whether the program is on the device; False makes the next call load it again."""
        self._device._loaded = self if isLoaded else None

    def checkInplacingAmbiguity(self) -> bool:
        """True iff in-place operators could change results: here nothing works in place."""
        return False

    @staticmethod
    def fromIr(ir: Ir, deviceInfo: DeviceInfo, name: str = "fromIr") -> InferenceSession:
        """A session of what `getIr` gave, on another device. popart_exception for the IR of a training session."""
        return inference_from(ir, deviceInfo, name)

    def _setDeviceInfo(self, deviceInfo: DeviceInfo) -> None:
        """Use another device with as many IPUs; before prepareDevice. popart_exception otherwise."""
        if self._executable is not None:
            raise popart_exception("_setDeviceInfo comes before prepareDevice.")
        if deviceInfo.numIpus != self._device.numIpus:
            raise popart_exception(
                f"The session was made for {self._device.numIpus} IPUs; the device has {deviceInfo.numIpus}."
            )
        self._device = deviceInfo


class TrainingSession(Session):
    """A model that is trained: the loss is the id of a scalar tensor, the optimizer changes the weights."""

    _training = True

    def __init__(
        self,
        fnModel: str | bytes | os.PathLike[str],
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
            raise TypeError(f"__init__(): incompatible function arguments. {optimizer!r} is no optimizer.")
        if not isinstance(loss, str):
            raise TypeError(
                f"__init__(): incompatible function arguments. The loss is a tensor's name, not {loss!r}."
            )
        super().__init__(
            fnModel, dataFlow, deviceInfo, inputShapeInfo, patterns, userOptions, name, loss, optimizer
        )

    def getTensorIds(self) -> set[str]:
        """Every tensor of the session."""
        return self._tensor_ids()

    def updateOptimizerFromHost(self, optimizer: Optimizer) -> None:
        """Change non-constant hyper-parameters from the next run on. popart_exception for any other
        change."""
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"updateOptimizerFromHost(): incompatible function arguments: {optimizer!r}.")
        assert self._optimizer is not None
        assert self._built.rule is not None
        optimizer.check_replaces(self._optimizer)
        self._optimizer = copy.deepcopy(optimizer)
        self._built.rule.optimizer = self._optimizer
        self._pending_scalars = True

    def _run_program(self, handle: str, io: IStepIO) -> None:
        from podrun.popart.sessions.forward_only import HANDLE, ForwardOnly

        if handle != HANDLE or not self._options.createImplicitPipeliningFwdOnlyProgram:
            super()._run_program(handle, io)
        self._check_io(io, self._step_inputs(), self._step_outputs())
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
        popdist.init()
        for name, value in sorted(self._weights.get_all().items()):
            self._weights.put(name, popdist.broadcast(np.array(value, order="C"), rootRank))
        self._weights_sent = False
