"""Update rules: the arithmetic of optimizers as the compiler takes it (`podrun.compiler.program.UpdateRule`).

Scalars. What a rule multiplies with (``lr / vs`` and the like) is computed here in double precision and rounded once to
float32, whether it is baked in or streamed: so a constant and a streamed hyper-parameter give the same bits. A compound
is streamed if one of its hyper-parameters is not constant; its name says whether it is the default's or one weight's.

Types. Weights and state are widened to float32, updated, and rounded once to their own type.
"""

from __future__ import annotations

import abc
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from podrun.compiler.program import FACTOR, RNG
from podrun.core.executable import TensorSpec
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.optimizers.hyperparameters import Hyperparameters, UpdateContext
from podrun.runtime.tensor_names import default_scalar, specific_scalar

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, slots=True)
class Compound:
    """A scalar made of hyper-parameters: ``compute(values, divisor)`` from values by name (lossScaling among them)."""

    name: str
    parts: tuple[str, ...]
    compute: Callable[[Mapping[str, float], int], float]

    @property
    def scales(self) -> bool:
        """True iff it grows with the loss scaling. Other compounds that use the loss scaling shrink as it grows."""
        return self.parts == ("lossScaling",)


def plain(name: str, part: str) -> Compound:
    """The compound that consists of one hyper-parameter."""
    return Compound(name, (part,), lambda values, divisor: values[part])


@dataclass(frozen=True, slots=True)
class Scalar:
    """A compound for one weight: its value, and its name if it is streamed (None: constant)."""

    value: float
    streamed: str | None


Clip = Callable[[Any], Any]
"""Scales the tensor that gradient clipping acts on. Which tensor that is depends on the optimizer."""


def unclipped(value: object) -> Any:
    """The value itself: the `Clip` of a weight that is not clipped, or has been."""
    return value


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What the update of one weight starts from, in float32: ``state`` by prefix, ``factors`` (compounds) by name. What
    gradient clipping scales goes through ``clip``, once.
    """

    weight: jax.Array
    gradient: jax.Array
    state: Mapping[str, jax.Array]
    factors: Mapping[str, jax.Array]
    clip: Clip = unclipped
    name: str = ""


class Rule(abc.ABC):
    """Base of the update rules. ``COMPOUNDS`` are the scalars it works with.

    ``values`` are the optimizer's hyper-parameters, which another optimizer's may replace.
    """

    elementwise: bool = True

    def __init__(self, values: Hyperparameters, context: UpdateContext) -> None:
        self.values = values
        self.context = context
        self.joint = bool(values.clipping)
        self.elementwise = not self.joint and not context.own_copies

    @abc.abstractmethod
    def form_key(self) -> tuple[Any, ...]:
        """What decides the arithmetic of all weights, apart from scalars: equal for rules of equal programs."""

    @abc.abstractmethod
    def compounds(self, weight: str) -> Sequence[Compound]:
        """The scalars that the update of ``weight`` uses."""

    def variant(self, weight: str) -> tuple[Any, ...]:
        """What decides the arithmetic of ``weight``'s update, apart from scalars."""
        return ()

    def operators(self, weight: str) -> tuple[str, ...]:
        """The types of the SDK's operators that ``weight``'s update is there, in order."""
        return ("ScaledVarUpdate",)

    def scalar(self, compound: Compound, weight: str) -> Scalar:
        """A compound's value and name for ``weight``."""
        parts, constant, specific = {}, True, False
        for part in compound.parts:
            if part == "lossScaling":
                value = self.values.loss_scaling
            else:
                value = self.values.hyperparameter(part, weight)
                specific = specific or self.values.is_specific(part, weight)
            parts[part] = value.value
            constant = constant and value.constant
        result = compound.compute(parts, self.context.divisor)
        if constant:
            return Scalar(result, None)
        return Scalar(
            result, specific_scalar(compound.name, weight) if specific else default_scalar(compound.name)
        )

    def group_key(self, weight: str) -> tuple[Any, ...]:
        """Weights with equal keys are updated with equal scalars by equal arithmetic."""
        scalars = [self.scalar(compound, weight) for compound in self.compounds(weight)]
        return (*self.variant(weight), *((s.streamed, None if s.streamed else s.value) for s in scalars))

    def scalars(self, weight: str) -> dict[str, float]:
        """Streamed scalars and their current values, without the factor of automatic loss scaling, which the device
        changes.
        """
        scalars = {}
        for compound in self.compounds(weight):
            scalar = self.scalar(compound, weight)
            if scalar.streamed is not None:
                scalars[scalar.streamed] = scalar.value
        scalars |= {FACTOR: 1.0} if self.context.automatic else {}
        return scalars | ({RNG: 0.0} if self.context.stochastic else {})

    def inverse_scales(self, weight: str) -> list[str | None]:
        """The streamed scalars that divide gradients by the loss scaling; None where the loss scaling itself is the
        divisor.
        """
        scalars = [c for c in self.compounds(weight) if "lossScaling" in c.parts]
        return [None if c.scales else self.scalar(c, weight).streamed for c in scalars]

    def factors(self, weight: str, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Compounds by name as float32 values inside the trace."""
        import jax.numpy as jnp

        factors = {}
        for compound in self.compounds(weight):
            scalar = self.scalar(compound, weight)
            factors[compound.name] = (
                jnp.float32(scalar.value)
                if scalar.streamed is None
                else scalars[scalar.streamed].astype(jnp.float32)
            )
            if self.context.automatic and "lossScaling" in compound.parts:
                value, factor = factors[compound.name], scalars[FACTOR].astype(jnp.float32)
                factors[compound.name] = value * factor if compound.scales else value / factor
        return factors

    @abc.abstractmethod
    def state(self, weight: TensorSpec) -> dict[str, tuple[TensorSpec, float]]:
        """Lasting state by reserved prefix, with the value it starts from."""

    def initial_state(self, weight: TensorSpec, value: object) -> dict[str, Any]:
        """State whose start depends on the weight's value (NumPy array), by prefix."""
        return {}

    def gradient_dtype(self, weight: TensorSpec) -> str:
        """Type that gradients are accumulated and reduced in."""
        return weight.dtype

    def apply(
        self,
        weight_name: str,
        weight: jax.Array,
        gradient: jax.Array,
        state: Mapping[str, Any],
        scalars: Mapping[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        """New weight and state (see the contract); widens and rounds around `update`."""
        return self._apply(weight_name, weight, gradient, state, scalars, unclipped)

    def _apply(
        self,
        name: str,
        weight: jax.Array,
        gradient: jax.Array,
        state: Mapping[str, Any],
        scalars: Mapping[str, Any],
        clip: Clip,
    ) -> tuple[Any, dict[str, Any]]:
        import jax.numpy as jnp

        wide = {prefix: value.astype(jnp.float32) for prefix, value in state.items()}
        new_weight, new_state = self.update(
            WeightUpdate(
                weight.astype(jnp.float32),
                gradient.astype(jnp.float32),
                wide,
                self.factors(name, scalars),
                clip,
                name,
            )
        )
        bits = scalars[RNG] if self.context.stochastic else None
        rounded = {
            prefix: _rounded(value, state[prefix].dtype, bits, name + prefix)
            for prefix, value in new_state.items()
        }
        return _rounded(new_weight, weight.dtype, bits, name), rounded

    def apply_joint(
        self,
        weights: Mapping[str, Any],
        gradients: Mapping[str, Any],
        states: Mapping[str, Mapping[str, Any]],
        scalars: Mapping[str, Any],
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Update all weights at once (see the contract). The tensors that `update` clips are scaled to their group's
        bound.

        The factor is ``maxNorm / max(norm, maxNorm)`` with the norm over all tensors of the group.
        """
        import jax.numpy as jnp

        norms = self.norms(weights, gradients, states, scalars)
        factor_of: dict[str, Any] = {}
        for number, group in enumerate(self.values.clipping):
            norm = norms[str(number)]
            bound = jnp.float32(group.max_norm)
            factor_of |= dict.fromkeys(group.members(sorted(weights)), bound / jnp.maximum(norm, bound))
        results = {}
        for name, weight in weights.items():
            clip = partial(operator.mul, factor_of[name]) if name in factor_of else unclipped
            results[name] = self._apply(name, weight, gradients[name], states[name], scalars, clip)
        return {n: new for n, (new, _) in results.items()}, {n: after for n, (_, after) in results.items()}

    def norms(
        self,
        weights: Mapping[str, Any],
        gradients: Mapping[str, Any],
        states: Mapping[str, Mapping[str, Any]],
        scalars: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The norm over all tensors of each clipping group, by its number: what ``GlobalNorm___`` anchors give."""
        import jax.numpy as jnp

        clipped: dict[str, Any] = {}
        for name, weight in weights.items():

            def keep(value: object, name: str = name) -> Any:
                clipped[name] = value
                return value

            self._apply(name, weight, gradients[name], states[name], scalars, keep)
        norms = {}
        for number, group in enumerate(self.values.clipping):
            members = group.members(sorted(weights))
            norms[str(number)] = jnp.sqrt(sum(jnp.sum(clipped[name] * clipped[name]) for name in members))
        return norms

    @abc.abstractmethod
    def update(self, now: WeightUpdate) -> tuple[Any, dict[str, Any]]:
        """The new weight and state, in float32."""


def _rounded(value: Any, dtype: Any, bits: Any, name: str) -> Any:
    """A new value in the type that stores it; halves are rounded stochastically if there are ``bits``."""
    import jax.numpy as jnp

    if bits is None or dtype != jnp.float16:
        return value.astype(dtype)
    from podrun.compiler.extra_state import place_state, stochastic_half

    return stochastic_half(value, place_state(bits, zlib.crc32(name.encode())))


def state_spec(prefix: str, weight: TensorSpec, dtype: str | None = None) -> TensorSpec:
    """State of the weight's shape, and of its type unless another one is given."""
    return TensorSpec(prefix + weight.name, dtype or weight.dtype, weight.shape)
