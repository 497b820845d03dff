"""Services after errors of IPUs: what is mended, what is taken again, what is told, and parameters that say so."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import (
    ApplicationRuntimeError,
    ConfigError,
    PodrunError,
    PoplarError,
    ServiceError,
    UnrecoverableRuntimeError,
    UsageError,
)
from podrun.core.layout import IpuRange
from podrun.device.machine import Machine
from podrun.serving.compiler import Compiler, ServedModel
from podrun.serving.instance import BackendSettings, PoplarInstance
from podrun.serving.loaded_model import from_machine
from podrun.serving.repository import serving_environment, write_missing_config
from podrun.serving.request_incidents import IncidentLog
from podrun.serving.runner import ModelRunner, RuntimeConfig
from podrun.serving.runtime import live_runner
from podrun.serving.runtime.live_runner import LiveRunner
from tests.serving.test_runner import OPTIONS, expected, model, rows_of


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    Compiler.compile_and_export(model(), None, folder, OPTIONS)
    return folder / "executable.popef"


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[PoplarError]:
    """Errors that the next runs of a machine end with, the last one first."""
    planned: list[PoplarError] = []
    run = Machine.run

    def broken(self: Machine, *work: Any, **options: Any) -> Any:
        if planned:
            self.abort(planned.pop())
        return run(self, *work, **options)

    monkeypatch.setattr(Machine, "run", broken)
    return planned


def asked(live: LiveRunner, label: str = "") -> np.ndarray:
    x, y = rows_of(2), np.full((2, 3), np.nan, np.float32)
    request = live.prepared({"x": x}, {"y": y}, label)
    live.run_now([request])
    request.future.wait(0)
    np.testing.assert_allclose(y, expected(x), rtol=1e-5, atol=1e-6)
    return y


CONFIG = RuntimeConfig(batching_dim=0, timeout_ns=1, auto_reset=True)


def test_ipus_are_taken_again_and_incidents_name_requests(
    file: Path, errors: list[PoplarError], tmp_path: Path
) -> None:
    log = IncidentLog("net/1", {"PODRUN_INCIDENTS": str(tmp_path / "incidents")})
    live = LiveRunner(ServedModel(str(file)), CONFIG, log, retry_seconds=0.01)
    try:
        errors[:] = [UnrecoverableRuntimeError("the machine is gone"), ApplicationRuntimeError("an overflow")]
        with pytest.raises(PoplarError, match="overflow"):
            asked(live, "first")
        with pytest.raises(PoplarError, match="gone"):
            asked(live, "second")
        assert not live.is_live
        asked(live)
        assert live.is_live
    finally:
        live.close()
    entries = [json.loads(line) for line in (tmp_path / "incidents").read_text().splitlines()]
    assert [entry["cost"]["requests"] for entry in entries] == [["first"], ["second"]]
    assert [entry["error"]["type"] for entry in entries] == [
        "application_runtime_error",
        "unrecoverable_runtime_error",
    ]
    assert ["reset" in entry["action"] for entry in entries] == [True, False]
    assert entries[0]["schema"] == "podrun-serving-incident-1"


def test_without_ipus_one_attempt_is_made_in_a_while(
    file: Path, errors: list[PoplarError], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveRunner(ServedModel(str(file)), CONFIG, IncidentLog("net", {}), retry_seconds=0.05)
    attempts: list[float] = []

    def refused(*arguments: object) -> ModelRunner:
        attempts.append(time.monotonic())
        raise UsageError("no device with 1 IPUs is free", hint="gc-monitor")

    try:
        errors.append(UnrecoverableRuntimeError("the machine is gone"))
        with pytest.raises(PoplarError):
            asked(live)
        with monkeypatch.context() as patch:
            patch.setattr(live_runner, "ModelRunner", refused)
            for _ in range(3):
                with pytest.raises(ServiceError, match=r"no IPUs: no device .*; before: the machine is gone"):
                    asked(live)
        assert all(b - a >= 0.049 for a, b in itertools.pairwise(attempts))
        asked(live)
    finally:
        live.close()


def test_without_auto_reset_the_error_stays(file: Path, errors: list[PoplarError]) -> None:
    config = {
        "max_batch_size": 4,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["8"]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": ["3"]}],
        "parameters": {"auto_reset": {"string_value": "0"}, "timeout_ns": {"string_value": "1000"}},
    }
    instance = PoplarInstance(file.parent, config)
    try:
        errors.append(ApplicationRuntimeError("an overflow"))
        for _ in range(2):
            request = instance.prepared({"x": rows_of(3)})
            instance.answer([request])
            with pytest.raises(PoplarError, match="overflow"):
                instance.results(request)
    finally:
        instance.runner.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [("synchronous_execution", "yes"), ("timeout_ns", "0"), ("timeout_ns", "-1"), ("auto_reset", "")],
)
def test_parameters_that_cannot_be(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"parameter {name} is '{value}'"):
        BackendSettings.of({"parameters": {name: {"string_value": value}}})
    assert BackendSettings.of({"parameters": {"another": {"string_value": "x"}}}) == BackendSettings()


def test_a_file_that_changes_while_it_is_used_is_told(
    file: Path, errors: list[PoplarError], tmp_path: Path
) -> None:
    copied = tmp_path / "executable.popef"
    copied.write_bytes(file.read_bytes())
    live = LiveRunner(ServedModel(str(copied)), CONFIG, IncidentLog("net", {}), retry_seconds=0.01)
    try:
        asked(live)
        os.utime(copied, ns=(1, 1))
        asked(live)  # What is on the IPUs goes on.
        errors.append(ApplicationRuntimeError("an overflow"))
        with pytest.raises(PoplarError, match="overflow"):
            asked(live)
        with pytest.raises(PodrunError, match="was changed while it was in use"):
            asked(live)
    finally:
        live.close()


def test_full_disks_and_wrong_faults_are_told(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net" / "1").mkdir(parents=True)
    (tmp_path / "net" / "1" / "executable.popef").write_bytes(file.read_bytes())

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(ConfigError, match=r"config\.pbtxt cannot be written: No space left"):
            write_missing_config(tmp_path / "net")
    assert not (tmp_path / "net" / "config.pbtxt").exists()
    with pytest.raises(UsageError):
        serving_environment({}, ["ipu:0@never:broken"])
    variables = serving_environment({}, ["ipu:0@batch=3:tile-parity"], tmp_path / "incidents")
    assert variables["PODRUN_FAULTS"] == "ipu:0@batch=3:tile-parity"
    with pytest.raises(ConfigError, match="cannot be written"):
        serving_environment({}, [], tmp_path / "absent" / "incidents")


def test_instances_begin_with_different_machines() -> None:
    devices = [(i, IpuRange(i, 1)) for i in range(16)]
    assert from_machine(devices, 0) == devices
    assert [ipus.first for _, ipus in from_machine(devices, 5)][:6] == [4, 5, 6, 7, 8, 9]
    assert from_machine(devices[:4], 3) == devices[:4]
