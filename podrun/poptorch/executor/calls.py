"""Arguments and results of a call: arguments bound to forward's parameters, compared with those of the first call.

``backward`` of a wrapper's result raises Error, because the IPU has computed the gradients already.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.capture.graph import Structure, arranged, flatten, unflatten
from podrun.poptorch.errors import ArgumentError, Error


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of a call, flat. ``parameters``: names of the parameters of forward that positions stand for."""

    leaves: list[Any]
    structure: Structure
    parameters: tuple[str, ...] = ()

    @property
    def tensors(self) -> dict[int, torch.Tensor]:
        """The call's tensors by their position among the flattened arguments."""
        return {place: leaf for place, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)}

    def replaced(self, tensors: dict[int, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with other tensors."""
        leaves = [tensors.get(place, leaf) for place, leaf in enumerate(self.leaves)]
        args, kwargs = unflatten(self.structure, leaves)
        return tuple(args), kwargs

    @property
    def names(self) -> list[str]:
        """What the program calls each leaf: ``x``, ``batch['mask']``."""
        return [self._name(path) for path in self.structure.paths]

    def _name(self, path: tuple[str, ...]) -> str:
        """``[0]`` leads to the positional arguments, ``[1]`` to the keywords."""
        kind, *rest = path
        if not rest:
            return "the arguments"
        first = rest[0][2:-2] if kind == "[1]" else self._parameter(int(rest[0][1:-1]))
        return first + "".join(rest[1:])

    def _parameter(self, place: int) -> str:
        return self.parameters[place] if place < len(self.parameters) else f"argument {place}"

    def arranged_like(self, compiled: CallArguments) -> CallArguments:
        """The same arguments in the order of those that the model was compiled for: a dictionary's keys may come in
        any order.
        """
        leaves = arranged(self.leaves, self.structure, compiled.structure)
        return CallArguments(leaves, compiled.structure, compiled.parameters)


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_signatures: WeakKeyDictionary[Callable[..., object], inspect.Signature] = WeakKeyDictionary()


def _signature(function: Callable[..., object]) -> inspect.Signature:
    """The signature of a function, worked out once."""
    signature = _signatures.get(function)
    if signature is None:
        signature = _signatures[function] = inspect.signature(function)
    return signature


def bind(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """The arguments in the order of forward's parameters.

    Error for a missing mandatory argument; AssertionError for too many, an unknown keyword or an argument that is given
    twice.
    """
    forward = module.forward
    owner = getattr(forward, "__func__", None)
    signature = inspect.signature(forward) if owner is None else _signature(owner)
    args = args if owner is None else (module, *args)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        text = str(error)
        if text.startswith("missing a required"):
            raise Error(f"The arguments of forward do not fit: {text}") from error
        raise ArgumentError(f"The arguments of forward do not fit: {text}") from error
    forwarded = bound.args if owner is None else bound.args[1:]
    leaves, structure = flatten((forwarded, bound.kwargs))
    positional = [p.name for p in signature.parameters.values() if p.kind in _BY_POSITION]
    names = tuple(positional if owner is None else positional[1:])
    return CallArguments([_prepared(leaf) for leaf in leaves], structure, names)


@functools.cache
def _positional(count: int) -> object:
    """The description of so many tensors as positional arguments, without keywords."""
    return flatten(((None,) * count, {}))[1].description


def same_again(
    compiled: CallArguments, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallArguments | None:
    """The arguments of a call like the first one, which need no binding: contiguous tensors of the same shapes and
    types by position. None if that is not all there is: `bind` and `check_same` then say more.
    """
    if kwargs or len(args) != len(compiled.leaves):
        return None
    for before, now in zip(compiled.leaves, args, strict=True):
        plain = type(now) is torch.Tensor and isinstance(before, torch.Tensor)
        if not plain or now.shape != before.shape or now.dtype != before.dtype:
            return None
        if now.requires_grad or now.layout is not torch.strided or not now.is_contiguous():
            return None
    if compiled.structure.description != _positional(len(args)):
        return None
    return CallArguments(list(args), compiled.structure, compiled.parameters)


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=5)


def _prepared(leaf: object) -> object:
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


_OTHER_INPUTS = "Call destroy() on the model, or make a new wrapper, to use other inputs."


_OTHER_TYPES = (
    'One or more input data types have changed since the first model run. You will need to call "destroy" on the model '
    "before running with different input data types. "
)


def check_same(compiled: CallArguments, call: CallArguments) -> CallArguments:
    """The arguments of a call in the order of those for which the model was compiled. Error, which names the argument,
    if they differ in anything but their values.
    """
    if compiled.structure.description != call.structure.description:
        raise Error(
            "The structure of the inputs is not the one that the model was compiled for"
            + _difference(compiled.names, call.names),
            hint=_OTHER_INPUTS,
        )
    ordered = call.arranged_like(compiled)
    for place, (before, now) in enumerate(zip(compiled.leaves, ordered.leaves, strict=True)):
        what = _change(before, now)
        if what:
            same_types = getattr(before, "dtype", None) == getattr(now, "dtype", None)
            changed = "" if same_types else _OTHER_TYPES
            raise Error(
                f"{changed}Input {compiled.names[place]!r} {what}", hint=_OTHER_INPUTS if same_types else ""
            )
    return ordered


def _difference(compiled: Sequence[str], call: Sequence[str]) -> str:
    """Which inputs are missing and which are new, in words; empty if the types of collections differ alone."""
    missing = [name for name in compiled if name not in call]
    added = [name for name in call if name not in compiled]
    parts = [f"missing: {', '.join(missing)}"] if missing else []
    parts += [f"new: {', '.join(added)}"] if added else []
    return f" ({'; '.join(parts)})" if parts else " (the types of its lists, tuples or dictionaries differ)"


def _change(before: object, now: object) -> str:
    """How an input differs from the one that the model was compiled for; empty if it does not."""
    if isinstance(before, torch.Tensor) != isinstance(now, torch.Tensor):
        return f"has changed its type from {type(before)} to {type(now)}"
    if not isinstance(before, torch.Tensor) or not isinstance(now, torch.Tensor):
        same = type(before) is type(now) and before == now
        return "" if same else f"was {before!r} when the model was compiled and is {now!r} now"
    if before.shape == now.shape and before.dtype == now.dtype:
        return ""
    return (
        f"was {before.dtype} of shape {list(before.shape)} when the model was compiled and is "
        f"{now.dtype} of shape {list(now.shape)} now"
    )


_returned: WeakIdKeyDictionary = WeakIdKeyDictionary()


@functools.cache
def _install() -> None:
    plain: Callable[..., None] = torch.Tensor.backward

    @functools.wraps(plain)
    def backward(self: torch.Tensor, *args: object, **kwargs: object) -> None:
        if self in _returned:
            raise Error(
                "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
                "trainingModel, the backwards pass is performed automatically when invoking the model. If you're "
                "using an inferenceModel, you should use a trainingModel instead."
            )
        plain(self, *args, **kwargs)

    torch.Tensor.backward = backward  # type: ignore[method-assign]


def mark_returned(leaves: Iterable[Any]) -> None:
    """Let ``backward`` of these tensors raise Error."""
    _install()
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            _returned[leaf] = True
