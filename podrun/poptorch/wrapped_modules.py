"""A module while it is wrapped for training: its class says so, and what is copied or saved of it does not.

The class becomes ``Poptorch<Class>``, a subclass, with ``copyWeightsToHostIfNeeded()`` and ``destroy()``. Pickling,
``torch.save`` and copies give the module as it was before.
"""

from __future__ import annotations

import copyreg
import weakref
from typing import Any

import torch

from podrun.poptorch.errors import Error

EXECUTOR = "_poptorch_executor"
"""Name under which a wrapped module holds the executor that trains it."""

_versions: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


def weights_version(module: torch.nn.Module) -> int:
    """A number that grows whenever training changes a module's weights."""
    return _versions.get(module, 0)


def weights_changed(module: torch.nn.Module) -> None:
    """Training has changed a module's weights."""
    _versions[module] = weights_version(module) + 1


def trainer_of(module: torch.nn.Module) -> Any:
    """The executor that trains a module; None if none does."""
    return module.__dict__.get(EXECUTOR)


def check_wrappable(module: Any) -> None:
    """RuntimeError for a module that is wrapped already; Error for no module, and for buffers of other classes."""
    if not isinstance(module, torch.nn.Module):
        raise Error(f"poptorch.trainingModel takes a torch.nn.Module, not {type(module).__name__}")
    if trainer_of(module) is not None:
        raise RuntimeError(
            "The model is wrapped already: call destroy() on the poptorch.trainingModel that has it first."
        )
    for name, buffer in module.named_buffers():
        if type(buffer) is not torch.Tensor:
            raise Error(
                f"Buffer {name!r} is a {type(buffer).__name__}: buffers of a training model must be torch.Tensor"
            )


def wrap(module: torch.nn.Module, executor: Any) -> None:
    """Give the module the class of wrapped ones."""
    plain = type(module)
    module.__dict__[EXECUTOR] = executor
    names = {
        "__module__": plain.__module__,
        "__qualname__": f"Poptorch{plain.__qualname__}",
        "__doc__": plain.__doc__,
        "copyWeightsToHostIfNeeded": _copy_if_needed,
        "destroy": _destroy,
        "__reduce_ex__": _reduce,
        "_poptorch_plain": plain,
    }
    module.__class__ = type(f"Poptorch{plain.__name__}", (plain,), names)


def unwrap(module: torch.nn.Module) -> None:
    """Give the module its own class again."""
    module.__dict__.pop(EXECUTOR, None)
    plain = getattr(type(module), "_poptorch_plain", None)
    if plain is not None:
        module.__class__ = plain


def _copy_if_needed(self: Any) -> bool:
    """Bring the weights from the IPU if they are newer there; whether they were."""
    executor = trainer_of(self)
    return executor is not None and bool(executor.copyWeightsToHostIfNeeded())


def _destroy(self: Any) -> None:
    """Destroy the wrapper that trains the module."""
    executor = trainer_of(self)
    if executor is not None:
        executor.destroy()


def _reduce(self: Any, protocol: Any) -> Any:
    """The module as it was before it was wrapped, with the weights as they are now."""
    _copy_if_needed(self)
    plain = object.__new__(type(self)._poptorch_plain)
    plain.__dict__.update({key: value for key, value in self.__dict__.items() if key != EXECUTOR})
    _, _, state, *_ = plain.__reduce_ex__(2)
    # By the function of protocol 1: that of protocol 2 insists on the class that the module has now.
    return copyreg._reconstructor, (type(plain), object, None), state  # type: ignore[attr-defined]
