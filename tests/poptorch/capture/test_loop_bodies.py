"""Bodies of loops and branches that write in place to their own arguments, against the same bodies on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402


def added(x: Any, y: Any) -> Any:
    x.add_(y)
    return x, y


def row_written(x: Any, y: Any) -> Any:
    x[0] = x[0] * y[1]
    y[1:].mul_(2)
    return x + 1, y


def swapped(x: Any, y: Any) -> Any:
    x *= 2
    return y, x


class Looped(torch.nn.Module):
    """Runs a body in a loop, or in a branch, and returns its arguments as they are afterwards too."""

    def __init__(self, body: Callable[..., Any], branch: bool) -> None:
        super().__init__()
        self.body, self.branch = body, branch

    def forward(self, x: Any, y: Any) -> Any:
        if self.branch:
            made = poptorch.cond(x.sum().reshape(1) > 0, self.body, [x.clone(), y.clone()], self.body, [y, x])
        else:
            made = poptorch.for_loop(3, self.body, [x, y])
        return tuple(made), x + 0, y + 0


@pytest.mark.parametrize("branch", [False, True], ids=["loop", "branch"])
@pytest.mark.parametrize("body", [added, row_written, swapped])
@pytest.mark.sample(2)
def test_a_body_writes_to_its_own_arguments(body: Callable[..., Any], branch: bool) -> None:
    x, y = torch.arange(1.0, 7).reshape(2, 3), torch.full((2, 3), 0.5)
    expected = Looped(body, branch)(x.clone(), y.clone())
    torch.testing.assert_close(poptorch.inferenceModel(Looped(body, branch))(x, y), expected)


def test_a_body_may_not_write_to_what_lies_outside() -> None:
    class Outside(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            def body(z: Any) -> Any:
                x.add_(1)
                return z + 1

            return poptorch.for_loop(2, body, [x])

    with pytest.raises(poptorch.Error, match="writes in place to a tensor from outside"):
        poptorch.inferenceModel(Outside())(torch.ones(2))
