"""The house: names stand for one thing, files and functions fit a screen, no module imports itself in a circle."""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.sources import syntax_nodes, syntax_tree

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
"""Names of values that two of PopTorch, PopART and the SDK's TensorFlow publish, each with its own values."""

SAME_FUNCTIONS = {
    "Array",
    "DistributedOptimizer",
    "barrier",
    "broadcast",
    "init",
    "synchronize",
}
"""Public functions that two of PopART, PopDist and PopTorch publish, each in its own module; and arrays of operators,
some of which may be traced. May only shrink."""
ENTRY_POINT = "main"
"""The function of a command's module that the command runs."""

SMALL_FILES = 12
"""Files under 70 lines, besides those in ``commands``, which hold one verb each. May only go down."""
LONGEST_FILE = 400
LONGEST_FUNCTION = 50
VAGUE_WORDS = {"found", "made", "given", "each"}
VAGUE_RESULTS: dict[str, int] = {
    "partition": 1,
    "upkeep": 1,
}
"""Room -> how many assignments and parameters call a value by one of these. May only go down."""
ASSERTS: dict[str, int] = {}
"""Room -> how many ``assert`` statements it holds. A user's mistake is an error of its own. May only go down."""
UNTYPED: dict[str, int] = {
    "checkpoint": 5,
    "collectives": 5,
    "compiler": 10,
    "core": 25,
    "device": 15,
    "estimate": 10,
    "launcher": 5,
    "monitor": 10,
    "numerics": 15,
    "onnx_backend": 20,
    "onnx_models": 35,
    "partition": 30,
    "popart": 40,
    "popdist": 10,
    "poptorch": 15,
    "private_apis": 20,
    "report": 5,
    "runtime": 20,
    "serving": 20,
    "simulate": 5,
    "tensorflow": 100,
}
"""Room -> how many parameters and fields are ``Any`` at most. May only go down."""


@dataclass(slots=True)
class Facts:
    """What the tests below want to know of one module, gathered in one walk."""

    path: Path
    lines: int
    tree: ast.Module
    functions: list[tuple[str, int]] = field(default_factory=list)  # (qualified name, lines)
    vague: int = 0
    asserts: int = 0
    untyped: int = 0


@functools.cache
def modules() -> Mapping[str, Facts]:
    """Facts by dotted name, without re-exports and generated code."""
    facts = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if not ROOMS_OF_FOREIGN_NAMES & set(parts) and not path.stem.endswith("_pb2"):
            facts[".".join(parts)] = _facts_of(path)
    return facts


def _facts_of(path: Path) -> Facts:
    facts = Facts(path, path.read_bytes().count(b"\n"), syntax_tree(path))
    for node in syntax_nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            facts.functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
        elif isinstance(node, ast.Name):
            facts.vague += node.id in VAGUE_WORDS and isinstance(node.ctx, ast.Store)
        elif isinstance(node, ast.arg):
            facts.vague += node.arg in VAGUE_WORDS
        elif isinstance(node, ast.Assert):
            facts.asserts += 1
        if isinstance(node, (ast.arg, ast.AnnAssign)) and isinstance(node.annotation, ast.Name):
            facts.untyped += node.annotation.id == "Any"
    return facts


def _room(module: str) -> str:
    return module.split(".")[1]


def _by_room(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for module, count in counts:
        total[_room(module)] += count
    return dict(total)


def _higher(now: Mapping[str, int], allowed: Mapping[str, int]) -> dict[str, str]:
    return {
        room: f"{count}, at most {allowed.get(room, 0)}"
        for room, count in now.items()
        if count > allowed.get(room, 0)
    }


def test_a_public_class_name_stands_for_one_thing() -> None:
    places = defaultdict(set)
    for name, facts in modules().items():
        for node in facts.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(name)
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in SAME_NAMES} == {}
    assert [name for name in SAME_NAMES if len(places[name]) < 2] == []


def _functions_and_aliases(tree: ast.Module) -> Iterator[str]:
    """Public names that a module defines at its top: functions, and other names of types and functions."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.Assign) and _is_alias(node.value):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).endswith("TypeAlias"):
            yield ast.unparse(node.target)


def _is_alias(value: ast.expr) -> bool:
    """Whether ``Name = value`` gives a type or a function another name; type variables and constants do not."""
    return isinstance(value, (ast.Name, ast.Attribute, ast.Subscript, ast.BinOp))


def test_a_public_function_name_stands_for_one_thing() -> None:
    places = defaultdict(set)
    for module, facts in modules().items():
        for name in _functions_and_aliases(facts.tree):
            if not name.startswith("_") and not name.isupper() and name != ENTRY_POINT:
                places[name].add(module)
    twice = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    assert {name: where for name, where in twice.items() if name not in SAME_FUNCTIONS} == {}


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
    small = [
        name
        for name, facts in modules().items()
        if facts.lines < 70 and not name.endswith(("__init__", "__main__")) and ".commands." not in name
    ]
    assert len(small) <= SMALL_FILES, small
    long = {name: facts.lines for name, facts in modules().items() if facts.lines > LONGEST_FILE}
    assert long == {}


def test_functions_fit_a_screen() -> None:
    long = {
        f"{module}.{name}": lines
        for module, facts in modules().items()
        for name, lines in facts.functions
        if lines > LONGEST_FUNCTION
    }
    assert long == {}


def test_results_are_called_what_they_are() -> None:
    now = _by_room((module, facts.vague) for module, facts in modules().items())
    assert _higher(now, VAGUE_RESULTS) == {}


def test_values_are_classes_that_import_fast() -> None:
    """`from podrun.core.quick_dataclass import dataclass`: the standard library's takes half a millisecond a class."""
    standalone = ("podrun.protos.", "podrun.private_apis.", "podrun.core.quick_dataclass")
    modules_there = {n: f.path for n, f in modules().items() if not f"{n}.".startswith(standalone)}
    assert [name for name, path in modules_there.items() if any(map(_is_standard, syntax_nodes(path)))] == []


def _is_standard(node: ast.AST) -> bool:
    """Whether code takes ``dataclass`` from the standard library's module."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "dataclasses" and any(name.name == "dataclass" for name in node.names)
    return isinstance(node, ast.Attribute) and node.attr == "dataclass"


def test_no_room_asserts_more_than_it_did() -> None:
    now = _by_room((module, facts.asserts) for module, facts in modules().items())
    assert _higher(now, ASSERTS) == {}


def test_no_room_has_more_untyped_names_than_it_had() -> None:
    now = _by_room((module, facts.untyped) for module, facts in modules().items())
    assert _higher(now, UNTYPED) == {}


def test_no_circle_of_imports() -> None:
    """Imports anywhere in modules, in functions too; those for types alone do not count."""
    assert sorted(_circles({name: set(_imported(facts.path)) for name, facts in modules().items()})) == []


def _imported(path: Path) -> Iterator[str]:
    of_types = {
        id(node)
        for block in syntax_tree(path).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
    }
    for node in syntax_nodes(path):
        if id(node) in of_types:
            continue
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
