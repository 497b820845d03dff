"""A mistake of the user's program inside forward as one error: what went wrong, in which module, on which line, with
which shapes and types. Torch's own errors come with its log and a hundred frames of its internals.
"""

from __future__ import annotations

import dis
import os
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType

import torch

from podrun.poptorch.capture.host_tensors import IpuDevice, is_users
from podrun.poptorch.capture.torch_names import tensors_in
from podrun.poptorch.errors import Error

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PODRUN = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_LONGEST = 400
"""Characters of torch's message that are shown."""
_MOST_TENSORS = 8


def described_tensors(values: object) -> str:
    """The types and shapes of the tensors among an operator's arguments: ``float32 [4, 3], int64 [4]``."""
    return ", ".join([_form(tensor) for tensor in tensors_in(values)][:_MOST_TENSORS])


_INSIDE = {"index": "nonzero"}
"""Operators of torch that fail only for another one inside: a mask as index is turned into positions."""


def data_dependent(name: str, *, shape: bool) -> Error:
    """The error for an operator, ``aten.nonzero.default``, whose result's shape or value depends on data."""
    namespace, packet, *_ = name.split(".")
    what = _INSIDE.get(packet, packet)
    if packet == "one_hot":
        return Error(
            "OneHot num classes must be specified and must be constant.",
            hint="Use torch.nn.functional.one_hot(x, num_classes=N), N a number.",
        )
    if shape:
        return Error(
            f"Operations using {namespace}::{what} are unsupported because the output shape is determined by the "
            "tensor values. The IPU cannot support dynamic output shapes.",
            hint="Use torch.where, a mask by which you multiply, or an operator with a fixed size (minlength=).",
        )
    return Error(
        f"the value of the result of {name} depends on data, which is not known while the model is compiled",
        hint="Use torch.where, a mask, or an operator with a fixed size (minlength=, num_classes=).",
    )


def mistake(error: Exception, names: Mapping[int, str], operator: str) -> Error | None:
    """The error to show for one that forward raised; None for one that must stay as it is: the program raises it
    itself, or it is a fault of podrun.

    ``names``: of the model's modules, by ``id``. ``operator``: the operator of torch that failed and its arguments, if
    one did.
    """
    frames = list(_frames(error.__traceback__))
    while frames and frames[-1][0].f_code is IpuDevice.__torch_function__.__code__:
        frames.pop()
    if not frames or _stays(*frames[-1], bool(operator)):
        return None
    users = [entry for entry in frames if is_users(entry[0])]
    where = _module_of([frame for frame, _ in frames], names)
    place = _line_of(users[-1]) if users else ""
    text = str(error)
    if text.startswith(".numpy() is not supported"):
        return Error(
            "forward asks for the data of a tensor (numpy()), which is not known while the model is compiled",
            location=f"module '{where}', {place}",
            hint="Compute with torch, or return the tensor and use numpy() on the result.",
        )
    tensors = operator or (_of_frame(users[-1][0]) if users else "")
    line = " ".join(text.split())
    message = f"{type(error).__name__} in forward: {line[:_LONGEST]}"
    return Error(
        f"{message}{' ...' if len(line) > _LONGEST else ''}{f' ({tensors})' if tensors else ''}",
        location=f"module '{where}', {place}",
    )


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, TracebackType]]:
    while trace is not None:
        yield trace.tb_frame, trace
        trace = trace.tb_next


def _stays(frame: FrameType, trace: TracebackType, operator: bool) -> bool:
    """Whether an error that began here is shown as it is."""
    file = frame.f_code.co_filename
    if file.startswith(_TORCH):
        return False
    raised = frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised or (file.startswith(_PODRUN) and not operator)


def _line_of(entry: tuple[FrameType, TracebackType]) -> str:
    return f"{entry[0].f_code.co_filename}:{entry[1].tb_lineno}"


def _module_of(frames: list[FrameType], names: Mapping[int, str]) -> str:
    """The dotted name of the innermost module whose method runs in one of the frames."""
    for frame in reversed(frames):
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and id(owner) in names:
            return names[id(owner)]
    return ""


def _of_frame(frame: FrameType) -> str:
    """The tensors among a frame's variables, by name."""
    own = {name: value for name, value in frame.f_locals.items() if isinstance(value, torch.Tensor)}
    return ", ".join([f"{name}: {_form(value)}" for name, value in own.items()][:_MOST_TENSORS])


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
