"""What a model is called with: bound to forward's parameters, flattened, checked against what was compiled."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from podrun.poptorch.capture.structure import Structure, flatten, unflatten
from podrun.poptorch.errors import Error


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of a call, flat. ``tensors``: positions of tensors among the leaves."""

    leaves: list[Any]
    structure: Structure

    @property
    def tensors(self) -> dict[int, torch.Tensor]:
        """Tensors by position."""
        return {place: leaf for place, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)}

    def replaced(self, tensors: dict[int, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with other tensors."""
        leaves = [tensors.get(place, leaf) for place, leaf in enumerate(self.leaves)]
        args, kwargs = unflatten(self.structure, leaves)
        return tuple(args), kwargs


def bind(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """The arguments in the order of forward's parameters.

    Error for a mandatory one that is missing; AssertionError for too many, an unknown keyword or one that is given
    twice.
    """
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        text = str(error)
        if text.startswith("missing a required"):
            raise Error(f"The arguments of forward do not fit: {text}") from error
        raise AssertionError(f"The arguments of forward do not fit: {text}") from error
    leaves, structure = flatten((bound.args, bound.kwargs))
    return CallArguments([_prepared(leaf) for leaf in leaves], structure)


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=5)


def _prepared(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.numel() == 0:
        raise Error(f"an input of shape {list(leaf.shape)} has no elements: IPUs take no empty tensors")
    if leaf.requires_grad:
        _warn_once("An input requires a gradient: gradients of inputs are not computed, it is detached")
        leaf = leaf.detach()
    if not leaf.is_contiguous():
        _warn_once("An input is not contiguous: it is copied for every call")
        leaf = leaf.contiguous()
    return leaf


def check_same(compiled: CallArguments, given: CallArguments) -> None:
    """Error if a call differs from the one that the model was compiled for."""
    tail = "Call destroy() on the model, or make a new wrapper, to use other inputs."
    if compiled.structure.description != given.structure.description:
        raise Error("The structure of the inputs is not the one that the model was compiled for", hint=tail)
    for before, now in zip(compiled.leaves, given.leaves, strict=True):
        if isinstance(before, torch.Tensor) != isinstance(now, torch.Tensor):
            raise Error(f"The type of an input has changed from {type(before)} to {type(now)}", hint=tail)
        if not isinstance(before, torch.Tensor):
            if type(before) is not type(now) or before != now:
                raise Error(
                    f"An input that is no tensor was {before!r} when the model was compiled and is {now!r} now",
                    hint=tail,
                )
            continue
        if before.shape != now.shape or before.dtype != now.dtype:
            raise Error(
                f"An input was {before.dtype} of shape {list(before.shape)} when the model was compiled and is "
                f"{now.dtype} of shape {list(now.shape)} now",
                hint=tail,
            )
