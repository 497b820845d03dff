"""Operators of the user's own, by Python functions that stand for their libraries (`podrun.runtime.user_operators`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from podrun.core.errors import NotFoundError
from podrun.runtime.user_operators import find_user_operator, run_custom_op_files
from podrun.tensorflow.capture.markers import mark


class _Loaded:
    done = False


def _load_files() -> None:
    """Run the files of ``PODRUN_CUSTOM_OPS``, once."""
    if not _Loaded.done:
        _Loaded.done = True
        run_custom_op_files()


def precompiled_user_op(
    inputs: Sequence[tf.Tensor],
    library_path: str,
    gp_path: str = "",
    outs: Mapping[str, Sequence[object]] | None = None,
    name: str = "UserOp",
    op_name: str = "Build",
    separate_gradients: bool = False,
    inputs_with_gradients: Sequence[int] | None = None,
    attributes: str | None = None,
    gradient_attributes: str | None = None,
) -> list[tf.Tensor] | tf.Operation:
    """The outputs of the Python function that stands for a library. NotFoundError, which says how to register one, if
    there is none. ``outs``: ``output_types`` and ``output_shapes``; without it the operation has no outputs. Entries
    of ``attributes``, a JSON object, are keyword arguments of the function, other text is ``attributes=``.
    """
    _load_files()
    find_user_operator(library_path, op_name)
    chosen = outs or {"output_types": [], "output_shapes": []}
    specs = [
        tf.TensorSpec(tf.TensorShape(shape), tf.as_dtype(dtype))
        for dtype, shape in zip(chosen["output_types"], chosen["output_shapes"], strict=True)
    ]
    tensors = [tf.convert_to_tensor(item) for item in inputs]
    wanted = list(range(len(tensors))) if inputs_with_gradients is None else list(inputs_with_gradients)
    results: list[tf.Tensor] | tf.Operation = mark(
        "user_op",
        tensors,
        specs,
        name=name,
        stateful=not specs,
        library=library_path,
        op_name=op_name,
        attributes=attributes or "",
        differentiable=wanted,
    )
    return results


def cpu_user_operation(
    inputs: Sequence[tf.Tensor],
    library_path: str,
    outs: Mapping[str, Sequence[object]] | None = None,
    name: str = "UserOp",
    op_name: str = "Callback",
    separate_gradients: bool = False,
    inputs_with_gradients: Sequence[int] | None = None,
    attributes: str | None = None,
    gradient_attributes: str | None = None,
) -> list[tf.Tensor] | tf.Operation:
    """The outputs of the Python function that stands for a library of the host's: see `precompiled_user_op`. The
    function is one for the device, so the host takes no part.
    """
    _load_files()
    try:
        find_user_operator(library_path, op_name)
    except NotFoundError:
        op_name = "Build"
    return precompiled_user_op(
        inputs, library_path, "", outs, name, op_name, separate_gradients, inputs_with_gradients, attributes
    )


def codelet_expression_op(vertex_expression: Callable[..., tf.Tensor], *args: tf.Tensor) -> tf.Tensor:
    """The expression of the elements of tensors, which are broadcast. The function computes it with operators of
    Python, so it is called with the tensors themselves.
    """
    return tf.convert_to_tensor(vertex_expression(*(tf.convert_to_tensor(a) for a in args)))
