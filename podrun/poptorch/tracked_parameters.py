"""Parameters and buffers of a wrapped model that bring their values from the IPU when they are read.

While a model is wrapped, its parameters and buffers have classes of their own: any access of an attribute, and any
operator of torch's, first lets the executor copy the weights to the host if the IPU's are newer. The classes go when
the wrapper is destroyed, and whatever is copied or saved has torch's own.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from podrun.private_apis.torch import without_subclass_hooks

_TRACKER = "_podrun_tracker"
"""Name under which a tensor holds its `_Tracker`. The tensor, the wrapped module and its executor form a cycle that the
garbage collector frees once the program has dropped all three."""
_paused = 0


@dataclass(frozen=True, slots=True)
class _Tracker:
    """What belongs to a tracked tensor: what brings it up to date, and what takes a parameter's replica grouping."""

    pull: Callable[[], Any]
    group: Callable[..., Any]


def _tracker(tensor: Any) -> _Tracker | None:
    found: _Tracker | None = object.__getattribute__(tensor, "__dict__").get(_TRACKER)
    return found


def _pull(tensor: Any) -> None:
    if not _paused:
        tracker = _tracker(tensor)
        if tracker is not None:
            tracker.pull()


@contextmanager
def untracked() -> Iterator[None]:
    """Read parameters as they are on the host, without asking the IPU."""
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


class TrackedParameter(torch.nn.Parameter):
    """A parameter whose value may be newer on the IPU."""

    def replicaGrouping(self, comm_group_type: Any, shards: int, variable_retrieval_mode: Any) -> None:
        """See `parameter_groups.ParameterHandle`."""
        tracker = _tracker(self)
        assert tracker is not None, "a parameter has a tracker as long as it has this class"
        tracker.group(self, comm_group_type, shards, variable_retrieval_mode)

    def __getattribute__(self, name: str) -> Any:
        if name != "__class__":
            _pull(self)
        return super().__getattribute__(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _plain_function(function, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _pull(self)
        with untracked():
            return _reduced(torch.nn.Parameter(self.data, self.requires_grad), protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        _pull(self)
        with untracked():
            made = torch.nn.Parameter(self.data.clone(), self.requires_grad)
        memo[id(self)] = made
        return made


class TrackedBuffer(torch.Tensor):
    """A buffer whose value may be newer on the IPU."""

    def __getattribute__(self, name: str) -> Any:
        if name != "__class__":
            _pull(self)
        return super().__getattribute__(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _plain_function(function, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _pull(self)
        with untracked():
            return _reduced(self.as_subclass(torch.Tensor).clone(), protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        _pull(self)
        with untracked():
            made = self.as_subclass(torch.Tensor).clone()
        memo[id(self)] = made
        return made


def _reduced(tensor: Any, protocol: Any) -> Any:
    return tensor.__reduce_ex__(protocol)


def _set_class(tensor: Any, kind: type) -> None:
    tensor.__class__ = kind


def _plain_function(function: Any, args: Any, kwargs: Any) -> Any:
    """A function of torch's, on values that are up to date; what it gives is not tracked."""
    for each in _tensors((args, kwargs or {})):
        _pull(each)
    with untracked(), without_subclass_hooks():
        return function(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, (TrackedParameter, TrackedBuffer)):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def track(module: torch.nn.Module, pull: Callable[[], Any], group: Callable[..., Any]) -> None:
    """Let reads of a module's parameters and buffers call ``pull`` first, and ``replicaGrouping`` call ``group``."""
    tracker = _Tracker(pull, group)
    for tensor in (*module.parameters(), *module.buffers()):
        tracked = _TRACKED.get(type(tensor))
        if tracked is not None:
            tensor.__dict__[_TRACKER] = tracker
            _set_class(tensor, tracked)


def untrack(module: torch.nn.Module) -> None:
    """Give a module's parameters and buffers torch's own classes back."""
    with untracked():
        for tensor in (*module.parameters(), *module.buffers()):
            for plain, tracked in _TRACKED.items():
                if type(tensor) is tracked:
                    _set_class(tensor, plain)
                    tensor.__dict__.pop(_TRACKER, None)


_TRACKED: dict[type, type] = {torch.nn.Parameter: TrackedParameter, torch.Tensor: TrackedBuffer}

copyreg.pickle(TrackedParameter, lambda p: p.__reduce_ex__(2))
