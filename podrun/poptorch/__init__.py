"""PopTorch's public API: PyTorch modules trained and run on IPUs.

A program that imports ``poptorch`` gets this room, through `podrun.compat.poptorch`. `api` is what it calls; `capture`
turns a module's forward pass into a graph of functional operators, each of which `operators` computes with JAX;
`compile` makes the runtime's model and settings of it, and `executor` runs that. `data` loads batches, `instances` is
what programs of several instances use. Only this room imports torch. Of podrun's other rooms only `podrun.estimate`
imports this one, for PyTorch programs.
"""

from __future__ import annotations

from typing import NoReturn

from podrun.core.errors import MissingPackageError as _MissingPackageError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise _MissingPackageError(
        "PyTorch is not installed, and PopTorch programs need it",
        hint="Install its CPU build: "
        "pip install -f https://download.pytorch.org/whl/cpu/torch/ 'podrun[torch]' "
        "(in a checkout: -c constraints.txt '.[torch]' in place of 'podrun[torch]')",
    ) from None

from podrun.poptorch.api import enums, optim, profiling
from podrun.poptorch.api import ops as ops
from podrun.poptorch.api import options as options
from podrun.poptorch.api.annotations import (
    Attribute,
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    NameScope,
    isRunningOnIpu,
    module_repr,
    removeBlocks,
)
from podrun.poptorch.api.enums import *  # noqa: F403
from podrun.poptorch.api.enums import __all__ as _ENUMS
from podrun.poptorch.api.logs import logger, setLogLevel
from podrun.poptorch.api.ops import (
    CPU,
    MultiConv,
    cond,
    ctc_beam_search_decoder,
    custom_op,
    dynamic_slice,
    dynamic_update,
    for_loop,
    fps,
    identity_loss,
    ipu_print_tensor,
    nearest,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from podrun.poptorch.api.options import Options
from podrun.poptorch.api.options_file import ConfigFileError
from podrun.poptorch.api.strategies import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from podrun.poptorch.api.tensor_locations import TensorLocationSettings
from podrun.poptorch.capture.graph import StructureParser as ICustomArgParser
from podrun.poptorch.capture.graph import register_parser as registerCustomArgParser
from podrun.poptorch.data.data_accessor import AsynchronousDataAccessor
from podrun.poptorch.data.data_loader import DataLoader
from podrun.poptorch.errors import Error, RecoverableError, UnrecoverableError, createPoptorchError
from podrun.poptorch.executor.devices import ipuHardwareIsAvailable, ipuHardwareVersion
from podrun.poptorch.executor.executor import PoplarExecutor
from podrun.poptorch.executor.watching import registerPostCompileHook, registerPreCompileHook
from podrun.poptorch.executor.wrappers import (
    BlockId,
    importPoptorchMetadataFromFile,
    inferenceModel,
    load,
    registerGeometricCustomArgParsers,
    trainingModel,
)

__all__ = [
    "setLogLevel",
    "registerGeometricCustomArgParsers",
    "ipuHardwareVersion",
    "ipuHardwareIsAvailable",
    "importPoptorchMetadataFromFile",
    "MultiConv",
    "ConfigFileError",
    "BlockId",
    *_ENUMS,
    "AsynchronousDataAccessor",
    "Attribute",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "DataLoader",
    "Error",
    "ICustomArgParser",
    "LegacyBeginBlockFn",
    "NameScope",
    "Options",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "TensorLocationSettings",
    "UnrecoverableError",
    "CPU",
    "cond",
    "ctc_beam_search_decoder",
    "createPoptorchError",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "enums",
    "for_loop",
    "fps",
    "identity_loss",
    "inferenceModel",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "logger",
    "module_repr",
    "nearest",
    "nop",
    "optim",
    "profiling",
    "recomputationCheckpoint",
    "registerCustomArgParser",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "removeBlocks",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "trainingModel",
]

__version__ = "3.3.0"

REFUSED = {
    "accessAttributes": "attributes of custom operators are data of the graph, not entries of a list",
    "attributes_lists": "attributes of custom operators are data of the graph, not entries of a list",
    "getIpuTensorId": "tensors of a captured model have no number outside of the capture",
    "poptorchAtExit": "IPUs and processes of loaders are let go without a call",
}
"""Names of the SDK that podrun does not have, and why."""


def __getattr__(name: str) -> NoReturn:
    reason = f": {REFUSED[name]}" if name in REFUSED else ""
    raise AttributeError(f"poptorch has no {name!r}{reason}")
