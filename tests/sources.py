"""podrun's source files as syntax trees: every file is parsed and walked once for all tests that read the code."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    """The tree of a file, which its readers do not change."""
    with _no_collection():
        return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def syntax_nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree, in no promised order."""
    nodes: list[ast.AST] = []
    waiting: list[ast.AST] = [syntax_tree(path)]
    with _no_collection():
        while waiting:
            node = waiting.pop()
            nodes.append(node)
            for name in node._fields:
                value = getattr(node, name, None)
                if type(value) is list:
                    waiting += [part for part in value if isinstance(part, ast.AST)]
                elif isinstance(value, ast.AST):
                    waiting.append(value)
    return tuple(nodes)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Trees are many objects that stay: the garbage collector would look through them while they are built."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()
