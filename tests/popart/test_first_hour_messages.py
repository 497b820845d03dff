"""Messages for people who type something slightly wrong, or give slightly wrong data."""

from __future__ import annotations

import shutil
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
from podrun.launcher.profile import TRUST
from podrun.session.exceptions import popart_exception
from podrun.session.parts.run import LabelRange


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


def test_labels_are_integers() -> None:
    assert LabelRange(3, None).strange(np.array([7.0])) is None
    assert LabelRange(3, None).strange(np.array([], np.int32)) is None


def test_a_wrong_anchor_lists_candidates() -> None:
    with pytest.raises(popart_exception, match=r"There are .*'Softmax:0'"):
        classifier(["qqqq"])
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


@pytest.mark.parametrize("word", ["init", "profil", "estimat", "status", "run"])
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
    from podrun.vipu import ray_session

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ServiceError, match="temporary files is full") as caught:
        ray_session._short_scratch(lambda command: None)
    assert "export TMPDIR=" in str(caught.value.hint)
