"""Functions that are called before and after a model is captured."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

_before: OrderedDict[int, Callable[[], Any]] = OrderedDict()
_after: OrderedDict[int, Callable[[], Any]] = OrderedDict()


def _register(hooks: OrderedDict[int, Callable[[], Any]], hook: Callable[[], Any]) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError("a hook must be callable")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call a function before every capture, in the order of registration. RuntimeError if it cannot be called."""
    return _register(_before, hook)


def registerPostCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call a function after every capture, also after one that failed."""
    return _register(_after, hook)


def run_before() -> None:
    """Call the functions that come before a capture."""
    for hook in list(_before.values()):
        hook()


def run_after() -> None:
    """Call the functions that come after a capture."""
    for hook in list(_after.values()):
        hook()
