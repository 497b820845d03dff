"""Messages for people who type something slightly wrong, or give slightly wrong data."""

from __future__ import annotations

import re
import shutil
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import podrun.popart as popart
from podrun.core.errors import ConfigError, ServiceError, UsageError
from podrun.device.program.engine import Engine
from podrun.launcher.cli import check_verb, main
from podrun.launcher.options import parse_command_line
from podrun.launcher.summary import TRUST
from podrun.partition.host import discovery
from podrun.popart.values.exceptions import popart_exception
from podrun.runtime.graph import Hints, Node
from podrun.runtime.label_checks import LabelRange, label_ranges, warn_of_strange_labels
from podrun.runtime.model_lowering import near


def classifier(
    anchors: list[str] | None = None, **attributes: int
) -> tuple[popart.InferenceSession, str, str]:
    builder = popart.Builder()
    x, label = builder.addInputTensor("FLOAT", [4, 8]), builder.addInputTensor("INT32", [2, 2])
    w = builder.addInitializedInputTensor(np.ones((8, 3), np.float32))
    flat = builder.aiOnnx.flatten([label], 0)
    flat = builder.reshape_const(builder.aiOnnx, [flat], [4])
    loss = builder.aiGraphcore.nllloss(
        [builder.aiOnnx.softmax([builder.aiOnnx.matmul([x, w])]), flat], **attributes
    )
    device = popart.DeviceManager().createCpuDevice()
    flow = popart.DataFlow(1, anchors or [loss])
    session = popart.InferenceSession(builder.getModelProto(), flow, device)
    session.prepareDevice()
    session.weightsFromHost()
    return session, x, label


@pytest.mark.parametrize(
    ("labels", "attributes", "said"),
    [
        ([0, 1, 2, 0], {}, ""),
        ([0, 1, 3, 0], {}, "label 3, but there are 3 classes (0 to 2)"),
        ([0, -1, 2, 0], {}, "label -1"),
        ([0, -1, 2, 0], {"ignoreIndex": -1}, ""),
    ],
)
def test_labels_that_are_no_class_are_said_once(
    labels: list[int], attributes: dict[str, int], said: str
) -> None:
    session, x, label = classifier(**attributes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            data = {x: np.ones((4, 8), np.float32), label: np.array(labels, np.int32).reshape(2, 2)}
            session.run(popart.PyStepIO(data, session.initAnchorArrays()))
    found = [warning for warning in caught if "label" in str(warning.message)]
    assert len(found) == bool(said)
    assert all(said in str(warning.message) and warning.filename == __file__ for warning in found)


def test_an_interrupted_run_is_no_bug_of_podrun(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    session, x, label = classifier()
    data = {x: np.ones((4, 8), np.float32), label: np.zeros((2, 2), np.int32)}
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.run(popart.PyStepIO(data, session.initAnchorArrays()))
    assert caplog.text == ""
    with pytest.raises(popart.poplar_application_runtime_error, match="was interrupted") as caught:
        session.run(popart.PyStepIO(data, session.initAnchorArrays()))
    assert "prepareDevice" in (caught.value.hint or "")
    session.prepareDevice()
    session.weightsFromHost()
    session.run(popart.PyStepIO(data, session.initAnchorArrays()))


def test_labels_that_are_no_integers_are_not_checked() -> None:
    assert LabelRange(3, None).strange(np.array([7.0])) is None
    assert LabelRange(3, None).strange(np.array([], np.int32)) is None


def spec(*shape: int) -> SimpleNamespace:
    return SimpleNamespace(shape=shape)


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "wrong", "said"),
    [
        (
            "Gather",
            ("w", "i"),
            {},
            5,
            "index 5, but Gather has 5 places (0 to 4): podrun reads the nearest row",
        ),
        ("Gather", ("w", "i"), {"axis": -1}, 3, "has 3 places"),
        ("GroupedGather", ("w", "i"), {"axis": 1}, 3, "GroupedGather has 3 places"),
        ("ScatterElements", ("w", "i", "w"), {}, -6, "leaves the update out"),
        ("ScatterReduce", ("w", "i"), {"axis_size": 7}, 7, "7 places"),
        (
            "OneHot",
            ("i", "d", "v"),
            {},
            9,
            "OneHot has 9 places (0 to 8): its row has the off value everywhere",
        ),
        (
            "aten.embedding.default",
            ("w", "i"),
            Hints(indices=(5,)),
            -1,
            "embedding has 5 places (0 to 4): PyTorch",
        ),
        (
            "aten.nll_loss.default",
            ("w", "i"),
            Hints(indices=(3, -100)),
            3,
            "label 3, but there are 3 classes",
        ),
    ],
)
def test_indices_out_of_range_are_said(
    operator: str, inputs: tuple[str, ...], attributes: dict[str, object] | Hints, wrong: int, said: str
) -> None:
    said_of = {"hints": attributes} if isinstance(attributes, Hints) else {"attributes": attributes}
    nodes = [Node("Cast", "", "", ("x",), ("i",)), Node(operator, "", "", inputs, ("y",), **said_of)]
    ranges = label_ranges(nodes, {"w": spec(5, 3), "y": spec(4, 9)}, ["x"])
    ((name, allowed),) = ranges.items()
    assert name == "x"
    right = [allowed.classes - 1, allowed.lowest, *([] if allowed.ignored is None else [allowed.ignored])]
    assert allowed.strange(np.array(right, np.int32)) is None
    with pytest.warns(UserWarning, match=re.escape(said)) as caught:
        warn_of_strange_labels(ranges, {"x": np.array([0, wrong], np.int32)})
    assert caught[0].filename == __file__
    assert ranges == {}


def test_the_narrowest_range_of_an_input_counts() -> None:
    nodes = [Node("Gather", "", "", (w, "x"), ("y",)) for w in ("large", "small", "unknown")]
    ranges = label_ranges(nodes, {"large": spec(9, 2), "small": spec(4, 2)}, ["x"])
    assert ranges["x"].classes == 4


def test_a_wrong_anchor_lists_candidates() -> None:
    with pytest.raises(popart_exception, match=r"There are .*'Softmax:0'"):
        classifier(["qqqq"])
    assert near("loos", ["Accum___w", "Gradient___Nll:0", "w", "Nll:0"]).startswith(
        " There are 'Nll:0', 'w', 'A"
    )
    with pytest.raises(popart_exception, match="Did you mean 'Softmax:0'"):
        classifier(["softmx:0"])


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("-np 4 train.py", "--num-instances"),
        ("--nproc 4 train.py", "--num-instances"),
        ("--nproc_per_node=4 train.py", "--num-instances"),
        ("--replicas 4 train.py", "--num-replicas"),
        ("--num-ipus 4 train.py", "--num-replicas"),
    ],
)
def test_names_of_other_launchers_are_understood(words: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_command_line(words.split())
    assert caught.value.hint == f"Did you mean {meant}?"


@pytest.mark.parametrize("word", ["init", "profil", "estimat", "status", "run", "kill", "report"])
def test_what_is_meant_for_podrun_is_not_run_as_a_command_of_the_host(
    word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([word]) == 2
    said = capsys.readouterr().err
    assert f"podrun has no command '{word}'" in said
    assert f"podrun -- {word}" in said
    (tmp_path / word).touch()
    check_verb(word)  # A file of that name is what is meant.


def test_help_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: podrun")
    check_verb("hostname")


def test_a_program_that_is_not_there_is_told_from_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats"]) == 2
    assert (
        "there is no program stats\nhint: Name a script or a command; podrun --help"
        in capsys.readouterr().err
    )


def test_what_is_said_after_each_run_is_short() -> None:
    assert len(TRUST) < 90


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from podrun.report import document
    from tests.report.profiles import pipeline_profile

    written = Path.write_text

    def full(self: Path, text: str, encoding: str) -> int:
        if document.PAGE in self.name:
            raise OSError(28, "No space left on device")
        return written(self, text, encoding=encoding)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match="No space left"):
        document.write_report(pipeline_profile(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_directory_for_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from podrun.partition.machines import ray_obstacles

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    for make in (ray_obstacles.short_scratch, discovery.scratch_directory):
        with pytest.raises(ServiceError, match="temporary files is full") as caught:
            make(lambda command: None)
        assert "export TMPDIR=" in str(caught.value.hint)


def test_compiled_programs_go_elsewhere_if_the_directory_for_temporary_files_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if path == tmp_path else 1 << 30)
    )
    assert discovery.scratch_parent() == Path("/tmp")
    assert discovery.scratch_parent(0 + len("/tmp")) == Path("/tmp")
