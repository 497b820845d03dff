"""Every variable that podrun reads is known and documented; caches have one place."""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from podrun.core.environment import VARIABLES, environment, podrun_cache_directory

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
