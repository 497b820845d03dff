"""A graph that an earlier session traced is not traced again, and what is kept of it is not believed blindly."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import podrun
from podrun.core import kept_files
from podrun.core.executable import TensorSpec
from podrun.costmodel.plan_cache import PlanEntry
from podrun.runtime.device_program import ProgramCompiler, fingerprint
from podrun.runtime.graph import Model, Node, OperatorGraph, TensorType
from podrun.runtime.kept_traces import TraceFacts, noted_names, warn_of_graph
from podrun.runtime.lowering import Lowered, lower_graph
from podrun.runtime.operators import Context
from tests.kept_programs import kept as kept
from tests.kept_programs import traces as traces

from .tiny import DOMAIN, FUNCTIONS, Descent, Network, TinyOperators, TinySession, data

Entry = dict[str, Any]


def resized(ctx: Context, node: Node, x: Any, size: Any, *rest: Any) -> Any:
    """``x`` in the shape that the second input says."""
    return x.reshape(tuple(int(n) for n in ctx.constant(1)))


def warning(ctx: Context, node: Node, x: Any) -> Any:
    """``x``, and a word about it."""
    logging.getLogger("podrun.test").warning("said of %s", node.label)
    return x


TABLE = TinyOperators({**FUNCTIONS, "resized": resized, "warning": warning})


def graph(shape: object = (3, 2), operator: str = "resized", **initial: Any) -> OperatorGraph:
    """One operator on an input of six numbers; ``shape``: what it reads beside it."""
    values = {"shape": np.asarray(shape), "w": np.zeros(3, np.float32), **initial}
    inputs = ("x", "shape", "w") if operator == "resized" else ("x",)
    node = Node(operator, DOMAIN, "y", inputs, ("y",))
    kind = TensorType(np.dtype(np.float32), (6,))
    return OperatorGraph("g", (node,), ("x",), ("y",), values, {"x": kind})


def lowered(graph: OperatorGraph) -> Lowered:
    return lower_graph(graph, TABLE)


def entry(folder: Path) -> Path:
    (path,) = folder.glob("*.plan.json")
    return path


def facts_of(model: Lowered) -> tuple[object, ...]:
    """All that comes from a trace, in order."""
    return (
        list(model.tensors.items()),
        list(model.constants),
        list(model.parameters.items()),
        list(model.outputs.items()),
        model.uses_random,
        dict(model.state_updates),
    )


@pytest.mark.parametrize(
    ("network", "training"),
    [
        pytest.param(Network(), True, marks=pytest.mark.slow),
        (Network(noise=0.1, means=True), True),
        pytest.param(Network(stages=2, layers=2), False, marks=pytest.mark.slow),
    ],
    ids=["plain", "random numbers and state", "stages"],
)
def test_a_second_session_is_the_first_without_a_trace(
    kept: Path, traces: list[TraceFacts], network: Network, training: bool
) -> None:
    def results() -> tuple[list[np.ndarray], object, object, str | None]:
        loss = "loss" if training else None
        descent = Descent(0.1, 0.5) if training else None
        session = TinySession(
            network.model(), ["loss"], network.settings(), loss=loss, optimizer=descent, ipus=network.stages
        )
        model = session.parts.model
        with session:
            runs = [session.run(**data(network.rows, seed))["loss"] for seed in range(2)]
            weights = [session.read(name) for name in ("w0", "b1")] if training else []
            profile = session.parts.reports.profile()
        digest = fingerprint(model.built)
        return [*runs, *weights], model.built.infos, profile, digest

    first, infos, profile, digest = results()
    count = len(traces)
    assert count > 0
    again, infos_again, profile_again, digest_again = results()
    assert len(traces) == count
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (infos, profile, digest) == (infos_again, profile_again, digest_again)


def test_the_second_session_compiles_nothing(kept: Path) -> None:
    def compiled_here() -> bool:
        with TinySession(Network().model(), ["loss"], loss="loss", optimizer=Descent(0.1)) as session:
            compiler: ProgramCompiler = session.parts.loader.compiler
            return compiler.compiled_here

    assert [compiled_here(), compiled_here()] == [True, False]
    assert len(list((kept / "programs").glob("*.popef"))) == 1


def test_facts_are_those_of_the_trace(kept: Path, traces: list[TraceFacts]) -> None:
    first, again = facts_of(lowered(graph())), facts_of(lowered(graph()))
    assert first == again
    assert len(traces) == 1
    assert traces[0].baked == {"shape"}
    assert dict(first[0])["y"] == TensorSpec("y", "float32", (3, 2))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "other",
    [
        graph(shape=(2, 3)),
        graph(w=np.zeros(4, np.float32)),
        graph(w=np.zeros(3, np.float16)),
        graph(w=np.zeros(3, np.int32)),
        replace(graph(), types={"x": TensorType(np.dtype(np.float16), (6,))}),
        graph(shape=np.array([3, 2], np.int32)),
    ],
    ids=["a small integer", "a shape", "a half", "an integer", "the type of an input", "a type"],
)
def test_whatever_decides_the_trace_has_an_entry_of_its_own(
    kept: Path, traces: list[TraceFacts], other: OperatorGraph
) -> None:
    lowered(graph())
    lowered(other)
    assert len(traces) == len(list((kept / "plans").glob("*.plan.json"))) == 2


def test_weights_may_begin_with_other_values(kept: Path, traces: list[TraceFacts]) -> None:
    lowered(graph())
    again = lowered(graph(w=np.ones(3, np.float32)))
    assert len(traces) == 1
    np.testing.assert_array_equal(again.initial["w"], np.ones(3, np.float32))


def test_values_that_decide_shapes_are_compared(kept: Path, traces: list[TraceFacts]) -> None:
    """Numbers that are no integers are no part of the name, so the entry says which it rests on."""
    shapes = [lowered(graph(shape=np.float32(s))).tensors["y"].shape for s in ([3, 2], [2, 3], [2, 3])]
    assert shapes == [(3, 2), (2, 3), (2, 3)]
    assert len(traces) == 2
    assert len(list((kept / "plans").glob("*.plan.json"))) == 1


def rewritten(path: Path, change: Any) -> None:
    """Change an entry as podrun itself would have written it."""
    stored = json.loads(path.read_text().partition("\n")[2])
    change(stored)
    PlanEntry(path).write(stored)


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: stored.pop("tensors"),
        lambda stored: stored.update(tensors=[["y", "float32", [-3, 2]]]),
        lambda stored: stored.update(tensors=[["y", "float32", "32"]]),
        lambda stored: stored.update(tensors=[["y", "float32"]]),
        lambda stored: stored.update(tensors=[[1, "float32", [3, 2]]]),
        lambda stored: stored.update(tensors=7),
        lambda stored: stored.update(baked={"nothing": "0"}),
        lambda stored: stored.update(baked=3),
        lambda stored: stored.update(uses_random="yes"),
        lambda stored: stored.update(state_updates=[["y"]]),
        lambda stored: stored.clear(),
    ],
)
def test_an_entry_that_says_something_else_is_traced_anew(
    kept: Path, traces: list[TraceFacts], change: Any
) -> None:
    first = facts_of(lowered(graph()))
    path = entry(kept / "plans")
    whole = path.read_bytes()
    rewritten(path, change)
    assert facts_of(lowered(graph())) == first
    assert len(traces) == 2
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "damage",
    [lambda d: b"", lambda d: d[:-9], lambda d: d.replace(b"float32", b"float16"), lambda d: b"\x80\x04N."],
    ids=["empty", "cut short", "changed", "a pickle"],
)
def test_a_damaged_entry_is_traced_anew_and_the_log_says_so(
    kept: Path, traces: list[TraceFacts], damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lowered(graph())
    path = entry(kept / "plans")
    path.write_bytes(damage(path.read_bytes()))
    lowered(graph())
    lowered(graph())
    assert len(traces) == 2
    assert path.name in caplog.text


def test_another_users_entry_is_not_read(
    kept: Path, traces: list[TraceFacts], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is that a warning: nobody asked for it."""
    caplog.set_level(logging.INFO, "podrun")
    lowered(graph())
    own = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: own + 1)
        lowered(graph())
    assert len(traces) == 2
    assert "belongs to another user" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_another_version_reads_nothing(
    kept: Path, traces: list[TraceFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered(graph())
    monkeypatch.setattr(kept_files, "_installed", lambda: "another")
    lowered(graph())
    assert len(traces) == 2


@pytest.mark.parametrize("variable", ["JAX_DEFAULT_MATMUL_PRECISION", "XLA_FLAGS"])
def test_what_the_environment_tells_the_libraries_counts(
    kept: Path, traces: list[TraceFacts], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    lowered(graph())
    monkeypatch.setenv(variable, "highest")
    lowered(graph())
    assert len(traces) == 2


def test_off_means_off(kept: Path, traces: list[TraceFacts], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it worked out what the names of entries would be."""
    monkeypatch.setenv("PODRUN_PLAN_CACHE", "off")
    monkeypatch.delattr(kept_files, "_installed")
    assert noted_names("names", lambda: {"a": [1]}, int) == {"a": [1]}
    for _ in range(2):
        with TinySession(Network().model(), ["loss"]) as session:
            assert session.parts.loader.compiler.compiled_here
    assert not (kept / "programs").exists()
    assert not (kept / "plans").exists()
    assert len(traces) == 2


def test_a_trace_that_warns_is_not_kept(
    kept: Path, traces: list[TraceFacts], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        lowered(graph(operator="warning"))
    assert len(traces) == 2
    assert caplog.text.count("said of y") == 2


def test_a_warning_counts_whoever_takes_its_line(
    kept: Path, traces: list[TraceFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PopART's front end takes lines of operators away from podrun's logger, or does not log them in one run."""
    log = logging.getLogger("podrun.test.taken")
    monkeypatch.setattr(log, "filters", [lambda record: False])

    def taken(ctx: Context, node: Node, x: Any) -> Any:
        warn_of_graph(log, "said of %s", node.label)
        return x

    table = TinyOperators({**FUNCTIONS, "taken": taken})
    for level in (logging.ERROR, logging.WARNING, logging.WARNING):
        log.setLevel(level)
        lower_graph(graph(operator="taken"), table)
    assert len(traces) == 3


class OwnOperators(TinyOperators):
    """A table of a user's functions."""

    def meaning(self, nodes: object) -> str | None:
        """Nobody knows."""
        return None


def test_a_program_of_the_users_own_operators_is_not_kept(kept: Path, traces: list[TraceFacts]) -> None:
    for _ in range(2):
        model = Network().model()
        with TinySession(Model(model.graph, OwnOperators(FUNCTIONS)), ["loss"]) as session:
            assert session.parts.loader.compiler.compiled_here
    assert len(traces) == 2
    assert not list(kept.glob("programs/*.popef"))


def test_a_folder_that_cannot_be_written_is_no_error(
    kept: Path, traces: list[TraceFacts], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is it a warning: nobody asked for it."""
    caplog.set_level(logging.INFO, "podrun")
    (kept / "plans").write_text("no folder")
    (kept / "programs").write_text("no folder")
    for count in (1, 2):
        with TinySession(Network().model(), ["loss"]) as session:
            assert session.parts.loader.compiler.compiled_here
        assert len(traces) == count
    assert caplog.text.count("plans cannot be kept") == 1
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_files_of_the_package_decide(tmp_path: Path) -> None:
    """A source that changed, came or went makes another version; bytecode and other files do not."""
    package = tmp_path / "package"
    (package / "room").mkdir(parents=True)
    (package / "room" / "a.py").write_text("1")

    def files() -> Mapping[str, tuple[int, int]]:
        return {name: (size, at) for name, size, at, _ in kept_files._package_files(package, "")}

    first = files()
    assert list(first) == ["/room/a.py"]
    (package / "room" / "__pycache__").mkdir()
    (package / "room" / "__pycache__" / "b.py").write_text("1")
    (package / "room" / "notes.txt").write_text("1")
    (package / "room" / ".#a.py").symlink_to("user@host.1234")
    (package / "room" / "gone.py").symlink_to("nowhere.py")
    assert files() == first
    (package / "room" / "a.py").write_text("12")
    assert files() != first


def test_sources_that_changed_while_a_process_runs_have_a_name_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether what the process imported is the text before or after the change."""
    source = tmp_path / "podrun" / "__init__.py"
    source.parent.mkdir()
    source.write_text("1")
    monkeypatch.setattr(podrun, "__file__", str(source))
    changed = source.stat().st_ctime_ns
    names = []
    for began in (changed - 1, changed - 1, changed + 1, changed + 1):
        monkeypatch.setattr(kept_files, "BEGAN_NS", began)
        names.append(kept_files._installed.__wrapped__())
    assert len(set(names)) == 3
    assert names[2] == names[3]


@pytest.mark.parametrize("library", kept_files.LIBRARIES)
def test_versions_are_those_that_libraries_say(library: str) -> None:
    assert kept_files.library_version(library) == importlib.import_module(library).__version__
    assert kept_files.library_version(f"no_{library}") == ""


def test_a_library_without_a_folder_of_its_version_has_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "orchard" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert kept_files.version_beside.__wrapped__("orchard") == ""
    assert kept_files.library_version("orchard") == str(source.stat().st_mtime_ns)
    (tmp_path / "orchard-1.2.dist-info").mkdir()
    (tmp_path / "orchard-1.1.dist-info.old").mkdir()
    assert kept_files.version_beside.__wrapped__("orchard") == "1.2"
