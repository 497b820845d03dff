"""Other ways to run a session than ``run``: callables that are made once, and runs in several steps.

TensorFlow takes these past ``run``, and so past the clusters of a device. In a session whose graph has something for an
IPU they are runs like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.core.quick_dataclass import dataclass
from podrun.private_apis.tensorflow import symbol
from podrun.tensorflow.execution.host_pieces import runs_once
from podrun.tensorflow.execution.placed_devices import is_placed_graph

if TYPE_CHECKING:
    from tensorflow.core.protobuf.config_pb2 import CallableOptions

    from podrun.tensorflow.execution.host_pieces import GraphOperation, GraphTensor

_numbers = itertools.count()
_RUNS = "_ipu_partial_runs"
"""The attribute of sessions that has their stepped runs of which fetches are left: handle -> run."""


@dataclass(slots=True)
class SteppedRun:
    """A run of a session in several steps. ``feeds`` and ``fetches``: names of what later steps may feed and fetch;
    ``values``: what has been fed and computed, by name; ``ran``: operations with an effect that ran.
    """

    session: tf.compat.v1.Session
    feeds: set[str]
    fetches: set[str]
    values: dict[str, object] = field(default_factory=dict)
    ran: set[GraphOperation] = field(default_factory=set)

    def step(self, fetches: object, feed_dict: Mapping[object, object] | None) -> object:
        """The values of more fetches. InvalidArgumentError for a feed or fetch that was not announced or is not the
        first of its name, UnsupportedError if an operation with an effect would run twice.
        """
        graph = self.session.graph
        fed = {graph.as_graph_element(k, allow_operation=False).name: v for k, v in (feed_dict or {}).items()}
        fetched = _fetched(graph, fetches)
        wanted = [*fetched.fetches(), *fetched.targets()]
        names = {element.name for element in wanted}
        _refuse_others("feed", fed, self.feeds)
        _refuse_others("fetch", names, self.fetches)
        known = {**self.values, **fed}
        again = _effects_before(wanted, known)
        if again & self.ran:
            name = min(operation.name for operation in again & self.ran)
            raise UnsupportedError(
                f"partial_run would run '{name}', which has an effect, a second time.",
                hint="Fetch what depends on it in one step, or in one session.run.",
            )
        later = [graph.as_graph_element(name) for name in self.fetches - names]
        shared = again & _effects_before(later, known)
        kept = [t for operation in shared for t in operation.outputs if _is_kept(graph, t)]
        tensors = [*fetched.fetches(), *kept]
        values = self.session.run([*tensors, *fetched.targets()], known)[: len(tensors)]
        computed = {t.name: v for t, v in zip(tensors, values, strict=True) if graph.is_feedable(t)}
        self.values = {**known, **computed}
        self.ran |= again
        self.feeds -= fed.keys()
        self.fetches -= names
        return fetched.build_results(self.session, values[: len(tensors) - len(kept)])


def _fetched(graph: tf.Graph, fetches: object) -> Any:
    """What a run fetches, by TensorFlow's own reading. TypeError or ValueError for what cannot be fetched."""
    return symbol("client.session._FetchHandler")(graph, fetches, {})


def _refuse_others(kind: str, names: Iterable[str], awaited: Collection[str]) -> None:
    """InvalidArgumentError for a name that is not, or no longer, among those that a stepped run awaits."""
    for name in names:
        if name not in awaited:
            raise tf.errors.InvalidArgumentError(
                None,
                None,
                f"The {kind} {name} was not specified in partial_run_setup, or an earlier step had it.",
            )


def _is_kept(graph: tf.Graph, tensor: GraphTensor) -> bool:
    """Whether a later step can take a tensor's value from an earlier one."""
    plain = tensor.dtype not in (tf.resource, tf.variant) and not tensor.dtype._is_ref_dtype
    return bool(plain and graph.is_fetchable(tensor) and graph.is_feedable(tensor))


def _effects_before(
    starts: Sequence[GraphTensor | GraphOperation], known: Collection[str]
) -> set[GraphOperation]:
    """The operations with an effect that run for ``starts`` where the values of ``known`` names are there."""
    waiting = [cast("GraphOperation", getattr(t, "op", t)) for t in starts if t.name not in known]
    seen = set(waiting)
    while waiting:
        operation = waiting.pop()
        before = {t.op for t in operation.inputs if t.name not in known} | {*operation.control_inputs}
        waiting += before - seen
        seen |= before
    return {operation for operation in seen if runs_once(operation) and operation.type != "ReadVariableOp"}


LAUNCHES = "_podrun_launches"
"""The attribute of graphs in which programs are launched."""


def _of_ipus(session: tf.compat.v1.Session) -> bool:
    """Whether a session's graph has something for an IPU."""
    return is_placed_graph(session.graph) or hasattr(session.graph, LAUNCHES)


def install_session_calls(
    base: type[tf.compat.v1.Session], check: Callable[[tf.compat.v1.Session], None]
) -> None:
    """Let callables and stepped runs of sessions be runs where a graph has something for an IPU. ``check`` is called
    with the session before a callable that is no such run.
    """
    _install_callables(base, check)
    _install_steps(base)


def _install_callables(
    base: type[tf.compat.v1.Session], check: Callable[[tf.compat.v1.Session], None]
) -> None:
    make_callable, from_options = base.make_callable, base._make_callable_from_options

    def checked(session: tf.compat.v1.Session, plain: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            check(session)
            return plain(*args, **named)

        return call

    def own_callable(
        self: tf.compat.v1.Session, fetches: object, feed_list: object = None, accept_options: bool = False
    ) -> Callable[..., object]:
        if feed_list is not None or not _of_ipus(self):
            return checked(self, make_callable(self, fetches, feed_list, accept_options))
        _fetched(self.graph, fetches)
        if accept_options:
            return lambda options=None, run_metadata=None: self.run(fetches, None, options, run_metadata)
        return lambda: self.run(fetches)

    def own_from_options(
        self: tf.compat.v1.Session, callable_options: CallableOptions
    ) -> Callable[..., object]:
        if callable_options.tensor_connection or not _of_ipus(self):
            return checked(self, from_options(self, callable_options))
        fetches, feeds = list(callable_options.fetch), list(callable_options.feed)
        targets = [self.graph.get_operation_by_name(name) for name in callable_options.target]

        def call(*values: object, run_metadata: object = None) -> object:
            chosen = callable_options.run_options if callable_options.HasField("run_options") else None
            fed = dict(zip(feeds, values, strict=True))
            return self.run([*fetches, *targets], fed, chosen, run_metadata)[: len(fetches)]

        return call

    own_callable.plain = make_callable  # type: ignore[attr-defined]
    own_from_options.plain = from_options  # type: ignore[attr-defined]
    base.make_callable, base._make_callable_from_options = own_callable, own_from_options


def _install_steps(base: type[tf.compat.v1.Session]) -> None:
    setup, partial_run = base.partial_run_setup, base.partial_run

    def own_setup(self: tf.compat.v1.Session, fetches: object, feeds: object = None) -> object:
        if not _of_ipus(self) or self._closed:
            return setup(self, fetches, feeds)
        listed = feeds if isinstance(feeds, (list, tuple)) else [] if feeds is None else [feeds]
        fed = {self.graph.as_graph_element(f, allow_operation=False).name for f in listed}
        fetched = _fetched(self.graph, fetches)
        names = {element.name for element in (*fetched.fetches(), *fetched.targets())}
        handle = f"podrun_partial_run_{next(_numbers)}"
        self.__dict__.setdefault(_RUNS, {})[handle] = SteppedRun(self, fed, names)
        return handle

    def own_partial_run(
        self: tf.compat.v1.Session,
        handle: object,
        fetches: object,
        feed_dict: Mapping[object, object] | None = None,
    ) -> object:
        runs = self.__dict__.get(_RUNS, {})
        if handle not in runs:
            return partial_run(self, handle, fetches, feed_dict)
        results = runs[handle].step(fetches, feed_dict)
        if not runs[handle].fetches:
            del runs[handle]
        return results

    base.partial_run_setup, base.partial_run = own_setup, own_partial_run
