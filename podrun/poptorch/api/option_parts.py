"""The parts of ``poptorch.Options``: Training, Precision, TensorLocations, Distributed, and PopART's own.

`OptionGroup` is what `Options` and its parts share: values with a type, freezing, copies.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, ClassVar, TypeVar

import torch

from podrun.core.environment import environment
from podrun.poptorch.api.enums import MeanReductionStrategy, ReductionType
from podrun.poptorch.api.signatures import checks_methods
from podrun.poptorch.errors import ArgumentError, Error

G = TypeVar("G", bound="OptionGroup")

FROZEN = "Can't modify frozen Options"


class OptionGroup:
    """Named values, each of the type that its default has.

    Reading or assigning ``group.name`` works for every value. AttributeError for a name that is unknown when it is
    read, or when anything is changed after `freeze`; AssertionError for an unknown name or another type when it is
    set.
    """

    _defaults: ClassVar[dict[str, Any]] = {}
    _types: ClassVar[dict[str, tuple[type, ...]]] = {}

    def __init__(self) -> None:
        self.__dict__["_values"] = copy.deepcopy(self._defaults)
        self.__dict__["_is_frozen"] = False
        self.__dict__["_parts"] = {}

    def add_part(self, name: str, part: OptionGroup) -> None:
        """Give the group a part (``Options.Training``), which is frozen and copied with it."""
        self._parts[name] = part

    def checkIsFrozen(self, option: str | None = None) -> None:
        """AttributeError if the options can no longer be changed."""
        if self._is_frozen:
            raise AttributeError(f"{FROZEN}" + (f" (option {option})" if option else ""))

    def set(self, **values: object) -> None:
        """Set values by name."""
        for name, value in values.items():
            self._set_checked(name, value)

    def _set_checked(self, name: str, value: object) -> None:
        self.checkIsFrozen(name)
        if name not in self._values:
            raise ArgumentError(f"Unknown option {name}")
        kinds = self._types.get(name)
        default = self._defaults.get(name)
        if kinds is None and default is not None:
            kinds = (type(default),)
        if kinds is not None and isinstance(value, int) and not isinstance(value, bool) and float in kinds:
            value = float(value)
        if kinds is not None and (not isinstance(value, kinds) or _bool_for_int(value, kinds)):
            raise ArgumentError(
                f"Unexpected type {type(value).__name__} for option {name}: expected "
                f"{' or '.join(kind.__name__ for kind in kinds)}"
            )
        self._values[name] = value

    def exists(self, name: str) -> bool:
        """Whether there is a value of that name."""
        return name in self._values

    def freeze(self) -> None:
        """Refuse changes from now on, to the parts as well."""
        self.__dict__["_is_frozen"] = True
        for part in self._parts.values():
            part.freeze()

    def unfreeze(self) -> None:
        """Allow changes again."""
        self.__dict__["_is_frozen"] = False
        for part in self._parts.values():
            part.unfreeze()

    def clone(self: G) -> G:
        """A copy that can be changed."""
        return copy.deepcopy(self)

    def __deepcopy__(self: G, memo: dict[int, Any]) -> G:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = copy.deepcopy(value, memo)
        copied.unfreeze()
        return copied

    def toDict(self) -> dict[str, Any]:
        """The values of the group itself."""
        return dict(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_values" not in self.__dict__:
            raise AttributeError(name)
        if name in self._parts:
            return self._parts[name]
        if name in self._values:
            return self._values[name]
        raise AttributeError(f"{type(self).__name__} has no option {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__.get("_values", {}):
            self._set_checked(name, value)
        else:
            self.checkIsFrozen(name)
            object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        parts = "".join(f",\n  {name}={part!r}" for name, part in self._parts.items())
        return f"{type(self).__name__.lstrip('_')}({values}{parts})"


def _bool_for_int(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, bool) and bool not in kinds and int in kinds


@checks_methods()
class TensorLocationSettings:
    """Where one kind of tensor is kept and how it gets there. Every setter returns the settings themselves.

    AssertionError for a value of another type.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def _set(self, key: str, value: object, kind: type) -> TensorLocationSettings:
        if not isinstance(value, kind):
            raise ArgumentError(f"{key} takes {kind.__name__}, not {value!r}")
        self._values[key] = value
        return self

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Keep smaller tensors on the chip."""
        return self._set("minElementsForOffChip", min_elements, int)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Do not shard smaller tensors."""
        return self._set("minElementsForReplicatedTensorSharding", min_elements, int)

    def useOnChipStorage(self, use: bool | None = True) -> TensorLocationSettings:
        """Keep tensors on the tiles (True) or in streaming memory (False); None: as PopART decides."""
        if use is None:
            self._values.pop("onChip", None)
            return self
        return self._set("onChip", use, bool)

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Give every replica a part of each tensor."""
        return self._set("useReplicatedTensorSharding", use, bool)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load through I/O tiles."""
        return self._set("useIOTilesToLoad", use, bool)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store through I/O tiles."""
        return self._set("useIOTilesToStore", use, bool)

    def toDict(self) -> dict[str, Any]:
        """All settings made so far."""
        return dict(self._values)

    def __repr__(self) -> str:
        return f"TensorLocationSettings({self._values})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorLocationSettings) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]


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
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> TrainingOptions:
        """Set whether gradients of micro-batches and replicas are added or averaged. ValueError for anything else."""
        if not isinstance(reduction_type, ReductionType) or reduction_type == ReductionType.NoReduction:
            raise ValueError("reduction_type must be poptorch.ReductionType.Mean or Sum")
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> TrainingOptions:
        """Set when a mean is divided: after each micro-batch or at the end."""
        if not isinstance(mean_reduction_strategy, MeanReductionStrategy):
            raise ArgumentError("a poptorch.MeanReductionStrategy is expected")
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        self.__dict__["_mean_strategy_chosen"] = True
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> TrainingOptions:
        """Set whether the loss scaling follows the gradients."""
        self.set(auto_loss_scaling=enabled)
        return self

    def setConvolutionDithering(self, enabled: bool) -> TrainingOptions:
        """Spread convolutions over tiles. Accepted; no effect on numbers."""
        self.set(convolution_dithering=enabled)
        return self


@checks_methods("setPartialsType", "runningStatisticsAlwaysFloat")
class PrecisionOptions(OptionGroup):
    """Options for rounding: ``Options.Precision``."""

    _defaults: ClassVar[dict[str, Any]] = {"floating_point_exceptions": False, "stochastic_rounding": False}
    popart: PopartOptions

    def enableFloatingPointExceptions(self, enabled: bool) -> PrecisionOptions:
        """Set whether division by zero, overflow and NaN end a run."""
        if not isinstance(enabled, bool):
            raise ArgumentError("enableFloatingPointExceptions takes True or False")
        self.set(floating_point_exceptions=enabled)
        return self

    def enableStochasticRounding(self, enabled: bool) -> PrecisionOptions:
        """Set whether halves are rounded at random."""
        if not isinstance(enabled, bool):
            raise ArgumentError("enableStochasticRounding takes True or False")
        self.set(stochastic_rounding=enabled)
        return self

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
class TensorLocationOptions(OptionGroup):
    """Options for the locations of tensors: ``Options.TensorLocations``."""

    _defaults: ClassVar[dict[str, Any]] = {
        "location_activation": {},
        "location_weight": {},
        "location_optimizer": {},
        "location_accumulator": {},
        "num_io_tiles": 0,
    }

    def _locate(self, name: str, location: TensorLocationSettings) -> TensorLocationOptions:
        if not isinstance(location, TensorLocationSettings):
            raise ArgumentError("a TensorLocationSettings is expected")
        self.set(**{name: location.toDict()})
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Set where activations are kept."""
        return self._locate("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Set where weights are kept."""
        return self._locate("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Set where optimizer state is kept."""
        return self._locate("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Set where accumulated gradients are kept."""
        return self._locate("location_accumulator", location)

    def numIOTiles(self, num_tiles: int) -> TensorLocationOptions:
        """Set the number of tiles that only move data: an even number from 32 to 192."""
        if not isinstance(num_tiles, int):
            raise ArgumentError("numIOTiles takes an even number from 32 to 192")
        if num_tiles not in range(32, 193, 2):
            raise ArgumentError("numIOTiles takes an even number from 32 to 192")
        self.set(num_io_tiles=num_tiles)
        return self


@checks_methods()
class DistributedOptions(OptionGroup):
    """Options for several processes: ``Options.Distributed``."""

    _defaults: ClassVar[dict[str, Any]] = {"num_distributed_processes": 1, "distributed_process_id": 0}

    def __init__(self) -> None:
        super().__init__()
        self._read("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

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
        self.set(num_distributed_processes=1, distributed_process_id=0)
        return self

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> DistributedOptions:
        """Read the number of processes and this process's number from other variables."""
        self._read(var_num_processes, var_process_id)
        return self

    def configureProcessId(self, process_id: int, num_processes: int) -> DistributedOptions:
        """Set the number of this process, and of all processes. AssertionError for a number out of range."""
        if not (0 <= process_id < num_processes):
            raise ArgumentError(f"There is no process {process_id} of {num_processes}")
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self

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
        if not isinstance(key, str):
            raise ArgumentError(f"a PopART option has a name, not {key!r}")
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options: dict[str, str]) -> PopartOptions:
        """Set options of Poplar's engine. AssertionError unless they are a dictionary."""
        if not isinstance(engine_options, dict):
            raise ArgumentError("setEngineOptions takes a dictionary")
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> PopartOptions:
        """Set which of PopART's patterns are applied."""
        self.checkIsFrozen("patterns")
        if not isinstance(level, int):
            raise ArgumentError("the level of patterns is a number")
        if not isinstance(patterns, dict):
            raise ArgumentError(f"patterns are True or False by name, not {patterns!r}")
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
