"""What update rules read of an optimizer and of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from podrun.core.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A value, and whether it is fixed for the life of the program."""

    value: float
    constant: bool = True


@dataclass(frozen=True, slots=True)
class Clipping:
    """A group of weights whose norm is clipped at ``max_norm``. ``weights`` None: all."""

    max_norm: float
    weights: tuple[str, ...] | None = None

    def members(self, weights: Sequence[str]) -> Sequence[str]:
        """The weights of the group among all, which are given in order."""
        return weights if self.weights is None else self.weights


class Hyperparameters(Protocol):
    """The values of an optimizer; a later optimizer's replace them while the program runs."""

    @property
    def loss_scaling(self) -> Hyperparameter:
        """What the loss is multiplied with before its gradients are computed."""

    @property
    def clipping(self) -> Sequence[Clipping]:
        """The groups of weights whose norms are clipped."""

    def hyperparameter(self, name: str, weight: str) -> Hyperparameter:
        """A value for one weight."""

    def is_specific(self, name: str, weight: str) -> bool:
        """True iff a weight has a value of its own."""


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """What an update rule must know about the session: replicas over all instances, accumulation, and whether gradients
    are averaged over both (Mean) or summed.
    """

    replicas: int = 1
    accumulation: int = 1
    mean: bool = False
    running: bool = False
    """The mean is a running one: gradients arrive averaged."""
    automatic: bool = False
    """Automatic loss scaling: the loss scaling is the optimizer's times `podrun.compiler.program.FACTOR`."""

    stochastic: bool = False
    """Halves that an update stores are rounded stochastically."""

    own_copies: bool = False
    """Each machine keeps and updates all weights by itself, so that a difference between machines is visible."""

    @property
    def divisor(self) -> int:
        """What an arriving gradient is divided by, apart from the loss scaling."""
        return self.replicas * self.accumulation if self.mean and not self.running else 1
