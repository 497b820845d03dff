"""podrun's source files as syntax trees: every file is parsed once for all tests that read the code."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    """The tree of a file, which its readers do not change."""
    return ast.parse(path.read_text(encoding="utf-8"))
