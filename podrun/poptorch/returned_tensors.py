"""What a wrapper returns: tensors on the host whose ``backward`` says that the IPU has computed it already."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from podrun.poptorch.errors import Error

_returned: Any = WeakIdKeyDictionary()


@functools.cache
def _install() -> None:
    plain: Any = torch.Tensor.backward

    @functools.wraps(plain)
    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self in _returned:
            raise Error(
                "backward() cannot be called on a tensor that a poptorch wrapper has returned",
                hint="A poptorch.trainingModel computes the backward pass and the weight update in its call.",
            )
        return plain(self, *args, **kwargs)

    torch.Tensor.backward = backward  # type: ignore[method-assign]


def mark_returned(leaves: Iterable[Any]) -> None:
    """Let ``backward`` of these tensors raise Error."""
    _install()
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            _returned[leaf] = True
