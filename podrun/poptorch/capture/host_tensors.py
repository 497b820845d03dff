"""Tensors of the host in forward, and the IPU as the device of all others.

The recorder computes shapes on fake tensors of the CPU, for which torch has every kernel. Programs see another device:
`IpuDevice`, a mode of torch's functions, answers ``ipu:0`` for these tensors and takes ``ipu`` where functions take a
device, so no code of torch ever gets an IPU. A real tensor is the host's. Moved to the IPU it becomes a constant of the
model; `name_of` finds what the program calls one that was not moved.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType, TracebackType
from typing import Any, TypeGuard

import torch
from torch.overrides import TorchFunctionMode

from podrun.poptorch.errors import Error
from podrun.private_apis import torch as private

TorchFunction = Callable[..., Any]
"""A function of torch, as modes of its functions get it."""

IPU = torch.device("ipu:0")
CPU = torch.device("cpu")

_NOT_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,
    "<",
)
"""Where code lies that is not the user's: torch, podrun, strings that were compiled."""
_TENSOR: Any = torch.Tensor  # Any: torch's types lack is_ipu and ipu().
_ANSWERS = (
    (_TENSOR.device, IPU),
    (_TENSOR.is_cpu, False),
    (_TENSOR.is_ipu, True),
    (_TENSOR.get_device, 0),
)
"""What tensors of the IPU say about their device."""
_MOVES = (_TENSOR.to, _TENSOR.type_as, _TENSOR.ipu, torch.as_tensor, torch.asarray, torch.tensor)
"""Functions that may bring a tensor of the host to another device."""

_REDIRECTED = (torch.tensor, torch.zeros_like, torch.full_like)
"""Functions whose result is on the IPU when they name no device, though their argument is the host's."""


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code of the user's program."""
    return not frame.f_code.co_filename.startswith(_NOT_USERS)


def line_of_user() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor podrun's; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class IpuDevice(TorchFunctionMode):
    """Shows programs the tensors of a capture on ``ipu:0``: ``with IpuDevice(recorder.moved, location): ...``.

    ``moved``: gives the tensor of the IPU that a real one becomes. ``location``: the program's present place in words.
    An `Error` for a tensor that forward moves back to the CPU.
    """

    def __init__(
        self, moved: Callable[[torch.Tensor], torch.Tensor], location: Callable[[], str] = str
    ) -> None:
        super().__init__()
        self._moved, self._location = moved, location
        self._shown = private.shown_device(lambda: IPU if is_users(sys._getframe(2)) else None)

    def __enter__(self) -> Any:
        self._shown.__enter__()
        enter: Callable[[], Any] = super().__enter__
        return enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave: Callable[..., None] = super().__exit__
        leave(kind, error, trace)
        self._shown.__exit__(kind, error, trace)

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, private.FakeTensor):
            asked = getattr(func, "__self__", func) if getattr(func, "__name__", "") == "__get__" else func
            for question, answer in _ANSWERS:
                if asked is question:
                    return answer
        if func is _TENSOR.__deepcopy__ and _is_real(first):
            with private.real_computation():
                return func(*args, **keywords)
        named = _device_named(func, args, keywords)
        if named == "ipu" or (not named and func in _REDIRECTED and _is_real(first)):
            return self._on_ipu(func, args, keywords)
        if named == "cpu" and is_users(sys._getframe(1)):
            if isinstance(first, private.FakeTensor) and func in (*_MOVES, _TENSOR.cpu):
                raise Error(
                    "forward moves a tensor from the IPU to the CPU, which a compiled model cannot do",
                    location=self._location(),
                    hint="Return the tensor, or call the function that needs it by poptorch.CPU (inference).",
                )
            if not any(isinstance(argument, torch.Tensor) for argument in (*args, *keywords.values())):
                with private.real_computation():
                    return func(*args, **keywords)
        return func(*args, **keywords)

    def _on_ipu(self, func: TorchFunction, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a function that names the IPU as its device."""
        if args and _is_real(args[0]):
            args = (self._moved(args[0]), *args[1:])
        if func is _TENSOR.ipu:
            return args[0]
        return func(*map(_on_cpu, args), **{name: _on_cpu(argument) for name, argument in keywords.items()})


def _is_real(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not isinstance(value, private.FakeTensor)


def _device_named(func: TorchFunction, args: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    """The type of the device that a call of a function names; empty if it names none."""
    if func in (_TENSOR.cpu, _TENSOR.ipu):
        return "cpu" if func is _TENSOR.cpu else "ipu"
    if func is torch.device:
        return ""
    device = keywords.get("device")
    if device is None and func in (_TENSOR.to, _TENSOR.type_as):
        device = next(
            (argument for argument in (*args[1:], *keywords.values()) if _names_device(argument)), None
        )
    if isinstance(device, private.FakeTensor):
        return "ipu"
    return torch.device(device).type if isinstance(device, (str, torch.device)) else ""


def _names_device(value: object) -> bool:
    return isinstance(value, (str, torch.device, torch.Tensor))


def _on_cpu(argument: object) -> object:
    """An argument with the CPU in place of an IPU."""
    if isinstance(argument, torch.device):
        return CPU if argument.type == "ipu" else argument
    return "cpu" if isinstance(argument, str) and argument.partition(":")[0] == "ipu" else argument


def name_of(tensor: torch.Tensor) -> str:
    """What the user's program calls a tensor, or the tensor that it is a view of: ``self.mask``, ``batch['x']``; empty
    if no variable, attribute or element holds it.
    """
    storage = private.storage_of(tensor)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame):
            names = [*frame.f_code.co_names, *frame.f_code.co_freevars]
            outside = {name: frame.f_globals[name] for name in names if name in frame.f_globals}
            for name, value in {**outside, **frame.f_locals}.items():
                for path, inside in _inside(name, value, 3):
                    if inside is tensor or private.storage_of(inside) == storage:
                        return path
        frame = frame.f_back
    return ""


def _inside(path: str, value: object, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The real tensors that a value holds, with how a program reaches them."""
    if isinstance(value, torch.Tensor):
        if _is_real(value):
            yield path, value
        return
    if not depth or isinstance(value, (type, ModuleType)):
        return
    parts: Iterator[tuple[str, Any]]
    if isinstance(value, dict):
        parts = ((f"{path}[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple)):
        parts = ((f"{path}[{place}]", item) for place, item in enumerate(value))
    else:
        own = dict(getattr(value, "__dict__", {}))
        own |= own.get("_modules", {}) if isinstance(value, torch.nn.Module) else {}
        parts = ((f"{path}.{name}", item) for name, item in own.items())
    for name, item in parts:
        yield from _inside(name, item, depth - 1)
