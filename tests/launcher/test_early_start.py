"""Interpreters that start before their programs: what they import, and that a program sees no difference."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from podrun.core.environment import PODRUN_EARLY_START
from podrun.launcher import early_start
from podrun.launcher.early_start import FOLDER, early_instances
from podrun.launcher.output import OutputChannel
from podrun.launcher.process import Command, ProcessRunner
from podrun.launcher.spec import own_environment
from podrun.private_apis.jax import MLIR_MODULES
from tests.launcher.test_process import ends, printed, run_all


@pytest.fixture(scope="module")
def early() -> ModuleType:
    spec = importlib.util.spec_from_file_location("early_sitecustomize", FOLDER / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- what is imported ahead -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import popart", "podrun.popart"),
        ("import numpy as np, popart", "podrun.popart"),
        ("try:\n    import popdist.popart\nexcept ImportError: pass", "podrun.popdist.core"),
        ("from poptorch import Options", "torch"),
        ("from torch.nn import (\n  Linear)", "torch"),
    ],
)
def test_what_a_script_imports_is_imported_ahead(
    early: ModuleType, tmp_path: Path, text: str, wanted: str
) -> None:
    (tmp_path / "train.py").write_text(text)
    assert wanted in early.modules_ahead(str(tmp_path / "train.py"))


def test_all_that_is_imported_ahead_is_there(early: ModuleType) -> None:
    names = {name for names in early.AHEAD.values() for name in names}
    assert names >= set(MLIR_MODULES)
    for name in names:
        module, _, function = name.partition(":")
        assert module.partition(".")[0] in ("jax", "jaxlib", "numpy", "onnx", "podrun", "torch")
        if module.startswith("podrun."):
            assert importlib.util.find_spec(module) is not None, name
            assert not function or callable(getattr(importlib.import_module(module), function))


def test_torch_is_imported_before_jax(early: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import popart\nimport torch")
    ahead = early.modules_ahead(str(tmp_path / "train.py"))
    assert ahead.index("torch") < ahead.index(*early.JAX)


def test_files_beside_the_script_count(early: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "model.py").write_text("import popart")
    (tmp_path / "other.py").write_text("import poptorch")
    (tmp_path / "train.py").write_text("from parts import model, data")
    ahead = early.modules_ahead(str(tmp_path / "train.py"))
    assert "podrun.popart" in ahead
    assert "torch" not in ahead


@pytest.mark.parametrize(
    "text",
    [
        "os.environ['OMP_NUM_THREADS'] = '1'",
        "os.environ.update(XLA_FLAGS='--xla_dump_to=x')",
        "os.putenv('JAX_ENABLE_X64', '1')",
        "from dotenv import load_dotenv",
        "import tensorflow as tf",
        "from tensorflow import keras",
    ],
)
def test_nothing_is_imported_ahead_where_order_counts(early: ModuleType, tmp_path: Path, text: str) -> None:
    """Also where it stands in a file of the script."""
    (tmp_path / "train.py").write_text(f"import os\n{text}\nimport popart\n")
    assert early.modules_ahead(str(tmp_path / "train.py")) == []
    (tmp_path / "setup_all.py").write_text(f"import os\n{text}\n")
    (tmp_path / "train.py").write_text("import setup_all\nimport popart\n")
    assert early.modules_ahead(str(tmp_path / "train.py")) == []


def test_a_file_with_a_modules_name_shadows_it(early: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    (tmp_path / "data.csv").touch()
    assert not early.shadowed(str(script), {"random", "numpy.linalg"})
    (tmp_path / "numpy").mkdir()
    assert early.shadowed(str(script), {"random", "numpy.linalg"})


# --- the processes ----------------------------------------------------------------------------------------------

PROBE = """\
import sys
early = "numpy" in sys.modules
import json, os
import numpy
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path, "orig": sys.orig_argv,
    "words": open("/proc/self/cmdline").read().split("\\0"), "env": dict(os.environ), "cwd": os.getcwd(),
    "group": os.getpgrp() == os.getpid(), "site": "sitecustomize" in sys.modules, "input": sys.stdin.read(),
    "files": sorted(os.listdir("/proc/self/fd")),
}))
print(early)
def fail():
    raise ValueError("as ever")
fail()
"""


@pytest.fixture
def runner() -> Iterator[ProcessRunner]:
    runner = ProcessRunner()
    yield runner
    runner.close()


def command(script: Path, environ: Mapping[str, str]) -> Command:
    words = (sys.executable, str(script), "--epochs", "3")
    environment = own_environment(environ, debug=False) | {"POPDIST_NUM_TOTAL_REPLICAS": "2", "PODRUN_X": "1"}
    return Command(0, words, os.getcwd(), environment)


def outcome(runner: ProcessRunner) -> tuple[list[str], str, int]:
    """Lines on standard output, standard error, exit code."""
    events = run_all(runner)
    out, err = (printed(events, 0, channel).decode() for channel in OutputChannel)
    return out.splitlines(), err, ends(events)[0].code


@pytest.fixture(autouse=True)
def no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "forwarded_stdin", lambda: None)


def run_early(runner: ProcessRunner, script: Path, asked: Command) -> tuple[list[str], str, int]:
    with early_instances({}, [str(script), *asked.words[2:]], os.environ):
        runner.start(asked)
    return outcome(runner)


@pytest.mark.system
def test_a_program_sees_no_difference(runner: ProcessRunner, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROBE)
    (seen, early), err, code = run_early(runner, script, command(script, os.environ))
    runner.close()
    runner.__init__()  # type: ignore[misc]
    runner.start(command(script, os.environ))
    (usual, late), usual_err, usual_code = outcome(runner)
    assert (early, late) == ("True", "False")
    assert json.loads(seen) == json.loads(usual) | {"site": True}
    assert PODRUN_EARLY_START not in seen
    assert str(FOLDER) not in seen
    assert "ValueError: as ever" in err
    assert (err, code) == (usual_err, usual_code)


@pytest.mark.system
def test_a_module_of_the_programs_own_comes_first(runner: ProcessRunner, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    (tmp_path / "secrets.py").write_text("whose = 'mine'")  # NumPy imports Python's.
    script.write_text("import secrets, sys\nprint(secrets.whose, sys.argv[1:])\nif 0:\n    import numpy\n")
    out, err, code = run_early(runner, script, command(script, os.environ))
    assert (out, err, code) == (["mine ['--epochs', '3']"], "", 0)


@pytest.mark.system
def test_an_instance_with_another_environment_starts_anew(runner: ProcessRunner, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, os\nprint('numpy' in sys.modules, os.environ['X'])\nimport numpy")
    asked = command(script, {**os.environ, "X": "1"})
    assert run_early(runner, script, asked) == (["False 1"], "", 0)


@pytest.mark.system
def test_a_process_that_nobody_takes_ends_without_running_its_program(tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "it-ran"
    script.write_text(f"open({str(trace)!r}, 'w')")
    with early_instances({}, [str(script)], os.environ):
        (waiting,) = early_start._waiting
    assert waiting.process.returncode is not None
    assert not early_start._waiting
    assert not trace.exists()


@pytest.mark.system
def test_an_interpreter_that_is_told_nothing_ends(tmp_path: Path) -> None:
    """As when podrun ends in the middle."""
    script, trace = tmp_path / "train.py", tmp_path / "it-ran"
    script.write_text(f"open({str(trace)!r}, 'w')")
    with early_instances({}, [str(script)], os.environ):
        (waiting,) = early_start._waiting
        waiting.tell.close()
        assert waiting.process.wait(60) == 0
    assert not trace.exists()


@pytest.mark.parametrize("program", [[], ["python3", "train.py"], ["missing.py"], ["train"]])
def test_only_scripts_start_early(program: list[str]) -> None:
    with early_instances({}, program, os.environ):
        assert not early_start._waiting


def test_no_more_start_early_than_there_are_cores() -> None:
    with early_instances({"num-instances": 4096}, [__file__], os.environ):
        assert not early_start._waiting
