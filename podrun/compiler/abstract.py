"""Abstract values: what a buffer holds, without its contents."""

from __future__ import annotations

import jax

from podrun.core.executable import TensorSpec, numpy_dtype


def abstract(spec: TensorSpec, *leading: int) -> jax.ShapeDtypeStruct:
    """The abstract value of a tensor with extra leading axes."""
    return buffer((*leading, *spec.shape), spec.dtype)


def buffer(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    """The abstract value of a buffer; ``dtype`` by name."""
    return jax.ShapeDtypeStruct(shape, numpy_dtype(dtype))  # type: ignore[no-untyped-call]
