"""The documentation site: its pages, what is generated for it, and its pictures."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from podrun.core.errors import ErrorCode, RecoveryAction
from podrun.launcher.commands.verb_names import VERBS
from podrun.launcher.options import OPTIONS
from tests.conftest import ROOT
from tests.copies import COMPAT, run_copied

GENERATED = {"contributing.md", "changelog.md", "reference/commands.md", "reference/errors.md"}


SITE = ROOT / "build" / "site"
QUESTIONS = {
    "replicationFactor": "poptorch.html",
    "replication factor": "poptorch.html",
    "gradient accumulation": "poptorch.html",
    "gradientAccumulation": "bring-your-program.html",
    "recoverable_runtime_error": "troubleshooting.html",
    "a planned fault did not strike": "troubleshooting.html",
    "cannot be divided evenly among": "troubleshooting.html",
    "Failed to attach to device": "troubleshooting.html",
    "command not found": "troubleshooting.html",
    "enableStochasticRounding": "reference/popart.html",
}
"""What people type into the search, and a page that is to be among the first answers."""
FIRST_ANSWERS = 8
PHONE_TEXT_PIXELS = 11


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


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "pictures").glob("*.svg")), ids=lambda path: path.stem
)
def test_a_picture_is_readable_on_a_phone(path: Path) -> None:
    """The style sheet gives pictures a width there, in which they scroll; their letters shrink with them."""
    shown = re.search(
        r"@media \(max-width.*picture img \{[^}]*width: (\d+)px",
        (ROOT / "website" / "site.css").read_text(encoding="utf-8"),
    )
    text = path.read_text(encoding="utf-8")
    box = re.search(r'viewBox="0 0 ([\d.]+) ', text)
    letters = [float(size) for size in re.findall(r'font-size(?:=|: ?)"?([\d.]+)', text)]
    assert shown
    assert box
    assert min(letters) * float(shown[1]) / float(box[1]) >= PHONE_TEXT_PIXELS


def test_pipes_in_code_of_tables_lose_the_backslash_of_their_source() -> None:
    plain = _hooks()["plain_pipes"]
    assert plain(r"| `--debug yes\|no` | a \| b | ``x\|`y`` |") == r"| `--debug yes|no` | a \| b | ``x|`y`` |"
    assert plain(r"In `sed 's/a\|b//'` it stays.") == r"In `sed 's/a\|b//'` it stays."


def test_search_divides_names_into_their_words() -> None:
    text = (ROOT / "website" / "mkdocs.yml").read_text(encoding="utf-8")
    plugins = yaml.safe_load(text)["plugins"]
    separator = next(entry["search"]["separator"] for entry in plugins if "search" in entry)
    words = [word for word in re.split(separator, "options.Training.gradientAccumulation(4) v3.1") if word]
    assert words == ["options", "Training", "gradient", "Accumulation", "4", "v3.1"]


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_first_program_learns_on_any_layout(replicas: int) -> None:
    program = ROOT / "examples" / "first_run" / "train.py"
    done = run_copied(COMPAT, ["--num-replicas", str(replicas), str(program)], timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0], losses


def _hooks() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "website" / "hooks.py"))


def test_the_reference_has_every_command_and_option() -> None:
    page = _hooks()["command_reference"]()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {f"podrun {verb}" for verb in VERBS} | set(project["scripts"]) - {"poprun"}
    headings = set(re.findall(r"^## (.+)$", page, re.MULTILINE))
    assert wanted - {"podrun help"} <= headings
    for option in OPTIONS:
        assert f"`--{option.name}" in page or f", --{option.name}" in page, option.name


@pytest.mark.slow
def test_the_reference_has_every_error() -> None:
    """Found here by the words of the code: a class whose base is a class of errors."""
    bases = {"PodrunError"}
    classes = [
        (name, set(re.findall(r"\w+", above)))
        for path in (ROOT / "podrun").rglob("*.py")
        for name, above in re.findall(
            r"^class (\w+)\(([^)]*)\)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    while more := {name for name, above in classes if above & bases} - bases:
        bases |= more
    page = _hooks()["error_reference"]()
    named = set(re.findall(r"^\| `(?:\w+\.)?(\w+)`(?:<br>| \|)", page, re.MULTILINE))
    assert {name for name in bases if not name.startswith("_")} <= named
    assert {code.name for code in ErrorCode} <= named
    assert {action.name for action in RecoveryAction} <= named


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
    scripts = [
        (path, source)
        for path in (ROOT / "build" / "site").rglob("*.html")
        for source in re.findall(
            r'(?:<script|<link rel="stylesheet")[^>]* (?:src|href)="([^"]*)"',
            path.read_text(encoding="utf-8"),
        )
    ]
    assert scripts
    assert [str(path) for path, source in scripts if "://" in source] == []
    assert all((path.parent / source).exists() for path, source in scripts if path.name != "404.html")
    errors = (ROOT / "build" / "site" / "reference" / "errors.html").read_text(encoding="utf-8")
    assert "RecoverableRuntimeError" in errors
    assert "PARTITION_RESET" in errors
    for page in SITE.rglob("*.html"):
        assert r"\|" not in page.read_text(encoding="utf-8"), page
    home = (SITE / "index.html").read_text(encoding="utf-8")
    assert home.count('<a class="picture"') == (ROOT / "docs" / "index.md").read_text(encoding="utf-8").count(
        "!["
    )
    assert 'class="md-footer__link md-footer__link--next"' in home
    assert home.count('name="__palette"') == 3
    _ask_the_search()


def _ask_the_search() -> None:
    """With the script that browsers run; only where there is Node."""
    node = shutil.which("node")
    if node is None:
        return
    words = [node, str(ROOT / "tests" / "search_site.js"), str(SITE), *QUESTIONS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    answers = dict(zip(QUESTIONS, map(json.loads, done.stdout.splitlines()), strict=True))
    assert [text for text, page in QUESTIONS.items() if page not in answers[text][:FIRST_ANSWERS]] == []
