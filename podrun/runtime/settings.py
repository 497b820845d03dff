"""How a model is to run: what front ends' options come down to.

A front end translates its own options into `RunSettings`; nothing in the runtime reads theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from enum import Enum, IntEnum, auto
from typing import Protocol

import numpy as np

from podrun.compiler.program import AnchorSpec, Beside, Locations, PipelineOrder
from podrun.core.executable import Retrieval, TensorSpec
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import OperatorGraph
from podrun.runtime.operators import Dialect
from podrun.runtime.words import NEUTRAL, Words


class PipelineSchedule(IntEnum):
    """The order of a pipeline's work, by the names that TensorFlow for IPUs has for it; PopART's is Grouped."""

    Grouped = 0
    Interleaved = 1
    Sequential = 2

    @property
    def order(self) -> PipelineOrder | None:
        """The schedule as the compiler calls it; None: stages do not overlap."""
        return None if self is PipelineSchedule.Sequential else PipelineOrder(self.name.lower())


class PlacedBy(Enum):
    """Who says on which IPU of a replica an operator runs."""

    ONE_IPU = auto()
    """Nobody: all operators run on IPU 0."""
    BY_HAND = auto()
    """The model: each operator has an IPU."""
    AUTOMATIC = auto()
    """The tile model's costs."""
    IN_PHASES = auto()
    """Phases that run one after the other, on IPUs that take turns."""


class SyntheticData(Enum):
    """What inputs hold that do not come from the host."""

    OFF = auto()
    ZEROS = auto()
    NORMAL = auto()
    UNIFORM = auto()


class Recomputation(Enum):
    """What the backward pass computes again: the rule of the compiler (`podrun.costmodel.settings.Recompute`)."""

    NOTHING = "none"
    STANDARD = "standard"
    NORMS = "norms"
    """Norms, and non-linearities that read them directly."""
    PIPELINE = "pipeline"
    ALL = "all"


class TrackedGradients(Enum):
    """The gradients whose halves automatic loss scaling counts, under PopART's names for the methods."""

    ALL_BUT_VIEWS = "AllNonViewChangingGradientTensors"
    """Gradients of all tensors that an operator computes with, rather than views."""
    PRODUCTS = "ConvAndMatmulGradients"
    """Gradients that enter convolutions and matrix products."""
    NAMED = "GradientsOfUserSpecifiedTensors"
    """Those of named tensors."""


@dataclass(frozen=True, slots=True)
class AdaptiveLossScale:
    """Automatic loss scaling: every ``period`` batches the scale halves if more than ``threshold`` of the tracked
    halves exceed ``edge`` times the largest half, and doubles otherwise. ``names``: the tensors of `NAMED`.
    """

    tracked: TrackedGradients = TrackedGradients.ALL_BUT_VIEWS
    names: tuple[str, ...] | None = None
    edge: float = 0.125
    threshold: float = 1e-7
    period: int = 1


@dataclass(frozen=True, slots=True)
class PhaseSettings:
    """Phased execution. ``stages``: IPUs that take turns. ``preload``: the next phase's weights come while one
    computes. ``batched``: optimizer state of all weights of an IPU comes at once.
    """

    phases: int = 0
    stages: int = 2
    preload: bool = True
    batched: bool = False


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a model is to run: what front ends' options come down to. The defaults are one replica on one IPU, one
    micro-batch a batch.

    ``replicas`` are those of all instances, ``local_replicas`` those of this process, of which ``first_replica`` is the
    first. ``accumulation`` micro-batches make a batch where gradients are accumulated (``accumulates``). Gradients are
    added; with ``mean`` they are averaged over replicas and micro-batches, with ``running_mean`` as they come.
    """

    replicas: int = 1
    local_replicas: int = 1
    first_replica: int = 0
    accumulates: bool = False
    accumulation: int = 1
    mean: bool = False
    running_mean: bool = False

    placement: PlacedBy = PlacedBy.ONE_IPU
    split_ratios: tuple[float, ...] = ()
    phases: PhaseSettings = PhaseSettings()
    pipelined: bool = False
    order: PipelineOrder | None = PipelineOrder.GROUPED
    """The order of micro-batches in a pipeline; None: one after the other, without overlap."""
    checks_restores: bool = True
    """Refuse what a pipeline that recomputes cannot restore."""
    clips_serially: bool = False
    """The update follows the accumulation serially, so that a pipeline has no norm over all gradients."""

    recomputation: Recomputation = Recomputation.NOTHING
    outlining: bool = True
    locations: Locations = field(default_factory=Locations)
    io_tiles: int = 0
    partials: str = "float32"
    convolution_partials: str = "float32"

    constant_weights: bool = False
    synthetic: SyntheticData = SyntheticData.OFF
    unsent: tuple[str, ...] = ()
    """Inputs and tensors of which synthetic data stand in for what crosses between host and device, and variables that
    stay on the host.
    """
    stochastic_rounding: bool = False
    floating_point_checks: bool = False
    keeps_random_state: bool = True
    keeps_replica_state: bool = False
    """The host keeps running statistics of every replica."""
    casting: bool = True
    """64-bit integers become 32-bit ones; otherwise they are refused, with ``casting_hint``."""
    casting_hint: str = ""
    loss_scale: AdaptiveLossScale | None = None
    wide_loss_scale: bool = False
    """A half loss is differentiated in float32."""

    cache_directory: str = ""
    cache_suffix: str = ".popef"
    """How the names of files in that directory end."""
    engine_options: Mapping[str, str] = field(default_factory=dict)
    planner_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """See `podrun.runtime.planner_options`."""
    cycle_counters: frozenset[str] | None = None
    """``outer`` and ``inner`` counters; None: no cycles are counted."""
    dialect: Dialect | None = None
    rewrite: Callable[[OperatorGraph, Sequence[str]], OperatorGraph] | None = None
    """The front end's own change of a training graph, given the anchors."""
    words: Words = NEUTRAL
    """What messages call the front end's calls and options."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a batch."""
        return self.accumulation if self.accumulates else 1

    @property
    def overlaps(self) -> bool:
        """True iff micro-batches overlap in a pipeline."""
        return self.pipelined and self.order is not None

    @property
    def overlaps_batches(self) -> bool:
        """True iff the batches of a run overlap in a pipeline: inference, or no accumulation."""
        return self.overlaps and not self.accumulates


@dataclass(frozen=True, slots=True)
class Returned:
    """Which values of a tensor come back to the host, and what runs while they cross."""

    retrieval: Retrieval = Retrieval.ALL
    period: int = 1
    beside: Beside = Beside.NOTHING

    def spec(self, name: str) -> AnchorSpec:
        """The anchor ``name``, as the compiler takes it."""
        return AnchorSpec(name, self.retrieval, self.period)

    @property
    def every_micro_batch(self) -> bool:
        """True iff all micro-batches of the batches that return come back, each by itself."""
        return self.retrieval in (Retrieval.ALL, Retrieval.EVERY_N)

    def crossings(self, batches: int, accumulation: int) -> int:
        """Micro-batches that each replica hands over in one run."""
        if self.retrieval is Retrieval.ALL:
            return batches * accumulation
        return batches // self.period * accumulation if self.retrieval is Retrieval.EVERY_N else 1

    def __str__(self) -> str:
        return (
            f"EveryN, {self.period}"
            if self.retrieval is Retrieval.EVERY_N
            else self.retrieval.name.capitalize()
        )


class RunPlan(Protocol):
    """What a run consists of: ``batches`` in one run, and the tensors that come back, in order of name."""

    @property
    def batches(self) -> int:
        """Batches in one run."""

    @property
    def returned(self) -> Mapping[str, Returned]:
        """Tensors that come back, by name."""


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """A `RunPlan` that does not change."""

    batches: int
    returned: Mapping[str, Returned]


@dataclass(frozen=True, slots=True)
class StepTensor:
    """A tensor that crosses in a run. ``spec``: of one micro-batch. ``layout``: the logical shape of the run's data.
    ``explain`` gives text that says where its size comes from, for error messages.
    """

    name: str
    spec: TensorSpec
    layout: tuple[int, ...]
    explain: Callable[[], str]

    @property
    def elements(self) -> int:
        """Elements in one run."""
        return int(np.prod(self.layout, dtype=np.int64))


class StepData:
    """What a run takes: hands over one tensor's data of a whole run, and takes one tensor's results."""

    def check(self, inputs: Mapping[str, StepTensor], outputs: Mapping[str, StepTensor]) -> None:
        """Raise before anything runs if the data cannot be right."""

    def input_names(self) -> Sequence[str]:
        """The inputs that data are given for, as far as that is known before they are fetched."""
        return ()

    def fetch(self, tensor: StepTensor) -> np.ndarray:
        """The data of input ``tensor``, with its layout and device type."""
        raise NotImplementedError

    def target(self, tensor: StepTensor) -> np.ndarray | None:
        """An array that the device may write the results of ``tensor`` to, in its layout; None: use `store`."""
        return None

    def store(self, tensor: StepTensor, value: np.ndarray) -> None:
        """Take the results of ``tensor``."""
        raise NotImplementedError
