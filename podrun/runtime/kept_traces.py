"""What tracing a graph tells, kept between runs: a graph that was traced once is not traced again for its shapes.

An entry holds types and shapes of a graph's tensors, the initializers that decide shapes, and whether random numbers
are drawn: nothing that is executed. It is found by the graph, by what its operators mean, by the options of the trace,
and by the versions of podrun and of its libraries (`podrun.core.kept_files.made_by`). Values of initializers are no
part of that, since weights may begin with others in every run; the digests of those that decide shapes are in the
entry, and a graph with others is traced. Small integers are part of the name, since most of what decides shapes is.

Nothing is kept of a graph with operators of the program's own, or of a trace that warned of something.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from podrun.core.environment import environment
from podrun.core.errors import InternalError
from podrun.core.executable import TensorSpec
from podrun.core.kept_files import made_by
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.plan_cache import folder, plan_entry
from podrun.runtime.device_types import misfit
from podrun.runtime.digest import GraphDigest
from podrun.runtime.graph import OperatorGraph, all_nodes

if TYPE_CHECKING:
    from podrun.runtime.operators import OperatorTable

_log = logging.getLogger(__name__)
SMALL = 4096
"""Elements of an integer initializer whose values are part of the name of an entry."""


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What a trace tells: the specs of all ``tensors`` of the graph, the initializers that decide shapes and so are
    ``baked`` in, whether operators draw random numbers, and the tensor that replaces each parameter that the forward
    pass changes.
    """

    tensors: dict[str, TensorSpec]
    baked: frozenset[str]
    uses_random: bool
    state_updates: dict[str, str]


@dataclass(frozen=True, slots=True)
class TraceQuestion:
    """What decides the facts. ``initial``: initializers in device types. ``inputs``: specs by name. ``options``: the
    other options of the trace, as plain values.
    """

    graph: OperatorGraph
    operators: OperatorTable
    initial: Mapping[str, np.ndarray]
    inputs: Mapping[str, object]
    options: tuple[object, ...]

    def key(self) -> tuple[str, ...] | None:
        """The question in words; None if podrun cannot tell what some operator means."""
        meaning = self.operators.meaning(all_nodes(self.graph))
        if meaning is None:
            return None
        named = {name for name, value in self.graph.initializers.items() if _is_named(value)}
        digest = GraphDigest()
        try:
            digest.graph(self.graph, without_values=self.graph.initializers.keys() - named)
            digest.add(sorted(n for n, v in self.initial.items() if misfit(v, n, x64=False)))
            digest.add(sorted(self.inputs.items()))
            digest.add(self.options)
        except InternalError as error:
            _log.debug("not kept: %s", error)
            return None
        return "trace", meaning, digest.hexdigest(), made_by(environment())


def _is_named(value: np.ndarray) -> bool:
    return value.dtype.kind in "biu" and value.size <= SMALL


def kept_facts(question: TraceQuestion, trace: Callable[[], TraceFacts]) -> TraceFacts:
    """The facts that an earlier trace told of an equal graph, or those of ``trace()``, which are kept then."""
    if folder(environment()) is None:
        return trace()
    key = question.key()
    entry = None if key is None else plan_entry(key, level=logging.INFO)
    if entry is None:
        return trace()
    facts = _read(entry.read(), question.graph.initializers)
    if facts is None:
        with _warnings_counted() as warnings:
            facts = trace()
        if not warnings:
            entry.write(_plain(facts, question.graph.initializers))
    return facts


T = TypeVar("T", int, str)


def noted_names(
    what: str, names: Callable[[], dict[str, list[T]]], kind: type[T]
) -> Mapping[str, Sequence[T]]:
    """What podrun's modules hold by name, numbers or texts (``kind``), as an earlier process found it or as ``names()``
    gives it.
    """
    if folder(environment()) is None:
        return names()
    entry = plan_entry(("names", what, made_by(environment())), level=logging.INFO)
    if entry is None:
        return names()
    stored = entry.read()
    lists = list(stored.values()) if isinstance(stored, dict) else [None]
    if all(isinstance(part, list) and part and {type(item) for item in part} == {kind} for part in lists):
        return dict(stored)
    answer = names()
    entry.write(answer)
    return answer


@contextmanager
def _warnings_counted() -> Iterator[list[int]]:
    """The levels of warnings and errors that podrun logs meanwhile: what was said once is to be said again."""
    levels: list[int] = []
    _counting.append(levels)

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            levels.append(record.levelno)

    handler, logger = Counting(logging.WARNING), logging.getLogger("podrun")
    logger.addHandler(handler)
    try:
        yield levels
    finally:
        logger.removeHandler(handler)
        _counting[:] = [one for one in _counting if one is not levels]


_counting: list[list[int]] = []


def warn_of_graph(log: logging.Logger, message: str, *values: object) -> None:
    """Log a warning of an operator while it is traced, and note that the trace gave one.

    The note does not depend on who shows the line: front ends pass it on to loggers of their own, or show none.
    """
    for levels in _counting:
        levels.append(logging.WARNING)
    log.warning(message, *values)


def _plain(facts: TraceFacts, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Facts as JSON values, with digests of the values that they rest on."""
    return {
        "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in facts.tensors.values()],
        "baked": {name: _digest(values[name]) for name in sorted(facts.baked)},
        "uses_random": facts.uses_random,
        "state_updates": list(map(list, facts.state_updates.items())),
    }


def _read(stored: object, values: Mapping[str, np.ndarray]) -> TraceFacts | None:
    """The facts in an entry; None if they are not what `_plain` writes, or rest on other values."""
    if not isinstance(stored, dict):
        return None
    try:
        baked, uses_random = dict(stored["baked"]), stored["uses_random"]
        if type(uses_random) is not bool or any(_digest(values[n]) != text for n, text in baked.items()):
            return None
        specs = [_spec(*item) for item in stored["tensors"]]
        updates = {_text(name): _text(tensor) for name, tensor in stored["state_updates"]}
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("a kept trace is not used: %s: %s; tracing anew", type(error).__name__, error)
        return None
    return TraceFacts({spec.name: spec for spec in specs}, frozenset(baked), uses_random, updates)


def _spec(name: object, dtype: object, shape: object) -> TensorSpec:
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{shape!r} is no shape")
    return TensorSpec(_text(name), _text(dtype), tuple(shape))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _digest(value: np.ndarray) -> str:
    text = f"{value.dtype.name}{value.shape}".encode()
    content = (
        repr(value.tolist()).encode() if value.dtype.kind == "O" else np.ascontiguousarray(value).tobytes()
    )
    return hashlib.sha256(text + content).hexdigest()
