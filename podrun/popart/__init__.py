"""The PopART front end: PopART's public Python API over podrun's compiler and machines.

`import popart` under ``podrun`` (or ``python -m podrun.compat``) is this package. What may enter: the API and its
checks. The folders, in the order in which a program meets them:

- ``building``: `Builder`; ``models``: ONNX models read, checked, rewritten and written;
- ``devices``, ``options``, ``optimizers``, ``step_data`` (data flow and step I/O), ``enums``: what a session is given;
- `session` with its parts in ``sessions``; ``weights``: variables and the host's copy of them;
- ``placing``: IPUs, stages and phases of operators; ``lowering``: from ONNX to JAX, with the operators in ``ops``;
  ``program``: all of it as a Program for the compiler.

Importing it imports neither JAX nor ONNX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

from podrun.popart import enums as _enums
from podrun.popart.building.builder import Builder
from podrun.popart.building.builder_model import DEFAULT_OPSET
from podrun.popart.building.contexts import (
    AttributeContextManager,
    KeyValueContextManager,
    NameContextManager,
)
from podrun.popart.building.operations import (
    OpDefinition,
    OperatorIdentifier,
    getSupportedOperations,
    getSupportedOperationsDefinition,
    getUnsupportedOperations,
)
from podrun.popart.custom import register_op
from podrun.popart.debug import (
    DebugContext,
    DebugInfo,
    SourceLocation,
    closePoplarDebugInfo,
    initializePoplarDebugInfo,
)
from podrun.popart.devices.device import DeviceInfo
from podrun.popart.devices.device_manager import DeviceManager, syncPatternFromString, syncPatternToString
from podrun.popart.enums import *  # noqa: F403
from podrun.popart.errors import (
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
from podrun.popart.logger import Logger, getLogger
from podrun.popart.logger import configure as _configure_log
from podrun.popart.models.numerics import NumericsReport
from podrun.popart.models.transformer import GraphTransformer
from podrun.popart.names import ACCESSORS as _ACCESSORS
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
from podrun.popart.options.session_options import SessionOptions
from podrun.popart.options.settings import (
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
from podrun.popart.patterns import Patterns
from podrun.popart.quiet_import import keep_the_programs_draws as _keep_the_programs_draws
from podrun.popart.retired import missing
from podrun.popart.session import InferenceSession, Session, TrainingSession
from podrun.popart.step_data.dataflow import AnchorReturnType, DataFlow, InputSettings
from podrun.popart.step_data.stepio import IStepIO, IWeightsIO, PyStepIO, PyStepIOCallback, PyWeightsIO
from podrun.popart.tensor_info import InputShapeInfo, TensorInfo, getTensorInfo
from podrun.popart.version import packageHash, versionNumber, versionString
from podrun.popart.weights.variables import CommGroup, ReplicaGrouping, VariableSettings

globals().update(_ACCESSORS)
_keep_the_programs_draws()
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
    "SGD",
    "AccumulateOuterFragmentSettings",
    "Adam",
    "Adaptive",
    "AnchorReturnType",
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

if not TYPE_CHECKING:  # Type checkers are to report what is not there.

    def __getattr__(name: str) -> Never:
        """Only for names that are not there."""
        raise missing(name)
