"""The low-level session of model_runtime: load, queues, runs and reload by hand."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from podrun.compat import model_runtime
from podrun.core.errors import CallError, UsageError
from podrun.runtime.device_pool import DevicePool
from podrun.serving.compiler import Compiler, CompilerOptions
from tests.serving.runtime.test_runners import close_to, empty
from tests.serving.test_runner import OPTIONS, expected, model, rows_of


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> model_runtime.PopefPaths:
    path = tmp_path_factory.mktemp("session") / "executable.popef"
    Compiler.compile_and_export(model(), None, path, OPTIONS)
    return model_runtime.PopefPaths(str(path))


def test_queues_feed_runs_in_order(paths: model_runtime.PopefPaths) -> None:
    config = model_runtime.SessionConfig(model_runtime.LaunchPolicy.Immediate)
    with model_runtime.Session(paths, config) as session:
        assert [a.name for a in session.getUserInputAnchors()] == ["x"]
        assert [a.name for a in session.getUserOutputAnchors()] == ["y"]
        queues = session.createQueueManager()
        session.runLoadPrograms()
        main = threading.Thread(target=lambda: all(iter(session.runMainPrograms, False)))
        main.start()
        xs, ys = [rows_of(4, seed) for seed in range(5)], [empty() for _ in range(5)]
        done = [threading.Event() for _ in ys]
        for x in xs:
            queues.inputQueue("x").enqueue(x)
        for y, event in zip(ys, done, strict=True):
            queues.outputQueue("y").enqueue(y, event.set)
        assert all(event.wait(60) for event in done)
        queues.disconnectAll()
        main.join(60)
        assert not main.is_alive()
    for x, y in zip(xs, ys, strict=True):
        close_to(y, x)


def test_flushed_runs_are_filled_with_zeros(tmp_path: Path) -> None:
    options = CompilerOptions(partials_type="float", num_ipus=2, popart_options={
        "enableReplicatedGraphs": True, "replicatedGraphCount": 2
    })  # fmt: skip
    Compiler.compile_and_export(model(), None, tmp_path, options)
    with model_runtime.Session(str(tmp_path / "executable.popef")) as session:
        queues = session.createQueueManager()
        x, y = rows_of(4), empty()
        queues.inputQueue("x").enqueue(x)
        queues.outputQueue("y").enqueue(y)
        queues.flushAll()
        assert session.runMainPrograms()
        close_to(y, x)


def test_a_model_takes_the_place_of_another_on_bound_ipus(
    paths: model_runtime.PopefPaths, tmp_path: Path
) -> None:
    Compiler.compile_and_export(model(), None, tmp_path, CompilerOptions(partials_type="half"))
    device = DevicePool().acquire(1).device
    assert device is not None
    try:
        session = model_runtime.Session(paths)
        with pytest.raises(CallError, match="not ready to run"):
            session.runMainPrograms()
        session.bindToDevice(device)
        for _ in range(2):
            queues = session.createQueueManager()
            session.runLoadPrograms()
            x, y = rows_of(4), empty()
            queues.inputQueue("x").enqueue(x)
            queues.outputQueue("y").enqueue(y)
            assert session.runMainPrograms()
            np.testing.assert_allclose(y, expected(x), rtol=2e-2, atol=2e-2)  # Half partials.
            session.reload(str(tmp_path / "executable.popef"))
        with pytest.raises(CallError, match="has IPUs already"):
            session.bindToDevice(device)
        session.stop()
        assert device.is_attached  # It stays the caller's.
    finally:
        device.detach()


def test_wrong_arrays_and_names_are_refused(paths: model_runtime.PopefPaths) -> None:
    with model_runtime.Session(paths) as session:
        queues = session.createQueueManager()
        info = queues.inputQueue("x").tensorInfo()
        assert (info.name, info.shape, info.size_in_bytes) == ("x", [4, 8], 128)
        for wrong, message in (
            (rows_of(3), r"takes float32\[4, 8\], not float32\[3, 8\]"),
            (rows_of(4).astype(np.float64), r"not float64\[4, 8\]"),
            ([1.0], "not list"),
        ):
            with pytest.raises(UsageError, match=message):
                queues.inputQueue("x").enqueue(wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="no output 'x'; it has y"):
            queues.outputQueue("x")


def test_handlers_take_the_place_of_queues(paths: model_runtime.PopefPaths) -> None:
    xs, ys = [rows_of(4, seed) for seed in range(3)], [empty() for _ in range(3)]
    given_out, taken = iter(xs), iter(ys)

    def fill(array: np.ndarray) -> None:
        array[...] = next(given_out)

    def take(array: np.ndarray) -> None:
        next(taken)[...] = array

    with model_runtime.Session(paths) as session:
        session.setUserInputHandler("x", fill)
        session.setUserOutputHandler("y", take)
        session.runLoadPrograms()
        for _ in range(2):
            assert session.runMainPrograms()
        session.setUserOutputHandler("y", None)  # Its queue again, while the input keeps its handler.
        queues = session.createQueueManager()
        queues.outputQueue("y").enqueue(ys[2])
        assert session.runMainPrograms()
        for wrong, message in ((("z", fill), "no input 'z'; it has x"), (("x", 3), "3 cannot be")):
            with pytest.raises(UsageError, match=message):
                session.setUserInputHandler(*wrong)
        with pytest.raises(UsageError, match="no output 'x'; it has y"):
            session.setUserOutputHandler("x", take)
    for x, y in zip(xs, ys, strict=True):
        close_to(y, x)
