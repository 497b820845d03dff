"""What an InferenceSession and a TrainingSession share: a model on a device.

Source: graphcore/popart, willow/src/session.cpp and popx/devicex.cpp, and the wrapper around it in Python.

Order of calls: construct (checks everything), ``prepareDevice`` (compiles and loads), ``weightsFromHost``,
``run`` any number of times, ``weightsToHost`` and ``readWeights``, or ``modelToHost``.

A session holds its parts (`podrun.runtime.assembly.SessionParts`), one object for each concern; its methods are
PopART's names for what the parts do.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.terminal import report_step
from podrun.onnx_models.light_model import LightModel
from podrun.popart.devices.device import DeviceInfo
from podrun.popart.models import loader
from podrun.popart.models.model_files import ModelFiles
from podrun.popart.models.transformer import ExternalFiles
from podrun.popart.optimizers.base import Optimizer
from podrun.popart.options.patterns import Patterns
from podrun.popart.options.session_options import SessionOptions
from podrun.popart.sessions import option_checks
from podrun.popart.sessions.run_settings import run_settings
from podrun.popart.sessions.session_ir import Ir, drawing_of, ir_text
from podrun.popart.step_data.dataflow import DataFlow
from podrun.popart.step_data.stepio import IStepIO, IWeightsIO, StreamCallbacks
from podrun.popart.values.enums import DeviceType, IrSerializationFormat
from podrun.popart.values.exceptions import incompatible, popart_exception, popart_runtime_error, surfacing
from podrun.popart.values.names import FormerSession
from podrun.popart.values.tensor_info import InputShapeInfo, TensorInfo, info_of
from podrun.runtime.assembly import PlacedModel, SessionSource, assemble, place_and_build
from podrun.runtime.device_program import DeviceProgram
from podrun.runtime.environment import preparing
from podrun.runtime.executable_files import check_writable, in_folder
from podrun.runtime.graph import Model
from podrun.runtime.graph_text import write_dots
from podrun.runtime.model_lowering import Request
from podrun.runtime.placing import recompute_annotated
from podrun.runtime.words import SessionCall

if TYPE_CHECKING:
    from podrun.onnx_models.external_data import ExternalPlace
    from podrun.report.model import Profile

_log = logging.getLogger("podrun.popart.devicex")


@surfacing
class Session(FormerSession):
    """The base of both kinds of session. Made through InferenceSession or TrainingSession."""

    _training = False

    def __init__(
        self,
        fnModel: str | bytes | os.PathLike[str] | Model,
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
        options, shapes = (userOptions or SessionOptions()).copy(), inputShapeInfo or InputShapeInfo()
        self._optimizer = optimizer = copy.deepcopy(optimizer)
        places: dict[str, ExternalPlace] = {}
        read = fnModel if isinstance(fnModel, Model) else loader.read_light_model(fnModel, places)
        option_checks.check_options(options, dataFlow, deviceInfo, training=self._training)
        fixed = loader.check_model(read, shapes) if isinstance(read, LightModel) else {}
        self._external = ExternalFiles(places)
        self._flow, self._options = copy.copy(dataFlow), options
        self._patterns, self._shapes = patterns or Patterns(), shapes
        self._files = ModelFiles(read) if isinstance(read, LightModel) else None
        self._taps, self.device = StreamCallbacks(), deviceInfo
        option_checks.check_scaling_optimizer(options, optimizer)
        device = deviceInfo.device
        with preparing(f"reading the model of {name!r}"):
            model = _in_memory(read)
            option_checks.check_recomputation(options, recompute_annotated(model.graph))
            source = SessionSource(name, model, self._flow, run_settings(options), self._training, fixed)
            built = self._build(source, source.request(device, loss, optimizer), device.target)
        write_dots(built.built.lowered.graph, drawing_of(options))
        self.parts = assemble(source, built, DeviceProgram(device, self, source.settings.words), self._taps)
        """The objects that the session consists of: podrun's own, not part of PopART's interface."""

    def _build(self, source: SessionSource, request: Request, target: str) -> PlacedModel:
        return place_and_build(source, request, target)

    # -- questions ----------------------------------------------------------------------------------------

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
        """Micro-batches whose gradients one weight update adds up."""
        return self._options.micro_batches

    def _getDataFlow(self) -> DataFlow:
        return self.dataFlow

    def _replicationFactor(self) -> int:
        return self.replicationFactor

    def _accumulationFactor(self) -> int:
        return self.accumulationFactor

    def getInfo(self, TensorId: str) -> TensorInfo:
        """Type and shape of a tensor on the device. popart_exception for an unknown one."""
        return info_of(self.parts.model.built.info(TensorId))

    def initAnchorArrays(self) -> dict[str, np.ndarray]:
        """An array for every anchor, in order of name, of the shape that its return type asks for.

        Zeros: with synthetic data nothing is written into them.
        """
        arrays, flow = {}, self.dataFlow
        for anchor in flow.anchors():
            info = self.getInfo(anchor)
            leading = flow.art(anchor).leading_dims(
                flow.batchesPerStep(), self.accumulationFactor, self.replicationFactor
            )
            arrays[anchor] = np.zeros((*leading, *info.shape()), info.numpy_dtype())
        return arrays

    # -- program and runs ---------------------------------------------------------------------------------

    def prepareDevice(self, loadEngine: bool = True) -> None:
        """Compile, and load onto the device unless ``loadEngine`` is False. OutOfMemoryException if the program does
        not fit. No-op while the program is on the device: weights stay.
        """
        parts, options = self.parts, self._options
        if not options.compileEngine:
            _log.info("Not compiling engine by request")
            return
        option_checks.check_every_n_with_pipelining(options, self._flow)
        settings = parts.reports.engine_settings()
        with preparing(f"preparing {parts.source.name!r}"):
            parts.loader.compile()
            parts.reports.after_compile(settings)
            offline = self.device.type is DeviceType.OfflineIpu
            if loadEngine and not offline and not parts.loader.loaded:
                report_step("loading")
                self.loadEngineAndConnectStreams()

    def loadEngineAndConnectStreams(self) -> None:
        """Load the program onto the device. Its previous content is gone, so weights have to be sent again."""
        self.parts.loader.load()

    def run(self, *args: Any, stepio: IStepIO | None = None, debugName: str = "") -> None:
        """``run(stepio, debugName="")``: one step. Anchors are in the stepio's arrays afterwards.

        ``run(programHandle, stepio, debugName="")``: a program of the session by name. If a run fails, the stepio's
        arrays may hold anchors of some of its batches.
        """
        rest = list(args)
        handle = rest.pop(0) if rest and isinstance(rest[0], str) else None
        io = rest.pop(0) if rest else stepio
        debugName = rest.pop(0) if rest else debugName
        if not isinstance(io, IStepIO):
            raise incompatible("run", f"run takes a PyStepIO, not {io!r}.")
        self.parts.batches.ensure_ready()
        self.parts.reports.name_run(debugName)
        if handle is None:
            self.parts.batches.run(io)
        else:
            self._run_program(handle, io)

    def _run_program(self, handle: str, io: IStepIO) -> None:
        raise popart_runtime_error(f"The session has no custom program {handle!r}.")

    def connectStreamToCallback(
        self, streamHandle: str, callback: Callable[[object], None], index: int = 0
    ) -> None:
        """Let a function fill an input's stream (``h2d_<input>``) or see an anchor's (``anchor_d2h_<anchor>``).

        ``index``: the replica of this process (`podrun.popart.step_data.stepio`). popart_runtime_error for an unknown
        stream.
        """
        self.parts.program.prepared(SessionCall.CONNECT_STREAM)
        self._taps.connect(streamHandle, callback, index, self.parts.runner.stream_rows())

    # -- weights ------------------------------------------------------------------------------------------

    def weightsFromHost(self) -> None:
        """Send the host's weights and optimizer state to the device."""
        self.parts.transfer.from_host()

    def weightsToHost(self) -> None:
        """Bring weights and optimizer state from the device into the host's copy."""
        self.parts.transfer.to_host()

    def readWeights(self, weightsIo: IWeightsIO) -> None:
        """Copy the host's weights into the arrays of a PyWeightsIO; names it does not know are left alone."""
        self.parts.transfer.read(weightsIo.weights)

    def writeWeights(self, weightsIo: IWeightsIO) -> None:
        """Change the host's weights; weightsFromHost sends them.

        As in PopART, unknown names are skipped (programs offer a checkpoint's optimizer state whatever the optimizer);
        a warning lists them.
        """
        self.parts.transfer.write(weightsIo.weights)

    def modelToHost(self, fn: str | os.PathLike[str]) -> None:
        """Write the model with the current weights and optimizer state as an ONNX file."""
        self.parts.transfer.to_host()
        options = self._options
        dropped = options.disableOptimizerStateTensorStreams or options.disableGradAccumulationTensorStreams
        data = self._external.put_out(self._model(with_state=not dropped), fn)
        with open(fn, "wb") as file:
            file.write(data.to_bytes())

    def resetHostWeights(
        self,
        modelProtoOrFilename: str | bytes | os.PathLike[str],
        ignoreWeightsInModelWithoutCorrespondingHostWeight: bool = False,
    ) -> None:
        """Take weights by name from another model; weightsFromHost sends them."""
        model = loader.read_light_model(modelProtoOrFilename)
        values = {tensor.name: model.value(tensor) for tensor in model.proto.graph.initializer}
        self.parts.transfer.reset(values, ignoreWeightsInModelWithoutCorrespondingHostWeight)

    def _checkpoint_state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """See `podrun.checkpoint.Checkpointed`."""
        return self.parts.transfer.checkpoint()

    def _restore_checkpoint(self, tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        """Continue from what `_checkpoint_state` gave. popart_exception for the state of another program."""
        self.parts.transfer.restore(tensors, values)

    # -- random numbers -----------------------------------------------------------------------------------

    def getRNGState(self) -> list[int]:
        """The present RNG state, 32-bit words; `setRNGState` continues from it.

        popart_exception without enableLoadAndOffloadRNGState, or before prepareDevice.
        """
        return self.parts.random.rng_state()

    def setRNGState(self, rngValue: Iterable[int]) -> None:
        """Continue from a state that `getRNGState` returned. popart_runtime_error for a state of another size."""
        self.parts.random.set_rng_state(rngValue)

    def setRandomSeed(self, seedValue: int) -> None:
        """Restart the sequence of random numbers from a seed."""
        self.parts.random.set_seed(seedValue)

    def getRandomSeed(self) -> int:
        """The present seed; setting it again later continues the sequence from here."""
        return self.parts.random.seed()

    # -- reports ------------------------------------------------------------------------------------------

    def getCycleCount(self, id: str = "") -> int:
        """Modelled cycles of the last run. popart_exception unless instrumentWithHardwareCycleCounter was set."""
        return self.parts.reports.cycle_count(id)

    def getSummaryReport(self, resetProfile: bool = True) -> str:
        """The tile model's report as text: time by cause, operators, layers, memory."""
        return self.parts.reports.summary()

    def getReport(self) -> Profile:
        """The tile model's report as values: a `podrun.report.Profile`, units in the names of its fields.

        Its ``compilation`` and ``execution`` have the shape of the SDK's analysis library.
        """
        return self.parts.reports.profile()

    # -- files --------------------------------------------------------------------------------------------

    def compileAndExport(self, filename: str) -> None:
        """Compile and write the executable to a file, or to ``executable.popef`` in a folder.

        OSError if the file cannot be written, popart_exception on a device whose executables cannot be saved.
        """
        path = check_writable(filename)
        self.prepareDevice(loadEngine=False)
        self.saveExecutable(path)

    def saveExecutable(self, path: str, savePopartMetadata: bool = True, saveVariables: bool = True) -> None:
        """Write the compiled program (with ``saveVariables`` the weights as an ONNX model beside it)."""
        target = in_folder(path, "executable.popef")
        self.parts.files.save(target)
        if saveVariables and self.parts.weights.get_all():
            self.saveVariables(str(Path(target).with_name("variables.popef")))

    def saveVariables(self, path: str) -> None:
        """Write an ONNX model whose initializers are the weights and optimizer state."""
        self.parts.files.check_can_save()
        with open(in_folder(path, "variables.popef"), "wb") as file:
            file.write(self._model(with_state=True).to_bytes())

    def _model(self, *, with_state: bool) -> LightModel:
        """The session's ONNX model with the host's weights, and with the optimizer's state."""
        if self._files is None:
            raise popart_exception("The session's model was not read from ONNX, so it has no ONNX form.")
        weights = self.parts.weights
        return self._files.model(weights.stored_values(), weights.state_values() if with_state else None)

    def loadExecutable(self, filename: str) -> None:
        """Use a program that compileAndExport wrote instead of compiling; before prepareDevice.

        popart_exception if it is damaged or not the program of this session's model.
        """
        self.parts.files.load(filename)

    def updateEngineCache(self) -> None:
        """No-op: executables are written to the cache when they are compiled."""
        self.parts.program.prepared(SessionCall.UPDATE_CACHE)

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
            self.parts.source.name,
            self._model(with_state=False).to_bytes(),
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
            raise incompatible("_serializeIr", f"{format!r} is no IrSerializationFormat.")
        return ir_text(self.parts)

    def getSerializedGraph(self) -> bytes:
        """The compiled program as JSON: its streams, variables, arenas, pieces, and the instructions of every IPU.

        popart_exception before prepareDevice, poplar_exception on a device without profiling.
        """
        from podrun.core import executable_file

        return json.dumps(executable_file.description(self.parts.program.profiled()), sort_keys=True).encode()


def _in_memory(model: Model | LightModel) -> Model:
    """A model as sessions work with it."""
    if isinstance(model, Model):
        return model
    from podrun.popart.models.model_files import session_model

    return session_model(model)
