"""Graphs of what a program computes on an IPU.

`IpuGraph` is a graph of TensorFlow inside the program's own graph, or inside eager execution. What it takes from
outside (variables, placeholders, constants) it captures. `trace` runs a function of the program in one. Variables that
the function makes belong to the graph outside.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.private_apis.tensorflow import private_module, symbol

_FuncGraph: Any = symbol("framework.func_graph.FuncGraph")
_tf_convert = symbol("autograph.impl.api.tf_convert")
_lift_to_graph = symbol("eager.lift_to_graph.lift_to_graph")
DEVICE = "/device:IPU:"
_SDK, _ADDONS = "podrun.tensorflow.sdk", "podrun.tensorflow.addons"
UNCONVERTED = (
    "json",
    "podrun.core",
    "podrun.tensorflow.capture",
    f"{_ADDONS}.attention_layers",
    f"{_ADDONS}.ctc_layers",
    f"{_ADDONS}.layers",
    f"{_ADDONS}.recurrent_call",
    f"{_ADDONS}.recurrent_layers",
    f"{_ADDONS}.time_major_layers",
    f"{_SDK}.eight_bit_tensors",
    f"{_SDK}.generated_operations",
    f"{_SDK}.ipu_infeed_queue",
    f"{_SDK}.ipu_outfeed_queue",
    f"{_SDK}.layer_ops",
    f"{_SDK}.library_operations",
    f"{_SDK}.replica_ops",
    f"{_SDK}.row_slices",
)
"""Modules that programs call and that call no function of a program that AutoGraph has to convert."""
TensorStructure: TypeAlias = "tf.Tensor | Sequence[TensorStructure] | Mapping[str, TensorStructure]"
"""A tensor, or tensors in lists, tuples and dictionaries, as ``tf.nest`` takes them."""


class FunctionGraph(Protocol):
    """What podrun uses of the graph of a function, whose class is not among TensorFlow's public names. ``captures``:
    pairs of a tensor outside and the input that stands for it.
    """

    name: str
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    control_outputs: list[tf.Operation]
    captures: Iterable[tuple[tf.Tensor, tf.Tensor]]
    external_captures: list[tf.Tensor]

    def get_operations(self) -> list[tf.Operation]:
        """All operations in the order of the program."""

    def as_default(self) -> AbstractContextManager[FunctionGraph]:
        """A scope in which new operations enter this graph."""

    def as_graph_def(self) -> tf.compat.v1.GraphDef:
        """The graph and the functions that it calls, as TensorFlow's message ``GraphDef``."""

    def capture(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor in this graph that stands for one outside; a tensor of this graph is its own."""


class IpuGraph(_FuncGraph):  # type: ignore[misc]
    """A graph that is computed on the IPU number ``ordinal`` of TensorFlow. ``automatic``: effects run in the order of
    the program (version 2); otherwise only what the results need runs (version 1).
    """

    def __init__(self, name: str, ordinal: int, *, automatic: bool) -> None:
        _share_variable_scope()
        super().__init__(name)
        self.ordinal, self.automatic = ordinal, automatic
        self.results: Any = None
        """What the traced function returned."""
        self.effects: list[tf.Operation] = []
        """Operations that it returned."""
        self.refused = ""
        """Why the program cannot run, which it is told when it runs."""

    @contextmanager
    def as_default(self) -> Iterator[IpuGraph]:
        """A scope in which new operations enter this graph, and functions traced are part of its program."""
        with inside_programs_of(self), super().as_default():
            yield self

    def variables_by_handle(self) -> dict[int, tf.Variable]:
        """The variables that the program reads, by the identity of their handles."""
        return {id(variable.handle): variable for variable in self._watched_variables}


def _share_variable_scope() -> None:
    """Let a new graph have the store and scope of the variables of the one around it."""
    if not tf.executing_eagerly():
        symbol("ops.variable_scope._get_default_variable_store")()
        symbol("ops.variable_scope.get_variable_scope")()


_entered: ContextVar[tuple[IpuGraph, ...]] = ContextVar("podrun_entered_programs", default=())
"""Programs that are being traced or differentiated. A function that was first traced in a program keeps its graph as
the outer one: when the host differentiates the function later, no program is entered.
"""


@contextmanager
def inside_programs_of(graph: tf.Graph | None) -> Iterator[None]:
    """A scope in which the program of ``graph``, and those around it, are being traced or differentiated."""
    token = _entered.set((*_entered.get(), *_programs_around(graph)))
    try:
        yield
    finally:
        _entered.reset(token)


def _programs_around(graph: tf.Graph | None) -> Iterator[IpuGraph]:
    """The graphs of programs among a graph and those around it, from the innermost."""
    while graph is not None:
        if isinstance(graph, IpuGraph):
            yield graph
        graph = getattr(graph, "outer_graph", None)


def _programs_here() -> list[IpuGraph]:
    """The graphs of the programs that are being traced here, from the innermost."""
    if tf.executing_eagerly():
        return []
    entered = set(map(id, _entered.get()))
    return [graph for graph in _programs_around(tf.compat.v1.get_default_graph()) if id(graph) in entered]


def innermost_program() -> IpuGraph | None:
    """The graph of the innermost program that is being traced, if any."""
    return next(iter(_programs_here()), None)


def outermost_program() -> IpuGraph | None:
    """The graph of the whole program that is being traced, if any: loops in it have graphs of their own."""
    return next(reversed(_programs_here()), None)


def in_program() -> bool:
    """Whether a program is being traced."""
    return innermost_program() is not None


OUTSIDE = "_podrun_outside"
"""Attribute of operations that the host computes in the middle of a program: the name of their scope."""
_OF_VARIABLES = {
    "ReadVariableOp",
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "VarHandleOp",
}


def host_scope(operation: tf.Operation) -> str | None:
    """The scope of an operation that the host computes; None for those of the device. Variables are the device's."""
    entry = operation.node_def.attr.get(OUTSIDE)
    if entry is None or operation.type in _OF_VARIABLES or operation.type in ("Const", "NoOp"):
        return None
    return str(entry.s.decode())


def parameter(graph: FunctionGraph, spec: tf.Tensor | tf.TensorSpec, name: str) -> tf.Tensor:
    """An input of a graph that is not captured."""
    with graph.as_default():
        tensor = tf.compat.v1.placeholder(spec.dtype, spec.shape, name=name)
    graph.inputs.append(tensor)
    return tensor


def trace(
    graph: IpuGraph,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    convert: bool = False,
) -> Any:
    """Run ``function`` in ``graph``. ``convert``: turn its Python loops into loops of the graph. Returns what it
    returned, with tensors of the graph.
    """
    from tensorflow.python.framework.auto_control_deps import AutomaticControlDependencies

    with graph.as_default(), tf.variable_creator_scope(_uncached):
        if convert:
            function = converted(function)
        if graph.automatic:
            with AutomaticControlDependencies() as dependencies:
                results = _in_graph(graph, function(*args, **(kwargs or {})))
                results = tf.nest.map_structure(
                    lambda r: dependencies.mark_as_return(r) if isinstance(r, tf.Tensor) else r, results
                )
            graph.control_outputs.extend(dependencies.ops_which_must_run)
        else:
            results = _in_graph(graph, function(*args, **(kwargs or {})))
    graph.results = results
    return results


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as AutoGraph converts it: its Python loops and conditions become operations of the graph."""
    from tensorflow.python.autograph.core import ag_ctx

    own: Callable[..., Any] = _tf_convert(function, ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED))
    return own


def leave_unconverted() -> None:
    """Keep AutoGraph from converting functions of `UNCONVERTED`, as it leaves TensorFlow's own: it changes nothing and
    takes up to 0.3 s for one.
    """
    config, own = private_module("autograph.core.config"), _own_rules()
    config.CONVERSION_RULES = (*own, *(rule for rule in config.CONVERSION_RULES if rule not in own))


@functools.cache
def _own_rules() -> tuple[Any, ...]:
    """AutoGraph rules that leave the functions of the modules in `UNCONVERTED` as they are."""
    return tuple(map(symbol("autograph.core.config.DoNotConvert"), UNCONVERTED))


def _uncached(next_creator: Callable[..., tf.Variable], **options: object) -> tf.Variable:
    """A variable without a cached value, which would be read outside of the program, before it runs. An initial value
    that is a tensor of the program is computed outside of it too.
    """
    value = options.get("initial_value")
    if isinstance(value, tf.Tensor) and isinstance(getattr(value, "graph", None), IpuGraph):
        options = options | {"initial_value": _outside_of_program(value)}
    return next_creator(**(options | {"caching_device": None}))


def read_variables_in_programs(is_placed: Callable[[], bool]) -> None:
    """Let a program, and what is made where ``is_placed`` says so, read variables themselves, where ``caching_device``
    has made a copy of their value outside of it: the copy is the value before the program, through which no gradient
    reaches the variable. ``dynamic_rnn`` and decoders ask for copies.
    """
    kind = private_module("ops.resource_variable_ops").BaseResourceVariable
    if "_cached_value" in vars(kind):
        return
    copies = "_podrun_cached_value"

    def cached(self: object) -> tf.Tensor | None:
        return None if in_program() or is_placed() else self.__dict__.get(copies)

    def cache(self: object, value: tf.Tensor | None) -> None:
        self.__dict__[copies] = value

    kind._cached_value = property(cached, cache)


def _outside_of_program(value: tf.Tensor) -> Callable[[], tf.Tensor]:
    """What gives the initial value of a variable outside of the program. ValueError, as in TensorFlow, for one that
    depends on inputs of the program.
    """
    graph = value.graph
    if any(t in graph.inputs for t in _ancestors(value)):
        raise ValueError(
            f"The initial value '{value.name}' of a variable depends on inputs of the program: compute it outside of "
            "the program."
        )
    with tf.init_scope():
        eager = tf.executing_eagerly()
        outer = None if eager else tf.compat.v1.get_default_graph()
    if eager:
        with tf.compat.v1.Session(graph=graph) as session:
            array = session.run(value)
        return lambda: tf.constant(array)
    known = {inner.op: outside.op for outside, inner in graph.captures if outside.graph is outer}
    known |= {inner: outside for outside, inner in graph.captures if outside.graph is outer}
    lifted = _lift_to_graph([value], outer, op_map=_identity_map(known))
    return lambda: lifted[value]


def _ancestors(value: tf.Tensor) -> list[tf.Tensor]:
    seen: dict[int, tf.Tensor] = {}
    waiting = [value]
    while waiting:
        tensor = waiting.pop()
        if id(tensor) not in seen:
            seen[id(tensor)] = tensor
            waiting += list(tensor.op.inputs)
    return list(seen.values())


def _identity_map(pairs: Mapping[Any, Any]) -> Any:
    table = symbol("util.object_identity.ObjectIdentityDictionary")()
    for key, item in pairs.items():
        table[key] = item
    return table


def _in_graph(graph: FunctionGraph, results: Any) -> Any:
    """The results with variables read and outer tensors captured; operations stay as they are."""

    def own(value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value)
        if isinstance(value, (tf.Variable,)) or hasattr(value, "read_value"):
            value = tf.convert_to_tensor(value)
        return graph.capture(value) if isinstance(value, tf.Tensor) else value

    return tf.nest.map_structure(own, results)


_SUMMARIES = {
    "ScalarSummary",
    "HistogramSummary",
    "TensorSummaryV2",
    "ImageSummary",
    "MergeSummary",
    "AudioSummaryV2",
}
"""Summaries of version 1: the SDK makes none in a program, and nothing on the IPU needs them."""


def check_host_free(graph: tf.Graph) -> None:
    """UnsupportedError for operations that only the host has."""
    for operation in graph.get_operations():
        if operation.type in _SUMMARIES:
            continue
        if operation.type == "Const" or host_scope(operation) is not None:
            continue
        if any(t.dtype == tf.string for t in operation.outputs):
            raise UnsupportedError(
                f"{operation.type} '{operation.name}' computes strings, which are not computed on IPUs.",
                hint="Compute them on the host, outside of the program.",
            )


def takes(function: Callable[..., Any], count: int, names: Sequence[str] = ()) -> str | None:
    """Why ``function`` cannot be called with ``count`` arguments and these keywords; None if it can."""
    try:
        inspect.signature(function).bind(*[None] * count, **dict.fromkeys(names))
    except TypeError as error:
        return str(error)
    except ValueError:
        return None
    return None


_ON_HOST = "_podrun_stays_on_host"


def stays_on_host(variable: tf.Variable) -> None:
    """Note that the program looks up rows of a variable on the host: it takes no memory of the IPUs."""
    program = outermost_program()
    if program is not None:
        setattr(program.capture(variable.handle), _ON_HOST, True)


def is_on_host(handle: tf.Tensor) -> bool:
    """Whether the variable of a handle among a program's inputs stays on the host."""
    return getattr(handle, _ON_HOST, False) is True
