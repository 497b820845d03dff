"""Everything that pages name exists: links, files, names and commands with their options."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from podrun.core.errors import PodrunError
from podrun.core.fault_forms import parse_fault
from podrun.launcher.commands.profile import read_words
from podrun.launcher.options import parse_command_line
from podrun.monitor.device_listing import gc_info_command, gc_inventory_command
from podrun.monitor.device_tools import gc_monitor_command, gc_reset_command
from podrun.monitor.gc_gwlinkstraffictest import gc_gwlinkstraffictest_command
from podrun.monitor.host_tools import gc_hostsynclatencytest_command, gc_hosttraffictest_command
from podrun.monitor.link_tools import gc_iputraffictest_command, gc_links_command
from podrun.monitor.load_tools import gc_flops_command, gc_powertest_command
from podrun.partition.commands.vipu import vipu_command
from podrun.partition.commands.vipu_admin import vipu_admin_command
from podrun.partition.commands.vipu_server import vipu_server_command
from tests.conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
COMMANDS: dict[str, click.Command] = {
    "vipu": vipu_command,
    "vipu-admin": vipu_admin_command,
    "vipu-server": vipu_server_command,
    "gc-monitor": gc_monitor_command,
    "gc-reset": gc_reset_command,
    "gc-info": gc_info_command,
    "gc-inventory": gc_inventory_command,
    "gc-links": gc_links_command,
    "gc-flops": gc_flops_command,
    "gc-iputraffictest": gc_iputraffictest_command,
    "gc-hosttraffictest": gc_hosttraffictest_command,
    "gc-hostsynclatencytest": gc_hostsynclatencytest_command,
    "gc-gwlinkstraffictest": gc_gwlinkstraffictest_command,
    "gc-powertest": gc_powertest_command,
}


def _name_in_repository(page: Path) -> str:
    return str(page.relative_to(ROOT))


NOT_PYTHON = {"podrun.strict", "podrun.vipu", "podrun.profile", "podrun.estimate"}
"""An engine option, a gRPC package, schemas of JSON documents."""
MADE_FOR_SITE = {"reference/commands.md", "reference/errors.md"}
"""Pages that the site's hooks make; `tests.test_site` builds them."""
MADE_BY_RUNS = re.compile(
    r"profile\.|run\.record\.|trace\.json|summary\.txt|executable\.popef|name_map\.json|framework\.json|model|train\.py|script\.py"
)


def _files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    return listed.stdout.split() or [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]


FILES = _files()


def _code(page: Path) -> Iterator[str]:
    """The text in back quotes."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=_name_in_repository)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    gone = [
        t for t in targets if "://" not in t and not (page.parent / t).exists() and t not in MADE_FOR_SITE
    ]
    assert gone == []


@pytest.mark.parametrize("page", PAGES, ids=_name_in_repository)
def test_files_that_are_named_are_there(page: Path) -> None:
    named = {
        word
        for code in _code(page)
        if re.fullmatch(r"[\w./-]+\.(py|md|yaml|proto|json|txt|toml)", word := code)
    }
    named |= {
        code.rstrip("/")
        for code in _code(page)
        if re.fullmatch(r"(podrun|tests|docs|benchmarks|examples)/[\w/.-]*", code)
    }
    gone = [
        name
        for name in sorted(named)
        if not MADE_BY_RUNS.match(Path(name).name)
        and not any(
            f == name or f.endswith("/" + name) or f.startswith(name + "/") or f"/{name}/" in f for f in FILES
        )
    ]
    assert gone == []


@pytest.mark.parametrize("page", PAGES, ids=_name_in_repository)
def test_python_names_are_there(page: Path) -> None:
    named = {
        code.removesuffix("()")
        for code in _code(page)
        if re.fullmatch(r"podrun(\.[A-Za-z_]\w*)+(\(\))?", code)
    }
    assert [name for name in sorted(named - NOT_PYTHON) if not _exists(name)] == []


def test_names_in_docstrings_are_there() -> None:
    """Of modules as files, so that nothing is imported for it."""
    gone = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "podrun").rglob("*.py"))
        for name in re.findall(r"(?<!`)`(podrun(?:\.[A-Za-z_]\w*)+)`(?!`)", path.read_text(encoding="utf-8"))
        if not _stands_in_a_file(name)
    ]
    assert gone == []


def _stands_in_a_file(dotted: str) -> bool:
    place, names = ROOT, dotted.split(".")
    while names and (place / names[0]).is_dir():
        place /= names.pop(0)
    for file in (f"{names[0]}.py", f"{names[0]}.c") if names else ():
        if (place / file).is_file():
            place, names = place / file, names[1:]
    file = place / "__init__.py" if place.is_dir() else place
    return not names or re.search(rf"\b{names[0]}\b", file.read_text(encoding="utf-8")) is not None


def _exists(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def _lines(page: Path) -> Iterator[list[str]]:
    """Commands of ours in code blocks, as words."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    blocks += re.findall(r"(?:^    \S.*\n)+", text, flags=re.MULTILINE)
    for line in "\n".join(blocks).splitlines():
        plain = re.sub(r"^(\w+=\S+ )+", "", line.strip().removeprefix("$ "))
        if plain.split(" ")[0] in {"podrun", *COMMANDS}:
            yield [w for w in shlex.split(plain, comments=True) if w != "&"]


@pytest.mark.parametrize("page", PAGES, ids=_name_in_repository)
def test_commands_take_what_they_are_given(page: Path) -> None:
    """Every command that a page shows is understood: verbs, options and their values."""
    refused = []
    for name, *words in _lines(page):
        try:
            if name != "podrun":
                _walk(COMMANDS[name], name, words)
            elif words[0] != "estimate" and "[options]" not in words:
                read_words(words[1:]) if words[0] == "profile" else parse_command_line(words)
        except (PodrunError, click.UsageError) as error:
            refused.append(f"{shlex.join([name, *words])}: {error}")
    assert refused == []


def _walk(command: click.Command, name: str, words: list[str]) -> None:
    context = command.make_context(name, list(words), allow_extra_args=isinstance(command, click.Group))
    if isinstance(command, click.Group) and (rest := [*context._protected_args, *context.args]):
        _, inner, rest = command.resolve_command(context, rest)
        assert inner is not None
        _walk(inner, f"{name} {rest}", rest)


def test_faults_that_guides_propose_are_faults() -> None:
    shown = re.findall(r"\| `(\w+:[^`]+@[^`]+)` \|", (ROOT / "docs/faults.md").read_text(encoding="utf-8"))
    assert len(shown) > 5
    for text in shown:
        parse_fault(text)


def test_no_two_guides_keep_checkpoints_in_one_folder() -> None:
    """One would resume where another ended."""
    sources = [*PAGES, *(ROOT / "examples").rglob("*.py")]
    folders = [
        f
        for path in sources
        for f in re.findall(r"--checkpoints ([a-z-]+)", path.read_text(encoding="utf-8"))
    ]
    assert len(folders) > 2
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_is_on_a_page(name: str) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = set(re.findall(r"--[a-z][a-z0-9-]*", pages))
    missing = [option for option in _options(COMMANDS[name]) if option not in shown]
    assert missing == []


def _options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            yield max(parameter.opts, key=len)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from _options(inner)


_MODEL = """import numpy as np
import popart
builder, options = popart.Builder(), popart.SessionOptions()
x = builder.addInputTensor("FLOAT", [16, 32])
labels = builder.addInputTensor("INT32", [16])
w0, w1 = (builder.addInitializedInputTensor(np.ones(shape, np.float32)) for shape in ((32, 8), (8, 4)))
"""
_SESSION = f"""{_MODEL}
h = builder.aiOnnx.softmax([builder.aiOnnx.matmul([builder.aiOnnx.matmul([x, w0]), w1])])
loss = builder.aiGraphcore.nllloss([h, labels])
flow = popart.DataFlow(1, {{loss: popart.AnchorReturnType("All")}})
device = popart.DeviceManager().createIpuModelDevice({{"numIPUs": 1}})
session = popart.TrainingSession(builder.getModelProto(), flow, loss, popart.ConstSGD(0.1), device)
session.prepareDevice()
session.weightsFromHost()
"""
BEFORE = {
    "bring-your-program.md": _MODEL,
    "checkpoints.md": f"{_SESSION}BATCHES, losses, generator, batch = 100, [0.5], np.random.default_rng(0), 0\n",
    "notebooks.md": _SESSION,
    "serving.md": """from pathlib import Path
import numpy as np
from podrun.serving.compiler import Compiler, CompilerOptions
if not Path("executable.popef").exists():
    Compiler.compile_and_export("model.onnx", None, "executable.popef", CompilerOptions(num_ipus=1))
x, y = np.ones(2, np.float32), np.zeros(2, np.float32)
""",
    "onnx.md": "import numpy as np\nx = np.ones(2, np.float32)\n",
    "popart.md": "import popart\nbuilder = popart.Builder()\nx = builder.addInputTensor('FLOAT', [2])\n",
    "tiles.md": "import jax\nstep = lambda a, b: a @ b\nshapes = (jax.ShapeDtypeStruct((64, 64), 'float16'),) * 2\n",
}
"""Lines that a page assumes before its programs, in Python."""
ELSEWHERE = re.compile(r"\bcreate\(4\)|\bimport serve\b")
"""In programs of several processes; these are tried in `tests/collectives` and `tests/serving/ray_serve`."""
WITH_PROGRAMS = [
    page for page in PAGES if "```python" in page.read_text(encoding="utf-8") and page.name != "runtime.md"
]
"""Pages whose programs run by themselves; `tests/runtime/tiny.py` has those of the page about the runtime."""


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=_name_in_repository)
def test_programs_of_pages_run(page: Path, tmp_path: Path) -> None:
    """Each in a process of its own, after `BEFORE`; but those of `ELSEWHERE`."""
    if page.name == "notebooks.md":
        pytest.importorskip("pandas")
    _profile_and_model(tmp_path)
    for program in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        if ELSEWHERE.search(program):
            continue
        (tmp_path / "program.py").write_text(BEFORE.get(page.name, "") + program, encoding="utf-8")
        command = [sys.executable, "-m", "podrun.compat", "program.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, f"{program}\n{done.stderr}"


def _profile_and_model(folder: Path) -> None:
    """Files that the pages' programs read: a report and a model that doubles two numbers."""
    from onnx import helper, save

    from podrun.report.document import profile_to_json
    from tests.report.profiles import pipeline_profile

    where = folder / "podrun-profile__instance_0/training"
    where.mkdir(parents=True)
    (where / "profile.pop").write_text(profile_to_json(pipeline_profile()), encoding="utf-8")
    x, y = (helper.make_tensor_value_info(name, 1, [2]) for name in "xy")
    save(
        helper.make_model(helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [x], [y])),
        folder / "model.onnx",
    )


def test_the_first_program_of_the_page_about_popart_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path / "no servers"))
    import podrun.popart as popart

    page = (ROOT / "docs/popart.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    path = tmp_path / "program.py"
    path.write_text(program.replace("import popart", "import podrun.popart as popart"), encoding="utf-8")
    device = runpy.run_path(str(path))["device"]
    assert isinstance(device, popart.DeviceInfo)
    assert device.isAttached
    device.detach()


def test_the_page_about_trust_says_what_no_program_reaches() -> None:
    """The formulas of stencils stand in the benchmark, and both pages say that no program reaches them."""
    page = (ROOT / "docs/fidelity.md").read_text(encoding="utf-8")
    kind = re.search(r"^\| stencil \| (\d+) \| \d+ \| \d+% \| (\d+) \|", page, re.MULTILINE)
    assert kind
    row = f"| stencils ({kind[1]} of the records) | no program reaches"
    assert row in (ROOT / "docs/trust.md").read_text(encoding="utf-8")
    assert int(kind[2]) < int(kind[1]) / 2
    assert not (ROOT / "podrun/costmodel/stencil.py").exists()
