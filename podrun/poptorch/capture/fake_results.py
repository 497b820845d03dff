"""Results of operators whose shapes torch cannot work out without data, although they do not depend on it.

Each function takes the operator's arguments, fake tensors among them, and gives fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from podrun.poptorch.errors import Error


def _ctc_loss(
    logs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    if reduction:
        return logs.new_empty(())
    return logs.new_empty(logs.shape[1:2] if logs.dim() == 3 else ())


def _of_rows(x: torch.Tensor, **keywords: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], x.shape[0]) if x.dim() == 2 and x.shape[0] > 1 else ())


def _narrow(x: torch.Tensor, dim: int, start: torch.Tensor, length: int) -> torch.Tensor:
    sizes = list(x.shape)
    sizes[dim] = length
    return x.new_empty(sizes)


def _bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    if not minlength:
        raise Error(
            "bincount gives as many numbers as its greatest value says, which is not known while the model is compiled",
            hint="Give minlength: greater values are left out.",
        )
    return x.new_empty(minlength) if weights is None else weights.new_empty(minlength)


FAKE_RESULTS: dict[str, Callable[..., torch.Tensor]] = {
    "aten.ctc_loss.IntList": _ctc_loss,
    "aten.ctc_loss.Tensor": _ctc_loss,
    "aten.bincount.default": _bincount,
    "aten.cov.default": _of_rows,
    "aten.corrcoef.default": _of_rows,
    "aten.narrow.Tensor": _narrow,
}
"""By the operator's name."""
