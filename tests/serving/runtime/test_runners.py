"""Runners beside `ModelRunner`, several models on one device, and what runs in flight may and may not do."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from podrun.core.errors import ApplicationRuntimeError, CallError, PoplarError, UsageError
from podrun.device.host.client import PortConnection
from podrun.serving.compiler import Compiler, CompilerOptions, ServedModel
from podrun.serving.loaded_model import LoadedModel
from podrun.serving.run_popef_command import exec_command
from podrun.serving.runner import ModelRunner, RuntimeConfig
from podrun.serving.runtime.config import OFF, LightRunnerConfig
from podrun.serving.runtime.factory import ServingDevices, make_runner
from podrun.serving.runtime.host_concat import HostConcatConfig, HostConcatRunner, HostConcatRunnerConfig
from podrun.serving.runtime.light_runner import LightRunner
from podrun.serving.runtime.pack_runner import PackRunnerConfig
from tests.serving.test_runner import OPTIONS, WEIGHT, model, rows_of


def close_to(y: np.ndarray, x: np.ndarray, weight: np.ndarray = WEIGHT) -> None:
    wanted = np.maximum(x.astype(np.float64) @ weight, 0)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def compiled() -> ServedModel:
    return Compiler.compile(model(), None, OPTIONS)


@pytest.fixture(scope="module")
def changeable() -> ServedModel:
    """The model with weights that the host can replace."""
    return Compiler.compile(model(), None, CompilerOptions(partials_type="float", constant_weights=False))


def empty(rows: int = 4) -> np.ndarray:
    return np.full((rows, 3), np.nan, np.float32)


# --- ModelRunner --------------------------------------------------------------------------------------------------


def test_rows_of_large_requests_fill_batches_and_the_rest_waits(
    compiled: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    start = LoadedModel.start

    def counted(self: LoadedModel, inputs: Any, count: int, *more: Any, **options: Any) -> Any:
        counts.append(count)
        return start(self, inputs, count, *more, **options)

    monkeypatch.setattr(LoadedModel, "start", counted)
    with ModelRunner(compiled, RuntimeConfig(batching_dim=0, timeout_ns=0)) as runner:
        first, second = rows_of(7, 1), rows_of(1, 2)
        y, z = empty(7), empty(1)
        waits = runner.execute_async({"x": first}, {"y": y})
        while not counts:  # The full batch runs without waiting for more.
            threading.Event().wait(0.001)
        assert not waits.done
        runner.execute_async({"x": second}, {"y": z}).wait(60)
        waits.wait(60)
        assert counts == [1, 1]
        close_to(y, first)
        close_to(z, second)
        left = runner.execute_async({"x": second}, {"y": z})
        runner.flush()
        left.wait(60)
        times = runner.request_times()
        assert len(times) == 3
        assert all(t.queued <= t.started <= t.answered for t in times)


def test_whoever_waits_flushes_where_that_is_asked(compiled: ServedModel) -> None:
    config = RuntimeConfig(batching_dim=0, timeout_ns=0, flush_on_waiting_outputs=True)
    with ModelRunner(compiled, config) as runner:
        y = empty(1)
        runner.execute_async({"x": rows_of(1)}, {"y": y}).wait(60)
        close_to(y, rows_of(1))


def test_whole_batches_are_used_and_filled_where_they_lie(
    compiled: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    start = PortConnection.start

    def watched(self: PortConnection, batches: int, inputs: Any, outputs: Any = None, **options: Any) -> Any:
        seen.append((inputs["x"], next(iter(outputs.values()), np.zeros(1))))
        return start(self, batches, inputs, outputs, **options)

    monkeypatch.setattr(PortConnection, "start", watched)
    with ModelRunner(compiled) as runner:
        x, y = rows_of(8), empty(8)
        runner.execute({"x": x}, {"y": y})
        assert np.shares_memory(seen[-1][0], x)
        assert np.shares_memory(seen[-1][1], y)
        close_to(y, x)
        strided = np.full((8, 6), np.nan, np.float32)[:, ::2]
        runner.execute({"x": x}, {"y": strided})
        close_to(strided, x)


@pytest.mark.parametrize("auto_reset", [False, True])
def test_an_error_of_the_ipus_is_mended_by_a_reset_where_that_is_asked(
    compiled: ServedModel, auto_reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exceptions and recoverable errors; an unrecoverable one stays."""
    from podrun.device.machine import Machine

    run, errors = Machine.run, [ApplicationRuntimeError("an exception on tile 3")]

    def broken(self: Machine, *work: Any, **options: Any) -> Any:
        if errors:
            self.abort(errors.pop())
        return run(self, *work, **options)

    config = RuntimeConfig(batching_dim=0, timeout_ns=1, auto_reset=auto_reset)
    with ModelRunner(compiled, config) as runner:
        monkeypatch.setattr(Machine, "run", broken)
        x, y = rows_of(4), empty()
        with pytest.raises(PoplarError, match="tile 3"):
            runner.execute({"x": x}, {"y": y})
        if auto_reset:
            runner.execute({"x": x}, {"y": y})
            close_to(y, x)
            assert runner.failure is None
        else:
            with pytest.raises(PoplarError, match="tile 3"):
                runner.execute({"x": x}, {"y": y})
            assert runner.failure is not None


def test_many_threads_get_their_own_rows(compiled: ServedModel) -> None:
    with ModelRunner(compiled, batching_dim=0, timeout_ns=200_000, ring_buffer_size_multiplier=4) as runner:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for turn in range(10):
                    x = rows_of(1 + (seed + turn) % 9, 100 * seed + turn)
                    y = empty(len(x))
                    runner.execute_async({"x": x}, {"y": y}).wait(60)
                    close_to(y, x)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batching_dim": 1}, "0 or off"),
        ({"timeout_ns": -1}, "timeout_ns is nanoseconds"),
        ({"ring_buffer_size_multiplier": 0}, "1 to 64"),
        ({"time_out": 1}, "no runtime option 'time_out'"),
        ({"replica_to_device": {1: 0}}, r"replicas \[1\]; the model has 0 to 0"),
        ({"replica_to_device": {0: 100}}, "device 100 has 4 IPUs; the model takes 1"),
    ],
)
def test_settings_that_cannot_be(compiled: ServedModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelRunner(compiled, **options)


# --- LightRunner and devices -----------------------------------------------------------------------------------------


def test_weights_are_replaced_on_the_ipus(changeable: ServedModel) -> None:
    x = rows_of(8)
    with LightRunner(changeable) as runner:
        described = {d.name: d.popef_contains_tensor_data for d in runner.get_model_inputs()}
        assert described == {"x": False, "w": True}
        y, z = empty(8), empty(8)
        before = runner.execute_async({"x": x}, {"y": y})
        runner.set_input_anchor("w", 2 * WEIGHT)
        runner.update_weights()
        runner.execute({"x": x}, {"y": z})
        before.wait()
        close_to(y, x)
        close_to(z, x, 2 * WEIGHT)
        assert before.modelled is not None
        runner.stop()
        with pytest.raises(CallError, match="stopped"):
            runner.execute({"x": x}, {"y": y})
        runner.reload()
        runner.execute({"x": x}, {"y": y})
        close_to(y, x, 2 * WEIGHT)
        with pytest.raises(UsageError, match="is no weight"):
            runner.set_input_anchor("v", WEIGHT)
        with pytest.raises(UsageError, match="float64"):
            runner.set_input_anchor("w", WEIGHT.astype(np.float64))


def test_constant_weights_cannot_be_replaced(compiled: ServedModel) -> None:
    with (
        LightRunner(compiled) as runner,
        pytest.raises(UsageError, match="is no weight"),
    ):
        runner.set_input_anchor("w", WEIGHT)


def test_models_take_turns_on_one_device(compiled: ServedModel, changeable: ServedModel) -> None:
    devices = ServingDevices()
    device = devices.get_device(1)
    assert devices.ipu_hardware_version() == "ipu2"
    assert devices.get_num_devices() == 64
    with pytest.raises(UsageError, match="is taken"):
        devices.get_specific_device(device.identifier)
    with (
        LightRunner(compiled, device=device) as one,
        ModelRunner(changeable, device=device, batching_dim=0, timeout_ns=1) as other,
    ):
        for turn in range(3):
            x, y, z = rows_of(4, turn), empty(), empty()
            started = one.execute_async({"x": x}, {"y": y})
            other.execute({"x": x}, {"y": z})
            started.wait()
            close_to(y, x)
            np.testing.assert_array_equal(y, z)
    assert device.is_attached
    with pytest.raises(UsageError, match="the device has 1 IPUs"):
        LightRunner(Compiler.compile(model(), None, CompilerOptions(num_ipus=2)), device=device)
    device.detach()


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ({"x": rows_of(6)}, {"y": empty(6)}, r"has shape \[6, 8\]"),
        ({"x": rows_of(4)}, {"y": empty(8)}, "different numbers of batches"),
        ({"x": rows_of(4)}, {"z": empty(4)}, "no output 'z'"),
        ({"a": rows_of(4)}, {"y": empty(4)}, r"the inputs are \['x'\]"),
        ({"x": rows_of(4).astype(np.float16)}, {"y": empty(4)}, "type float16"),
    ],
)
def test_exact_batches_alone_are_taken(
    compiled: ServedModel, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], message: str
) -> None:
    with LightRunner(compiled) as runner, pytest.raises(UsageError, match=message):
        runner.execute(inputs, outputs)


def test_the_factory_goes_by_the_settings(compiled: ServedModel) -> None:
    for config, kind in ((None, ModelRunner), (LightRunnerConfig(), LightRunner)):
        runner = make_runner(compiled, config)
        assert type(runner) is kind
        runner.close()
    with pytest.raises(UsageError, match="not a PackRunnerConfig"):
        make_runner(compiled, RuntimeConfig(), runner_type=1)
    with pytest.raises(UsageError, match="dynamic_input_name is ''"):
        make_runner(compiled, PackRunnerConfig())


# --- HostConcatRunner -----------------------------------------------------------------------------------------------


def test_small_inputs_are_joined_on_the_host(compiled: ServedModel) -> None:
    names = ["a", "b", "c", "d"]
    config = HostConcatRunnerConfig(host_concat_config={"x": HostConcatConfig("x", names, (4, 8), 128)})
    x, y = rows_of(4), empty()
    with HostConcatRunner(compiled, config) as runner:
        assert [(d.name, d.shape) for d in runner.get_execute_inputs()] == [(n, (1, 8)) for n in names]
        runner.execute({name: x[i] for i, name in enumerate(names)}, {"y": y})
        close_to(y, x)
        with pytest.raises(UsageError, match="input 'd' is missing"):
            runner.execute({name: x[i] for i, name in enumerate(names[:3])}, {"y": y})
        with pytest.raises(UsageError, match=r"input 'a' is float32\[7\]"):
            runner.execute({name: x[i, : 7 + i] for i, name in enumerate(names)}, {"y": y})
    with pytest.raises(UsageError, match="does not say which"):
        HostConcatRunner(compiled)
    for wrong, message in (
        (HostConcatConfig("z", names, (4, 8)), "has 'z'"),
        (HostConcatConfig("x", names[:3], (4, 8)), "equal shares"),
        (HostConcatConfig("x", names, (4, 8), 100), "has 128 bytes, not 100"),
    ):
        with pytest.raises(UsageError, match=message):
            HostConcatRunner(compiled, HostConcatRunnerConfig(host_concat_config={wrong.tensor_name: wrong}))


# --- Names that programs use --------------------------------------------------------------------------------------


def test_model_runtime_as_public_programs_use_it(compiled: ServedModel, tmp_path: Path) -> None:
    from podrun.compat import model_runtime, popef

    Compiler.compile_and_export(model(), None, tmp_path, OPTIONS)
    config = model_runtime.ModelRunnerConfig()
    config.device_wait_config = model_runtime.DeviceWaitConfig(
        model_runtime.DeviceWaitStrategy.WAIT_WITH_TIMEOUT,
        timeout=timedelta(seconds=1),
        sleepTime=timedelta(seconds=1),
    )
    paths = model_runtime.PopefPaths(str(tmp_path / "executable.popef"))
    with model_runtime.ModelRunner(paths, config=config) as runner:
        (description,) = runner.getExecuteInputs()
        x = rows_of(4).astype(popef.popefTypeToNumpyDType(description.data_type))
        view = model_runtime.InputMemoryView()
        view[description.name] = x
        result = runner.execute(view)
        (out,) = runner.getExecuteOutputs()
        y = np.frombuffer(result[out.name], dtype=popef.popefTypeToNumpyDType(out.data_type))
        close_to(y.reshape(out.shape), x)
        future = runner.executeAsync(view)
        future.wait()
        close_to(future["y"], x)
    with pytest.raises(UsageError, match="one PopEF file, not 2"):
        model_runtime.PopefPaths(["a", "b"])


def test_poprt_run_popef_prints_latency_and_throughput(tmp_path: Path) -> None:
    from podrun.compat.poprt import runtime

    assert runtime.Runner is make_runner
    Compiler.compile_and_export(model(), None, tmp_path, OPTIONS)
    words = ["poprt_run_popef", "--popef", str(tmp_path / "executable.popef"), "--iteration", "9"]
    for more in ([], ["--runner", "lightRunner", "--numThreads", "1"], ["--batchSize", "3"]):
        result = CliRunner().invoke(
            exec_command, [*words, *more], standalone_mode=False, catch_exceptions=False
        )
        assert "Requests: 9\nMax latency: " in result.output
        assert " samples/s" in result.output
    with pytest.raises(UsageError, match="fused models"):
        CliRunner().invoke(
            exec_command, [*words, "--index", "0"], standalone_mode=False, catch_exceptions=False
        )
    assert RuntimeConfig().batching_dim == OFF
