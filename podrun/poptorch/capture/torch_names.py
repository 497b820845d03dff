"""Names of torch's operators and types as the graph has them, and functional forms of operators in place."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from podrun.poptorch.errors import Error

aten = torch.ops.aten

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
"""What the IPU computes for each type of torch's. 64-bit types are narrowed, as PopTorch does."""

_SEPARATE_NAMES = {
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.bernoulli_.Tensor": "aten.bernoulli.Tensor",
    "aten.random_.default": "aten.random.default",
}
"""Operators in place whose functional form has a name of its own."""


def operator_name(operator: Any) -> str:
    """``aten.add.Tensor`` for an operator of torch's."""
    return f"{operator.namespace}.{str(operator).partition('.')[2]}"


def device_dtype(dtype: torch.dtype) -> str:
    """The name of the type that the IPU computes. Raises Error for a type that IPUs do not have."""
    if dtype not in DTYPES:
        raise Error(f"tensors of type {dtype} are not supported on the IPU")
    return DTYPES[dtype]


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The data of a tensor, in the type that the IPU computes."""
    plain = tensor.detach()
    name = device_dtype(plain.dtype)
    if plain.dtype == torch.bfloat16:
        import ml_dtypes

        return plain.float().numpy().astype(ml_dtypes.bfloat16)
    return np.asarray(plain.cpu().numpy().astype(name), order="C")


@functools.cache
def functional_form(operator: Any) -> Any:
    """The operator that computes what an operator in place writes; None if torch has none."""
    name = operator_name(operator)
    if name in _SEPARATE_NAMES:
        _, separate, form = _SEPARATE_NAMES[name].split(".")
        return getattr(getattr(aten, separate, None), form, None)
    base = name.split(".")[1]
    if operator.namespace != "aten" or not base.endswith("_") or base.endswith("__"):
        return None
    found: Any = getattr(aten, base[:-1], None)
    packet = found
    if packet is None:
        return None
    wanted = [str(argument.type) for argument in operator._schema.arguments]
    for overload in (str(operator).rpartition(".")[2], *packet.overloads()):
        found = getattr(packet, overload, None)
        if found is None or found._schema.is_mutable:
            continue
        if [str(argument.type) for argument in found._schema.arguments[: len(wanted)]] == wanted:
            return found
    return None
