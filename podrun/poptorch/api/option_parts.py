"""The parts of ``poptorch.Options``: Training, Precision, Distributed, and PopART's own."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch

from podrun.core.environment import OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, environment
from podrun.poptorch.api.enums import MeanReductionStrategy, ReductionType
from podrun.poptorch.api.option_group import OptionGroup, check_flag
from podrun.poptorch.api.signatures import checks_methods
from podrun.poptorch.api.tensor_locations import (
    TensorLocationOptions as TensorLocationOptions,  # Saved models name it.
)
from podrun.poptorch.errors import ArgumentError, Error


class JitOptions(OptionGroup):
    """Deprecated: models are captured by their operators."""

    def traceModel(self, trace_model: bool) -> JitOptions:
        """ValueError for True: models are no longer traced by torch.jit."""
        if trace_model:
            raise ValueError("Jit.traceModel(True) is no longer supported: leave the option out")
        return self


@checks_methods("accumulationAndReplicationReductionType")
class TrainingOptions(OptionGroup):
    """Options for training: ``Options.Training``."""

    _defaults: ClassVar[dict[str, Any]] = {
        "gradient_accumulation": 1,
        "accumulation_and_replication_reduction_type": ReductionType.Mean,
        "meanAccumulationAndReplicationReductionStrategy": MeanReductionStrategy.Post,
        "auto_loss_scaling": False,
        "convolution_dithering": False,
    }

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_mean_strategy_chosen"] = False

    def gradientAccumulation(self, gradient_accumulation: int) -> TrainingOptions:
        """Set the micro-batches whose gradients one weight update uses."""
        if isinstance(gradient_accumulation, int) and gradient_accumulation <= 0:
            raise ArgumentError("gradientAccumulation must be above 0")
        return self.set(gradient_accumulation=gradient_accumulation)

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> TrainingOptions:
        """Set whether gradients of micro-batches and replicas are added or averaged. ValueError for anything else."""
        if not isinstance(reduction_type, ReductionType) or reduction_type == ReductionType.NoReduction:
            raise ValueError("reduction_type must be poptorch.ReductionType.Mean or Sum")
        return self.set(accumulation_and_replication_reduction_type=reduction_type)

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> TrainingOptions:
        """Set when a mean is divided: after each micro-batch or at the end."""
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        self.__dict__["_mean_strategy_chosen"] = True
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> TrainingOptions:
        """Set whether the loss scaling follows the gradients."""
        return self.set(auto_loss_scaling=enabled)

    def setConvolutionDithering(self, enabled: bool) -> TrainingOptions:
        """Spread convolutions over tiles. Accepted; no effect on numbers."""
        return self.set(convolution_dithering=enabled)


@checks_methods("setPartialsType", "runningStatisticsAlwaysFloat")
class PrecisionOptions(OptionGroup):
    """Options for rounding: ``Options.Precision``."""

    _defaults: ClassVar[dict[str, Any]] = {"floating_point_exceptions": False, "stochastic_rounding": False}
    popart: PopartOptions

    def enableFloatingPointExceptions(self, enabled: bool) -> PrecisionOptions:
        """Set whether division by zero, overflow and NaN end a run."""
        check_flag("enableFloatingPointExceptions", enabled)
        return self.set(floating_point_exceptions=enabled)

    def enableStochasticRounding(self, enabled: bool) -> PrecisionOptions:
        """Set whether halves are rounded at random."""
        check_flag("enableStochasticRounding", enabled)
        return self.set(stochastic_rounding=enabled)

    def setPartialsType(self, dtype: torch.dtype) -> PrecisionOptions:
        """Set the type in which products and convolutions add up: torch.float or torch.half. ValueError for another."""
        names = {torch.float32: "float", torch.float16: "half"}
        if not isinstance(dtype, torch.dtype) or dtype not in names:
            raise ValueError("setPartialsType takes torch.float or torch.half")
        self.checkIsFrozen("partials_type")
        self.popart.set("partialsTypeMatMuls", names[dtype])
        self.popart.set("convolutionOptions", {"partialsType": names[dtype]})
        return self

    def halfFloatCasting(self, half_float_casting: object) -> PrecisionOptions:
        """Deprecated; types are promoted as torch does."""
        warnings.warn("halfFloatCasting has no effect: types are promoted as torch does", stacklevel=3)
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> PrecisionOptions:
        """Deprecated; running statistics have the type of their module."""
        if not isinstance(value, bool):
            raise ValueError("runningStatisticsAlwaysFloat takes True or False")
        warnings.warn(
            "runningStatisticsAlwaysFloat has no effect: running statistics have the type of their module",
            stacklevel=2,
        )
        return self


@checks_methods()
class DistributedOptions(OptionGroup):
    """Options for several processes: ``Options.Distributed``."""

    _defaults: ClassVar[dict[str, Any]] = {"num_distributed_processes": 1, "distributed_process_id": 0}

    def __init__(self) -> None:
        super().__init__()
        self._read(OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK)

    def _read(self, size: str, rank: str) -> None:
        numbers = []
        for name, default in ((size, "1"), (rank, "0")):
            text = environment().get(name, default)
            if not text.isdecimal():
                raise Error(f"the environment variable {name} must be a number, not {text!r}")
            numbers.append(int(text))
        self.set(num_distributed_processes=numbers[0], distributed_process_id=numbers[1])

    def disable(self) -> DistributedOptions:
        """One process, whatever the environment says."""
        return self.set(num_distributed_processes=1, distributed_process_id=0)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> DistributedOptions:
        """Read the number of processes and this process's number from other variables."""
        self._read(var_num_processes, var_process_id)
        return self

    def configureProcessId(self, process_id: int, num_processes: int) -> DistributedOptions:
        """Set the number of this process, and of all processes. AssertionError for a number out of range."""
        if not (0 <= process_id < num_processes):
            raise ArgumentError(f"There is no process {process_id} of {num_processes}")
        return self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)

    @property
    def processId(self) -> int:
        """The number of this process, from 0."""
        return int(self.distributed_process_id)

    @property
    def numProcesses(self) -> int:
        """The number of processes that run the model together."""
        return int(self.num_distributed_processes)


@checks_methods()
class PopartOptions(OptionGroup):
    """PopART's session options by name: ``Options._Popart.set("autoRecomputation", 1)``.

    Any name can be set; names that the session does not know are refused when the model is compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["options"] = {}
        self.__dict__["patterns_level"] = 2
        self.__dict__["patterns"] = {}

    def set(self, key: str, value: object) -> PopartOptions:  # type: ignore[override]
        """Set one option."""
        self.checkIsFrozen(key)
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options: dict[str, str]) -> PopartOptions:
        """Set options of Poplar's engine. AssertionError unless they are a dictionary."""
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> PopartOptions:
        """Set which of PopART's patterns are applied."""
        self.checkIsFrozen("patterns")
        if not isinstance(level, int):
            raise ArgumentError("the level of patterns is a number")
        self.patterns.update(patterns)
        self.__dict__["patterns_level"] = level
        return self

    def toDict(self) -> dict[str, Any]:
        """All options, and the patterns."""
        return {
            "popart_options": dict(self.options),
            "patterns": dict(self.patterns),
            "patterns_level": self.patterns_level,
        }
