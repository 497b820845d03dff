"""The compiler's modules import those before them in the order of compilation; costs import no schedule."""

from __future__ import annotations

import ast
from pathlib import Path

import podrun.compiler

ROOM = Path(podrun.compiler.__file__).parent
ORDER = (
    *(
        "program",
        "anchors",
        "jaxprs",
        "model_collectives",
        "grid_rounding",
        "stochastic",
        "forward_trace",
        "random_words",
        "export",
        "segments",
    ),
    *(
        "extra_state",
        "replica_groups",
        "checks",
        "arenas",
        "fold",
        "chunk",
        "update",
        "summed_products",
        "elementwise_updates",
        "shared_updates",
        "collective_cuts",
        "chain",
        "schedule",
    ),
    *(
        "ipu_memory",
        "memory_remedies",
        "collective_times",
        "timeline",
        "update_cost",
        "cost",
        "operator_balance",
    ),
    *("cache", "compile"),
)
"""The order of the list in ``podrun/compiler/__init__.py``: a module may import those before it."""
SCHEDULES = {"collective_cuts", "chain", "schedule"}
COSTS = {
    "ipu_memory",
    "memory_remedies",
    "collective_times",
    "timeline",
    "update_cost",
    "cost",
    "operator_balance",
}


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("podrun.compiler"):
            found |= {f"{node.module}.{name.name}".split(".")[2] for name in node.names}
    return found


def test_modules_import_only_earlier_stages() -> None:
    assert {path.stem for path in ROOM.glob("*.py")} == {*ORDER, "__init__"}
    for index, name in enumerate(ORDER):
        imported = _imported(ROOM / f"{name}.py")
        assert imported <= {*ORDER[:index]}, name
        assert name not in COSTS or not imported & SCHEDULES, name
