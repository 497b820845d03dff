"""The documentation site: its pages, what is generated for it, and its pictures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tests.conftest import ROOT

GENERATED = {"contributing.md", "changelog.md", "reference/commands.md", "reference/errors.md"}


def _pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry if isinstance(entry, list) else list(entry.values()) if isinstance(entry, dict) else []
    return [page for value in values for page in _pages(value)]


def test_every_page_has_a_place_in_the_menu() -> None:
    text = (ROOT / "website" / "mkdocs.yml").read_text(encoding="utf-8")
    menu = _pages(yaml.safe_load(text)["nav"])
    assert len(menu) == len(set(menu))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(menu) == pages | GENERATED


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "pictures").glob("*.svg")), ids=lambda path: path.stem
)
def test_a_picture_is_whole_fetches_nothing_and_is_shown(path: Path) -> None:
    drawing = ElementTree.parse(path).getroot()
    assert drawing.tag.endswith("svg")
    assert len(list(drawing.iter())) > 20
    assert not re.search(r"(?:src|href)=|url\(\s*[\"']?http", path.read_text(encoding="utf-8"))
    assert any(
        f"pictures/{path.name}" in page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")
    )


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_first_program_learns_on_any_layout(replicas: int) -> None:
    program = ROOT / "examples" / "first_run" / "train.py"
    words = [sys.executable, "-m", "podrun.compat", "--num-replicas", str(replicas), str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0], losses


@pytest.mark.slow
@pytest.mark.system
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """With links, anchors and API references checked; what is generated names the commands and classes."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(["make", "docs"], cwd=ROOT, check=True, timeout=600, env=environment)
    commands = (ROOT / "build" / "site" / "reference" / "commands.html").read_text(encoding="utf-8")
    assert "vipu create partition" in commands
    assert "--num-replicas" in commands
    assert "gc-hostsynclatencytest" in commands
    errors = (ROOT / "build" / "site" / "reference" / "errors.html").read_text(encoding="utf-8")
    assert "RecoverableRuntimeError" in errors
    assert "PARTITION_RESET" in errors
