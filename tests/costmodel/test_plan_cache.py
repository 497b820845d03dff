"""Plans on disk: found by their question and by nothing else; damaged files do not count; the folder stays small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.costmodel import cost, plan_cache
from podrun.costmodel.cost import cost_jaxpr
from podrun.costmodel.flatten import flatten_jaxpr

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("aZ0 \0é中😀", max_size=8),
    lambda inner: (
        st.tuples(inner, inner) | st.dictionaries(st.text("aZ0 \0é中😀", max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for the test alone."""
    monkeypatch.setenv("PODRUN_PLAN_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


def deep(layers: int = 40, width: int = 64) -> Any:
    def run(w: Any, x: Any) -> Any:
        for index in range(layers):
            with jax.named_scope(f"layer{index}"):
                x = jnp.tanh(x @ w)
        return x

    half = jnp.float16
    return jax.make_jaxpr(run)(
        jax.ShapeDtypeStruct((width, width), half), jax.ShapeDtypeStruct((8, width), half)
    )


def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often something is planned."""
    calls: list[int] = []
    make = cost.make_schedule

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return make(*arguments)

    monkeypatch.setattr(cost, "make_schedule", counted)
    return calls


def test_an_equal_step_is_planned_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = planned(monkeypatch)
    first = cost_jaxpr(deep(), "gc200")
    assert cost_jaxpr(deep(), "gc200") == first
    assert len(calls) == 1
    assert len(list(kept.iterdir())) == 1


def test_whatever_changes_the_answer_changes_the_question(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = planned(monkeypatch)
    step = deep()
    cost_jaxpr(step, "gc200")
    cost_jaxpr(step, "bow")
    cost_jaxpr(step, "gc200", partials_type="float16")
    cost_jaxpr(step, "gc200", available_memory_proportion=0.3)
    cost_jaxpr(step, "gc200", repeats=2)
    cost_jaxpr(step, "gc200", results_stay=False)
    cost_jaxpr(deep(width=128), "gc200")
    cost_jaxpr(deep(layers=41), "gc200")
    assert len(calls) == 8


def test_another_version_of_the_model_reads_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = planned(monkeypatch)
    cost_jaxpr(deep(), "gc200")
    monkeypatch.setattr(plan_cache, "version", lambda: "another")
    cost_jaxpr(deep(), "gc200")
    assert len(calls) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-10],
        lambda data: data.replace(b"cycles", b"cycels"),
        lambda data: b"\xff\xfe" + data,
        lambda data: b"\x80\x04N.",  # A pickle.
    ],
)
def test_a_damaged_entry_is_ignored_and_written_anew(
    kept: Path, monkeypatch: pytest.MonkeyPatch, damage: Any
) -> None:
    first = cost_jaxpr(deep(), "gc200")
    (entry,) = kept.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    calls = planned(monkeypatch)
    assert cost_jaxpr(deep(), "gc200") == first
    assert len(calls) == 1
    assert entry.read_bytes() == whole


def test_the_folder_is_cut_back_to_what_was_used_last(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_BYTES", 1000)
    answers = {name: name * 200 for name in "abcdef"}
    for name, answer in answers.items():
        assert plan_cache.remembered(name, lambda answer=answer: answer) == answer
        for path in kept.iterdir():
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
    assert sum(path.stat().st_size for path in kept.iterdir()) <= 1000
    assert plan_cache.remembered("f", lambda: "planned anew") == answers["f"]
    assert plan_cache.remembered("a", lambda: "planned anew") == "planned anew"


def test_an_answer_too_large_is_not_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_BYTES", 10)
    assert plan_cache.remembered("q", lambda: "x" * 20) == "x" * 20
    assert not kept.exists()


def test_a_folder_that_cannot_be_is_no_error_and_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PODRUN_PLAN_CACHE", str(tmp_path / "file"))
    assert [plan_cache.remembered(question, lambda: 1) for question in ("q", "r")] == [1, 1]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert caplog.text.count("PODRUN_CACHE_DIR") == 1


def test_where_plans_are_kept() -> None:
    assert plan_cache.folder({"PODRUN_PLAN_CACHE": "off"}) is None
    assert plan_cache.folder({"PODRUN_PLAN_CACHE": ""}) is None
    assert plan_cache.folder({"PODRUN_PLAN_CACHE": "/a"}) == Path("/a")
    assert plan_cache.folder({"PODRUN_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a/plans")
    assert plan_cache.folder({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/podrun/plans")
    assert plan_cache.folder({"HOME": "/c"}) == Path("/c/.cache/podrun/plans")
    assert plan_cache.folder({}) is None


@given(PLAIN, PLAIN)
def test_questions_that_differ_have_different_names(one: Any, other: Any) -> None:
    same = repr(one) == repr(other) or (type(one) is type(other) is dict and one == other)
    if same:
        assert plan_cache.question_digest(one) == plan_cache.question_digest(other)
    elif one != other:
        assert plan_cache.question_digest(one) != plan_cache.question_digest(other)


def test_what_has_no_name_of_its_own_is_no_question(kept: Path) -> None:
    with pytest.raises(plan_cache.Unkeyed):
        plan_cache.question_digest(object())
    assert plan_cache.remembered(lambda: None, lambda: 1) == 1
    assert not kept.exists()


@pytest.mark.system
def test_another_process_finds_it(kept: Path) -> None:
    """Names do not depend on the process: hashes of strings, addresses, the order of sets."""
    cost_jaxpr(deep(), "gc200")
    (entry,) = kept.iterdir()
    code = (
        "from tests.costmodel.test_plan_cache import deep, flatten_jaxpr, cost\n"
        "def never(*a): raise SystemExit('planned')\n"
        "cost.make_schedule = never\n"
        "print(cost.cost_jaxpr(deep(), 'gc200')['step']['cycles'])\n"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    body = json.loads(entry.read_text().partition("\n")[2])
    assert int(done.stdout) == body["step"]["cycles"]
    assert flatten_jaxpr(deep()).equations
