"""``poptorch.Options``: how a model is compiled and run. Every setter returns the options themselves."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex

import torch

from podrun.core.environment import POPLAR_ENGINE_OPTIONS, POPTORCH_CACHE_DIR, environment
from podrun.poptorch.api.enums import CommGroupType, ConnectionType, OutputMode, SyncPattern
from podrun.poptorch.api.logs import logger
from podrun.poptorch.api.option_group import OptionGroup, check_flag
from podrun.poptorch.api.option_parts import (
    DistributedOptions,
    JitOptions,
    PopartOptions,
    PrecisionOptions,
    TrainingOptions,
)
from podrun.poptorch.api.options_file import ConfigFileError as ConfigFileError
from podrun.poptorch.api.options_file import apply_json, load_options
from podrun.poptorch.api.signatures import checks_methods
from podrun.poptorch.api.strategies import ExecutionStrategy, PipelinedExecution
from podrun.poptorch.api.tensor_locations import TensorLocationOptions
from podrun.poptorch.errors import ArgumentError

DEFAULT_OPTIONS = "POPTORCH_DEFAULT_OPTIONS"
"""Environment variable: a JSON object of options that every `Options` starts with."""


@checks_methods("enableSyntheticData", "extra")
class Options(OptionGroup):
    """How a model is compiled and run.

    Example: ``poptorch.Options().deviceIterations(4).replicationFactor(2)``. A wrapper freezes its options and keeps a
    copy. Names, defaults and checks are the SDK's.
    """

    _defaults: ClassVar[dict[str, Any]] = {
        "replication_factor": 1,
        "input_group_size": 1,
        "input_cgt": CommGroupType.Consecutive,
        "broadcast_buffers": True,
        "device_iterations": 1,
        "log_dir": ".",
        "max_repeat_logs": 4,
        "auto_round_num_ipus": False,
        "output_mode": OutputMode.Default,
        "output_return_period": 1,
        "connection_type": ConnectionType.Always,
        "sync_pattern": SyncPattern.Full,
        "available_memory_proportion": {},
    }
    _types: ClassVar[dict[str, tuple[type, ...]]] = {"max_repeat_logs": (int, type(None))}

    def __init__(self) -> None:
        super().__init__()
        for name, part in (
            ("_jit", JitOptions()),
            ("_training", TrainingOptions()),
            ("_popart", PopartOptions()),
            ("_precision", PrecisionOptions()),
            ("_tensor_locations", TensorLocationOptions()),
            ("_distributed", DistributedOptions()),
        ):
            self.add_part(name, part)
        self._parts["_precision"].popart = self._parts["_popart"]
        self._execution_strategy: ExecutionStrategy = PipelinedExecution()
        self._module_namescope_enabled = True
        self._show_progress = True
        self._source_excludes: list[str] = ["site-packages/torch", "podrun"]
        self._is_default_output_mode = True
        self.anchored_tensors: dict[str, tuple[str, OutputMode | None, int]] = {}
        self.updatable_named_buffers: list[str] = []
        self._extra: dict[str, Any] = {}
        if environment().get(POPTORCH_CACHE_DIR):
            self.enableExecutableCaching(environment()[POPTORCH_CACHE_DIR])
        if DEFAULT_OPTIONS in environment():
            self.from_json(environment()[DEFAULT_OPTIONS])

    # --- Parts --------------------------------------------------------------------------------------------------------

    @property
    def Training(self) -> TrainingOptions:
        """Options for training."""
        return self._parts["_training"]  # type: ignore[no-any-return]

    @property
    def Precision(self) -> PrecisionOptions:
        """Options for rounding and half precision."""
        return self._parts["_precision"]  # type: ignore[no-any-return]

    @property
    def TensorLocations(self) -> TensorLocationOptions:
        """Options for the locations of tensors."""
        return self._parts["_tensor_locations"]  # type: ignore[no-any-return]

    @property
    def Distributed(self) -> DistributedOptions:
        """Options for several processes."""
        return self._parts["_distributed"]  # type: ignore[no-any-return]

    @property
    def Jit(self) -> JitOptions:
        """Options of tracing, all deprecated: modules are always captured by running them."""
        return self._parts["_jit"]  # type: ignore[no-any-return]

    @property
    def _Popart(self) -> PopartOptions:
        """PopART's own session options."""
        return self._parts["_popart"]  # type: ignore[no-any-return]

    # --- Batches ------------------------------------------------------------------------------------------------------

    def deviceIterations(self, device_iterations: int) -> Options:
        """Set the iterations (in training: weight updates) of one call."""
        if isinstance(device_iterations, int) and device_iterations <= 0:
            raise ArgumentError("deviceIterations must be above 0")
        return self.set(device_iterations=device_iterations)

    def replicationFactor(self, replication_factor: int) -> Options:
        """Set the number of copies of the model in this process."""
        if isinstance(replication_factor, int) and replication_factor <= 0:
            raise ArgumentError("replicationFactor must be above 0")
        return self.set(replication_factor=replication_factor)

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Options:
        """Give the replicas of a group the same input. ValueError for ``All``, for a group larger than the replicas,
        and for one that does not divide them."""
        self.checkIsFrozen("input_group_size")
        if input_group_type == CommGroupType.All:
            raise ValueError("Input group type All is not supported: all replicas would have the same input")
        if input_group_type == CommGroupType.NoGrouping:
            input_group_size = 1
        if input_group_size < 1:
            raise ValueError("The input group size must be above 0")
        if input_group_size > self.replication_factor:
            raise ValueError("The input group size exceeds the replication factor")
        if self.replication_factor % input_group_size:
            raise ValueError("The input group size must divide the replication factor")
        return self.set(input_group_size=input_group_size, input_cgt=input_group_type)

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Options:
        """Set whether all replicas have the same buffers. Buffers that forward writes need False with several
        replicas.
        """
        return self.set(broadcast_buffers=broadcast_buffers)

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Options:
        """Set which results a call returns. AssertionError for EveryN without a period above 0."""
        period = 1
        if output_mode == OutputMode.EveryN:
            period = output_return_period or 0
            if period <= 0:
                raise ArgumentError("EveryN must have output_return_period set to a number above 0")
        self.set(output_mode=output_mode, output_return_period=period)
        self._is_default_output_mode = output_mode == OutputMode.Default
        return self

    def defaultOutputMode(self) -> bool:
        """Whether no output mode was chosen."""
        return self._is_default_output_mode

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int = 1,
    ) -> Options:
        """Return a tensor of the compiled graph as well: `PoplarExecutor.getAnchoredTensor` of ``short_name``."""
        if output_mode == OutputMode.EveryN and output_return_period <= 0:
            raise ArgumentError("EveryN must have output_return_period set to a number above 0")
        self.anchored_tensors[short_name] = (long_name, output_mode, output_return_period)
        return self

    def updatableNamedBuffers(self, buffers: list[str]) -> Options:
        """Name the buffers that `PoplarExecutor.copyNamedBuffersToDevice` writes."""
        self.checkIsFrozen("updatable_named_buffers")
        self.updatable_named_buffers = list(buffers)
        return self

    # --- IPUs ---------------------------------------------------------------------------------------------------------

    def setExecutionStrategy(self, strategy: ExecutionStrategy) -> Options:
        """Set how the model is divided over IPUs. AssertionError for anything but an execution strategy."""
        self.checkIsFrozen("execution_strategy")
        self._execution_strategy = strategy
        return self

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Options:
        """Take the next power of two of IPUs."""
        return self.set(auto_round_num_ipus=auto_round_num_ipus)

    def connectionType(self, connection_type: ConnectionType) -> Options:
        """Set when the model takes its IPUs: before it is compiled, afterwards, or never."""
        return self.set(connection_type=connection_type)

    def syncPattern(self, sync_pattern: SyncPattern) -> Options:
        """Set which IPUs wait for each other."""
        return self.set(sync_pattern=sync_pattern)

    def useIpuId(self, ipu_id: int) -> Options:
        """Use the device of that id."""
        if not isinstance(ipu_id, int):
            raise ArgumentError("useIpuId takes a device id")
        return self._set_extra("ipu_id", ipu_id)

    def useIpuModel(self, use_model: bool) -> Options:
        """Use a model of an IPU in this process instead of a device."""
        check_flag("useIpuModel", use_model)
        return self._set_extra("use_model", use_model)

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Options:
        """Compile without an IPU, for one of version 1, 2 or 21."""
        if ipu_version not in (1, 2, 21):
            raise ArgumentError("ipu_version must be 1, 2 or 21")
        self.connectionType(ConnectionType.Never)
        return self._set_extra("ipu_version", ipu_version)

    def setAvailableMemoryProportion(self, available_memory_proportion: Mapping[str, float]) -> Options:
        """Set the part of the tiles' memory that products and convolutions may take for temporary data, by ``"IPU0"``,
        ``"IPU1"`` and so on: IPUs of a replica. Changes modelled cycles and memory, no number.
        """
        proportions = {}
        for name, value in available_memory_proportion.items():
            number = name.removeprefix("IPU")
            if number == name or not number.isdecimal():
                raise ArgumentError(f"{name!r} is no IPU: use 'IPU0', 'IPU1' ...")
            if not (0 < float(value) <= 1):
                raise ArgumentError(f"{name}: a proportion is above 0 and at most 1, not {value!r}")
            proportions[int(number)] = float(value)
        return self.set(available_memory_proportion=proportions)

    # --- Running ------------------------------------------------------------------------------------------------------

    def randomSeed(self, random_seed: int) -> Options:
        """Set the seed of the IPU's random numbers, and of torch's on the host."""
        if not isinstance(random_seed, int):
            raise ArgumentError("randomSeed takes a number")
        torch.manual_seed(random_seed)
        return self._set_extra("random_seed", random_seed)

    def enableSyntheticData(self, enabled: SupportsIndex) -> Options:
        """Run without data from or to the host. A number is a ``popart.SyntheticDataMode``: 0 is off."""
        if not isinstance(enabled, SupportsIndex):
            raise ArgumentError("enableSyntheticData takes True, False or a popart.SyntheticDataMode")
        return self._set_extra("enable_synthetic_data", bool(operator.index(enabled)))

    def enableExecutableCaching(self, path: str | os.PathLike[str] | None) -> Options:
        """Keep compiled programs in a folder; None: nowhere. Default: that of POPTORCH_CACHE_DIR, if it is set."""
        self._Popart.set("enableEngineCaching", path is not None)
        self._Popart.set("cachePath", "" if path is None else str(path))
        return self._set_extra("cache_path", path)

    def enableProfiling(self, profile_dir: str | os.PathLike[str] | None = None) -> Options:
        """Write a report of time and memory to ``profile_dir`` (default: here), in a folder with the model's name."""
        if environment().get(POPLAR_ENGINE_OPTIONS):
            logger.warning("POPLAR_ENGINE_OPTIONS is set: it takes precedence over enableProfiling")
        folder = str(profile_dir or os.getcwd())
        settings = {
            "debug.allowOutOfMemory": "true",
            "autoReport.directory": folder,
            "autoReport.all": "true",
        }
        self._Popart.setEngineOptions({**self._Popart.options.get("engineOptions", {}), **settings})
        return self._set_extra("profile_dir", folder)

    def enableStableNorm(self, enabled: bool) -> Options:
        """Compute variances in two passes, which podrun always does."""
        check_flag("enableStableNorm", enabled)
        return self._set_extra("stable_norm", enabled)

    def logCycleCount(self, log_cycle_count: bool) -> Options:
        """Count the cycles of a run, for `PoplarExecutor.cycleCount`."""
        check_flag("logCycleCount", log_cycle_count)
        return self._set_extra("log_cycle_count", bool(log_cycle_count))

    def logDir(self, log_dir: str) -> Options:
        """Set the folder for logs and exported files."""
        return self.set(log_dir=log_dir)

    def maxRepeatLogs(self, max_lines: int | None) -> Options:
        """Set how often a line of a log may repeat; None: without limit."""
        return self.set(max_repeat_logs=max_lines)

    def modelName(self, name: str) -> Options:
        """Set the model's name in profiles."""
        return self._set_extra("model_name", name)

    def showCompilationProgressBar(self, show: bool = True) -> Options:
        """Set whether compiling is timed, for `PoplarExecutor.compilationTime`. No bar is shown."""
        check_flag("showCompilationProgressBar", show)
        self.checkIsFrozen("show_progress")
        self._show_progress = show
        return self

    def disableModuleNamescope(self) -> Options:
        """Leave modules' names out of operators' names."""
        self.checkIsFrozen("module_namescope")
        self._module_namescope_enabled = False
        return self

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Options:
        """Do not warn of attributes of optimizers that are ignored."""
        return self._set_extra("relax_optimizer_checks", relax)

    def appendToLocationExcludes(self, *excludes: str) -> Options:
        """Add files whose lines are not the source of an operator."""
        self.checkIsFrozen("source_excludes")
        self._source_excludes += excludes
        return self

    def sourceLocationExcludes(self, excludes: list[str]) -> Options:
        """Set the files whose lines are not the source of an operator."""
        self.checkIsFrozen("source_excludes")
        self._source_excludes = list(excludes)
        return self

    def _set_extra(self, name: str, value: object) -> Options:
        self.checkIsFrozen(name)
        self._extra[name] = value
        return self

    def extra(self, name: str, default: object = None) -> Any:
        """A value that only programs set and that has no default: ``random_seed``, ``ipu_id`` and the like."""
        return self._extra.get(name, default)

    def __getattr__(self, name: str) -> Any:
        """Read values without a default, such as ``options.random_seed``. AttributeError before they are set."""
        extra = self.__dict__.get("_extra", {})
        return extra[name] if name in extra else super().__getattr__(name)

    # --- Files --------------------------------------------------------------------------------------------------------

    def from_json(self, string: str) -> None:
        """Set options from JSON: ``{"deviceIterations": 2, "Training.gradientAccumulation": 4}``. A list is several
        arguments; ``"OutputMode.All"`` is a member of an enumeration."""
        apply_json(self, string)

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> None:
        """Set options from a file: one call a line, as ``deviceIterations(1)``; ``#`` begins a comment.
        ConfigFileError for a line that is none."""
        load_options(self, Path(filepath))

    def toDict(self) -> dict[str, Any]:
        """All values in one dictionary. AssertionError while the output mode is Default."""
        if self.output_mode == OutputMode.Default:
            raise ArgumentError("the output mode has to be chosen before toDict()")
        merged: dict[str, Any] = {}
        for group in (
            self._execution_strategy.backendOptions(),
            self._values,
            self._extra,
            *(part.toDict() for part in self._parts.values()),
        ):
            shared = merged.keys() & group.keys()
            if shared:
                raise ArgumentError(f"options with the same names: {sorted(shared)}")
            merged.update(group)
        return merged
