"""Patterns of operators in a graph: ``PatternMatcher(["s:0->MatMul:m->Add:a->e:0"]).next_pattern(graph)``.

Each string is a line of nodes from a start ``s:INPUT`` to an end ``e:OUTPUT``: ``TYPE:KEY`` with an arrow to what uses
its result. Lines share nodes by their keys. A match is a dictionary from keys to nodes. PopRT's own grammar is not
published whole; this is what its examples show.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from onnx import GraphProto, NodeProto

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class _Step:
    """A node of a line. ``type``: its operator, ``*`` for any."""

    type: str
    key: str


def _line(text: str) -> list[_Step]:
    words = [word.strip() for word in text.split("->")]
    if len(words) < 3 or not re.fullmatch(r"s:\w+", words[0]) or not re.fullmatch(r"e:\w+", words[-1]):
        raise UsageError(f"{text!r} is no pattern", hint='As in "s:0->MatMul:m->Add:a->e:0".')
    steps = []
    for word in words[1:-1]:
        kind, colon, key = word.partition(":")
        if not colon or not re.fullmatch(r"[A-Za-z0-9_*.]+", kind) or not key:
            raise UsageError(f"{text!r}: {word!r} is no operator with a key", hint="As in MatMul:m.")
        steps.append(_Step(kind, key))
    return steps


class PatternMatcher:
    """Finds lines of operators; see the module's text."""

    def __init__(self, patterns: Sequence[str]) -> None:
        if isinstance(patterns, str) or not patterns:
            raise UsageError("PatternMatcher takes a list of patterns")
        self._lines = [_line(text) for text in patterns]
        self._seen: set[tuple[str, ...]] = set()

    def next_pattern(self, graph: GraphProto) -> dict[str, NodeProto] | None:
        """The next match that was not returned yet; None after the last."""
        for match in self._matches(graph):
            identity = tuple(node.output[0] for node in match.values())
            if identity not in self._seen:
                self._seen.add(identity)
                return match
        return None

    def _matches(self, graph: GraphProto) -> Iterator[dict[str, NodeProto]]:
        users: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                users.setdefault(name, []).append(node)
        for node in graph.node:
            yield from self._extended(0, 0, node, {}, graph, users)

    def _extended(
        self,
        line: int,
        step: int,
        node: NodeProto,
        match: dict[str, NodeProto],
        graph: GraphProto,
        users: dict[str, list[NodeProto]],
    ) -> Iterator[dict[str, NodeProto]]:
        wanted = self._lines[line][step]
        held = match.get(wanted.key)
        if wanted.type not in ("*", node.op_type) or (held is not None and held.output[0] != node.output[0]):
            return
        match = match | {wanted.key: node}
        if step + 1 < len(self._lines[line]):
            for name in node.output:
                for user in users.get(name, []):
                    yield from self._extended(line, step + 1, user, match, graph, users)
        elif line + 1 < len(self._lines):
            for other in graph.node:
                yield from self._extended(line + 1, 0, other, match, graph, users)
        else:
            yield match
