"""Scripts with the name of a module are refused by name, and `python -m podrun` is podrun, whatever lies around it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from podrun.compat import COMPAT_PATH
from podrun.core.errors import UsageError
from podrun.core.shadowing import LIBRARIES, SDK, check_script_name, shadowing_file
from tests.conftest import BIN

NAMES = ["popart", "poptorch", "random", "numpy", "ray"]
COMMANDS = {
    "podrun": [str(BIN / "podrun"), "--offline-mode=yes"],
    "python -m podrun": [sys.executable, "-m", "podrun", "--offline-mode=yes"],
    "python -m podrun.compat": [sys.executable, "-m", "podrun.compat"],
}


def test_every_module_of_the_sdk_that_podrun_has_is_known() -> None:
    folders = {path.stem for path in Path(COMPAT_PATH).iterdir() if (path / "__init__.py").is_file()}
    assert set(SDK) == folders


@pytest.mark.parametrize("name", [*NAMES, "popdist", "torch", "logging"])
def test_a_script_with_a_module_s_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"folder/{name}.py has the name of .* module {name}") as error:
        check_script_name(Path("folder", f"{name}.py"))
    assert error.value.hint == f"Rename it: mv folder/{name}.py folder/my_{name}.py"


def test_only_python_files_with_exactly_a_module_s_name_are_refused() -> None:
    names = ["train.py", "test.py", "popart", "my_numpy.py", "random.sh", "train_popart.py", "numpy.py"]
    assert [name for name in names if is_refused(name)] == ["numpy.py"]


def is_refused(name: str) -> bool:
    try:
        check_script_name(Path(name))
    except UsageError:
        return True
    return False


def test_a_file_beside_a_program_that_hides_a_module_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "popef.py").write_text("import popef\npopef.Reader\n")
    (tmp_path / "xxhash").mkdir()
    (tmp_path / "xxhash" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("popef", "xxhash"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(AttributeError) as caught:
        importlib.import_module("popef")
    assert shadowing_file(caught.value, tmp_path) == tmp_path / "popef.py"
    assert shadowing_file(caught.value, tmp_path.parent) is None
    with pytest.raises(AttributeError) as caught:
        importlib.import_module("xxhash").xxh64  # noqa: B018
    assert shadowing_file(caught.value, tmp_path) == tmp_path / "xxhash"
    assert shadowing_file(ValueError(), tmp_path) is None
    monkeypatch.delitem(sys.modules, "xxhash")


def test_podrun_s_own_dependencies_are_known() -> None:
    for name in ("numpy", "jax", "ray", "onnx", "torch", "yaml", "grpc", "prometheus_client"):
        assert name in LIBRARIES


@pytest.mark.system
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_the_script_and_say_to_rename_it(command: str, tmp_path: Path) -> None:
    """All scripts lie in one folder, from which the command is started: none may be run or imported."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("print('ran')\n")
    (tmp_path / "tempfile.py").write_text("print('ran')\n")
    for name in NAMES if command == "podrun" else ["random"]:
        done = subprocess.run(
            [*COMMANDS[command], f"{name}.py"],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert f"error: the script {name}.py has the name of " in done.stderr
        assert f"\nhint: Rename it: mv {name}.py my_{name}.py\n" in done.stderr
        assert "ran" not in done.stdout
