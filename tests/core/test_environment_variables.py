"""Every variable that podrun reads is known and documented; caches have one place."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from podrun.core.environment import (
    PODRUN_DEFAULTS,
    VARIABLES,
    chosen_by_user,
    environment,
    podrun_cache_directory,
    set_default,
)

ROOT = Path(__file__).resolve().parents[2]
NAME = r"(?:PODRUN|POPDIST|IPUOF|IPU_APP|POPART|POPXL|POPLAR|XDG|VIPU_CLI)_[A-Z_]*[A-Z]"
NOT_READ = {"IPUOF_VIPU_API", "VIPU_CLI_API"}  # prefixes of names
READERS = 13
"""Files that may touch the environment of the process: those that set variables of libraries, and commands' first
lines."""


@functools.cache
def sources() -> Mapping[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in (ROOT / "podrun").rglob("*.py")}


def test_every_variable_that_the_package_names_is_in_the_list() -> None:
    named = {name for text in sources().values() for name in re.findall(rf"""["']({NAME})["']""", text)}
    assert len(named) > 25
    assert named - NOT_READ <= VARIABLES.keys()


def test_the_name_of_a_variable_is_typed_in_one_module() -> None:
    """Besides the table: modules that share a name import it from `podrun.core.environment`."""
    typed = defaultdict(set)
    for path, text in sources().items():
        for name in re.findall(rf"""["']({NAME}|OMPI_[A-Z_]+|GCDA_OPTIONS|XLA_FLAGS)["']""", text):
            typed[name].add(str(path.relative_to(ROOT)))
    table = "podrun/core/environment.py"
    constants = {name for name in typed if re.search(rf"^{name} = ", sources()[ROOT / table], re.MULTILINE)}
    assert len(constants) > 30
    again = {
        name: sorted(files)
        for name, files in typed.items()
        if name in VARIABLES and len(files - {table}) > (name not in constants)
    }
    assert again == {}, "import the constant"


def test_the_page_for_users_has_the_same_table() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (.+) \|$", page, re.MULTILINE))
    assert rows == dict(VARIABLES)


def test_few_files_read_the_environment_of_the_process() -> None:
    readers = [str(path) for path, text in sources().items() if re.search(r"os\.environ|os\.getenv", text)]
    assert len(readers) <= READERS, readers


def test_a_mapping_that_is_given_stands_for_the_environment() -> None:
    assert environment({"A": "b"}) == {"A": "b"}
    assert environment({}) == {}
    assert environment() is os.environ


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PODRUN_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/podrun"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/podrun"),
        ({"HOME": "/c"}, "/c/.cache/podrun"),
        ({"HOME": "", "XDG_CACHE_HOME": ""}, None),
        ({}, None),
    ],
)
def test_caches_have_one_place_and_never_a_shared_one(
    variables: dict[str, str], expected: str | None
) -> None:
    assert podrun_cache_directory(variables) == (expected and Path(expected))


def test_a_default_is_not_the_users_choice_until_the_user_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PODRUN_DEFAULTS, "")
    for name in ("SOME_LEVEL", "OTHER_LEVEL"):
        monkeypatch.setenv(name, "")  # Puts back what is there now.
        monkeypatch.delenv(name)
    monkeypatch.setenv("THIRD_LEVEL", "3")
    for name in ("SOME_LEVEL", "OTHER_LEVEL", "THIRD_LEVEL"):
        set_default(name, "2")
    assert [chosen_by_user(n) for n in ("SOME_LEVEL", "OTHER_LEVEL", "THIRD_LEVEL")] == [None, None, "3"]
    monkeypatch.setenv("SOME_LEVEL", "0")
    assert chosen_by_user("SOME_LEVEL") == "0"
    monkeypatch.delenv("OTHER_LEVEL")
    assert chosen_by_user("OTHER_LEVEL") is None


def test_a_process_knows_which_variables_its_parent_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has nothing but the environment."""
    monkeypatch.setenv("SOME_LEVEL", "")
    monkeypatch.delenv("SOME_LEVEL")
    monkeypatch.setenv(PODRUN_DEFAULTS, "")
    set_default("SOME_LEVEL", "2")
    spec = importlib.util.find_spec("podrun.core.environment")
    assert spec is not None
    assert spec.loader is not None
    childs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(childs)
    childs.set_default("SOME_LEVEL", "2")
    assert childs.chosen_by_user("SOME_LEVEL") is None
