"""Scopes: on which device and IPU operations are, and what else a program says of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from podrun.tensorflow.capture.tracing import innermost_program


@contextlib.contextmanager
def ipu_jit_scope(ipu_scope: Any) -> Iterator[None]:
    """Nothing: programs are compiled whole."""
    yield


@contextlib.contextmanager
def ipu_scope(device: str) -> Iterator[Any]:
    """Operations are on an IPU device, and variables are resources."""
    with tf.device(device), tf.compat.v1.variable_scope("", use_resource=True) as scope:
        yield scope


@contextlib.contextmanager
def ipu_shard(index: Any) -> Iterator[None]:
    """Operations are on the IPU number ``index`` of the device."""
    program = innermost_program()
    highest = max(index) if isinstance(index, (list, tuple)) else index
    while program is not None:
        program.shards = max(getattr(program, "shards", 1), highest + 1)
        program = getattr(program, "outer_graph", None)
        if not hasattr(program, "ordinal"):
            break
    yield


_outside: list[bool] = []


@contextlib.contextmanager
def outside_compilation_scope(name: str = "outside") -> Iterator[None]:
    """Refused: the host takes no part in the middle of a program."""
    if innermost_program() is None:
        raise ValueError("outside_compilation_scope is only allowed in XLA context")
    raise NotImplementedError(
        "podrun does not run operations on the host in the middle of a program: enqueue their inputs, and compute on "
        "the host after the program."
    )
    yield


@contextlib.contextmanager
def frontend_attribute(attribute_name: Any, attribute_value: Any, restore_to: Any = None) -> Iterator[None]:
    """An attribute for the compiler: accepted, without an effect on numbers."""
    yield


@contextlib.contextmanager
def stochastic_rounding(override: Any) -> Iterator[None]:
    """Accepted: rounding is that of the configuration."""
    yield


@contextlib.contextmanager
def partials_type(override_type: Any) -> Iterator[None]:
    """The type of partial sums: float16 or float32; sums are in float32."""
    if tf.as_dtype(override_type) not in (tf.float16, tf.float32):
        raise ValueError(f"Only support float16, float32, provided {override_type}")
    yield
