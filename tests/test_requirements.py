"""The packages that `pip install podrun` installs, without extras, suffice to compile a program and train."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
WITHOUT = """
import json, runpy, sys

class Missing:
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

missing, module, *arguments = json.loads(sys.argv[1])
sys.meta_path.insert(0, Missing(frozenset(missing)))
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def _brought_along(requirements: Iterable[str]) -> set[str]:
    """Distributions that these requirements bring, and those in turn."""
    found: set[str] = set()
    left = [(Requirement(text), "") for text in requirements]
    while left:
        wanted, extra = left.pop()
        name = canonicalize_name(wanted.name)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        if name not in found or wanted.extras:
            found.add(name)
            try:
                inner = requires(wanted.name) or []
            except PackageNotFoundError:
                continue
            left += [(Requirement(text), each) for text in inner for each in ("", *wanted.extras)]
    return found


def _not_brought_along() -> list[str]:
    """Modules that are installed here, and would not be without the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    there = _brought_along(project["dependencies"]) | {"podrun", "pip", "setuptools"}
    return [
        module
        for module, distributions in packages_distributions().items()
        if not there & {canonicalize_name(name) for name in distributions}
    ]


def test_required_packages_suffice() -> None:
    missing = _not_brought_along()
    assert {"pytest", "hypothesis", "sklearn"} <= set(missing)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            WITHOUT,
            json.dumps([missing, "podrun.compat", "examples/popart/import_graph.py"]),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_without_pytorch_a_program_of_poptorch_hears_what_to_install(tmp_path: Path) -> None:
    program = tmp_path / "net.py"
    program.write_text("import poptorch\n")
    words = [sys.executable, "-c", WITHOUT, json.dumps([["torch"], "podrun.compat", str(program)])]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert (
        "PyTorch is not installed, and PopTorch programs need it\nhint: Install its CPU build: pip install"
        in done.stderr
    )
    words[-1] = json.dumps([["torch"], "podrun.estimate", str(program)])
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert ": error: " in done.stderr.splitlines()[0]
    assert "\nhint: Install its CPU build: pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_installed_runs_on_the_oldest_python() -> None:
    """The versions of constraints.txt; those of the site's packages where `make docs` has installed them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    checked, refused = 0, []
    for distribution in distributions():
        wanted = distribution.metadata["Requires-Python"]
        if wanted and pinned.get(distribution.name) == distribution.version:
            checked += 1
            if oldest not in SpecifierSet(wanted):
                refused.append(f"{distribution.name}=={distribution.version} needs Python {wanted}")
    assert checked > 20
    assert refused == []


def test_every_requirement_has_one_version_that_it_allows() -> None:
    """A name that is pinned twice, or out of its requirement's bounds, makes every fresh install fail."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if "==" in line]
    pinned = {canonicalize_name(name): version for name, version in pins}
    assert len(pinned) == len(pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    for requirement in map(Requirement, wanted):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, requirement
        assert requirement.specifier.contains(version), requirement
