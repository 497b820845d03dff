"""PopART's session options as PopTorch programs set them by name: ``options._Popart.set("autoRecomputation", 1)``.

Each name has a type. Some change the runtime's settings; most only change how hardware would be used, and are accepted
without effect. Others say what an option of PopTorch's own decides already, and are refused with its name.
(Source of names, types and numbers: the PopART API reference. A test holds them equal to PopART's front end.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from podrun.compiler.program import Locations, PipelineOrder
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.settings import Location
from podrun.poptorch.compile.popart_option_types import WITHOUT_EFFECT, in_type, member_number
from podrun.poptorch.errors import Error
from podrun.runtime.environment import cache_directory
from podrun.runtime.graph_text import Drawing
from podrun.runtime.planner_options import CONVOLUTIONS, LSTMS, PRODUCTS, partials_of
from podrun.runtime.session_reports import INNER, OUTER
from podrun.runtime.settings import PhaseSettings, Recomputation, RunSettings, SyntheticData, TrackedGradients

_log = logging.getLogger("poptorch::python")

PopartValues = Mapping[str, object]
"""What a program has set, by name."""
Change = Callable[[RunSettings, Any], RunSettings]
"""The settings with one value of an option in force. The value has the option's type (`PopartOption.kind`)."""


@dataclass(frozen=True, slots=True)
class PopartOption:
    """The type of an option, and what it changes. ``kind`` is a range for an option that is a member of an
    enumeration, by number; ``change`` is None for an option without effect.
    """

    kind: type | range
    change: Change | None = None


def _field(name: str) -> Change:
    """The option is a field of the settings."""
    return lambda settings, value: replace(settings, **{name: value})


def _member(name: str, *members: object) -> PopartOption:
    """The option is a field of the settings, and a number among ``members``."""
    set_field = _field(name)
    return PopartOption(range(len(members)), lambda settings, number: set_field(settings, members[number]))


def _locations(kind: str) -> dict[str, PopartOption]:
    """The options of a kind of tensors: ``weights``, ``optimizer_state`` and so on in `Locations`."""

    def change(part: Callable[[Location, RunSettings, Any], Location]) -> Change:
        def changed(settings: RunSettings, value: Any) -> RunSettings:  # Any: see `Change`.
            where: Locations = settings.locations
            changes: dict[str, Any] = {kind: part(getattr(where, kind), settings, value)}
            return replace(settings, locations=replace(where, **changes))

        return changed

    return {
        "location.storage": PopartOption(range(2), change(lambda w, _, n: replace(w, off_chip=n == 1))),
        "location.replicatedTensorSharding": PopartOption(
            range(2), change(lambda w, s, n: replace(w, shards=s.replicas if n else 1))
        ),
        "location.loadTileSet": PopartOption(range(2)),
        "location.storageTileSet": PopartOption(range(2)),
        "minElementsForOffChip": PopartOption(int, change(lambda w, _, n: replace(w, min_off_chip=n))),
        "minElementsForReplicatedTensorSharding": PopartOption(
            int, change(lambda w, _, n: replace(w, min_sharded=n))
        ),
    }


def _phases(name: str) -> Change:
    def changed(settings: RunSettings, number: int) -> RunSettings:
        phases: PhaseSettings = settings.phases
        value = {"preload": number == 0, "batched": number != 0}[name]
        return replace(settings, phases=replace(phases, **{name: value}))

    return changed


def _scaling(name: str, convert: Callable[[Any], object]) -> Change:
    """The option is a field of automatic loss scaling, where that is on."""

    def changed(settings: RunSettings, value: Any) -> RunSettings:  # Any: see `Change`.
        scale = settings.loss_scale
        if scale is None:
            return settings
        changes: dict[str, Any] = {name: convert(value)}
        return replace(settings, loss_scale=replace(scale, **changes))

    return changed


def _share(value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError("it is a part, from 0 to 1")
    return value


def _positive(value: int) -> int:
    if value < 1:
        raise ValueError("it is at least 1")
    return value


_PARTIALS = {"": "float32", "float": "float32", "half": "float16"}


def _partials(settings: RunSettings, value: str) -> RunSettings:
    if value not in _PARTIALS:
        raise ValueError("a partials type is 'float' or 'half'")
    return replace(settings, partials=_PARTIALS[value])


def _planner(source: str, partials: str = "") -> Change:
    """Options of a planner, which are checked before the model is compiled. ``partials``: what their type of partial
    sums sets.
    """

    def changed(settings: RunSettings, value: Mapping[str, str]) -> RunSettings:
        settings = replace(settings, planner_options={**settings.planner_options, source: dict(value)})
        return _field(partials)(settings, partials_of(value)) if "partialsType" in value else settings

    return changed


def _io_tiles(settings: RunSettings, tiles: int) -> RunSettings:
    if tiles and tiles not in range(32, 193, 2):
        raise ValueError("it is an even number from 32 to 192")
    return replace(settings, io_tiles=tiles)


def _counters(settings: RunSettings, kinds: set[Any]) -> RunSettings:
    """Which counters there are; `Options.logCycleCount` says whether they count."""
    names = (OUTER, INNER)
    chosen = frozenset(names[member_number(kind, range(2))] for kind in kinds)
    return settings if settings.cycle_counters is None else replace(settings, cycle_counters=chosen)


def _mean(settings: RunSettings, number: int) -> RunSettings:
    mean = number == 1
    return replace(settings, mean=mean, running_mean=mean and settings.running_mean)


def _refused(reason: str) -> Change:
    def changed(settings: RunSettings, value: object) -> RunSettings:
        if value:
            raise ValueError(reason)
        return settings

    return changed


def _not_done(reason: str) -> Change:
    def changed(settings: RunSettings, value: object) -> RunSettings:
        if value:
            _log.warning("A PopART option has no effect: %s.", reason)
        return settings

    return changed


_NO_GRAPH = "there is no Poplar graph to write"
_NO_SCHEDULER = "there is no Poprithms scheduler whose graphs could be written"

_WITH_EFFECT: dict[str, PopartOption] = {
    "autoRecomputation": _member("recomputation", *Recomputation),
    "pipelineSchedule": _member("order", PipelineOrder.GROUPED, PipelineOrder.INTERLEAVED, None),
    "syntheticDataMode": _member("synthetic", *SyntheticData),
    "accumulationAndReplicationReductionType": PopartOption(range(3), _mean),
    "meanAccumulationAndReplicationReductionStrategy": PopartOption(
        range(2), lambda s, number: replace(s, running_mean=s.mean and number == 0)
    ),
    "accumulateOuterFragmentSettings.schedule": PopartOption(
        range(4), lambda s, number: replace(s, clips_serially=number == 1)
    ),
    "explicitRecomputation": PopartOption(bool, lambda s, on: replace(s, checks_restores=not on)),
    "enableExplicitMainLoops": PopartOption(bool, lambda s, on: replace(s, checks_restores=not on)),
    "enableOutlining": PopartOption(bool, _field("outlining")),
    "constantWeights": PopartOption(bool, _field("constant_weights")),
    "enableStochasticRounding": PopartOption(bool, _field("stochastic_rounding")),
    "enableFloatingPointChecks": PopartOption(bool, _field("floating_point_checks")),
    "enableLoadAndOffloadRNGState": PopartOption(bool, _field("keeps_random_state")),
    "enableSupportedDataTypeCasting": PopartOption(bool, _field("casting")),
    "ensureFp32LossScaleTensor": PopartOption(bool, _field("wide_loss_scale")),
    "numIOTiles": PopartOption(int, _io_tiles),
    "partialsTypeMatMuls": PopartOption(str, _partials),
    "matmulOptions": PopartOption(dict, _planner(PRODUCTS, "partials")),
    "convolutionOptions": PopartOption(dict, _planner(CONVOLUTIONS, "convolution_partials")),
    "lstmOptions": PopartOption(dict, _planner(LSTMS)),
    "virtualGraphSplitRatios": PopartOption(list, lambda s, ratios: replace(s, split_ratios=tuple(ratios))),
    "engineOptions": PopartOption(
        dict, lambda s, values: replace(s, engine_options={**s.engine_options, **values})
    ),
    "instrumentWithHardwareCycleCounter": PopartOption(
        bool, lambda s, on: replace(s, cycle_counters=frozenset({OUTER}) if on else None)
    ),
    "hardwareInstrumentations": PopartOption(set, _counters),
    "executionPhaseSettings.weightIOSchedule": PopartOption(range(2), _phases("preload")),
    "executionPhaseSettings.activationIOSchedule": PopartOption(range(2), _phases("preload")),
    "executionPhaseSettings.schedule": PopartOption(range(3), _phases("batched")),
    "automaticLossScalingSettings.toTrackTensors": PopartOption(list, _scaling("names", tuple)),
    "automaticLossScalingSettings.binEdgeLocation": PopartOption(float, _scaling("edge", _share)),
    "automaticLossScalingSettings.thresholdUpperCountProportion": PopartOption(
        float, _scaling("threshold", _share)
    ),
    "automaticLossScalingSettings.updatePeriod": PopartOption(int, _scaling("period", _positive)),
    "automaticLossScalingSettings.gradientTensorTrackingMethod": PopartOption(
        range(3), _scaling("tracked", lambda number: tuple(TrackedGradients)[number])
    ),
    **{f"weightTensorLocationSettings.{n}": o for n, o in _locations("weights").items()},
    **{f"optimizerStateTensorLocationSettings.{n}": o for n, o in _locations("optimizer_state").items()},
    **{f"accumulatorTensorLocationSettings.{n}": o for n, o in _locations("accumulators").items()},
    **{f"activationTensorLocationSettings.{n}": o for n, o in _locations("activations").items()},
    "customCodelets": PopartOption(list, _refused("codelets are code for the IPU, which cannot run here")),
    "experimentalSettings.customTransformApplierSettings": PopartOption(
        dict, _refused("transforms of compiled libraries cannot be loaded")
    ),
    "exportPoplarComputationGraph": PopartOption(bool, _not_done(_NO_GRAPH)),
    "exportPoplarVertexGraph": PopartOption(bool, _not_done(_NO_GRAPH)),
    "serializedPoprithmsShiftGraphsDir": PopartOption(str, _not_done(_NO_SCHEDULER)),
    "serializedPoprithmsAnnealGraphsDir": PopartOption(str, _not_done(_NO_SCHEDULER)),
}

_REPLICATION, _ACCUMULATION = "options.replicationFactor", "options.Training.gradientAccumulation"
_STRATEGY = "options.setExecutionStrategy"
DECIDED_BY = {
    "enableReplicatedGraphs": _REPLICATION,
    "replicatedGraphCount": _REPLICATION,
    "enableDistributedReplicatedGraphs": "options.Distributed",
    "globalReplicationFactor": "options.Distributed",
    "globalReplicaOffset": "options.Distributed",
    "enableGradientAccumulation": _ACCUMULATION,
    "accumulationFactor": _ACCUMULATION,
    "virtualGraphMode": _STRATEGY,
    "enablePipelining": _STRATEGY,
    "executionPhaseSettings.phases": _STRATEGY,
    "executionPhaseSettings.stages": _STRATEGY,
    "createImplicitPipeliningFwdOnlyProgram": "poptorch.inferenceModel",
    "automaticLossScalingSettings.enabled": "options.Training.setAutomaticLossScaling",
    "tensorLocationSettingsOverride": "options.TensorLocations",
}
"""Options of PopART's that another option decides."""


OPTIONS: Mapping[str, PopartOption] = {
    **_WITH_EFFECT,
    **{name: PopartOption(kind) for name, kind in WITHOUT_EFFECT.items()},
}
"""All options by name, but those of `DECIDED_BY`."""


def with_popart_options(settings: RunSettings, values: PopartValues) -> RunSettings:
    """The settings with a program's options in force, in the order in which they were set. Error for an unknown name,
    a wrong value, and a name of `DECIDED_BY`.
    """
    for name, value in values.items():
        if name in DECIDED_BY:
            raise Error(
                f"PopART option {name!r} cannot be set beside what decides it: use {DECIDED_BY[name]}",
            )
        converted = _converted(name, value)
        change = OPTIONS[name].change
        if change is not None:
            try:
                settings = change(settings, converted)
            except ValueError as error:
                raise _wrong(name, value, str(error)) from error
    return settings


def check_popart_options(values: PopartValues) -> None:
    """Error for options that PopART does not have, or that have impossible values."""
    for name, value in values.items():
        if name not in DECIDED_BY:
            _converted(name, value)


def cache_folder(values: PopartValues) -> str:
    """The folder of compiled programs, or empty: as options say, else as POPART_CACHE_DIR does."""
    folder = cache_directory()
    if not values.get("enableEngineCaching", bool(folder)):
        return ""
    return str(values.get("cachePath", folder or "session_cache"))


def compiles_engine(values: PopartValues) -> bool:
    """Whether a program is compiled; without one the model cannot run."""
    return bool(values.get("compileEngine", True))


def requested_drawing(values: PopartValues) -> Drawing:
    """The drawings of the graph that ``dotChecks`` and its like ask for."""

    def value(name: str, default: object) -> Any:
        return _converted(name, values[name]) if name in values else default

    return Drawing(
        tuple(sorted(value("dotChecks", ()))),
        value("logDir", "") or ".",
        value("firstDotOp", 0),
        value("finalDotOp", 10000),
        value("dotOpNames", False),
        folder_option='options._Popart.set("logDir", DIRECTORY)',
    )


def _wrong(name: str, value: object, why: str) -> Error:
    return Error(f"PopART option {name!r} cannot be {value!r}: {why}")


def _converted(name: str, value: object) -> Any:
    """A value in the form that the option's type has. Error for another type."""
    if name not in OPTIONS:
        raise Error(f"Unknown PopART option {name!r}", hint="dir(popart.SessionOptions()) lists the names.")
    kind = OPTIONS[name].kind
    try:
        return in_type(kind, value)
    except (TypeError, ValueError) as error:
        raise _wrong(name, value, str(error)) from error
