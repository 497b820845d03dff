"""The PopART front end: PopART's public Python API over podrun's compiler and machines.

`import popart` under ``podrun`` (or ``python -m podrun.compat``) is this package. Only the API and its checks may
enter. A program makes a model (`building`, with `operators`) or reads one (`models`), sets `options` and an optimizer
(`optimizers`), takes a device (`devices`) and makes a session (`sessions`), which it gives the data of steps
(`step_data`). `values` are what all of these speak of. Importing this package imports neither JAX nor ONNX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

from podrun.popart.building.attributes import (
    AttributeContextManager,
    KeyValueContextManager,
    NameContextManager,
)
from podrun.popart.building.builder import Builder
from podrun.popart.building.former_losses import AnchorReturnTypes, IdentityLoss, L1Loss, NllLoss
from podrun.popart.building.graph_builder import DEFAULT_OPSET
from podrun.popart.building.schemas import (
    OpDefinition,
    OperatorIdentifier,
    getSupportedOperations,
    getSupportedOperationsDefinition,
    getUnsupportedOperations,
)
from podrun.popart.devices.device import DeviceInfo
from podrun.popart.devices.device_manager import DeviceManager, syncPatternFromString, syncPatternToString
from podrun.popart.models.transformer import GraphTransformer, NumericsReport
from podrun.popart.operators.custom import register_op
from podrun.popart.optimizers import (
    SGD,
    Adam,
    Adaptive,
    ClipNormSettings,
    ConstSGD,
    Optimizer,
    OptimizerValue,
    OptimizerValueMap,
)
from podrun.popart.options.option_groups import (
    AccumulateOuterFragmentSettings,
    AutodiffSettings,
    AutomaticLossScalingSettings,
    BatchSerializationSettings,
    ExecutionPhaseSettings,
    ExperimentalSettings,
    NumIOTiles,
    ReplicatedCollectivesSettings,
    TensorLocation,
    TensorLocationSettings,
)
from podrun.popart.options.patterns import Patterns, register_pattern
from podrun.popart.options.session_options import SessionOptions
from podrun.popart.sessions import session as session
from podrun.popart.sessions.session import InferenceSession, Session, TrainingSession
from podrun.popart.step_data.dataflow import AnchorReturnType, DataFlow, InputSettings
from podrun.popart.step_data.stepio import IStepIO, IWeightsIO, PyStepIO, PyStepIOCallback, PyWeightsIO
from podrun.popart.values import enums as _enums
from podrun.popart.values.debug import (
    DebugContext,
    DebugInfo,
    Logger,
    SourceLocation,
    closePoplarDebugInfo,
    getLogger,
    initializePoplarDebugInfo,
    packageHash,
    versionNumber,
    versionString,
)
from podrun.popart.values.debug import configure as _configure_log
from podrun.popart.values.enums import *  # noqa: F403
from podrun.popart.values.exceptions import (
    OutOfMemoryError,
    OutOfMemoryException,
    popart_exception,
    popart_internal_exception,
    popart_runtime_error,
    poplar_application_runtime_error,
    poplar_exception,
    poplar_recoverable_runtime_error,
    poplar_runtime_error,
    poplar_system_runtime_error,
    poplar_unknown_runtime_error,
    poplar_unrecoverable_runtime_error,
    poplibs_exception,
)
from podrun.popart.values.names import ACCESSORS as _ACCESSORS
from podrun.popart.values.names import missing
from podrun.popart.values.tensor_info import InputShapeInfo, TensorInfo, getTensorInfo
from podrun.popart.values.variables import CommGroup, ReplicaGrouping, VariableSettings

globals().update(_ACCESSORS)
_configure_log()

defaultAiOnnxOpset = DEFAULT_OPSET
defaultAiOnnxMlOpset = defaultAiGraphcoreOpset = 1

__all__ = [
    "AttributeContextManager",
    "KeyValueContextManager",
    "NameContextManager",
    "NumericsReport",
    "OutOfMemoryError",
    "DebugContext",
    "DebugInfo",
    "SourceLocation",
    "closePoplarDebugInfo",
    "initializePoplarDebugInfo",
    "OpDefinition",
    "OperatorIdentifier",
    "getSupportedOperations",
    "getSupportedOperationsDefinition",
    "getUnsupportedOperations",
    "register_op",
    "register_pattern",
    "SGD",
    "AccumulateOuterFragmentSettings",
    "Adam",
    "Adaptive",
    "AnchorReturnType",
    "AnchorReturnTypes",
    "IdentityLoss",
    "L1Loss",
    "NllLoss",
    "AutodiffSettings",
    "AutomaticLossScalingSettings",
    "BatchSerializationSettings",
    "Builder",
    "ClipNormSettings",
    "CommGroup",
    "ConstSGD",
    "DataFlow",
    "DeviceInfo",
    "DeviceManager",
    "ExecutionPhaseSettings",
    "ExperimentalSettings",
    "GraphTransformer",
    "IStepIO",
    "IWeightsIO",
    "InferenceSession",
    "InputSettings",
    "InputShapeInfo",
    "Logger",
    "NumIOTiles",
    "Optimizer",
    "OptimizerValue",
    "OptimizerValueMap",
    "OutOfMemoryException",
    "Patterns",
    "PyStepIO",
    "PyStepIOCallback",
    "PyWeightsIO",
    "ReplicaGrouping",
    "ReplicatedCollectivesSettings",
    "Session",
    "SessionOptions",
    "TensorInfo",
    "TensorLocation",
    "TensorLocationSettings",
    "TrainingSession",
    "VariableSettings",
    "defaultAiGraphcoreOpset",
    "defaultAiOnnxMlOpset",
    "defaultAiOnnxOpset",
    "getLogger",
    "getTensorInfo",
    "packageHash",
    "popart_exception",
    "popart_internal_exception",
    "popart_runtime_error",
    "poplar_application_runtime_error",
    "poplar_exception",
    "poplar_recoverable_runtime_error",
    "poplar_runtime_error",
    "poplar_system_runtime_error",
    "poplar_unknown_runtime_error",
    "poplar_unrecoverable_runtime_error",
    "poplibs_exception",
    "syncPatternFromString",
    "syncPatternToString",
    "versionNumber",
    "versionString",
    *_enums.__all__,
    *_ACCESSORS,
]

if not TYPE_CHECKING:  # Type checkers must still report unknown names.

    def __getattr__(name: str) -> Never:
        """Called only for names that do not exist."""
        raise missing(name, __all__)
