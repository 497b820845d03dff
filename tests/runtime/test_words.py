"""Messages of the runtime: neutral by default, in the words of the front end that hands its own in."""

from __future__ import annotations

import ast
import string
from dataclasses import fields
from pathlib import Path

import pytest

from podrun.popart.sessions.run_settings import POPART_WORDS
from podrun.poptorch.compile.torch_settings import TORCH_WORDS
from podrun.runtime.words import NEUTRAL, SessionCall, Words

RUNTIME = Path(__file__).resolve().parents[2] / "podrun" / "runtime"
POPART_NAMES = (
    "AnchorReturnType", "Devicex", "RNGState", "SessionOption", "compileAndExport", "enableGradientAccumulation",
    "ensureFp32LossScaleTensor", "loadExecutable", "prepareDevice", "setRandomSeed", "stepIO", "weightsFromHost",
    "weightsToHost", "writeWeights", "resetHostWeights",
)  # fmt: skip


@pytest.mark.parametrize("words", [POPART_WORDS, TORCH_WORDS], ids=["popart", "poptorch"])
def test_a_front_end_uses_no_value_that_the_neutral_template_lacks(words: Words) -> None:
    def used(template: str) -> set[str]:
        return {name for _, name, _, _ in string.Formatter().parse(template) if name}

    for item in fields(Words):
        if item.name != "calls":
            assert used(getattr(words, item.name)) <= used(getattr(NEUTRAL, item.name)), item.name


def test_the_runtime_says_no_name_of_popart() -> None:
    """In texts and in docstrings; facts about where a rule comes from may name PopART itself."""
    strange = [
        f"{path.name}:{node.lineno}: {node.value[:60]!r}"
        for path in sorted(RUNTIME.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if path.name != "words.py" and any(name in node.value for name in POPART_NAMES)
    ]
    assert strange == []


def test_calls_without_a_name_of_their_own_stay_neutral() -> None:
    assert POPART_WORDS.name(SessionCall.SET_RANDOM_STATE) == "setRNGState"
    assert POPART_WORDS.name(SessionCall.SAVE_CHECKPOINT) == "a checkpoint's save"
    assert TORCH_WORDS.name(SessionCall.SEND_WEIGHTS) == NEUTRAL.name(SessionCall.SEND_WEIGHTS)
