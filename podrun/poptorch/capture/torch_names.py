"""Torch's operators and types by the graph's names; functional forms of operators in place; fake results of operators
whose shapes torch cannot work out without data, although they do not depend on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from podrun.poptorch.errors import Error
from podrun.private_apis.torch import TorchOperator

ATEN = torch.ops.aten

DTYPES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float64: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int32",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
"""The types that the IPU computes for torch's types. 64-bit types are narrowed, as PopTorch does."""

_SEPARATE_NAMES = {
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.bernoulli_.Tensor": "aten.bernoulli.Tensor",
}
"""Operators in place whose functional form has a name of its own."""


def operator_name(operator: TorchOperator) -> str:
    """``aten.add.Tensor`` for an operator of torch's."""
    return f"{operator.namespace}.{str(operator).partition('.')[2]}"


def ipu_dtype(dtype: torch.dtype) -> str:
    """The name of the type that the IPU computes. Raises Error for a type that IPUs do not have."""
    if dtype not in DTYPES:
        raise Error(f"tensors of type {dtype} are not supported on the IPU")
    return DTYPES[dtype]


def to_numpy(tensor: torch.Tensor, *, copy: bool = True) -> np.ndarray:
    """The data of a tensor, in the type that the IPU computes. ``copy``: in memory of its own."""
    plain = tensor.detach()
    name = ipu_dtype(plain.dtype)
    if plain.dtype == torch.bfloat16:
        import ml_dtypes

        return plain.float().numpy().astype(ml_dtypes.bfloat16)
    return np.asarray(plain.cpu().numpy().astype(name, copy=copy), order="C")


@functools.cache
def functional_form(operator: TorchOperator) -> TorchOperator | None:
    """The functional operator that computes the values which an in-place operator writes; None if torch has none."""
    name = operator_name(operator)
    if name in _SEPARATE_NAMES:
        _, separate, form = _SEPARATE_NAMES[name].split(".")
        named: TorchOperator | None = getattr(getattr(ATEN, separate, None), form, None)
        return named
    base = name.split(".")[1]
    if operator.namespace != "aten" or not base.endswith("_") or base.endswith("__"):
        return None
    packet = getattr(ATEN, base[:-1], None)
    if packet is None:
        return None
    wanted = [str(argument.type) for argument in operator._schema.arguments]
    for overload in (str(operator).rpartition(".")[2], *packet.overloads()):
        candidate: TorchOperator | None = getattr(packet, overload, None)
        if candidate is None or candidate._schema.is_mutable:
            continue
        if [str(argument.type) for argument in candidate._schema.arguments[: len(wanted)]] == wanted:
            return candidate
    return None


@functools.cache
def form_without_out(operator: TorchOperator) -> TorchOperator | None:
    """The functional operator that computes what an operator writes into ``out=``; None for one without it."""
    wanted = [argument for argument in operator._schema.arguments if not argument.is_out]
    if operator.namespace != "aten" or len(wanted) == len(operator._schema.arguments):
        return None
    packet = getattr(ATEN, operator_name(operator).split(".")[1])
    for name in packet.overloads():
        form: TorchOperator = getattr(packet, name)
        arguments = form._schema.arguments
        begins = [(argument.name, str(argument.type)) for argument in arguments[: len(wanted)]]
        if not form._schema.is_mutable and begins == [
            (argument.name, str(argument.type)) for argument in wanted
        ]:
            return form
    return None


def _ctc_loss(
    logs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    if reduction:
        return logs.new_empty(())
    return logs.new_empty(logs.shape[1:2] if logs.dim() == 3 else ())


def _of_rows(x: torch.Tensor, **keywords: object) -> torch.Tensor:
    return x.new_empty((x.shape[0], x.shape[0]) if x.dim() == 2 and x.shape[0] > 1 else ())


def _narrow(x: torch.Tensor, dim: int, start: torch.Tensor, length: int) -> torch.Tensor:
    sizes = list(x.shape)
    sizes[dim] = length
    return x.new_empty(sizes)


def _bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    if not minlength:
        raise Error(
            "bincount gives as many numbers as its greatest value says, which is not known while the model is compiled",
            hint="Give minlength: greater values are left out.",
        )
    return x.new_empty(minlength) if weights is None else weights.new_empty(minlength)


def _least_squares(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, ...]:
    rows, columns = a.shape[-2:]
    vector = b.dim() == a.dim() - 1 and b.shape == a.shape[:-1]
    broadcast: Callable[..., torch.Size] = torch.broadcast_shapes
    lead = list(broadcast(a.shape[:-2], b.shape[: -1 if vector else -2]))
    right = [] if vector else [b.shape[-1]]
    residuals = [*lead, *right] if rows > columns and driver not in (None, "gelsy") else [0]
    ranks = [0] if driver == "gels" else list(a.shape[:-2])
    return (
        b.new_empty([*lead, columns, *right]),
        b.new_empty(residuals),
        b.new_empty(ranks, dtype=torch.int64),
        b.new_empty([0]),
    )


FAKE_RESULTS: dict[str, Callable[..., Any]] = {
    "aten.ctc_loss.IntList": _ctc_loss,
    "aten.ctc_loss.Tensor": _ctc_loss,
    "aten.linalg_lstsq.default": _least_squares,
    "aten.bincount.default": _bincount,
    "aten.cov.default": _of_rows,
    "aten.corrcoef.default": _of_rows,
    "aten.narrow.Tensor": _narrow,
}
"""Functions that make fake results, by the operator's name."""


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors inside nested lists, tuples and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
