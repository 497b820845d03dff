"""The house: names stand for one thing, small files live with what they serve, no module imports itself in a circle."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.sources import syntax_tree

PACKAGE = Path(__file__).resolve().parents[1] / "podrun"
ROOMS_OF_FOREIGN_NAMES = {"compat", "protos"}
"""Folders that re-export names, or hold generated code."""

SAME_NAMES = {
    "CommGroupType",
    "MeanReductionStrategy",
    "ReductionType",
    "SyncPattern",
    "TensorLocationSettings",
    "VariableRetrievalMode",
}
"""Names of values that PopTorch and PopART both publish. PopTorch's are integers or take setters, PopART's do not."""
SMALL_FILES = 12
"""Files under 70 lines, besides those in ``commands``, which hold one verb each. May only go down."""
LONGEST = 600


@functools.cache
def modules() -> Mapping[str, tuple[Path, ast.Module]]:
    """Syntax trees by dotted name, without re-exports and generated code."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if not ROOMS_OF_FOREIGN_NAMES & set(parts):
            found[".".join(parts)] = (path, syntax_tree(path))
    return found


def test_a_public_class_name_stands_for_one_thing() -> None:
    places = defaultdict(set)
    for name, (_, tree) in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(name)
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in SAME_NAMES} == {}
    assert [name for name in SAME_NAMES if len(places[name]) < 2] == []


def test_a_module_name_stands_for_two_files_at_most() -> None:
    places = defaultdict(list)
    for name in modules():
        places[name.rsplit(".", 1)[1]].append(name)
    assert {
        name: where
        for name, where in places.items()
        if len(where) > 2 and name not in ("__init__", "__main__")
    } == {}


def test_files_are_neither_tiny_nor_long() -> None:
    lines = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, (path, _) in modules().items()
    }
    small = [
        name
        for name, count in lines.items()
        if count < 70 and not name.endswith(("__init__", "__main__")) and ".commands." not in name
    ]
    assert len(small) <= SMALL_FILES, small
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


def test_no_circle_of_imports() -> None:
    """Imports at the top of modules; those inside functions and for types alone do not count."""
    assert sorted(_circles({name: set(_imported(tree)) for name, (_, tree) in modules().items()})) == []


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in modules():
                    yield inner
                elif node.module in modules():
                    yield node.module


def _circles(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """Strongly connected groups of more than one module, each sorted."""
    reach = {name: _reachable(graph, name) for name in graph}
    return {
        group
        for name in graph
        if len(group := tuple(sorted(other for other in reach[name] if name in reach[other]))) > 1
    }


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph.get(name, ())
    return seen
