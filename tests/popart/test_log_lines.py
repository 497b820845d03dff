"""Lines of the rooms below PopART's front end, in PopART's log: under its names, levels and words."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import podrun.popart as popart
from podrun.popart.values import debug


@pytest.fixture(autouse=True)
def _default_levels() -> Iterator[None]:
    """PopART's log as a fresh import sets it up."""
    debug.configure({})
    yield
    for part in ("session", "devicex"):
        logging.getLogger(f"podrun.popart.{part}").setLevel(logging.NOTSET)
    debug.configure()  # sets the levels of lower rooms again


@pytest.mark.parametrize(
    ("room", "part"),
    [
        ("podrun.runtime", "session"),
        ("podrun.runtime.engine", "devicex"),
        ("podrun.compiler.cache", "devicex"),
        ("podrun.onnx_models", "ops"),
    ],
)
def test_warnings_of_lower_rooms_come_once_under_the_name_of_a_part_of_popart(
    room: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger(room).warning("%s is passed over", "w")
    logging.getLogger(room).info("not at this level")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"podrun.popart.{part} [W] w is passed over")


def test_levels_of_a_part_decide_and_documented_lines_keep_their_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    popart.getLogger("devicex").setLevel("DEBUG")
    logging.getLogger("podrun.runtime.engine").debug("Loading the serialized executable %s", "a.popef")
    logging.getLogger("podrun.runtime").debug("the session's level has not changed")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("podrun.popart.devicex [D] Loading serialized PopART executable a.popef")
