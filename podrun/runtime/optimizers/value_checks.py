"""Checks of hyper-parameters: which values make sense, and which may replace others in a running program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.optimizers.hyperparameters import Hyperparameter


def _spoken(name: str) -> str:
    """A hyper-parameter's name in a sentence: ``velocityScaling`` -> ``velocity scaling``."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name)


@dataclass(frozen=True, slots=True)
class ValueLimits:
    """Hyper-parameters of an optimizer ``owner`` that must be at least 0, and those that must be greater."""

    owner: str
    not_negative: Sequence[str]
    positive: Sequence[str] = ()

    def check(self, where: str, values: Mapping[str, Hyperparameter]) -> None:
        """UsageError for a value out of its limits. ``where``: whose values these are, for messages."""
        for name in self.not_negative:
            if values[name].value < 0:
                raise UsageError(
                    f"Negative {_spoken(name)} ({values[name].value:g}) in {self.owner}, {where}: {name} must be at "
                    "least 0."
                )
        for name in self.positive:
            if values[name].value <= 0:
                raise UsageError(
                    f"Non-positive {_spoken(name)} ({values[name].value:g}) in {self.owner} is not supported ({where}: "
                    f"{name})."
                )
        rate = values["learningRate"]
        if rate.constant and rate.value == 0:
            raise UsageError(
                f"Constant, zero learning rate in {self.owner}, {where}: it would train nothing."
            )


ADAM_LIMITS = ValueLimits(
    "Adam", ("learningRate", "weightDecay", "beta1", "beta2", "maxWeightNorm"), ("eps",)
)
ADAPTIVE_LIMITS = ValueLimits("Adaptive", ("learningRate", "weightDecay", "alpha", "momentum"), ("eps",))
SGD_LIMITS = ValueLimits(
    "SGD", ("learningRate", "weightDecay", "momentum", "dampening"), ("velocityScaling",)
)


def check_loss_scaling(owner: str, value: Hyperparameter) -> None:
    """UsageError for a loss scaling of 0."""
    if value.value == 0:
        raise UsageError(f"Loss scaling cannot be 0 ({owner}: lossScaling).")


def check_bounds(bounds: Iterable[float]) -> None:
    """UsageError for a bound of a norm that is not positive."""
    if any(bound <= 0 for bound in bounds):
        raise UsageError("The maxNorm of ClipNormSettings must be positive.")


def check_forms(owners: tuple[str, str], same: bool) -> None:
    """UsageError if an optimizer of another kind, or of another form, is to replace the first one of ``owners``."""
    before, after = owners
    if before != after:
        raise UsageError(
            f"Optimizer update not valid: the session was made with {before}, which {after} cannot replace."
        )
    if not same:
        raise UsageError(
            "Optimizer update not valid: clip norm settings, modes and types must be those the session was made with."
        )


def check_weights(before: Iterable[str], after: Iterable[str]) -> None:
    """UsageError unless the same weights have values of their own."""
    if set(before) != set(after):
        raise UsageError(
            f"Optimizer update not valid: weights with values of their own were {sorted(before)}, now {sorted(after)}."
        )


def check_replaced(what: str, old: Hyperparameter, new: Hyperparameter) -> None:
    """UsageError for a constant that changes, or for a value that becomes constant or stops being so."""
    if old.constant != new.constant:
        raise UsageError(
            f"Can not replace a {'' if old.constant else 'non '}constant value with a "
            f"{'' if new.constant else 'non '}constant value. Optimizer update not valid: {what}."
        )
    if old.constant and old.value != new.value:
        raise UsageError(
            f"Values are constant but do not match. Optimizer update not valid: {what} is constant at "
            f"{old.value:g}, so it cannot become {new.value:g}."
        )
