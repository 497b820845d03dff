"""Torch's eager code without its compiler, `torch._dynamo`, which it imports for little.

spare_compiler()
mode = lean_fake_mode(allow_non_fake_inputs=True)

Importing `torch._dynamo` takes as long as torch itself, with sympy, Inductor and all. Torch does so in two cases:

- It calls a function that its compiler leaves alone (``torch._compile._disable_dynamo``: methods of optimizers,
  dispatch modes, most references of operators). While there is no compiler such a function runs as it is
  (`spare_compiler`).
- Modes of fake tensors read settings and names of the compiler, by the attribute ``torch._dynamo`` (`_Torch`), by
  ``import torch._dynamo.config`` and by ``from torch._dynamo.source import X`` (`_import`, which gives `_Compiler`).
  Copies of their methods see these in place of torch's (`lean_fake_mode`). Settings have their defaults.

The compiler is not replaced: nothing stands for it in ``sys.modules`` or as an attribute of torch. A program that
imports or uses it, at any time and in any thread, gets it as ever, and from then on torch's own code runs. A torch
with other names than those below imports the compiler as before.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import os
import sys
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._subclasses import fake_tensor, meta_utils

from podrun.private_apis import find_name

COMPILER = "torch._dynamo"
_DISABLED = "__dynamo_disable"
"""The attribute in which torch keeps the function that it calls in place of one that the compiler leaves alone."""


def _there() -> bool:
    """Whether the compiler is imported as a whole: while another thread imports it, nothing of it can be used."""
    module = sys.modules.get(COMPILER)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def spare_compiler() -> None:
    """Let functions that torch's compiler leaves alone run as they are until the compiler is imported.

    Torch asks with ``getattr`` what to call in their place; `_sparing_getattr` answers from here on. The compiler is
    told to skip that function, so that no program it compiles holds it. Nothing is done if the compiler is there, or
    for a torch whose compiler cannot be told so.
    """
    module, frames = sys.modules.get("torch._compile"), find_name("torch._C._dynamo.eval_frame")
    if _there() or module is None or not hasattr(frames, "_FrameExecStrategy"):
        return
    actions = frames._FrameAction
    alone = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    frames.set_code_exec_strategy(_sparing_getattr.__code__, alone)
    vars(module)["getattr"] = _sparing_getattr


def _sparing_getattr(owner: object, name: str, *default: object) -> object:
    """Stands for ``getattr`` in the module ``torch._compile``, which asks what to call in place of a function,
    ``owner``.

    Before the compiler is imported it gives ``owner`` itself. Afterwards it removes itself from the module and does
    what ``getattr`` does.
    """
    if name == _DISABLED and not _there():
        return owner
    vars(sys.modules["torch._compile"]).pop("getattr", None)
    return getattr(owner, name, *default)


def lean_fake_mode(**settings: bool) -> Any:
    """A ``FakeTensorMode`` of torch with these settings, which does not import the compiler unless a method needs
    more of it than settings and sources.
    """
    return (fake_tensor.FakeTensorMode if _there() else _sparing_mode())(**settings)


@functools.cache
def _sparing_mode() -> Any:
    """A subclass of torch's ``FakeTensorMode`` whose methods do not import the compiler. The converters that it
    makes are such subclasses too.
    """
    names = dict[str, Any]()
    for kind in (meta_utils.MetaConverter, fake_tensor.FakeTensorConverter, fake_tensor.FakeTensorMode):
        methods = {
            name: _sparing(method, names)
            for name, method in vars(kind).items()
            if isinstance(method, FunctionType) and (name == "__init__" or _names_compiler(method.__code__))
        }
        names[kind.__name__] = type(kind)(kind.__name__, (kind,), methods)
    return names["FakeTensorMode"]


def _names_compiler(code: CodeType) -> bool:
    """Whether the code of a function, or of one defined inside it, names ``torch._dynamo``."""
    if any(name == "_dynamo" or name.startswith(COMPILER) for name in code.co_names):
        return True
    return any(_names_compiler(inner) for inner in code.co_consts if isinstance(inner, CodeType))


def _sparing(function: FunctionType, others: Mapping[str, Any]) -> FunctionType:
    """A copy of a function of torch that sees `_Torch` by the name ``torch``, `_import` as ``__import__``, and
    ``others`` in place of those names of its module.
    """
    builtin_names = {**vars(builtins), "__import__": _import}
    names = {**function.__globals__, **others, "torch": _TORCH, "__builtins__": builtin_names}
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def default_settings(variables: Mapping[str, str]) -> dict[str, Any]:
    """Settings of torch's compiler that modes of fake tensors read, as ``torch/_dynamo/config.py`` takes them from
    the environment.
    """
    return {
        "fake_tensor_cache_enabled": variables.get("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "1") == "1",
        "fake_tensor_cache_crosscheck_enabled": (
            variables.get("TORCH_FAKE_TENSOR_DISPATCH_CACHE_CROSSCHECK", "0") == "1"
        ),
        "_custom_ops_profile": None,
    }


class _Source:
    """Stands for classes of ``torch._dynamo.source``: a text that says where a tensor comes from. Torch only names
    symbolic sizes by it, which fake tensors here do not have.
    """

    def __init__(self, *parts: object) -> None:
        self.name = ".".join(getattr(part, "name", str(part)) for part in parts)


class _RandomValueSource(_Source):
    """Stands for the class of that name in ``torch._dynamo.source``; torch tests sources with ``isinstance``."""


class _Compiler:
    """Stands for the module ``name`` of the compiler in copied methods: it has the attributes ``known``, and
    imports the module for any other.
    """

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        self._name, self._known = name, known

    def __getattr__(self, name: str) -> Any:
        if not _there() and name in self._known:
            return self._known[name]
        return getattr(importlib.import_module(self._name), name)


class _Torch:
    """Stands for the module torch in copied methods: it has `_COMPILER` as ``_dynamo`` until the compiler is
    imported.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "_dynamo" and not _there():
            return _COMPILER
        return getattr(torch, name)


_TORCH = _Torch()
_KINDS = dict.fromkeys(("AttrSource", "ConstantSource", "EphemeralSource"), _Source)
_MODULES = {
    "config": _Compiler(f"{COMPILER}.config", default_settings(os.environ)),
    "source": _Compiler(f"{COMPILER}.source", {**_KINDS, "RandomValueSource": _RandomValueSource}),
}
_COMPILER = _Compiler(COMPILER, _MODULES)


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: tuple[str, ...] | None = (),
    level: int = 0,
) -> Any:
    """What copied methods call for ``import``: Python's ``__import__``, but it gives `_MODULES` for modules of a
    compiler that is not imported yet, and `_Torch` for torch.
    """
    package, _, last = name.rpartition(".")
    if package == COMPILER and last in _MODULES and not _there():
        return _MODULES[last] if fromlist else _TORCH
    module = builtins.__import__(name, globals, locals, fromlist or (), level)
    return _TORCH if module is torch else module
