"""PopTorch's own operators as operators of torch, in the namespace ``podrun``.

So the recorder sees them like any other. Here stand their signatures, and what they compute on the host: there, and on
tensors without data, where only shapes and types count. `podrun.poptorch.operators.ipu` computes them for the IPU.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch

from podrun.private_apis.torch import FakeTensor

NAMESPACE = "podrun"


SCHEMAS = {
    "identity_loss": "(Tensor x, int reduction) -> Tensor",
    "nop": "(Tensor x) -> Tensor",
    "recomputation_checkpoint": "(Tensor x) -> Tensor",
    "set_available_memory": "(Tensor x, float proportion) -> Tensor",
    "print_tensor": "(Tensor x, str title, bool gradient, int threshold, int edge_items, int width, int digits, "
    "int float_format, str separator, str open_bracket, str close_bracket) -> Tensor",
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
