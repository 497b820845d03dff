"""A Program: what a front end hands to the compiler. Plain values and one JAX-traceable function.

The function computes one micro-batch on one replica. The compiler traces it once, folds replicas and
micro-batches over it, differentiates it, schedules it and exports it; the same trace is costed on tiles.
`classify` says what each anchor is: its kind and its tensor, by the reserved names that the compiler knows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from podrun.core.errors import present
from podrun.core.executable import Reduction, Retrieval, TensorSpec
from podrun.core.layout import Layout
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.settings import NOTHING, ON_CHIP, Location, PlanOptions, Recompute

if TYPE_CHECKING:
    import jax

Tensors = Mapping[str, Any]
"""Tensors by name: ``jax.Array`` inside a trace, ``numpy.ndarray`` outside."""

Forward = Callable[[Tensors, Tensors, Any], dict[str, Any]]
"""``forward(parameters, inputs, key) -> values``: every tensor that an anchor, the loss or a state update
names (more does no harm: what nobody names is pruned).

``parameters`` has every entry of `Program.parameters`, ``inputs`` every entry of `Program.inputs` for one
replica and one micro-batch, ``key`` is a JAX random key (threefry), distinct for each replica and
micro-batch. Operators placed on IPU *i* run under ``jax.named_scope("ipu:i")``, pipeline stage *s* under
``jax.named_scope("stage:s")``, and each operator under its own name. A tensor whose gradient is anchored
(``Gradient___<name>``) goes through `tap` before anything uses it.
"""


def tap(name: str, value: object) -> Any:
    """``value`` as the tensor ``name``, apart from every other tensor that has the same value.

    An identity that costs nothing and is seen by the compiler: gradients are taken with respect to what consumers of
    ``name`` read, so an operator that passes its input through (Identity, Reshape to the same shape) does not make the
    gradients of its input and its output one. Cheap enough to use for every output of every operator.
    """
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(value, name)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """An initializer of the model. ``trainable``: a gradient path to the loss exists and the optimizer
    updates it. ``group_of``: the group of each replica of the program, if groups of replicas have values of
    their own (`podrun.compiler.arenas`); ``spec`` is then what one replica sees. Empty: one value for all. Of a
    parameter in `Program.state_updates`, which every replica keeps for itself: which row of the host's each starts
    from, and which each may be read from (`podrun.core.executable.Variable.rows`)."""

    spec: TensorSpec
    trainable: bool
    group_of: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A model input for one micro-batch of one replica. ``broadcast``: all replicas get the same data."""

    spec: TensorSpec
    broadcast: bool = False


@dataclass(frozen=True, slots=True)
class AnchorSpec:
    """A tensor handed back to the host: an activation, a parameter, the loss, or ``Gradient___<name>``."""

    name: str
    retrieval: Retrieval = Retrieval.ALL
    period: int = 1


class UpdateRule(Protocol):
    """How an optimizer changes one weight. Stateless object; state and scalars are passed in.

    ``elementwise`` rules see flat slices of any length (many weights at once, if their scalars agree), so
    each machine updates its own slice. The others see each whole weight by itself.
    """

    @property
    def elementwise(self) -> bool: ...

    def group_key(self, weight: str) -> tuple[Any, ...]:
        """Weights with equal keys share constant hyper-parameters and scalar names, and so one arena."""

    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        """Lasting state by reserved-name prefix (``Accl___`` ...): spec (named prefix + weight) and initial value."""

    def scalars(self, weight: str) -> dict[str, float]:
        """Streamed (non-const) hyper-parameters by full reserved name, with their current values."""

    def apply(
        self,
        weight_name: str,
        weight: jax.Array,
        gradient: jax.Array,
        state: Mapping[str, Any],
        scalars: Mapping[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        """New weight and state. ``gradient`` is the sum over replicas and micro-batches of the loss-scaled
        gradients."""


@runtime_checkable
class JointRule(UpdateRule, Protocol):
    """A rule whose update of one weight depends on other weights' gradients or states (clipping by a norm
    over several weights). If ``joint`` is true, all weights are updated by one call of `apply_joint`;
    ``elementwise`` must be false then.
    """

    @property
    def joint(self) -> bool: ...

    def apply_joint(
        self,
        weights: Mapping[str, Any],
        gradients: Mapping[str, Any],
        states: Mapping[str, Mapping[str, Any]],
        scalars: Mapping[str, Any],
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """New weights and states by weight; ``scalars`` has those of all weights (and may have more)."""


@runtime_checkable
class NormRule(JointRule, Protocol):
    """A joint rule that can tell the norms it clips by."""

    def norms(
        self,
        weights: Mapping[str, Any],
        gradients: Mapping[str, Any],
        states: Mapping[str, Mapping[str, Any]],
        scalars: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The norm of each group by its number (``"0"``, ``"1"`` ...), from what `apply_joint` takes."""


def joint(rule: UpdateRule | None) -> JointRule | None:
    """The rule if it updates all weights at once, else None."""
    return rule if isinstance(rule, JointRule) and rule.joint else None


@dataclass(frozen=True, slots=True)
class Locations:
    """Where kinds of variables live, and single tensors by name (``overrides``). Locations never change a result."""

    weights: Location = ON_CHIP
    optimizer_state: Location = ON_CHIP
    accumulators: Location = ON_CHIP
    activations: Location = ON_CHIP
    overrides: Mapping[str, Location] = field(default_factory=dict)

    def of(self, name: str, kind: Location) -> Location:
        """Where the tensor ``name`` of a kind lives."""
        return self.overrides.get(name, kind)


FACTOR = "lossScaleUpdateFactor"
"""Variable: the factor by which automatic loss scaling multiplies the loss scaling. Update rules divide it out
again.
"""
PHASE = "lossScaleUpdatePhase"
"""Variable: the batch's number modulo the period of automatic loss scaling."""


RNG = "rngState___"
"""Variable, uint32 ``[2]``: the state of the generator that rounds stochastically. A rule that names it among its
scalars gets the state of its own place.
"""


@dataclass(frozen=True, slots=True)
class AutomaticScaling:
    """Automatic loss scaling (`podrun.compiler.extra_state`).

    ``tracked``: the values and weights whose gradients are counted; ``edge``: the magnitude that divides them in small
    and large; ``threshold``: the part of large ones beyond which the factor is halved; ``period``: batches from update
    to update; ``most``: the greatest loss scaling that the factor may lead to (None: any).
    """

    tracked: tuple[str, ...]
    edge: float
    threshold: float
    period: int = 1
    most: float | None = None


class PipelineOrder(enum.Enum):
    """The order of a pipelined replica's work. All give the same bits."""

    GROUPED = "grouped"
    """An IPU does forward and backward work of different micro-batches in each cycle; PopART's."""
    INTERLEAVED = "interleaved"
    """Forward and backward work take turns: half of the stash, less overlap."""

    @property
    def period(self) -> int:
        """Cycles from one micro-batch to the next."""
        return 2 if self is PipelineOrder.INTERLEAVED else 1


@dataclass(frozen=True, slots=True)
class Phases:
    """Operators run in ``count`` phases, then backward through all but the last of them. Places (scopes ``stage:s``)
    are ``phase * ipus_per_replica + ipu``. ``preload``: while a phase computes, the next one's off-chip tensors come.
    ``batched``: optimizer state of all weights comes together, while others are updated, not with each weight in turn.
    """

    count: int
    preload: bool
    batched: bool = False


class Beside(enum.Enum):
    """What runs while a tensor crosses between host and IPU."""

    NOTHING = "nothing"
    """The IPU waits for it."""
    MICRO_BATCHES = "micro_batches"
    """Other micro-batches of its batch: the first load and the last store of a batch are waited for."""
    BATCHES = "batches"
    """Other micro-batches, also those of the batches before and after."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """How the host's data cross, in a program that arranges it. Changes modelled time and memory, no result.

    ``io_tiles``: tiles of each IPU that only move data. ``beside``: by name of an input or anchor; NOTHING for others.
    """

    io_tiles: int = 0
    beside: Mapping[str, Beside] = field(default_factory=dict)

    def of(self, name: str) -> Beside:
        """What runs while an input or anchor crosses."""
        return self.beside.get(name, Beside.NOTHING)


@dataclass(frozen=True, slots=True)
class Program:
    """What a front end hands to the compiler: plain values, and a JAX-traceable function of one micro-batch on one
    replica.

    ``replicas``: over the whole program (all instances); ``ipus_per_replica`` IPUs each; on machines of four IPUs, or
    on one smaller partition. ``loss`` names a forward value with one element (None: inference). ``state_updates`` maps
    a parameter to the forward value that replaces it after each micro-batch (running statistics). ``loss_scaling``
    multiplies the gradient that enters the backward pass; the update rule divides it out.
    """

    name: str
    forward: Forward
    parameters: Mapping[str, ParameterSpec]
    inputs: Mapping[str, InputSpec]
    anchors: tuple[AnchorSpec, ...]
    replicas: int = 1
    ipus_per_replica: int = 1
    accumulation_factor: int = 1
    loss: str | None = None
    update: UpdateRule | None = None
    loss_scaling: float | str = 1.0
    """A constant, or the name of the scalar variable that holds it."""
    reduction: Reduction = Reduction.SUM
    """SUM: the update sees the sum of the gradients over replicas and micro-batches. MEAN: their running mean
    (`podrun.compiler.extra_state`)."""
    automatic_scaling: AutomaticScaling | None = None
    state_updates: Mapping[str, str] = field(default_factory=dict)
    shared_state: frozenset[str] = frozenset()
    """Parameters among ``state_updates`` whose new values are equal on all replicas, as those of weights are that a
    step updates with summed gradients: a machine holds one copy of each. Only without a loss, and on one place.
    """
    uses_random: bool = False
    rounds_stochastically: bool = False
    """float16 results of operators are rounded stochastically (`podrun.compiler.stochastic`), gradients too."""
    pipelined: bool = False
    """Stages (scopes ``stage:s``) of a replica work on different micro-batches at the same time."""
    pipeline_schedule: PipelineOrder = PipelineOrder.GROUPED
    updates_each_micro_batch: bool = False
    """Pipelined training without accumulation: the micro-batches of a "batch" are batches of one. Each changes the
    weights of a stage as soon as that stage has their gradient, while others are in flight."""
    phases: Phases | None = None
    recompute: Recompute = NOTHING
    """Forward values that the backward pass computes again. Changes modelled memory and cycles, and no bit of a
    result.
    """
    locations: Locations = field(default_factory=Locations)
    plans: PlanOptions = field(default_factory=PlanOptions)
    """How the tile model plans products: changes modelled cycles and memory, no result."""
    transfers: Transfers | None = None
    """None: the host's data are there in time, and take no modelled time."""
    unsent: frozenset[str] = frozenset()
    """Inputs and anchors whose data do not cross between host and device, and parameters that stay on the host. They
    are modelled without buffers and transfers.
    """
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def update_rule(self) -> UpdateRule:
        """The update of a program that trains. Raises InternalError for one that does not."""
        return present(self.update, "only a program that trains is asked for its update")

    @property
    def training(self) -> bool:
        """True iff there is a loss to differentiate and a rule to apply."""
        return self.loss is not None

    @property
    def replica_state(self) -> frozenset[str]:
        """The parameters of which every replica keeps a value of its own."""
        return frozenset(self.state_updates) - self.shared_state

    @property
    def accumulates(self) -> bool:
        """True iff gradients of several micro-batches are added up before an update."""
        return self.training and self.accumulation_factor > 1 and not self.updates_each_micro_batch


def layout_of(program: Program) -> Layout:
    """The machines that the program's replicas lie on. Raises UsageError if they cannot fill machines evenly."""
    return Layout.of(program.replicas, program.ipus_per_replica)
