"""PopTorch's functions for use in forward: losses, hints, slices at run time, control flow, custom operators.

They are operators of torch in the namespace ``podrun``, so the recorder sees them like any other. On the host they
compute what they mean there; `podrun.poptorch.operators.ipu` computes them for the IPU.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from podrun.poptorch.api.annotations import capturing, isRunningOnIpu
from podrun.poptorch.api.enums import MatMulSerializationMode, MultiConvPlanType, OverlapMode
from podrun.poptorch.api.signatures import checks_arguments, checks_arguments_but, checks_methods
from podrun.poptorch.capture.capture import branch, host_call, loop
from podrun.poptorch.capture.graph import flatten, unflatten
from podrun.poptorch.capture.recorder import line_of_user
from podrun.poptorch.errors import ArgumentError, Error
from podrun.private_apis.torch import FakeTensor

T = TypeVar("T")

NAMESPACE = "podrun"

SCHEMAS = {
    "identity_loss": "(Tensor x, int reduction) -> Tensor",
    "nop": "(Tensor x) -> Tensor",
    "recomputation_checkpoint": "(Tensor x) -> Tensor",
    "set_available_memory": "(Tensor x, float proportion) -> Tensor",
    "print_tensor": "(Tensor x, str settings) -> Tensor",
    "serialized_matmul": "(Tensor a, Tensor b, str mode, int factor, bool keep_precision) -> Tensor",
    "dynamic_slice": "(Tensor x, int dim, Tensor start, int size, int step) -> Tensor",
    "dynamic_update": "(Tensor x, Tensor part, int dim, Tensor start, int size) -> Tensor",
    "overlap_input": "(Tensor x, str mode) -> Tensor",
    "overlap_output": "(Tensor x, str mode) -> Tensor",
    "ctc_beam_search": "(Tensor logs, Tensor lengths, int blank, int width, int best) -> (Tensor, Tensor, Tensor)",
    "fps": "(Tensor points, int[] begins, float ratio, bool random_start) -> Tensor",
    "custom": "(Tensor[] inputs, str name, str domain, int version, str attributes, Tensor[] examples) -> Tensor[]",
}


def _identity_loss(x: torch.Tensor, reduction: int) -> torch.Tensor:
    return x.sum() if reduction == 0 else x.mean() if reduction == 1 else x.clone()


def _same(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return x.clone()


def _matmul(a: torch.Tensor, b: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.matmul(a, b)


def _dynamic_slice(x: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    if isinstance(start, FakeTensor):
        return x.narrow(dim, 0, size)[(slice(None),) * (dim % x.dim()) + (slice(None, None, step),)].clone()
    first = int(start.reshape(-1)[0])
    return x[(slice(None),) * (dim % x.dim()) + (slice(first, first + size, step),)].clone()


def _dynamic_update(
    x: torch.Tensor, part: torch.Tensor, dim: int, start: torch.Tensor, size: int
) -> torch.Tensor:
    result = x.clone()
    if not isinstance(start, FakeTensor):
        result.narrow(dim, int(start.reshape(-1)[0]), size).copy_(part)
    return result


def _custom(
    inputs: list[torch.Tensor],
    name: str,
    domain: str,
    version: int,
    attributes: str,
    examples: list[torch.Tensor],
) -> list[torch.Tensor]:
    return [torch.empty_like(example) for example in examples]


def _ctc_beam_search(
    logs: torch.Tensor, lengths: torch.Tensor, blank: int, width: int, best: int
) -> tuple[torch.Tensor, ...]:
    time, samples, _ = logs.shape
    sizes = logs.new_zeros((samples, best), dtype=torch.int32)
    return logs.new_zeros((samples, best)), sizes, logs.new_zeros((samples, best, time), dtype=torch.int32)


def _fps(points: torch.Tensor, begins: list[int], ratio: float, random_start: bool) -> torch.Tensor:
    parts = []
    for first, end in itertools.pairwise(begins):
        count = math.ceil((end - first) * ratio)
        if isinstance(points, FakeTensor):
            parts.append(points.new_empty(count, dtype=torch.int64))
            continue
        start = int(torch.randint(end - first, ())) if random_start else 0
        chosen, inside = [start], points[first:end]
        nearest = torch.full((end - first,), float("inf"))
        for _ in range(count - 1):
            nearest = torch.minimum(nearest, (inside - inside[chosen[-1]]).square().sum(-1))
            chosen.append(int(nearest.argmax()))
        parts.append(torch.tensor(chosen) + first)
    return torch.cat(parts)


_HOST = {
    "identity_loss": _identity_loss,
    "nop": _same,
    "recomputation_checkpoint": _same,
    "set_available_memory": _same,
    "print_tensor": _same,
    "serialized_matmul": _matmul,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update": _dynamic_update,
    "overlap_input": _same,
    "overlap_output": _same,
    "ctc_beam_search": _ctc_beam_search,
    "fps": _fps,
    "custom": _custom,
}


@functools.cache
def operator_library() -> Any:
    """Register the operators with torch; returns the namespace that holds them."""
    kind: Any = torch.library.Library  # Any: torch does not type its methods.
    library = kind(NAMESPACE, "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _HOST[name], "CompositeExplicitAutograd")
    operator_library.library = library  # type: ignore[attr-defined]  # It is undone when nobody holds it.
    return getattr(torch.ops, NAMESPACE)


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
    settings = {
        "title": title,
        "print_gradient": print_gradient,
        "summarise_threshold": summarise_threshold,
        "edge_items": edge_items,
        "max_line_width": max_line_width,
        "digits": digits,
        "float_format": float_format,
        "separator": separator,
        "open_bracket": open_bracket,
        "close_bracket": close_bracket,
    }
    return _marked(tensor, "print_tensor", json.dumps(settings))


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


def _tensor_list(values: object, name: str) -> list[torch.Tensor]:
    if not isinstance(values, list) or not all(isinstance(value, torch.Tensor) for value in values):
        raise ValueError(f"poptorch.{name} takes a list of tensors")
    return values


def _results(returned: Any) -> list[torch.Tensor]:
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


@checks_arguments_but("inputs")
def for_loop(count: int, body: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run ``body`` ``count`` times; its results go into the next round. For inference alone.

    ValueError if inputs is not a list of tensors; Error if the body returns other shapes or types than it takes, or
    writes to tensors from outside.
    """
    values = [tensor.clone() for tensor in _tensor_list(inputs, "for_loop")]
    if isRunningOnIpu():
        return loop(count, body, values)
    for _ in range(count):
        values = _results(body(*values))
    return values


@checks_arguments_but("then_inps", "else_inps")
def cond(
    condition: torch.Tensor,
    then_body: Callable[..., Any],
    then_inps: list[torch.Tensor],
    else_body: Callable[..., Any],
    else_inps: list[torch.Tensor],
) -> list[torch.Tensor]:
    """The results of ``then_body`` if the condition holds, of ``else_body`` otherwise. For inference alone.

    ValueError if the inputs are not lists of tensors; Error if the bodies return other shapes or types.
    """
    inputs = (_tensor_list(then_inps, "cond"), _tensor_list(else_inps, "cond"))
    if isRunningOnIpu():
        return branch(condition, (then_body, else_body), inputs)
    return _results(then_body(*inputs[0]) if bool(condition) else else_body(*inputs[1]))


@checks_arguments
def ctc_beam_search_decoder(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The most probable labellings of log probabilities ``[time, samples, classes]``: scores and lengths
    ``[samples, top_paths]``, labels ``[samples, top_paths, time]``. On the CPU: zeros. Error for what is no tensor."""
    if not isinstance(probs, torch.Tensor) or not isinstance(lengths, torch.Tensor):
        raise Error("poptorch.ctc_beam_search_decoder takes tensors of probabilities and lengths")
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
    if not isinstance(src, torch.Tensor):
        raise Error("poptorch.fps takes a tensor of points")
    if not isinstance(ptr, (list, tuple)) or not all(isinstance(start, int) for start in ptr):
        raise Error("poptorch.fps: ptr is a list of numbers")
    if not isinstance(ratio, float) or not 0 < ratio <= 1:
        raise Error("poptorch.fps: the ratio is a float above 0 and at most 1")
    points = src.unsqueeze(-1) if src.dim() == 1 else src
    indices: torch.Tensor = operator_library().fps(points, list(ptr), ratio, bool(random_start))
    return indices


@checks_methods()
class CPU:
    """A function or module that runs on the host in the middle of an inference model: ``CPU(function, "id")(x)``.

    In a compiled model it is called again in every run, once for each micro-batch, with copies of the tensors. Its
    results must have the same shapes and types each time. Outside of a model it is simply called. Error in training.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self._layer, self._id = layer_to_call, ID

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the function, or record the call while a model is compiled."""
        if not isRunningOnIpu():
            return self._layer(*args, **kwargs)
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        if not args or kwargs or len(tensors) != len(args):
            raise Error(
                f"poptorch.CPU ({self._id!r}) takes tensors by position in a model that is compiled",
                location=line_of_user(),
            )
        results = host_call(self._layer, tensors)
        return results[0] if len(results) == 1 else tuple(results)

    def execute(self) -> None:
        """No-op: the SDK's machinery calls this."""

    def registerPersistentData(self) -> None:
        """No-op: the SDK's machinery calls this."""


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
    `podrun.poptorch.compile.model_compiler` checks the options.
    """
    return _overlapped(input_tensors, mode, "overlap_input")


@checks_arguments
def set_overlap_for_output(output_tensors: T, mode: OverlapMode) -> T:
    """Let the transfer of results overlap with computing. The returned tensor must be returned from forward, once."""
    return _overlapped(output_tensors, mode, "overlap_output")


@checks_methods("availableMemoryProportions", "partialsTypes", "enableConvDithering")
class MultiConv(torch.nn.Module):
    """Convolutions called inside form one group: ``with poptorch.MultiConv(): y = a(x); z = b(x)``.

    The IPU computes the same numbers either way. Setters return the group itself and check their values; the tile model
    plans each convolution by itself. Error for a group inside another.
    """

    def __init__(self) -> None:
        super().__init__()
        self._settings: dict[str, Any] = {}

    def availableMemoryProportions(self, value: float | Sequence[float]) -> MultiConv:
        """Set the part of the tiles' memory for all convolutions, or for each. AssertionError unless they are
        numbers.
        """
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values:
            raise ArgumentError("availableMemoryProportions takes a number or a list that is not empty")
        if not all(isinstance(proportion, float) for proportion in values):
            raise ArgumentError("availableMemoryProportions takes numbers")
        return self._set("availableMemoryProportions", values)

    def partialsTypes(self, value: torch.dtype | Sequence[torch.dtype]) -> MultiConv:
        """Set the type in which convolutions add up: torch.float or torch.half. ValueError for another."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values or any(dtype not in (torch.float32, torch.float16) for dtype in values):
            raise ValueError("Invalid partials types: use torch.float or torch.half")
        return self._set("partialsTypes", values)

    def planType(self, value: MultiConvPlanType | None) -> MultiConv:
        """Set whether the convolutions run at the same time. AssertionError for another type."""
        return self._set("planType", value)

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """Set the least number of tiles of each convolution. AssertionError unless it is a number."""
        if isinstance(value, bool):
            raise ArgumentError("perConvReservedTiles takes a number of tiles")
        return self._set("perConvReservedTiles", value)

    def cycleBackOff(self, value: float) -> MultiConv:
        """Set by how much the plan may be slower than the fastest. AssertionError unless it is a number."""
        if not isinstance(value, float):
            raise ArgumentError("cycleBackOff takes a number")
        return self._set("cycleBackOff", value)

    def enableConvDithering(self, value: bool | Sequence[bool] | None) -> MultiConv:
        """Spread convolutions over tiles. ValueError unless it is a flag."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        flags = all(isinstance(flag, bool) for flag in values) and bool(values)
        if value is not None and not flags:
            raise ValueError("enableConvDithering takes True, False or a list of these")
        return self._set("enableConvDithering", value)

    def _set(self, name: str, value: object) -> MultiConv:
        if value is None:
            self._settings.pop(name, None)
        else:
            self._settings[name] = value
        return self

    def __enter__(self) -> MultiConv:
        annotations = capturing()
        if annotations is not None:
            if annotations.multi_convolution is not None:
                raise Error("a poptorch.MultiConv cannot be inside another")
            annotations.multi_convolution = self
        return self

    def __exit__(self, *error: object) -> None:
        annotations = capturing()
        if annotations is not None:
            annotations.multi_convolution = None
