"""``compile``: a function of a version-1 program as one program on an IPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from podrun.tensorflow.capture.program_graphs import IpuGraph, check_host_free, parameter, takes, trace
from podrun.tensorflow.execution.host_program import HostProgram
from podrun.tensorflow.execution.launching import launch_program

_IPU = re.compile(r"device:IPU:(\d+)", re.IGNORECASE)


def placed_ordinal(graph: Any) -> int | None:
    """The number of the IPU device in whose scope the program is; None outside of any."""
    ordinal = None
    for entry in graph._device_functions_outer_to_inner:
        text = str((getattr(entry, "string_merge", None) and entry.display_name) or entry)
        hit = _IPU.search(text)
        if hit:
            ordinal = int(hit.group(1))
        elif "device:CPU" in text:
            ordinal = None
    return ordinal


def compile(computation: Callable[..., Any], inputs: Any = None) -> Any:
    """Trace ``computation`` once, and return its results: a list of tensors, or an operation that runs it."""
    outer = tf.compat.v1.get_default_graph()
    values = [tf.convert_to_tensor(v) for v in tf.nest.flatten([] if inputs is None else inputs)]
    ordinal = placed_ordinal(outer)
    graph = IpuGraph("ipu_program", ordinal or 0, automatic=False)
    parameters = [parameter(graph, v, f"input_{i}") for i, v in enumerate(values)]
    arguments = parameters if inputs is None else tf.nest.pack_sequence_as(inputs, parameters)
    arguments = arguments if isinstance(arguments, (list, tuple)) else [arguments]
    wrong = takes(computation, len(arguments))
    if wrong:
        raise TypeError(f"Supplied computation cannot be called with the specified inputs. {wrong}")
    outcome = trace(graph, computation, list(arguments))
    if type(outcome).__name__.endswith("EstimatorSpec"):
        raise ValueError("xla.compile does not support EstimatorSpec as an output of the computation.")
    flat = [r for r in tf.nest.flatten(outcome) if r is not None]
    results = [tf.convert_to_tensor(r) if not isinstance(r, tf.Operation) else r for r in _in(graph, flat)]
    tensors = [r for r in results if isinstance(r, tf.Tensor)]
    effects = [*(r for r in results if isinstance(r, tf.Operation)), *graph.control_outputs]
    if ordinal is None and any(
        o.type not in ("NoOp", "Placeholder", "Const") for o in graph.get_operations()
    ):
        raise Exception(  # noqa: TRY002 - the SDK's class and words
            "The computation was not placed on an IPU device: use `with ipu.scopes.ipu_scope('/device:IPU:0')`."
        )
    check_host_free(graph)
    if not tensors and not effects:
        return tf.no_op()
    program = HostProgram(graph, tensors, effects, shards=getattr(graph, "shards", 1))
    arguments = [*values, *(t for t, _ in graph.captures)]
    *launched, done = launch_program(program, arguments)
    if not tensors:
        return done
    if isinstance(outcome, (list, tuple, dict)) and any(isinstance(o, (list, tuple, dict)) for o in outcome):
        return tf.nest.pack_sequence_as([o for o in outcome if not isinstance(o, tf.Operation)], launched)
    return launched


def _in(graph: Any, values: Any) -> list[Any]:
    with graph.as_default():
        return [v if isinstance(v, tf.Operation) else graph.capture(tf.convert_to_tensor(v)) for v in values]
