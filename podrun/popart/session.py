"""InferenceSession and TrainingSession: a model on a device (semantics, section 13).

Order of calls: construct (checks everything), ``prepareDevice`` (compiles and loads), ``weightsFromHost``,
``run`` any number of times, ``weightsToHost`` and ``readWeights``, or ``modelToHost``.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.compiler.program import RNG
from podrun.executable import Executable, Retrieval, VariableRole
from podrun.popart import checks, loader, placement
from podrun.popart.build import BuiltModel, build
from podrun.popart.dataflow import DataFlow
from podrun.popart.device import DeviceInfo
from podrun.popart.enums import DeviceType, ReplicatedStreamMode, SyntheticDataMode, VirtualGraphMode
from podrun.popart.errors import (
    popart_exception,
    popart_runtime_error,
    poplar_application_runtime_error,
    surfaced,
)
from podrun.popart.external import ExternalFiles
from podrun.popart.observers import observe
from podrun.popart.optimizers.base import Optimizer
from podrun.popart.options import SessionOptions
from podrun.popart.patterns import Patterns
from podrun.popart.pipelining import check_pipeline
from podrun.popart.session_files import SessionFiles, refuse
from podrun.popart.session_ir import Ir, SessionIr, inference_from
from podrun.popart.session_reports import SessionReports
from podrun.popart.session_rng import WORDS, SessionRng
from podrun.popart.session_weights import SessionWeights
from podrun.popart.stepio import IStepIO, StepTensor
from podrun.popart.tensor_info import InputShapeInfo, TensorInfo
from podrun.popart.weights import HostWeights

if TYPE_CHECKING:
    from onnx import ModelProto

_log = logging.getLogger("podrun.popart.session")


CACHE_VARIABLE = "POPDIST_EXECUTABLE_CACHE_PATH"
"""Names the executable cache that all instances of a run share."""


class Session(SessionFiles, SessionIr, SessionRng, SessionReports, SessionWeights):
    """What both kinds of session are. Made through InferenceSession or TrainingSession."""

    _training = False

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
        checks.check_options(self._options, dataFlow, deviceInfo, training=self._training)
        self._model = loader.read_model(fnModel)
        shapes = inputShapeInfo or InputShapeInfo()
        loader.check_model(self._model, shapes)
        self._shapes, self._external = shapes, ExternalFiles(fnModel)
        with surfaced():
            self._built = self._build(shapes, loss)
        self._weights = HostWeights(self._model, self._built)
        self._executable: Executable | None = None
        self._weights_sent = False
        self._pending_scalars = False
        self._seed: int | None = None
        self._rng = [0] * WORDS
        self._cycles: int | None = None

    def _build(self, shapes: InputShapeInfo, loss: str | None) -> BuiltModel:
        from onnx import ModelProto

        placed = ModelProto()
        placed.CopyFrom(self._model)
        checks.check_recomputation(self._options, placement.recompute_annotated(placed))
        per_replica = self._device.numIpus // self._options.local_replicas
        if self._options.virtualGraphMode is VirtualGraphMode.Auto:
            self._place_automatically(placed, shapes, loss, per_replica)
        placement.place(placed, self._options, per_replica)
        check_pipeline(placed, self._options, self._flow.batchesPerStep(), training=self._training)
        self._placed = placed
        return build(
            placed, self._flow, self._options, shapes, per_replica, self._name, loss, self._optimizer
        )

    def _place_automatically(
        self, model: ModelProto, shapes: InputShapeInfo, loss: str | None, per_replica: int
    ) -> None:
        from podrun.popart.auto_placement import place_automatically

        def plain(model: ModelProto) -> BuiltModel:
            return build(
                model, self._flow, self._options, shapes, per_replica, self._name, loss, self._optimizer
            )

        ratios = self._options.virtualGraphSplitRatios
        place_automatically(model, plain, per_replica, ratios, self._device.target)

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
        """An array for every anchor, in order of name, of the shape that its return type asks for."""
        arrays = {}
        for anchor in self._flow.anchors():
            info = self.getInfo(anchor)
            leading = self._flow.art(anchor).leading_dims(
                self._flow.batchesPerStep(), self.accumulationFactor, self.replicationFactor
            )
            arrays[anchor] = np.empty((*leading, *info.shape()), info.numpy_dtype())
        return arrays

    # -- preparing --------------------------------------------------------------------------------

    def prepareDevice(self, loadEngine: bool = True) -> None:
        """Compile, and load onto the device unless ``loadEngine`` is False. OutOfMemoryException if it does
        not fit.
        """
        checks.check_every_n_with_pipelining(self._options, self._flow)
        settings = self._engine_settings()
        with surfaced():
            if self._executable is None:
                self._executable = self._compile()
        self._after_compile(settings)
        if loadEngine and self._device.type is not DeviceType.OfflineIpu:
            self.loadEngineAndConnectStreams()

    def _compile(self) -> Executable:
        from podrun.compiler.compile import CompileOptions, compile_program
        from podrun.popart.fingerprint import fingerprint

        folder = self._cache_directory()
        digest = fingerprint(self._placed, self._built) if folder is not None else None
        options = CompileOptions(cache_directory=folder, program_digest=digest)
        return compile_program(self._built.program, target=self._device.target, options=options)

    def _cache_directory(self) -> Path | None:
        """The session's own directory if caching is on, else the one that ``podrun`` gives all its
        instances.
        """
        if self._device.type not in (DeviceType.Ipu, DeviceType.OfflineIpu):
            return None
        if self._options.enableEngineCaching and self._options.cachePath:
            return Path(self._options.cachePath).expanduser()
        shared = os.environ.get(CACHE_VARIABLE)
        return Path(shared) if shared else None

    def loadEngineAndConnectStreams(self) -> None:
        """Load the program onto the device: what was there is gone, weights have to be sent again."""
        executable = self._prepared("loadEngineAndConnectStreams")
        self._device.ensure_attached()
        with surfaced():
            self._device.connection.load(executable)
        self._device._loaded = self
        self._weights_sent = False
        self._write_start_values()

    def _write_start_values(self) -> None:
        """What the host gives without being asked: constant weights, streamed scalars, the seed."""
        values: dict[str, np.ndarray] = {}
        if self._constant_weights:
            values |= self._weights.device_values()
        values |= self._scalars()
        if self._seed is not None:
            values |= self._seed_value(self._seed)
        values |= self._rng_value()
        self._write(values)

    def _scalars(self) -> dict[str, np.ndarray]:
        executable = self._prepared("run")
        scalars = {name: v for name, v in executable.variables.items() if v.role is VariableRole.SCALAR}
        current: dict[str, float] = {}
        if self._built.rule is not None and self._optimizer is not None:
            for weight in self._built.trained:
                current |= self._built.rule.scalars(weight)
            if isinstance(self._built.program.loss_scaling, str):
                current[self._built.program.loss_scaling] = self._optimizer.getLossScalingVal()
        return {
            name: np.asarray(current[name], variable.spec.dtype).reshape(variable.spec.shape)
            for name, variable in scalars.items()
            if name != RNG
        }

    def _write(self, values: Mapping[str, np.ndarray]) -> None:
        if values:
            with surfaced():
                self._device.connection.write_variables(values)

    def _prepared(self, call: str) -> Executable:
        if self._executable is None:
            raise popart_exception(
                f"Devicex::prepare() must be called before {call}: call session.prepareDevice() first."
            )
        return self._executable

    def _ensure_loaded(self) -> None:
        """Load again if another session has used the device since, or an error cost it its memory."""
        self._prepared("run")
        if self._device.type is DeviceType.OfflineIpu:
            raise popart_exception(
                "The device is an offline device: a session can be compiled for it, not run."
            )
        if self._device._loaded is not self or not self._device.isAttached:
            self.loadEngineAndConnectStreams()

    @property
    def _constant_weights(self) -> bool:
        return not self._training and self._options.constantWeights

    # -- running ----------------------------------------------------------------------------------

    def run(self, *args: Any, stepio: IStepIO | None = None, debugName: str = "") -> None:
        """``run(stepio, debugName="")``: one step. Anchors are in the stepio's arrays afterwards."""
        if args and isinstance(args[0], str):
            raise popart_runtime_error(f"The session has no custom program {args[0]!r}.")
        io = args[0] if args else stepio
        if not isinstance(io, IStepIO):
            raise TypeError(f"run(): incompatible function arguments. run takes a PyStepIO, not {io!r}.")
        self._ensure_loaded()
        if self._built.weights and not self._weights_sent and not self._constant_weights:
            raise popart_runtime_error(
                "Must call weightsFromHost before run: the weights have not been sent to the device since "
                "the program was loaded or the host's weights changed."
            )
        inputs, outputs = self._step_inputs(), self._step_outputs()
        self._check_io(io, inputs, outputs)
        data = {name: self._input_data(io, tensor) for name, tensor in inputs.items()}
        if self._pending_scalars:
            self._write(self._scalars())
            self._pending_scalars = False
        result = self._run_on_device(data)
        self._observe(result)
        if self._options.syntheticDataMode is SyntheticDataMode.Off:
            given = self._by_batch(result.anchors)
            for name, tensor in outputs.items():
                io.store(tensor, self._built.anchor(name, given))

    def _observe(self, result: Any) -> None:
        """Print and abort as the program says."""
        if not self._built.observers:
            return
        values = self._built.observed(self._by_batch(result.anchors))
        first = self._options.globalReplicaOffset if self._options.enableDistributedReplicatedGraphs else 0
        try:
            observe(self._built.observers, values, first, self._built.program.replicas > 1)
        except poplar_application_runtime_error:
            self._device._loaded = None
            raise

    def _by_batch(self, anchors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Anchors by batch and micro-batch, where the program took a step's batches for micro-batches."""
        if not self._options.overlaps_batches:
            return anchors
        every = {spec.name for spec in self._built.program.anchors if spec.retrieval is Retrieval.ALL}
        return {n: v.swapaxes(0, 1) if n in every else v for n, v in anchors.items()}

    def _run_on_device(self, data: Mapping[str, np.ndarray]) -> Any:
        from podrun.errors import PoplarError

        batches = self._flow.batchesPerStep()
        if self._options.overlaps_batches:
            data = {name: value.reshape(1, batches, *value.shape[2:]) for name, value in data.items()}
            batches = 1
        try:
            with surfaced():
                result = self._device.connection.run(batches, data)
        except PoplarError:
            self._device._loaded = None  # What was on the IPUs cannot be trusted: the next call loads anew.
            raise
        step = self._prepared("run").tile_report.get("step", {})
        self._cycles = int(step.get("cycles") or 0) * batches
        self._weights.device_is_ahead = True
        return result

    def _check_io(
        self, io: IStepIO, inputs: Mapping[str, StepTensor], outputs: Mapping[str, StepTensor]
    ) -> None:
        from podrun.popart.stepio import PyStepIO

        if self._options.syntheticDataMode is not SyntheticDataMode.Off:
            return
        io.check(inputs, outputs)
        if isinstance(io, PyStepIO):
            model_inputs = {value.name for value in self._model.graph.input} - set(self._built.weights)
            for name in io.input_names():
                if name in inputs:
                    continue
                if name not in model_inputs:
                    what = (
                        "is no input of the model"
                        if name in self._built.infos
                        else "is not known to the model"
                    )
                    raise popart_runtime_error(
                        f"The PyStepIO has data for {name!r}, which {what}; the inputs are "
                        f"{sorted(model_inputs)}."
                    )
                _log.warning("Input %r is not used by the model; its data are ignored.", name)

    def _input_data(self, io: IStepIO, tensor: StepTensor) -> np.ndarray:
        mode = self._options.syntheticDataMode
        if mode is SyntheticDataMode.Off:
            return io.fetch(tensor)
        dtype = tensor.info.numpy_dtype()
        if mode is SyntheticDataMode.Zeros or dtype.kind in "iub":
            return np.zeros(tensor.layout, dtype)
        random = np.random.default_rng(0)
        draw = random.standard_normal if mode is SyntheticDataMode.RandomNormal else random.random
        return draw(tensor.layout, np.float32).astype(dtype)

    def _step_inputs(self) -> dict[str, StepTensor]:
        found = {}
        batches, accumulation = self._flow.batchesPerStep(), self.accumulationFactor
        for name, item in self._built.program.inputs.items():
            info = self._built.infos.get(name) or _info_of(item.spec)
            replicas = () if item.broadcast else (self.replicationFactor,)
            mode = ReplicatedStreamMode.Broadcast if item.broadcast else ReplicatedStreamMode.Replicate
            how = (
                f"{int(np.prod(item.spec.shape))} elements of {info}, times {batches} batches per step, "
                f"accumulation factor {accumulation}, replication factor {self.replicationFactor} "
                f"({mode.name})"
            )
            found[name] = StepTensor(name, info, (batches, accumulation, *replicas, *item.spec.shape), how)
        return found

    def _step_outputs(self) -> dict[str, StepTensor]:
        found = {}
        batches, accumulation = self._flow.batchesPerStep(), self.accumulationFactor
        for name in self._flow.anchors():
            info, kind = self.getInfo(name), self._flow.art(name)
            crossings = kind.fetches(batches, accumulation)
            how = (
                f"{info.nelms()} elements of {info}, {kind!r} of {batches} batches per step with "
                f"accumulation factor {accumulation} is {crossings} per replica, replication factor "
                f"{self.replicationFactor}"
            )
            layout = (crossings, self.replicationFactor, *info.shape())
            found[name] = StepTensor(name, info, layout, how)
        return found

    # -- public in PopART, refused by name here --------------------------------------------------------


def _info_of(spec: Any) -> TensorInfo:
    from podrun.executable import numpy_dtype
    from podrun.popart.tensor_info import data_type_of

    return TensorInfo(data_type_of(numpy_dtype(spec.dtype)), spec.shape)


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

    connectStreamToCallback = refuse("connectStreamToCallback")
