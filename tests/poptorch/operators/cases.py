"""A case of the table of operators, and numbers for its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SHAPES = ((3, 4), (2, 3, 5), ())


@dataclass(frozen=True, slots=True)
class Case:
    """One call. ``arguments``: made from a source of numbers. ``smooth``: it has a gradient that torch has, too."""

    form: str
    arguments: Callable[[Numbers], tuple[Any, ...]]
    keywords: dict[str, Any]
    smooth: bool
    label: str


class Numbers:
    """Tensors of random numbers, always the same ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._random = dtype, np.random.default_rng(7)

    def __call__(self, *shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
        """Between two bounds, all different and none near a whole number or a half."""
        count = int(np.prod(shape))
        steps = (self._random.permutation(count) + 0.37) / max(count, 1)
        values = torch.from_numpy(np.asarray(low + steps * (high - low), np.float32).reshape(shape))
        return values.to(self.dtype)

    def whole(self, high: int, *shape: int) -> torch.Tensor:
        """Integers below a bound."""
        return torch.from_numpy(np.asarray(self._random.integers(0, high, shape), np.int64))

    def truths(self, *shape: int) -> torch.Tensor:
        """True or False."""
        return self.whole(2, *shape).bool()

    def matrix(self, n: int, *lead: int) -> torch.Tensor:
        """Square matrices with positive eigenvalues, in float32 whatever the type."""
        x = torch.from_numpy(self._random.standard_normal((*lead, n, n)).astype(np.float32))
        return x @ x.mT + n * torch.eye(n)


Make = Callable[[Numbers], tuple[Any, ...]]


def cases_of(forms: str, *makes: Make, smooth: bool = True, **keywords: Any) -> Iterator[Case]:
    for form in forms.split():
        for index, make in enumerate(makes):
            yield Case(form, make, keywords, smooth, f"{form}:{index}")


def shaped(forms: str, low: float = -2.0, high: float = 2.0, smooth: bool = True, count: int = 1) -> Any:
    """Element-wise operators of ``count`` tensors."""

    def make(shape: tuple[int, ...]) -> Make:
        return lambda n: tuple(n(*shape, low=low, high=high) for _ in range(count))

    return cases_of(forms, *[make(shape) for shape in SHAPES], smooth=smooth)


def operator_of(form: str, args: Any, keywords: Any) -> Any:
    """Torch's operator of a form: the named overload, or the first one that takes these arguments."""
    name, _, overload = form.partition(".")
    packet = getattr(torch.ops.aten, name)
    if overload:
        return getattr(packet, overload)
    numbers = ("out", "int", "float", "complex", "str", "Scalar")
    for overload in packet.overloads():
        if overload.split("_")[0] in numbers and overload != "Scalar":
            continue
        found = getattr(packet, overload)
        try:
            with torch.no_grad():
                found(*args, **keywords)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        return found
    raise LookupError(f"no overload of {form} takes the case's arguments")
