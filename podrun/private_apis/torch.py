"""Uses of torch that torch does not promise to keep.

Everything below a leading underscore is reached through this module alone. `REQUIRED` lists each use with its purpose;
`missing_torch_names` names those that the installed torch no longer has, and `tests/private_apis/test_torch.py` fails
with that list. Without any of them PyTorch programs cannot be captured, so the front end refuses to start and says
which one is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from podrun.private_apis import find_name, torch_compiler

if TYPE_CHECKING:
    from torch._ops import OpOverload

REQUIRED: dict[str, str] = {
    "torch.utils._python_dispatch.TorchDispatchMode": "sees every operator that a forward pass calls",
    "torch.utils._python_dispatch._disable_current_modes": "makes tensors that the recorder does not see",
    "torch._subclasses.fake_tensor.FakeTensorMode": "tensors that have shapes and types and no data",
    "torch._subclasses.fake_tensor.FakeTensor": "tells tensors without data from others",
    "torch._subclasses.fake_tensor.FakeTensor.device": "shows programs the IPU as their tensors' device",
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "computes with real data in the middle of a capture",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "an operator whose result depends on data",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "an operator whose result's shape depends on data",
    "torch.utils._mode_utils.no_dispatch": "runs operators that the recorder does not see",
    "torch._C._ExcludeDispatchKeyGuard": "leaves autograd out, so that composite operators arrive whole",
    "torch._C.DisableTorchFunctionSubclass": "calls torch's functions on tensors of a subclass without its hooks",
    "torch._C.DispatchKeySet": "names the dispatch keys that are left out",
    "torch._C.DispatchKey": "names one dispatch key",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "tells whether an operator has a composite form",
    "torch.distributions.Distribution._validate_args": "whether distributions look at their parameters' values",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers": "ends workers of a loader, which "
    "torch stops by a signal at the end of a process, so that their folders stay in the temporary directory",
    "torch._decomp.global_decomposition_table": "torch's decompositions of operators",
    "torch._decomp.core_aten_decompositions": "torch's decompositions into its core operators",
}


def missing_torch_names() -> list[str]:
    """The names of `REQUIRED` that the installed torch does not have."""
    return [name for name in REQUIRED if find_name(name) is None]


@functools.cache  # Some are asked for with each function of torch that a program calls.
def _need(name: str) -> Any:
    value = find_name(name)
    if value is None:
        raise ImportError(
            f"this torch ({torch.__version__}) has no {name}, which podrun needs: {REQUIRED[name]}"
        )
    return value


torch_compiler.spare_compiler()  # before a program makes its first optimizer
DispatchMode: Any = _need("torch.utils._python_dispatch.TorchDispatchMode")
FakeTensorMode: Any = _need("torch._subclasses.fake_tensor.FakeTensorMode")
FakeTensor: Any = _need("torch._subclasses.fake_tensor.FakeTensor")
DataDependent: Any = _need("torch._subclasses.fake_tensor.DataDependentOutputException")
DynamicShape: Any = _need("torch._subclasses.fake_tensor.DynamicOutputShapeException")
FUNCTION_MODULES = ("torch.nn.functional", "torch._C._nn")
"""Modules that torch's functions name as theirs; saved programs may refer to these functions."""


TorchOperator: TypeAlias = "OpOverload[..., Any]"
"""One overload of an operator of torch: ``torch.ops.aten.add.Tensor``."""


class FakeMode(AbstractContextManager["FakeMode"], Protocol):
    """The part of torch's FakeTensorMode that a capture uses: a context in which new tensors have no data."""

    def from_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without data, of the same shape, strides and type."""


def fake_mode() -> FakeMode:
    """A mode whose tensors have shapes, types and no data; all sizes are plain numbers."""
    mode: FakeMode = torch_compiler.lean_fake_mode(allow_non_fake_inputs=True, static_shapes=True)
    return mode


@contextlib.contextmanager
def real_computation() -> Iterator[None]:
    """Compute with real tensors inside a capture, without recording."""
    with (
        _need("torch.utils._mode_utils.no_dispatch")(),
        _need("torch._subclasses.fake_tensor.unset_fake_temporarily")(),
    ):
        yield


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep torch from logging a block of its internals when an operator does not take fake tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def shown_device(shown: Callable[[], torch.device | None]) -> Iterator[None]:
    """Let tensors without data say that they are on the device that ``shown`` gives, called by what asks; None: on the
    one that they are on.
    """
    before = _need("torch._subclasses.fake_tensor.FakeTensor.device")

    def device(tensor: torch.Tensor) -> torch.device:
        kept: torch.device = before.fget(tensor)
        return shown() or kept

    FakeTensor.device = property(device, before.fset)
    try:
        yield
    finally:
        FakeTensor.device = before


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Outside all modes of dispatch: nothing is recorded."""
    with _need("torch.utils._python_dispatch._disable_current_modes")():
        yield


@contextlib.contextmanager
def composites_whole() -> Iterator[None]:
    """Leave autograd out of dispatch: ``linear`` or ``lstm`` then reach the recorder as one operator."""
    keys, key = _need("torch._C.DispatchKeySet"), _need("torch._C.DispatchKey")
    left_out = keys(key.AutogradFunctionality) | keys(key.ADInplaceOrView)
    with _need("torch._C._ExcludeDispatchKeyGuard")(left_out):
        yield


def is_composite(operator: TorchOperator) -> bool:
    """Whether torch defines an operator by other operators, whatever the device."""
    has_kernel = _need("torch._C._dispatch_has_kernel_for_dispatch_key")
    name: Callable[[], str] = operator.name
    return bool(has_kernel(name(), "CompositeImplicitAutograd"))


@functools.cache
def decompositions() -> Mapping[TorchOperator, Callable[..., object]]:
    """Torch's decompositions, by operator. Collecting them takes 0.3 s."""
    tables = _need("torch._decomp.global_decomposition_table")
    return {**tables["post_autograd"], **_need("torch._decomp.core_aten_decompositions")()}


@contextlib.contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Let torch.distributions not look at the values of their parameters, unless a program asks for it by
    ``validate_args``."""
    distribution = torch.distributions.Distribution
    before: bool = _need("torch.distributions.Distribution._validate_args")
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(before)


def note_step(optimizer: object) -> None:
    """Let learning rate schedulers know that a step was made, as the IPU makes them: they warn of steps before it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors on one storage share."""
    return int(tensor.untyped_storage()._cdata)


def without_subclass_hooks() -> AbstractContextManager[None]:
    """A context in which torch's functions do not call the hooks of tensor subclasses."""
    context: AbstractContextManager[None] = _need("torch._C.DisableTorchFunctionSubclass")()
    return context


_loading: weakref.WeakKeyDictionary[Iterator[object], int] = weakref.WeakKeyDictionary()
"""Iterators over loaders, and the process that made each: a fork has its parent's in its memory as well."""


def watch_workers(iterator: Iterator[object]) -> None:
    """Have `end_workers` end the workers of an iterator over a loader. An iterator without workers is left alone."""
    if not hasattr(iterator, "_shutdown_workers"):
        return
    if not _loading:
        atexit.unregister(end_workers)
        atexit.register(end_workers)
    _loading[iterator] = os.getpid()


def end_workers() -> None:
    """Have the workers of all watched iterators of this process end by themselves. A program's end calls it."""
    for iterator, owner in list(_loading.items()):
        if owner == os.getpid():
            iterator._shutdown_workers()  # type: ignore[attr-defined]
