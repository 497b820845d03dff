"""YAML and JSON that people write: values, their lines, and refusals with their place."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import podrun
from podrun.core.cluster_file import read_cluster
from podrun.core.documents import MAX_BYTES, parse_document, parse_json, read_bytes, read_document
from podrun.core.errors import ConfigError, NotFoundError, UsageError
from podrun.launcher.config_file import read_options_file
from podrun.launcher.host_names import read_hostfile
from podrun.partition.commands.which_server import read_hcl
from podrun.report.document import load_profile

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["version"],
    "properties": {"version": {"const": 1}, "list": {"type": "array", "items": {"type": "integer"}}},
}


def test_values_and_lines_of_yaml_and_json() -> None:
    document = parse_document("version: 1\nlist:\n  - 3\n  - 4\nwhen: 2026-01-02\nno: off\n", "f.yaml")
    assert document.value == {"version": 1, "list": [3, 4], "when": "2026-01-02", "no": False}
    assert document.at(("list", 1)) == "f.yaml:4"
    assert document.at(("list", 7, "x")) == "f.yaml:2"
    same = parse_document('{"version": 1,\n "list": [3, 4]}', "f.json")
    assert same.value == {"version": 1, "list": [3, 4]}
    assert same.at(("list",)) == "f.json:2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 1\nlist: [1, x]\n", r"f:2: list.1: 'x' is not of type 'integer'"),
        ("version: 2\n", r"f:1: version: 1 was expected"),
        ("list: []\n", r"f:1: 'version' is a required property"),
        ("version: 1\nother: 2\n", r"f:1: Additional properties are not allowed \('other' was unexpected\)"),
        ("version: 1\nversion: 1\n", r"f:2: version is given twice"),
        ("version: &a 1\nlist: *a\n", r"an alias \(\*name\) is not understood here"),
        ("version: !!python/object:os.system 1\n", r"f:1: a value of type .* is not understood here"),
        ("? [a]\n: 1\n", r"f:1: a key is not text"),
        ("version: [1\n", r"f:2: not YAML: "),
        ("", r"f: the file is empty"),
        ("[" * 5000, r"f:1: lists and mappings are nested too deeply"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_document(text, "f").check(SCHEMA)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"there is no file .*gone"):
        read_document(tmp_path / "gone")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_document(tmp_path)
    (tmp_path / "binary").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text: byte 3"):
        read_document(tmp_path / "binary")
    (tmp_path / "large").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="is the most"):
        read_document(tmp_path / "large")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "bomb": (BOMB, "an alias"),
    "itself": ("a: &a [*a]", "an alias"),
    "merge": ("a: &a {b: 1}\nc: {<<: *a}", "an alias"),
    "deep list": ("[" * 50_000, "nested too deeply|not YAML"),
    "deep mapping": ("{a: " * 50_000, "nested too deeply|not YAML"),
    "65 levels": ("[" * 70 + "]" * 70, "nested too deeply"),
    "control characters": ("a: \x00", "not YAML"),
    "many values": ("- [" + "1," * 40_000 + "]", "more than 20000 values"),
    "many lines": ("- a\n" * 21_000, "more than 20000 values"),
    "minutes of seconds": ("a: 1" + ":1" * 100_000, "a number has 200001 characters"),
    "digits": ("a: " + "9" * 100_000, "a number has 100000 characters"),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("read", [read_document, read_cluster, read_options_file])
def test_hostile_yaml_is_refused_in_time_by_every_reader(
    tmp_path: Path, read: Callable[[Path], object], kind: str
) -> None:
    text, reason = HOSTILE[kind]
    path = tmp_path / "file.yaml"
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=rf"file\.yaml.*({reason})"):
        read(path)
    assert time.monotonic() - began < 120


def test_yaml_is_read_in_one_place() -> None:
    calls = re.compile(r"yaml\.(?:\w+_)?(?:load|compose|parse|scan)(?:_all)?\(")
    folder = Path(podrun.__file__).parent
    readers = {path.name for path in folder.rglob("*.py") if calls.search(path.read_text(encoding="utf-8"))}
    assert readers == {"documents.py"}


def test_a_tag_that_does_not_fit_its_text_is_named() -> None:
    for text in ("a: !!int x", "a: !!bool maybe", "a: !!float ."):
        with pytest.raises(ConfigError, match=r"f:1: '.*' is no value of type"):
            parse_document(text, "f")


def special(folder: Path) -> list[Path]:
    os.mkfifo(folder / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "socket"))
    server.close()
    return [
        Path("/dev/zero"),
        Path("/dev/stdin"),
        folder / "pipe",
        folder / "socket",
        folder,
        folder / ("x" * 300),
    ]


def test_special_files_are_refused_at_once_by_every_reader(tmp_path: Path) -> None:
    readers = (
        read_document,
        read_cluster,
        read_options_file,
        read_hostfile,
        read_hcl,
        load_profile,
        read_bytes,
    )
    for path in special(tmp_path):
        for read in readers:
            with pytest.raises(UsageError, match=r"regular file|cannot be read|is the most|no .*file"):
                read(path)


def test_deep_json_is_refused() -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000):
        with pytest.raises(ConfigError, match=r"nested too deeply|is not JSON"):
            parse_json(text, "f")


DEEP = "[" * 100_000


def test_kept_plans_options_and_notes_of_servers_go_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from podrun.costmodel import plan_cache
    from podrun.faults.plan_file import simulated_soc_errors
    from podrun.partition.host.discovery import Registry
    from podrun.partition.machines.keeper import MachineList
    from podrun.report.chrome_trace import log_of

    kept = tmp_path / "plan"
    kept.write_text(f"{hashlib.sha256(DEEP.encode()).hexdigest()}\n{DEEP}")
    assert plan_cache.PlanEntry(kept).read() is None
    os.mkfifo(tmp_path / "pipe")
    assert plan_cache.PlanEntry(tmp_path / "pipe").read() is None
    assert "is not a regular file" in caplog.text
    with pytest.raises(ConfigError, match="nested too deeply"):
        simulated_soc_errors({"GCDA_OPTIONS": f'{{"simulateSOCError.errorList": {DEEP}'})
    log_of({"PVTI_OPTIONS": DEEP})
    (tmp_path / "deep.json").write_text(DEEP)
    assert Registry(tmp_path).entries() == []
    (tmp_path / "p.machines").write_text(DEEP)
    assert MachineList(tmp_path, "p").read() is None
