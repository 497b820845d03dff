"""Imports point down the table of rooms in docs/design.md, and fast commands start without heavy libraries."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sources import syntax_nodes, syntax_tree

PACKAGE = Path(__file__).resolve().parent.parent / "podrun"

# room -> rooms it may import. Longest matching prefix wins.
BASE = {"core", "protos"}
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "protos": set(),
    "private_apis": set(),
    "faults": BASE,
    "collectives": BASE | {"commands"},  # The test tool is a command.
    "costmodel": BASE | {"collectives"},
    "device": BASE | {"faults", "collectives", "costmodel", "private_apis"},
    "compiler": BASE
    | {"costmodel", "collectives", "private_apis", "device.xla.clients", "device.xla.instruction_set"},
    "numerics": {"core"},
    "popef": BASE,
    "runtime": BASE
    | {"compiler", "costmodel", "popdist", "report", "record", "popef"}
    | {"device.connection", "device.host.connecting", "device.xla.clients"},
    "onnx_models": BASE | {"numerics", "runtime", "compiler", "collectives"},
    "popart": BASE | {"runtime", "onnx_models", "popdist", "report", "compiler", "costmodel", "private_apis"},
    "poptorch": BASE
    | {"numerics", "runtime", "popdist", "private_apis", "report.model", "popef"}
    | {"compiler.program", "costmodel.settings"},
    "serving": BASE
    | {
        "popef",
        "popart",
        "onnx_models",
        "runtime",
        "onnx_backend",
        "commands",
        "faults",
        "device.connection",
        "estimate",
        "costmodel",
        "report.curves",
    }
    | {"simulate.streams", "simulate.traces.lines"},
    "tensorflow": BASE | {"numerics", "runtime", "popdist", "private_apis", "compiler", "serving"},
    "models": BASE | {"popart"},
    "popdist": BASE | {"device.connection", "collectives", "record", "faults"},
    "onnx_backend": BASE | {"onnx_models", "runtime", "compiler", "device.xla"},
    "partition": BASE | {"faults", "device", "private_apis"},
    # The test tools hold IPUs and run programs on them, as front ends do.
    "monitor": BASE | {"partition", "device", "collectives", "costmodel", "commands", "record"},
    # A POD of its own: it hosts the service and machines, and judges health as the monitor does.
    "drill": BASE | {"faults", "partition", "monitor", "checkpoint", "popdist"},
    "commands": {"core"},  # Imports the command that is asked for, and nothing before it; core tells errors.
    "__main__": {"commands"},  # python -m podrun.
    # Completion tells a shell the options of every verb.
    "launcher": BASE | {"faults", "partition", "report", "estimate", "record", "upkeep", "compat.__main__"},
    "upkeep": BASE | {"partition", "serving.triton_server"},
    # Decides as they do, in virtual time. The launcher imports its verbs by name, when they are asked for.
    "simulate": BASE
    | {
        "faults",
        "partition",
        "launcher",
        "record",
        "checkpoint",
        "costmodel",
        "estimate",
        "collectives",
        "report.curves",
    },
    "estimate": BASE
    | {"onnx_models", "poptorch", "tensorflow", "runtime", "popart", "report", "costmodel", "commands"},
    "report": BASE | {"costmodel.target", "commands", "popef"},
    "record": BASE | {"faults", "device.connection"},
    "checkpoint": BASE | {"popdist", "record", "faults"},
    "compat": BASE
    | {"popef", "poptorch", "popart", "onnx_models", "popdist", "monitor", "report", "commands", "serving"}
    | {"tensorflow"},
}


def _room(module: str) -> str:
    parts = module.split(".")[1:]
    return parts[0] if parts else ""


@functools.cache
def _imports(path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere in it."""
    found: set[str] = set()
    for node in syntax_nodes(path):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.split(".")[0] == "podrun"}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "podrun":
            if node.module == "podrun":
                found |= {f"podrun.{name.name}" for name in node.names}
            else:
                found.add(node.module)
    return found


def _files() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if not p.stem.endswith("_pb2"))


def _modules_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE.parent).with_suffix("")
    return ".".join(relative.parts).removesuffix(".__init__")


def _imports_upwards(path: Path) -> list[str]:
    """Modules that a file imports although its room may not."""
    room = _room(_modules_of(path))
    if not room:
        return []
    assert room in ALLOWED, f"{path.name} is in no room of docs/design.md"
    wrong = []
    for module in sorted(_imports(path)):
        other = _room(module)
        if other in ("", room, "__version__"):
            continue
        inner = ".".join(module.split(".")[1:])
        if not any(inner == a or inner.startswith(a + ".") or other == a for a in ALLOWED[room]):
            wrong.append(module)
    return wrong


def test_imports_point_down() -> None:
    upwards = {_modules_of(path): _imports_upwards(path) for path in _files()}
    assert {module: wrong for module, wrong in upwards.items() if wrong} == {}


CIRCLES: set[tuple[str, str]] = set()
"""Pairs of rooms that import each other. Stays empty."""


def test_no_room_is_entered_from_above_and_below() -> None:
    reach: dict[str, set[str]] = {}
    for path in _files():
        room = _room(_modules_of(path))
        reach.setdefault(room, set()).update(_room(module) for module in _imports(path))
    pairs = {
        (room, other)
        for room, others in reach.items()
        for other in others
        if room < other and room in reach.get(other, ())
    }
    assert pairs - {("", "")} <= CIRCLES


def test_poptorch_imports_nothing_of_popart() -> None:
    importers = {
        _modules_of(path)
        for path in (PACKAGE / "poptorch").rglob("*.py")
        if any(_room(module) == "popart" for module in _imports(path))
    }
    assert importers == set()


FOLDERS_OF_PARTITION: dict[str, set[str]] = {
    "host": set(),
    "state": {"host"},
    "machines": {"host", "state"},
    "server": {"host", "state", "machines"},
    "client": {"host", "state"},
    "commands": {"host", "state", "machines", "server", "client"},
}
"""Folder of podrun/partition -> those that it may import at run time."""


FOLDERS_OF_POPTORCH: dict[str, set[str]] = {
    "capture": set(),
    "operators": {"capture"},
    "api": {"capture"},
    "data": {"api", "capture"},
    "instances": {"api"},
    "compile": {"api", "capture", "operators"},
    "executor": {"api", "capture", "compile"},
}
"""The same for podrun/poptorch."""


FOLDERS_OF_POPART: dict[str, set[str]] = {
    "values": set(),
    "step_data": {"values"},
    "options": {"values"},
    "optimizers": {"values"},
    "devices": {"values"},
    "operators": {"values"},
    "models": {"values", "step_data"},
    "building": {"values", "step_data", "options", "operators", "models"},
    "sessions": {"values", "step_data", "options", "optimizers", "devices", "models"},
}
"""The same for podrun/popart."""


@pytest.mark.parametrize(
    ("room", "folders"),
    [
        ("partition", FOLDERS_OF_PARTITION),
        ("poptorch", FOLDERS_OF_POPTORCH),
        ("popart", FOLDERS_OF_POPART),
    ],
)
def test_imports_inside_a_room_point_down(room: str, folders: dict[str, set[str]]) -> None:
    wrong = []
    for path in sorted((PACKAGE / room).glob("*/*.py")):
        for node in _at_run_time(syntax_tree(path)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if (
                not module.startswith(f"podrun.{room}.")
                or (PACKAGE / room / f"{module.split('.')[2]}.py").exists()
            ):
                continue
            if module.split(".")[2] not in folders[path.parent.name] | {path.parent.name}:
                wrong.append(f"{path.parent.name}/{path.name}: {module}")
    assert wrong == []


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only type checkers read."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _at_run_time(child)


def test_every_room_is_in_the_table_of_the_design() -> None:
    page = (PACKAGE.parent / "docs/design.md").read_text(encoding="utf-8")
    told = {
        name
        for row in re.findall(r"^\| (`podrun/.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"podrun/(\w+)", row)
    }
    assert told == set(ALLOWED)
    there = {_room(_modules_of(path)) for path in _files()} - {""}
    assert there == set(ALLOWED)


TEST_TOOLS = ("link_tools", "host_tools", "load_tools", "gc_gwlinkstraffictest")


FAST = (
    *("podrun.launcher.cli", "podrun.upkeep.verbs", "podrun.upkeep.doctor", "podrun.upkeep.running"),
    "podrun.launcher.commands.completion",
    *("podrun.partition.commands.vipu", "podrun.partition.commands.vipu_admin"),
    "podrun.partition.commands.vipu_server",
    *("podrun.monitor.device_tools", "podrun.monitor.device_listing"),
    *(f"podrun.monitor.{name}" for name in TEST_TOOLS),
)
"""Modules of commands that start at once. What all of them do not import none of them does."""


def test_fast_commands_import_nothing_heavy() -> None:
    assert heavy_modules_after(f"import {', '.join(FAST)}\n") == []


def _file_of(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _named(statement: ast.Import | ast.ImportFrom, module: str) -> list[str]:
    """Names that an import statement may stand for."""
    if isinstance(statement, ast.Import):
        return [name.name for name in statement.names]
    assert not statement.level, f"{module}, line {statement.lineno}: a relative import is not followed here"
    return [f"{statement.module}.{name.name}" for name in statement.names]


def _imported_at_once(module: str) -> Iterator[str]:
    """Names that a module's import statements outside of functions may stand for, with the packages above them."""
    path = _file_of(module)
    waiting = list(syntax_tree(path).body) if path.exists() else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _named(node, module)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def _imported_anywhere(module: str) -> Iterator[str]:
    """The same of all its import statements, and of ``import_module`` with a name that is written there."""
    path = _file_of(module)
    for node in syntax_nodes(path) if path.exists() else ():
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _named(node, module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
            yield from (word.value for word in node.args[:1] if isinstance(word, ast.Constant))


def _reached(modules: list[str], imported: Callable[[str], Iterator[str]]) -> set[str]:
    """The names to which import statements lead from some modules."""
    reached, waiting = set[str](), list(modules)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [".".join(name.split(".")[:-1])] if "." in name else []
            waiting += imported(name) if name.startswith("podrun") else []
    return reached


def test_a_program_of_poptorch_begins_without_jax() -> None:
    """As its import statements say. A slow test asks a process."""
    reached = _reached(["podrun.poptorch", "podrun.compat.__main__"], _imported_at_once)
    assert {"torch", "podrun.runtime"} <= reached
    assert not {"jax", "jaxlib", "ray"} & reached


def test_the_runtime_needs_no_front_end() -> None:
    """Nor do the rooms below it, in whatever they import, also in functions. A slow test asks a process."""
    reached = _reached(
        [_modules_of(path) for path in (PACKAGE / "runtime").rglob("*.py")], _imported_anywhere
    )
    assert {"jax", "podrun.device.machine", "podrun.report", "podrun.popef"} <= reached
    others = {"podrun.popart", "podrun.poptorch", "podrun.tensorflow", "podrun.onnx_models"}
    assert not {*others, "onnx", "torch", "tensorflow"} & reached


def test_planning_a_launch_imports_nothing_heavy() -> None:
    """Numbers are for placing partitions, which a server does."""
    planned = (
        "import podrun.launcher.launch\n"
        "from podrun.launcher.plan import plan_launch\n"
        "from podrun.launcher.program import LaunchContext\n"
        "options = {'num-replicas': 16, 'vipu-partition': 'p16'}\n"
        "plan_launch(options, ('true',), LaunchContext({}, '/', '/bin/true'))\n"
    )
    assert heavy_modules_after(planned) == []


def heavy_modules_after(statements: str) -> list[str]:
    """Those of the slow libraries that a new interpreter has imported after some statements."""
    code = (
        f"import sys\n{statements}"
        "heavy = {'jax', 'jaxlib', 'onnx', 'ray', 'grpc', 'torch', 'numpy', 'psutil'} & set(sys.modules)\n"
        "print(*sorted(heavy))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_programs_that_attach_to_machines_import_no_machine() -> None:
    code = (
        "import sys, podrun.popart, podrun.popdist, podrun.device.host.partition_config\n"
        "parts = ('device.machine', 'device.xla', 'collectives.rendezvous', 'report.document', 'popef',\n"
        " 'costmodel.cost', 'costmodel.equations')\n"
        "print(*(name for name in parts if f'podrun.{name}' in sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_no_machine_paths_or_index_addresses_in_the_project() -> None:
    root = PACKAGE.parent
    listed = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    patterns = ["/" + "work/", "/" + "root/", "index" + "-url", "pypi.org" + "/simple"]
    offending = []
    for name in listed:
        path = root / name
        if path.suffix in {".py", ".md", ".txt", ".toml", ".yaml", ".json", ".proto", ""} and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            offending += [f"{name}: {p}" for p in patterns if p in text]
    assert offending == []


def test_models_are_read_before_a_front_end_is_imported() -> None:
    """As ``podrun estimate FILE`` does: tests import PopART first, and pass over a circle that begins elsewhere."""
    done = subprocess.run(
        [sys.executable, "-c", "import podrun.onnx_models.model_loader"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
