"""Other ways to run a session than ``run``: callables that are made once, and runs in several steps.

TensorFlow takes these past ``run``, and so past the clusters of a device. In a session whose graph has something for an
IPU they are runs like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.tensorflow.execution.host_pieces import runs_once
from podrun.tensorflow.execution.placed_devices import is_placed_graph

if TYPE_CHECKING:
    from tensorflow.core.protobuf.config_pb2 import CallableOptions

    from podrun.tensorflow.execution.host_pieces import GraphOperation, GraphTensor

_numbers = itertools.count()


@dataclass(slots=True)
class SteppedRun:
    """A run of a session in several steps. ``feeds``: what may be fed; ``values``: what has been fed and fetched, by
    name; ``ran``: operations with an effect that ran.
    """

    session: tf.compat.v1.Session
    feeds: frozenset[str]
    values: dict[str, object] = field(default_factory=dict)
    ran: set[GraphOperation] = field(default_factory=set)

    def step(self, fetches: object, feed_dict: Mapping[object, object] | None) -> object:
        """The values of more fetches. ValueError for a feed that was not announced, UnsupportedError if an operation
        with an effect would run twice.
        """
        graph = self.session.graph
        for key, value in (feed_dict or {}).items():
            name = graph.as_graph_element(key, allow_operation=False).name
            if name not in self.feeds:
                raise ValueError(f"The feed '{name}' was not given to partial_run_setup.")
            self.values[name] = value
        flat = [graph.as_graph_element(f) for f in tf.nest.flatten(fetches)]
        again = self._reached(flat)
        if again & self.ran:
            name = min(operation.name for operation in again & self.ran)
            raise UnsupportedError(
                f"partial_run would run '{name}', which has an effect, a second time.",
                hint="Fetch what depends on it in one step, or in one session.run.",
            )
        results = self.session.run(fetches, self.values)
        self.ran |= again
        named = zip(flat, tf.nest.flatten(results), strict=False)
        self.values.update((t.name, v) for t, v in named if isinstance(t, tf.Tensor) and graph.is_feedable(t))
        return results

    def _reached(self, starts: Sequence[GraphTensor | GraphOperation]) -> set[GraphOperation]:
        """The operations with an effect that a step runs."""
        waiting = [cast("GraphOperation", getattr(t, "op", t)) for t in starts if t.name not in self.values]
        seen = set(waiting)
        while waiting:
            operation = waiting.pop()
            before = {t.op for t in operation.inputs if t.name not in self.values} | {
                *operation.control_inputs
            }
            waiting += before - seen
            seen |= before
        return {
            operation for operation in seen if runs_once(operation) and operation.type != "ReadVariableOp"
        }


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
            chosen = callable_options.run_options if run_metadata is not None else None
            fed = dict(zip(feeds, values, strict=True))
            return self.run([*fetches, *targets], fed, chosen, run_metadata)[: len(fetches)]

        return call

    own_from_options.plain = from_options  # type: ignore[attr-defined]
    base.make_callable, base._make_callable_from_options = own_callable, own_from_options


def _install_steps(base: type[tf.compat.v1.Session]) -> None:
    setup, partial_run = base.partial_run_setup, base.partial_run

    def own_setup(
        self: tf.compat.v1.Session, fetches: object, feeds: Sequence[object] | None = None
    ) -> object:
        if not is_placed_graph(self.graph):
            return setup(self, fetches, feeds)
        names = (self.graph.as_graph_element(f, allow_operation=False).name for f in feeds or ())
        handle = f"podrun_partial_run_{next(_numbers)}"
        runs = self.__dict__.setdefault("_ipu_partial_runs", {})
        runs[handle] = SteppedRun(self, frozenset(names))
        return handle

    def own_partial_run(
        self: tf.compat.v1.Session,
        handle: object,
        fetches: object,
        feed_dict: Mapping[object, object] | None = None,
    ) -> object:
        run = self.__dict__.get("_ipu_partial_runs", {}).get(handle)
        return partial_run(self, handle, fetches, feed_dict) if run is None else run.step(fetches, feed_dict)

    base.partial_run_setup, base.partial_run = own_setup, own_partial_run
