"""PopTorch's functions for use in forward: losses, hints, slices at run time, control flow, custom operators.

Most call an operator of `operator_library`. Programs find all of them here, those of `control_flow` and
`multi_convolution` too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from podrun.poptorch.api.annotations import isRunningOnIpu
from podrun.poptorch.api.control_flow import CPU as CPU
from podrun.poptorch.api.control_flow import cond as cond
from podrun.poptorch.api.control_flow import for_loop as for_loop
from podrun.poptorch.api.enums import MatMulSerializationMode, OverlapMode
from podrun.poptorch.api.multi_convolution import MultiConv as MultiConv
from podrun.poptorch.api.operator_library import operator_library
from podrun.poptorch.api.signatures import checks_arguments, checks_arguments_but
from podrun.poptorch.capture.graph import flatten, unflatten
from podrun.poptorch.errors import ArgumentError, Error

T = TypeVar("T")


FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")
REDUCTIONS = {"sum": 0, "mean": 1, "none": 2}


@checks_arguments
def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Mark a tensor as the loss: its ``sum``, its ``mean`` or (``none``) the tensor itself. AssertionError for another
    reduction.
    """
    if reduction not in REDUCTIONS:
        raise ArgumentError("Unsupported reduction type!")
    if isRunningOnIpu():
        loss: torch.Tensor = operator_library().identity_loss(x, REDUCTIONS[reduction])
        return loss
    return x.sum() if reduction == "sum" else x.mean() if reduction == "mean" else x


def _marked(tensor: torch.Tensor, name: str, *settings: object) -> torch.Tensor:
    return getattr(operator_library(), name)(tensor, *settings) if isRunningOnIpu() else tensor


@checks_arguments
def nop(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, by an operator that no optimisation removes. Error unless it is a tensor."""
    return _marked(tensor, "nop")


@checks_arguments
def recomputationCheckpoint(*tensors: object) -> Any:
    """Keep tensors for the backward pass instead of computing them again. ValueError unless they are tensors."""
    single = tensors[0] if len(tensors) == 1 else tensors
    if isinstance(single, torch.Tensor):
        return _marked(single, "recomputation_checkpoint")
    if not isinstance(single, (list, tuple)) or not all(
        isinstance(tensor, torch.Tensor) for tensor in single
    ):
        raise ValueError("poptorch.recomputationCheckpoint takes tensors")
    return type(single)(_marked(tensor, "recomputation_checkpoint") for tensor in single)


@checks_arguments
def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Set the part of the tiles' memory that the product or convolution which made the tensor may take."""
    if not 0 < available_memory_proportion <= 1:
        raise ValueError("available_memory_proportion must be above 0 and at most 1")
    return _marked(tensor, "set_available_memory", float(available_memory_proportion))


@checks_arguments
def ipu_print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    """Print a tensor to standard error whenever it is computed, and its gradient as ``<title>_gradient``; the result is
    the tensor itself and has to be used. KeyError for an unknown ``float_format``."""
    if float_format not in FLOAT_FORMATS:
        raise KeyError(float_format)
    numbers = (int(summarise_threshold), int(edge_items), int(max_line_width), int(digits))
    kind = FLOAT_FORMATS.index(float_format)
    marks = (separator, open_bracket, close_bracket)
    return _marked(tensor, "print_tensor", title, bool(print_gradient), *numbers, kind, *marks)


@checks_arguments
def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """``lhs @ rhs``, computed in ``factor`` parts of one dimension."""
    if isRunningOnIpu():
        product: torch.Tensor = operator_library().serialized_matmul(
            lhs, rhs, mode.value, factor, keep_precision
        )
        return product
    return torch.matmul(lhs, rhs)


def _check_slice(name: str, tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> None:
    """Error for a dimension, a start or a size that a tensor's slices cannot have."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise Error(f"poptorch.{name}: a tensor of {tensor.dim()} dimensions has no dimension {dim}")
    if start.numel() != 1 or start.is_floating_point() or start.dtype == torch.bool:
        raise Error(
            f"poptorch.{name}: the start is one integer, not {str(start.dtype).removeprefix('torch.')} "
            f"{list(start.shape)}"
        )
    if not 0 < size <= tensor.shape[dim]:
        raise Error(
            f"poptorch.{name}: the size must be above 0 and at most {tensor.shape[dim]}, the size of dimension {dim}, "
            f"not {size}"
        )


@checks_arguments
def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """``tensor[start : start + size : step]`` of a dimension; ``start`` is data. Error for wrong types and sizes."""
    _check_slice("dynamic_slice", tensor, dim, start, size)
    if step <= 0:
        raise Error(f"poptorch.dynamic_slice: the step must be above 0, not {step}")
    part: torch.Tensor = operator_library().dynamic_slice(tensor, dim, start, size, step)
    return part


@checks_arguments
def dynamic_update(
    input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int
) -> torch.Tensor:
    """``input`` with ``src`` at ``start`` of a dimension; ``start`` is data. Error for other ranks or types."""
    if input.dtype != src.dtype or input.dim() != src.dim():
        raise Error("poptorch.dynamic_update: input and src must have the same type and rank")
    _check_slice("dynamic_update", input, dim, start, size)
    wanted = list(input.shape)
    wanted[dim] = size
    if list(src.shape) != wanted:
        raise Error(f"poptorch.dynamic_update: src has the shape {list(src.shape)}, {wanted} was expected")
    updated: torch.Tensor = operator_library().dynamic_update(input, src, dim, start, size)
    return updated


@checks_arguments
def ctc_beam_search_decoder(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The most probable labellings of log probabilities ``[time, samples, classes]``: scores and lengths
    ``[samples, top_paths]``, labels ``[samples, top_paths, time]``. On the CPU: zeros. Error for what is no tensor."""
    if top_paths > beam_width:
        raise Error(
            f"poptorch.ctc_beam_search_decoder: top_paths {top_paths} exceeds beam_width {beam_width}"
        )
    decoded: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = operator_library().ctc_beam_search(
        probs, lengths, blank, beam_width, top_paths
    )
    return decoded


Samples = torch.Tensor | Sequence[int]
"""The number of the sample to which each row belongs."""


@checks_arguments
def nearest(
    x: torch.Tensor, y: torch.Tensor, batch_x: Samples | None = None, batch_y: Samples | None = None
) -> torch.Tensor:
    """For each row of x the index of the row of y that is nearest to it. ``batch_x`` and ``batch_y``, lists or tensors,
    say which sample a row belongs to; rows of other samples are not looked at."""
    x, y = (points.unsqueeze(-1) if points.dim() == 1 else points for points in (x, y))
    away = torch.cdist(x.float(), y.float())
    if batch_x is not None and batch_y is not None:
        samples = [
            batch if isinstance(batch, torch.Tensor) else torch.tensor(batch) for batch in (batch_x, batch_y)
        ]
        away = away.masked_fill(samples[0][:, None] != samples[1][None, :], float("inf"))
    return away.argmin(1)


@checks_arguments
def fps(
    src: torch.Tensor, ptr: Sequence[int], ratio: float = 0.5, random_start: bool = False
) -> torch.Tensor:
    """Indices of points that are far from each other: ``ceil(ratio * n)`` of each sample's n rows of ``src``, which
    begin at ``ptr``. Error for other types."""
    if not isinstance(ptr, (list, tuple)) or not all(isinstance(start, int) for start in ptr):
        raise Error("poptorch.fps: ptr is a list of numbers")
    if not isinstance(ratio, float) or not 0 < ratio <= 1:
        raise Error("poptorch.fps: the ratio is a float above 0 and at most 1")
    points = src.unsqueeze(-1) if src.dim() == 1 else src
    indices: torch.Tensor = operator_library().fps(points, list(ptr), ratio, bool(random_start))
    return indices


@checks_arguments_but("attributes")
def custom_op(
    inputs: Sequence[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[torch.Tensor],
    attributes: dict[str, Any] | None = None,
) -> list[torch.Tensor]:
    """An operator of the program's own, whose computation is registered with PODRUN_CUSTOM_OPS."""
    values = attributes or {}
    if not isinstance(values, Mapping) or not all(
        isinstance(key, str) and key.isascii() and _plain(value) for key, value in values.items()
    ):
        raise ValueError(
            "poptorch.custom_op: attributes are numbers, ASCII texts, or lists of one of them, by name"
        )
    if not isRunningOnIpu():
        return [torch.zeros_like(example) for example in example_outputs]
    examples = [torch.empty_like(example) for example in example_outputs]
    return list(
        operator_library().custom(list(inputs), name, domain, domain_version, json.dumps(values), examples)
    )


def _plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len({type(item) for item in value}) == 1 and all(_plain(item) for item in value)
    return isinstance(value, (int, float)) or (isinstance(value, str) and value.isascii())


def _overlapped(tensors: T, mode: OverlapMode, name: str) -> T:
    if not isRunningOnIpu():
        return tensors
    leaves, structure = flatten(tensors)
    operator = getattr(operator_library(), name)
    marked = [operator(x, mode.value) if isinstance(x, torch.Tensor) else x for x in leaves]
    result: T = unflatten(structure, marked)
    return result


@checks_arguments
def set_overlap_for_input(input_tensors: T, mode: OverlapMode) -> T:
    """Let the transfer of inputs overlap with computing. Nothing else may use the inputs;
    `podrun.poptorch.compile.graph_checks` checks the options.
    """
    return _overlapped(input_tensors, mode, "overlap_input")


@checks_arguments
def set_overlap_for_output(output_tensors: T, mode: OverlapMode) -> T:
    """Let the transfer of results overlap with computing. The returned tensor must be returned from forward, once."""
    return _overlapped(output_tensors, mode, "overlap_output")
