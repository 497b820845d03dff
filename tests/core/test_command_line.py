"""Odd words on command lines: each is refused in two lines, the error and what to type."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import click
import pytest
from onnx import TensorProto, helper, save

from podrun.commands import UnheldWriter
from podrun.core.command_line import MOST_SECONDS, FiniteRange, run_command, seconds_range
from podrun.core.identity import connect_tcp

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("text", ["nan", "-nan", "inf", "-inf", "1e999"])
def test_a_number_that_is_not_finite_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="finite"):
        FiniteRange()(text)
    with pytest.raises(click.BadParameter):
        seconds_range(0.1)(text)


def test_seconds_have_an_upper_bound_below_that_of_the_system_s_clocks() -> None:
    assert seconds_range()(str(MOST_SECONDS)) == MOST_SECONDS
    with pytest.raises(click.BadParameter, match="range"):
        seconds_range()("1e300")


def test_no_command_takes_numbers_of_click_s_own_type() -> None:
    """It takes NaN within any bounds."""
    plain = re.compile(r"click\.FloatRange\(|type=float\b|type=click\.FLOAT")
    texts = {path: path.read_text() for path in (ROOT / "podrun").rglob("*.py")}
    assert [str(path) for path, text in texts.items() if plain.search(text)] == []


def write_relu(path: Path) -> None:
    shape = [1, 4]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


COMMANDS = {
    "vipu": ("podrun.partition.commands.vipu", "vipu_command"),
    "vipu-admin": ("podrun.partition.commands.vipu_admin", "vipu_admin_command"),
    "vipu-server": ("podrun.partition.commands.vipu_server", "vipu_server_command"),
    "poprt": ("podrun.serving.poprt_command", "poprt_command"),
    "load": ("podrun.serving.commands.load", "load_verb"),
    "capacity": ("podrun.serving.commands.capacity", "capacity_verb"),
    "drill": ("podrun.drill.commands.drill", "drill_verb"),
    "simulate": ("podrun.simulate.commands.simulate", "simulate_verb"),
    "chaos": ("podrun.simulate.commands.chaos", "chaos_verb"),
}


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("vipu", ["--timeout", "nan", "list", "partitions"], "finite"),
        ("vipu", ["--timeout", "1e300", "list", "partitions"], "range"),
        ("vipu", ["--api-host", "", "list", "partitions"], "--api-host is empty"),
        ("vipu-admin", ["create", "user", "\udcff"], "UTF-8"),
        ("vipu", ["explain", "--if", "size=²"], "size is '²', not a whole number"),
        ("vipu", ["explain", "--if", "size=--4"], "size is '--4', not a whole number"),
        ("vipu", ["create", "partition", "p", "--size", "4", "--time-limit", "nan"], "finite"),
        ("vipu-admin", ["drain", "agent", "a", "--deadline", "inf"], "range"),
        ("vipu-server", ["--port", "-1"], "--port"),
        (
            "vipu",
            ["--api-port", "1", "create", "partition", "p", "--size", "4", "--priority", "99999999999"],
            "range",
        ),
        ("vipu", ["--api-port", "1", "explain", "--if", "size=4,priority=99999999999"], "out of range"),
        (
            "vipu-admin",
            ["--api-port", "1", "restart", "agent", "a", "--generation", f"{10**20}"],
            "out of range",
        ),
        ("poprt", ["-i", "EMPTY"], "it holds no graph"),
        ("poprt", ["-i", "FOLDER"], "one is wanted"),
        ("poprt", ["-i", "MODEL", "--input_shape", "x=²"], "numbers above 0"),
        ("poprt", ["-i", "MODEL", "--convert_version", "999"], "not 999"),
        ("poprt", ["-i", "MODEL", "--compiler_options", "foo=1"], "foo"),
        ("load", ["localhost:1", "-m", "n", "--request-rate-range", "nan"], "'nan' is no range"),
        ("load", ["localhost:1", "-m", "n", "--request-rate-range", "1:inf"], "'1:inf' is no range"),
        ("load", ["localhost:1", "-m", "n", "--concurrency-range", "nan"], "'nan' is no range"),
        ("load", ["localhost:1", "-m", "n", "--concurrency-range", "99999999"], "at once"),
        ("capacity", ["MODEL", "--rate", "9/s", "--price", "pod16=nan"], "no price"),
        ("capacity", ["MODEL", "--rate", "9/s", "--target", "nosuch"], "unknown system"),
        ("capacity", ["MODEL", "--rate", "9/s", "--ipus-per-replica", "3"], "do not divide"),
        ("drill", ["BROKEN"], "not YAML"),
        ("simulate", ["--generate", "jobs=99999999999999999999", "--pod", "pod16"], "too long"),
        ("chaos", ["--workers", "-1"], "--workers"),
        ("simulate", ["--generate", "jobs=5", "--pod", "pod16", "--scale", "nan"], "finite"),
    ],
)
def test_odd_words_are_answered_in_two_lines(
    name: str, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "broken.yaml").write_text("x: [1,\n")
    (tmp_path / "folder").mkdir()
    write_relu(tmp_path / "model.onnx")
    files = {"EMPTY": "empty.onnx", "FOLDER": "folder", "BROKEN": "broken.yaml", "MODEL": "model.onnx"}
    module, attribute = COMMANDS[name]
    command = getattr(import_module(module), attribute)
    typed = [str(tmp_path / files[word]) if word in files else word for word in words]
    assert run_command(command, typed) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert said in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("host", ["a..b", "a" * 99])
def test_a_name_that_no_host_can_have_is_one_where_nobody_answers(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, attribute = COMMANDS["vipu"]
    command = getattr(import_module(module), attribute)
    assert run_command(command, ["--api-host", host, "--timeout", "1", "list", "partitions"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert "no V-IPU server answers" in error
    assert hint.startswith("hint: ")
    with pytest.raises(OSError, match="no name of a host"):
        connect_tcp(host, 1, 1.0)


class Dribble(io.RawIOBase):
    """Takes three bytes at a time."""

    def __init__(self) -> None:
        self.taken = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self.taken += bytes(data[:3])
        return len(data[:3])


@pytest.mark.parametrize(("make", "held"), [(UnheldWriter, False), (io.BufferedWriter, True)])
def test_programs_that_want_no_buffers_get_none(
    make: Callable[[Dribble], io.BufferedWriter], held: bool
) -> None:
    raw = Dribble()
    stream = io.TextIOWrapper(make(raw), encoding="utf-8", write_through=True)
    stream.write("no newline yet")
    assert (raw.taken == b"no newline yet") is not held
    stream.flush()
    assert raw.taken == b"no newline yet"
