"""Functions that a program calls under a gradient tape in the scope of an IPU: programs that the tape records.

The function is one program. When a gradient is asked for, a second one computes the function again, from the values of
the first time, and its gradients; the tapes around record that one too, so that gradients have gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.private_apis.tensorflow import private_module, symbol
from podrun.runtime.graph import Node, subgraphs
from podrun.tensorflow.capture.gradient_cuts import cut_gradients
from podrun.tensorflow.capture.program_graphs import IpuGraph, converted
from podrun.tensorflow.execution.host_program import HostProgram
from podrun.tensorflow.execution.launching import (
    launch_program,
    results_from_values,
    value_tensor,
    variable_type,
)
from podrun.tensorflow.execution.program_parts import PartedProgram
from podrun.tensorflow.graph.structure import ASSERTED
from podrun.tensorflow.operators.table import HANDLERS, load_table

_PLACE = object()
Flat = Callable[..., list[tf.Tensor]]
"""A function of tensors."""
Tracing = Callable[[Flat, Sequence[tf.Tensor]], tuple[HostProgram | PartedProgram, Any]]
"""What makes the program of a function for tensors, or has made it before."""
_record = private_module("eager.record")
_recording = symbol("eager.record.record_operation")
_backward: weakref.WeakKeyDictionary[HostProgram, Flat] = weakref.WeakKeyDictionary()
"""Program -> the function of its second one."""


class _Handle:
    """A variable of which a program has the handle alone, as a source of gradients."""

    def __init__(self, handle: tf.Tensor) -> None:
        self.handle = handle
        self.dtype, self.shape = variable_type(handle)

    def read_value(self) -> tf.Tensor:
        """The value of the variable."""
        return value_tensor(self.handle)


def flat_function(fn: Callable[..., Any], arguments: tuple[Any, Any]) -> Flat:
    """A tf.function as one of the tensors in its arguments, whose other arguments stay."""
    concrete = hasattr(fn, "structured_input_signature")
    function = getattr(fn, "python_function", getattr(fn, "_python_function", fn))
    places = tf.nest.map_structure(lambda v: _PLACE if isinstance(v, tf.Tensor) else v, arguments)

    def call(*tensors: tf.Tensor) -> list[tf.Tensor]:
        it = iter(tensors)
        args, kwargs = tf.nest.map_structure(lambda v: next(it) if v is _PLACE else v, places)
        outcome = (function if concrete else converted(function))(*args, **kwargs)
        return [t for t in tf.nest.flatten(outcome) if isinstance(t, tf.Tensor)]

    return call


def recorded_call(
    program: HostProgram | PartedProgram, function: Flat, tensors: Sequence[tf.Tensor], traced: Tracing
) -> list[tf.Tensor]:
    """The results of the program of a function, which the tapes that are open record. UnsupportedError, before any of
    it has run, for one that cannot be computed a second time: it draws random numbers or uses queues.
    """
    program = _repeatable(program)
    variables = cast("IpuGraph", program.graph).variables_by_handle()
    outer = [tensor for tensor, _ in program.graph.captures]
    entering = [_entering(tensor, variables) for tensor in outer]
    values = dict(zip(map(id, outer), entering, strict=True))
    return _recorded(program, function, tensors, outer, values, traced)


def _repeatable(program: HostProgram | PartedProgram) -> HostProgram:
    """A program that computes the same a second time, and moves nothing but its arguments and results."""
    load_table()
    if isinstance(program, HostProgram) and program.loop is None:
        step = program.step
        if not step.infeeds and not step.outfeeds.keys() - {ASSERTED} and not _draws(step.nodes):
            return program
    raise UnsupportedError("A tape records no function that draws random numbers or uses queues.")


def _draws(nodes: Iterable[Node]) -> bool:
    """Whether operations, or some inside them, draw random numbers."""
    for node in nodes:
        graphs, handler = list(subgraphs(node)), HANDLERS.get(node.op_type)
        if any(_draws(graph.nodes) for graph in graphs):
            return True
        if not graphs and handler is not None and handler.random:
            return True
    return False


def _entering(tensor: tf.Tensor, variables: Mapping[int, tf.Variable]) -> tf.Tensor:
    """What a program takes from outside, read such that tapes see it."""
    if tensor.dtype != tf.resource:
        return tensor
    variable = variables.get(id(tensor))
    return value_tensor(tensor) if variable is None else variable.read_value()


def _recorded(
    program: HostProgram,
    function: Flat,
    tensors: Sequence[tf.Tensor],
    outer: Sequence[tf.Tensor],
    values: Mapping[int, tf.Tensor],
    traced: Tracing,
    *,
    again: bool = False,
) -> list[tf.Tensor]:
    """The results of a program for tensors and what it takes from outside, ``values`` by the identity of ``outer``.
    ``again``: it was computed before, and writes no variable now.
    """
    places = [i for i, t in enumerate(program.results) if t.dtype.is_floating]
    if program not in _backward:
        _backward[program] = _with_gradients(function, len(tensors), outer, places)
    both = _backward[program]
    inputs = [*tensors, *(values[id(t)] for t in outer)]
    sources = [t for t in inputs if t.dtype.is_floating]
    if _record.should_record_backprop(sources):  # What has no gradient is told before the program runs.
        zeros = [tf.zeros(program.results[i].shape, program.results[i].dtype) for i in places]
        traced(both, [*tensors, *zeros])
    with _record.stop_recording():
        results = (
            results_from_values(program, inputs) if again else launch_program(program, [*tensors, *outer])
        )

    def backward(*incoming: tf.Tensor) -> list[tf.Tensor | None]:
        program_again, template = traced(both, [*tensors, *incoming])
        second = cast("HostProgram", program_again)  # As the first, which `recorded_call` has looked at.
        own = [tensor for tensor, _ in second.graph.captures]
        known = {id(t): values[id(t)] if id(t) in values else _entering(t, {}) for t in own}
        gradients = iter(_recorded(second, both, [*tensors, *incoming], own, known, traced, again=True))
        return [None if mark is None else next(gradients) for mark in template]

    _recording("IpuProgram", [results[i] for i in places], sources, backward)
    return results


def _with_gradients(function: Flat, count: int, outer: Sequence[tf.Tensor], places: Sequence[int]) -> Flat:
    """The gradients of a function for ``count`` tensors and what it takes from outside, from those of its results at
    ``places``; None for what they do not depend on.
    """

    def call(*tensors: tf.Tensor) -> list[tf.Tensor | None]:
        inputs, incoming = tensors[:count], tensors[count:]
        results = [t for t in function(*inputs) if t is not None]
        entering = (_Handle(t) if t.dtype == tf.resource else t for t in outer)
        sources = [source for source in (*inputs, *entering) if source.dtype.is_floating]
        return cut_gradients([results[i] for i in places], sources, incoming)

    without: Flat = tf.autograph.experimental.do_not_convert(call)
    return without
