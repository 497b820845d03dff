"""The user's module while it is wrapped for training: its class, its parameters, and copies of it.

The class becomes ``Poptorch<Class>``, a subclass, with ``copyWeightsToHostIfNeeded()`` and ``destroy()``. Parameters
and buffers have classes of their own: any access of an attribute, and any operator of torch's, first lets the executor
copy the weights to the host if the IPU's are newer. `destroy` restores the classes of before; objects that are pickled,
saved by ``torch.save`` or copied have torch's own.

A parameter whose value differs between groups of replicas has a leading dimension with a row for each group;
forward sees one row. The executor hands out parameters as `ParameterHandle`, so that programs can say
``model.weight.replicaGrouping(...)``.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

import torch

from podrun.core.errors import InternalError
from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.api.enums import CommGroupType, VariableRetrievalMode
from podrun.poptorch.capture.torch_names import tensors_in
from podrun.poptorch.errors import ArgumentError, Error
from podrun.private_apis.torch import without_subclass_hooks

if TYPE_CHECKING:
    from podrun.poptorch.compile.module_capture import ReplicaGroups

EXECUTOR = "_poptorch_executor"
"""Name under which a wrapped module holds the executor that trains it."""


class Trainer(Protocol):
    """The executor that trains a wrapped module."""

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Bring the weights from the IPU if they are newer there. Returns whether they were."""

    def destroy(self) -> None:
        """Release the IPUs, and give the module its own class again."""


_versions: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


def weights_version(module: torch.nn.Module) -> int:
    """A number that grows whenever training changes a module's weights."""
    return _versions.get(module, 0)


def weights_changed(module: torch.nn.Module) -> None:
    """Note that training has changed a module's weights."""
    _versions[module] = weights_version(module) + 1


def trainer_of(module: torch.nn.Module) -> Trainer | None:
    """The executor that trains a module; None if none does."""
    trainer: Trainer | None = module.__dict__.get(EXECUTOR)
    return trainer


def check_wrappable(module: object) -> None:
    """RuntimeError for a module that is wrapped already; Error unless it is a module, and for buffers of other
    classes.
    """
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


def wrap(module: torch.nn.Module, executor: Trainer) -> None:
    """Give the module the class ``Poptorch<Class>``, whose methods reach the executor that trains it."""
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


def _copy_if_needed(self: torch.nn.Module) -> bool:
    """Bring the weights from the IPU if they are newer there. Returns whether they were."""
    executor = trainer_of(self)
    return executor is not None and bool(executor.copyWeightsToHostIfNeeded())


def _destroy(self: torch.nn.Module) -> None:
    """Destroy the wrapper that trains the module."""
    executor = trainer_of(self)
    if executor is not None:
        executor.destroy()


def _reduce(self: torch.nn.Module, protocol: SupportsIndex) -> tuple[Any, ...]:
    """The module as it was before it was wrapped, with the present weights."""
    _copy_if_needed(self)
    kind: type[torch.nn.Module] = type(self)._poptorch_plain  # type: ignore[attr-defined]
    plain = object.__new__(kind)
    plain.__dict__.update({key: value for key, value in self.__dict__.items() if key != EXECUTOR})
    reduced: tuple[Any, ...] = plain.__reduce_ex__(2)  # type: ignore[assignment]
    state = reduced[2]
    # By the function of protocol 1: that of protocol 2 insists on the class that the module has now.
    return copyreg._reconstructor, (type(plain), object, None), state  # type: ignore[attr-defined]


_TRACKER = "_podrun_tracker"
"""Name under which a tensor holds its `_Tracker`. The tensor, the wrapped module and its executor form a cycle that the
garbage collector frees once the program has dropped all three."""
_paused = 0


@dataclass(frozen=True, slots=True)
class _Tracker:
    """Belongs to a tracked tensor: ``pull`` brings it up to date, ``group`` sets a parameter's replica grouping."""

    pull: Callable[[], Any]
    group: Callable[..., Any]


def _tracker(tensor: torch.Tensor) -> _Tracker | None:
    tracker: _Tracker | None = object.__getattribute__(tensor, "__dict__").get(_TRACKER)
    return tracker


def _pull(tensor: torch.Tensor) -> None:
    if not _paused:
        tracker = _tracker(tensor)
        if tracker is not None:
            tracker.pull()


@contextmanager
def untracked() -> Iterator[None]:
    """Read parameters in their present form on the host, without asking the IPU."""
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


class _Tracked(torch.Tensor):
    """A tensor whose value may be newer on the IPU: whoever looks at it brings it up to date first."""

    def __getattribute__(self, name: str) -> Any:
        if name != "__class__":
            _pull(self)
        return super().__getattribute__(name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        return _plain_function(function, args, kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        _pull(self)
        with untracked():
            return _reduced(self._plain_tensor(copies=False), protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        _pull(self)
        with untracked():
            copied = self._plain_tensor(copies=True)
        memo[id(self)] = copied
        return copied

    def _plain_tensor(self, *, copies: bool) -> torch.Tensor:
        """The tensor in torch's own class; ``copies``: on memory of its own."""
        raise NotImplementedError


class TrackedParameter(_Tracked, torch.nn.Parameter):
    """A parameter whose value may be newer on the IPU."""

    def replicaGrouping(
        self, comm_group_type: CommGroupType, shards: int, variable_retrieval_mode: VariableRetrievalMode
    ) -> None:
        """See `ParameterHandle.replicaGrouping`."""
        tracker = _tracker(self)
        if tracker is None:
            raise InternalError("a parameter has a tracker as long as it has this class")
        tracker.group(self, comm_group_type, shards, variable_retrieval_mode)

    def _plain_tensor(self, *, copies: bool) -> torch.Tensor:
        return torch.nn.Parameter(self.data.clone() if copies else self.data, self.requires_grad)


class TrackedBuffer(_Tracked):
    """A buffer whose value may be newer on the IPU."""

    def _plain_tensor(self, *, copies: bool) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def _reduced(tensor: torch.Tensor, protocol: SupportsIndex) -> Any:
    return tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _set_class(tensor: torch.Tensor, kind: type) -> None:
    tensor.__class__ = kind


def _plain_function(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object] | None
) -> Any:
    """Call a function of torch on up-to-date values; the result is not tracked."""
    for tensor in tensors_in((args, kwargs or {})):
        if isinstance(tensor, _Tracked):
            _pull(tensor)
    with untracked(), without_subclass_hooks():
        return function(*args, **(kwargs or {}))


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


class ParameterHandle:
    """A parameter read through an executor. Everything but `replicaGrouping` is the parameter's own."""

    def __init__(self, parameter: torch.nn.Parameter, group: Callable[..., Any]) -> None:
        self._parameter, self._group = parameter, group

    def replicaGrouping(
        self, comm_group_type: CommGroupType, shards: int, variable_retrieval_mode: VariableRetrievalMode
    ) -> None:
        """Give groups of ``shards`` replicas values of their own, before the model is compiled. Error afterwards, and
        for a parameter without dimensions.
        """
        if not isinstance(comm_group_type, CommGroupType):
            raise ArgumentError("comm_group_type is a poptorch.CommGroupType")
        if not isinstance(variable_retrieval_mode, VariableRetrievalMode):
            raise ArgumentError("variable_retrieval_mode is a poptorch.VariableRetrievalMode")
        self._group(self._parameter, comm_group_type, shards, variable_retrieval_mode)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        """Functions of torch's take the parameter itself."""
        return function(*_plain(args), **_plain(kwargs or {}))

    def __repr__(self) -> str:
        return repr(self._parameter)


def _plain(value: object) -> Any:
    if isinstance(value, ParameterHandle):
        return value._parameter
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


@contextmanager
def one_row_each(
    module: torch.nn.Module, groups: Mapping[str, ReplicaGroups], replicas: int
) -> Iterator[None]:
    """Let forward see one row of each grouped parameter. Error for one whose rows are not the groups."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, grouping in groups.items():
            count = grouping.groups(replicas)
            if count == 1:
                continue
            owner, _, key = name.rpartition(".")
            owned = module.get_submodule(owner)._parameters
            whole = owned[key]
            if whole is None:
                raise InternalError("a grouped parameter is gone")
            if whole.shape[0] != count:
                raise Error(
                    f"replicaGrouping: {name!r} has {whole.shape[0]} rows for {count} groups of replicas",
                    hint="The first dimension of a grouped parameter has a row for each group.",
                )
            replaced.append((owned, key, whole))
            owned[key] = torch.nn.Parameter(whole.detach()[0], whole.requires_grad)
        yield
    finally:
        for owned, key, whole in replaced:
            owned[key] = whole
