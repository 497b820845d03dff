"""InferenceSession and TrainingSession: a model on a device.

Source: graphcore/popart, willow/src/session.cpp and popx/devicex.cpp, and the wrapper around it in Python.

Order of calls: construct (checks everything), ``prepareDevice`` (compiles and loads), ``weightsFromHost``,
``run`` any number of times, ``weightsToHost`` and ``readWeights``, or ``modelToHost``.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from podrun.onnx_models import loader
from podrun.onnx_models.light_model import LightModel
from podrun.onnx_models.transformer import ExternalFiles
from podrun.session import option_checks
from podrun.session import virtual_graphs as placement
from podrun.session.dataflow import DataFlow
from podrun.session.device import DeviceInfo
from podrun.session.enums import IrSerializationFormat, VirtualGraphMode
from podrun.session.environment import check_replicas, progress
from podrun.session.exceptions import (
    OutOfMemoryException as OutOfMemoryException,  # Programs look for it here, too.
)
from podrun.session.exceptions import popart_exception, surfaced
from podrun.session.optimizers.base import Optimizer
from podrun.session.parts.device_program import DeviceProgram
from podrun.session.parts.files import ExecutableFiles, SessionReports, check_writable
from podrun.session.parts.host_weights import HostWeights
from podrun.session.parts.ir import Ir, inference_from, ir_text, write_dots
from podrun.session.parts.replica_check import ReplicaCheck
from podrun.session.parts.rng import RandomState
from podrun.session.parts.run import SessionRun, StepRunner
from podrun.session.parts.weights import SessionWeights
from podrun.session.patterns import Patterns
from podrun.session.pipelining import check_pipeline
from podrun.session.program.build import BuiltModel, build
from podrun.session.program.lowering_models import Request
from podrun.session.session_options import SessionOptions
from podrun.session.stepio import IStepIO
from podrun.session.tensor_info import InputShapeInfo

if TYPE_CHECKING:
    from onnx import ModelProto

    from podrun.onnx_models.model_loader import ExternalPlace
    from podrun.report.model import Profile
    from podrun.session.parts.forward_only import ForwardOnly


class Session(SessionRun, SessionWeights):
    """What both kinds of session are. Made through InferenceSession or TrainingSession."""

    def __init__(
        self,
        fnModel: str | bytes | os.PathLike[str] | LightModel,
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
        self._program = DeviceProgram(deviceInfo, self)
        self._check = ReplicaCheck(check_replicas(deviceInfo._environ))
        self._patterns = patterns or Patterns()
        self._name = name
        self._optimizer = copy.deepcopy(optimizer)
        places: dict[str, ExternalPlace] = {}
        self._model = loader.read_light_model(fnModel, places)
        option_checks.check_options(self._options, dataFlow, deviceInfo, training=self._training)
        shapes = inputShapeInfo or InputShapeInfo()
        loader.check_model(self._model, shapes)
        self._shapes, self._external = shapes, ExternalFiles(places)
        with progress(f"reading the model of {name!r}"), surfaced():
            self._built = self._build(shapes, loss)
        write_dots(self._built.lowered.graph, self._options)
        self._weights = HostWeights(self._model, self._built)
        self._weights_sent = False
        self._pending_scalars = False
        self._random = RandomState(self._program, self._options)
        ipus = self._built.program.ipus_per_replica
        self._reports = SessionReports(self._program, self._options, ipus, name)
        self._files = ExecutableFiles(self._program, self._built, self._weights)
        inputs = (value.name for value in self._model.proto.graph.input)
        self._runner = StepRunner(self._built, self._flow, self._options, inputs)

    def _build(self, shapes: InputShapeInfo, loss: str | None) -> BuiltModel:
        self._placed = self._model.copy()
        placed, options = self._placed.proto, self._options
        option_checks.check_recomputation(options, placement.recompute_annotated(placed))
        asked = self._request(shapes, loss)
        if options.virtualGraphMode is VirtualGraphMode.Auto:
            self._place_automatically(asked)
        placement.place(placed, options, asked.ipus_per_replica)
        check_pipeline(placed, options, self._flow.batchesPerStep(), training=self._training)
        return build(self._placed, asked)

    def _request(self, shapes: InputShapeInfo, loss: str | None) -> Request:
        per_replica = self._device.numIpus // self._options.local_replicas
        asked = Request(self._name, self._flow, self._options, shapes, per_replica, loss, self._optimizer)
        return dataclasses.replace(asked, own_copies=self._check.every > 0)

    def _place_automatically(self, asked: Request) -> None:
        from podrun.session.virtual_graphs import place_automatically

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

    # -- random numbers -----------------------------------------------------------------------------------

    def getRNGState(self) -> list[int]:
        """The RNG state as it stands now, 32-bit words; `setRNGState` continues from it.

        popart_exception without enableLoadAndOffloadRNGState, or before prepareDevice.
        """
        return self._random.rng_state()

    def setRNGState(self, rngValue: Iterable[int]) -> None:
        """Continue from a state that `getRNGState` gave. popart_runtime_error for one of another size."""
        self._random.set_rng_state(rngValue)

    def setRandomSeed(self, seedValue: int) -> None:
        """Start the sequence of random numbers anew from a seed."""
        self._random.set_seed(seedValue)

    def getRandomSeed(self) -> int:
        """The seed as it stands now; setting it again later continues the sequence from here."""
        return self._random.seed()

    # -- reports ------------------------------------------------------------------------------------------

    def getCycleCount(self, id: str = "") -> int:
        """Modelled cycles of the last run. popart_exception unless instrumentWithHardwareCycleCounter was set."""
        return self._reports.cycle_count(id)

    def getSummaryReport(self, resetProfile: bool = True) -> str:
        """The tile model's report as text: time by cause, operators, layers, memory."""
        return self._reports.summary()

    def getReport(self) -> Profile:
        """The tile model's report as values: a `podrun.report.Profile`, units in the names of its fields.

        Its ``compilation`` and ``execution`` have the shape of the SDK's analysis library.
        """
        return self._reports.profile()

    # -- files --------------------------------------------------------------------------------------------

    def compileAndExport(self, filename: str) -> None:
        """Compile and write the executable to a file, or to ``executable.popef`` in a folder.

        OSError if the file cannot be written, popart_exception on a device whose executables cannot be saved.
        """
        path = check_writable(filename)
        self.prepareDevice(loadEngine=False)
        self._files.save(path, variables=True)

    def saveExecutable(self, path: str, savePopartMetadata: bool = True, saveVariables: bool = True) -> None:
        """Write the compiled program (with ``saveVariables`` the weights as an ONNX model beside it)."""
        self._files.save(path, variables=saveVariables)

    def saveVariables(self, path: str) -> None:
        """Write weights and optimizer state: an ONNX model whose initializers they are."""
        self._files.save_variables(path)

    def loadExecutable(self, filename: str) -> None:
        """Take a program that compileAndExport wrote, in place of compiling; before prepareDevice.

        popart_exception if it is damaged or not the program of this session's model.
        """
        self._files.load(filename)

    def updateEngineCache(self) -> None:
        """Executables are written to the cache when they are compiled, so there is nothing left to do."""
        self._prepared("updateEngineCache")

    def updateExternallySavedTensorLocations(self, fromLocation: str, toLocation: str) -> None:
        """Have modelToHost write the tensors that lie in the file ``fromLocation`` to ``toLocation``, with their
        optimizer state; what is there now is copied. (Those of other files are overwritten where they lie.)

        popart_exception if ``toLocation`` exists, ``fromLocation`` does not, or nothing lies in it.
        """
        self._external.move(fromLocation, toLocation)

    # -- the graph ----------------------------------------------------------------------------------------

    def getIr(self) -> Ir:
        """The session's IR, with the weights that the host holds."""
        return Ir(
            self._name,
            self._weights.model(with_state=False).to_bytes(),
            self._flow,
            self._shapes,
            self._patterns,
            self._options.copy(),
            self._training,
            self._serializeIr(),
        )

    def _serializeIr(self, format: IrSerializationFormat = IrSerializationFormat.JSON) -> str:
        """The forward graph after pruning, as JSON: graph name -> list of operators (`ir_text`)."""
        if not isinstance(format, IrSerializationFormat):
            raise TypeError(
                f"_serializeIr(): incompatible function arguments. {format!r} is no IrSerializationFormat."
            )
        built = self._built
        return ir_text(
            built.lowered.graph, self._placed.proto, built.infos, self._options, training=self._training
        )

    def getSerializedGraph(self) -> bytes:
        """The compiled program as JSON: its streams, variables, arenas, pieces, and the instructions of every IPU.

        popart_exception before prepareDevice, poplar_exception on a device without profiling.
        """
        from podrun.core import executable_file

        return json.dumps(executable_file.description(self._program.profiled()), sort_keys=True).encode()


class InferenceSession(Session):
    """A model that runs forward: ``InferenceSession(model, DataFlow(1, {y: art}), device)``."""

    def __init__(
        self,
        fnModel: str | bytes | os.PathLike[str] | LightModel,
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
        self._program.on_device = isLoaded

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
        self._program.device = deviceInfo


class TrainingSession(Session):
    """A model that is trained: the loss is the id of a scalar tensor, the optimizer changes the weights."""

    _training = True

    def __init__(
        self,
        fnModel: str | bytes | os.PathLike[str] | LightModel,
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
        from podrun.session.parts.forward_only import HANDLE, ForwardOnly

        if handle != HANDLE or not self._options.createImplicitPipeliningFwdOnlyProgram:
            super()._run_program(handle, io)
        self._runner.check(io)
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
