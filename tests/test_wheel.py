"""What is installed: the wheel, used from another folder; Ray with podrun; by make demo no more than it needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from podrun.core.errors import MissingPackageError
from podrun.partition.machines import ray_obstacles
from tests.conftest import ROOT


def test_ray_is_a_plain_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any(text.startswith("ray>") for text in project["dependencies"])
    assert project["optional-dependencies"]["pod"] == []


def _installed_by(target: str, folder: Path) -> list[str]:
    """The extras that ``make TARGET`` installs where nothing is installed."""
    for name in ("pyproject.toml", "constraints.txt", "build_extension.py"):
        shutil.copy2(ROOT / name, folder / name)
    for name in ("podrun/collectives/_collectives.c", "podrun/device/_crash_stack.c"):
        (folder / name).parent.mkdir(parents=True)
        shutil.copy2(ROOT / name, folder / name)
    shown = subprocess.run(
        ["make", "-n", "-f", str(ROOT / "Makefile"), target],
        cwd=folder, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    return re.findall(r"-e '\.\[([^]]*)\]'", shown)


def test_the_demo_installs_what_it_runs_and_the_tests_all(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "all").mkdir()
    assert _installed_by("demo", tmp_path / "demo") == ["examples"]
    assert _installed_by("check", tmp_path / "all") == ["examples,torch,tensorflow,dev"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert [text.split(">")[0] for text in extras["examples"]] == ["scikit-learn"]


def test_without_ray_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_obstacles.check_installed()
    monkeypatch.setattr(ray_obstacles.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="Ray is not installed") as error:
        ray_obstacles.check_installed()
    assert "pip install ray " in str(error.value.hint)
    assert "podrun compat PROGRAM" in str(error.value.hint)


@pytest.mark.slow
@pytest.mark.system
def test_the_wheel_works_from_another_folder(tmp_path: Path) -> None:
    """Built by pip, and unpacked beside this environment's packages, without what only a checkout has."""
    source = tmp_path / "source"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "website/", "benchmarks/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), "."]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    if "No module named pip" in built.stderr:
        pytest.skip("this environment has no pip: make test-all has one")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("podrun-*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    for data in ("report/page.js", "report/page.css", "py.typed", "_cluster_configs", "_docs/faults.md"):
        assert (installed / "podrun" / data).exists(), data
    environ = {**os.environ, "PYTHONPATH": str(installed), "PODRUN_CACHE_DIR": str(tmp_path / "cache")}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = "import podrun; print(podrun.__file__)"
    for words in (
        ["-c", where],
        ["-m", "podrun.compat", str(ROOT / "examples/first_run/train.py")],
        ["-m", "podrun.launcher.cli", "--help"],
        ["-m", "podrun.launcher.cli", "help", "reference/faults"],
    ):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=elsewhere, env=environ, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert words[1] != where or done.stdout.startswith(str(installed)), done.stdout
