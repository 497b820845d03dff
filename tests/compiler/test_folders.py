"""The compiler's folders import those above them in the list of ``podrun/compiler/__init__.py``, and no other."""

from __future__ import annotations

import ast
from pathlib import Path

import podrun.compiler

ROOM = Path(podrun.compiler.__file__).parent
MAY_IMPORT = {
    "export": set(),
    "tracing": {"export"},
    "state": {"export"},
    "numbers": {"export", "tracing", "state"},
    "order": {"export", "tracing", "state", "numbers"},
    "costs": {"export", "tracing", "state", "numbers"},
}


def _folders_imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("podrun.compiler"):
            found |= {f"{node.module}.{name.name}".split(".")[2] for name in node.names}
    return found & set(MAY_IMPORT)


def test_folders_import_only_what_stands_above_them() -> None:
    assert {path.parent.name for path in ROOM.glob("*/__init__.py")} == set(MAY_IMPORT)
    for folder, allowed in MAY_IMPORT.items():
        for path in (ROOM / folder).glob("*.py"):
            assert _folders_imported(path) <= allowed | {folder}, path
