"""Loading in a process of its own: really ahead, the same batches, errors, nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from podrun.poptorch.data import data_accessor  # noqa: E402
from podrun.private_apis.torch import end_workers  # noqa: E402
from tests.conftest import wait_until  # noqa: E402
from tests.poptorch.data.data_sets import Failing, Numbered, Started, Streamed, Uneven, Waiting, loads  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process of a loader outlives its test."""
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


def loader_of(data: Any, mode: str = "Async", batch_size: int = 2, **settings: Any) -> Any:
    return poptorch.DataLoader(
        poptorch.Options(),
        data,
        batch_size=batch_size,
        mode=poptorch.DataLoaderMode[mode],
        **settings,
    )


def numbers(loader: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


def test_it_gives_what_the_loader_in_this_process_gives() -> None:
    torch.manual_seed(5)
    expected = [numbers(poptorch.DataLoader(poptorch.Options(), Numbered(9), 2, shuffle=True))]
    torch.manual_seed(5)
    loader = loader_of(Numbered(9), shuffle=True)
    try:
        assert len(loader) == 4
        assert numbers(loader) == expected[0]
        again = numbers(loader)
        assert len(again) == 4
        assert again != expected[0]
    finally:
        loader.terminate()
        loader.terminate()


def test_it_loads_ahead_as_far_as_the_buffer_goes(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    loader = loader_of(
        Numbered(40, str(trace)), batch_size=1, async_options={"buffer_size": 4, "early_preload": True}
    )
    try:
        # Four slots are full, and one more element waits for a slot.
        wait_until(lambda: loads(trace) == 5, 60, "five elements are loaded before any is asked for")
        rows = iter(loader)
        first = next(rows)[1]
        next(rows)
        wait_until(lambda: loads(trace) == 6, 60, "a slot that is given back is filled")
        assert first.data_ptr() != next(rows)[1].data_ptr()
    finally:
        loader.terminate()


def test_an_epoch_that_is_left_begins_anew() -> None:
    loader = loader_of(Numbered(12))
    try:
        assert next(iter(loader))[1].tolist() == [0, 1]
        assert numbers(loader) == [[2 * i, 2 * i + 1] for i in range(6)]
        assert numbers(loader)[0] == [0, 1]
    finally:
        loader.terminate()


@pytest.mark.parametrize("drop_last", [True, False])
def test_rebatching_leaves_one_partial_batch_at_most(drop_last: bool) -> None:
    loader = loader_of(Numbered(11), "AsyncRebatched", 4, rebatched_worker_size=3, drop_last=drop_last)
    try:
        rows = numbers(loader)
        assert rows[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert rows[2:] == ([] if drop_last else [[8, 9, 10]])
        assert len(loader) == len(rows)
    finally:
        loader.terminate()


def test_rebatching_joins_what_workers_of_a_stream_give() -> None:
    loader = loader_of(
        Streamed(10), "AsyncRebatched", 4, num_workers=2, worker_init_fn=_ready, persistent_workers=False
    )
    try:
        rows = [row.flatten().tolist() for row in loader]
        assert sorted(n for row in rows for n in row)[:2] == [0.0, 1.0]
        assert [len(row) for row in rows] == [4, 4]
    finally:
        loader.terminate()


def _ready(worker: int) -> None:
    """Elements are divided by the data set."""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Failing(), "element 5 is damaged"),
        (Failing(killed=True), "has ended"),
    ],
)
def test_what_fails_in_the_process_reaches_the_program(data: Any, message: str) -> None:
    loader = loader_of(data, batch_size=1)
    rows = iter(loader)
    with pytest.raises(AssertionError, match=message):
        numbers(rows)
    with pytest.raises(AssertionError, match="terminated"):
        next(rows)


def test_what_fails_at_the_start_is_an_error() -> None:
    with pytest.raises(poptorch.Error, match="is damaged"):
        loader_of(Failing(at=0))
    with pytest.raises(poptorch.Error, match="empty"):
        poptorch.AsynchronousDataAccessor(Numbered(0))
    loader = loader_of(Numbered(4))
    with pytest.raises(poptorch.Error, match="already"):
        poptorch.AsynchronousDataAccessor(loader)
    loader.terminate()


def test_elements_that_cannot_be_shared_are_refused() -> None:
    accessor = poptorch.AsynchronousDataAccessor(Uneven(4))
    with pytest.raises(AssertionError, match="shapes and types of the first one"):
        list(accessor)
    nested = [((torch.zeros(1), torch.zeros(1)), torch.zeros(1))]
    with pytest.raises(poptorch.Error, match="nesting"):
        poptorch.AsynchronousDataAccessor(nested)
    plain = torch.utils.data.DataLoader(Numbered(5), batch_size=2)
    with pytest.raises(AssertionError, match="drop_last=True"):
        poptorch.AsynchronousDataAccessor(plain)
    with pytest.raises(AssertionError, match="above 1"):
        poptorch.AsynchronousDataAccessor(plain, rebatched_size=1)


@pytest.mark.parametrize(
    "element", [torch.ones(2), [torch.ones(2)], {"a": torch.ones(2), "b": torch.zeros(3)}]
)
def test_elements_keep_their_structure(element: Any) -> None:
    accessor = poptorch.AsynchronousDataAccessor([element])
    (found,) = list(accessor)
    accessor.terminate()
    assert type(found) is type(element)
    torch.testing.assert_close(found, element)


@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called")
@pytest.mark.parametrize("mode", ["Async", "Sync"])
def test_workers_leave_no_folders(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)  # type: ignore[attr-defined]
    loader = loader_of(Numbered(8), mode, num_workers=2)
    rows = iter(loader)
    assert len(list(rows)) == 4
    assert list(tmp_path.glob("pymp-*"))
    loader.terminate()
    end_workers()  # The end of a program does this.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_process_and_its_workers_are_copies_of_the_program(times: int) -> None:
    """A class that no other process could import, while threads of XLA compute."""

    class Local(Numbered):
        pass

    ended = threading.Event()

    def compute() -> None:
        product = jax.jit(lambda x: x @ x)
        while not ended.is_set():
            product(np.ones((64, 64), np.float32)).block_until_ready()

    busy = threading.Thread(target=compute)
    busy.start()
    try:
        for _ in range(times):
            loader = loader_of(Local(8), num_workers=2)
            assert numbers(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
            loader.terminate()
    finally:
        ended.set()
        busy.join()


class _Traced:
    """Part of a cycle; leaves a line in a file when it is collected in another process than its own."""

    def __init__(self, path: Path) -> None:
        self.itself, self._path, self._owner = self, path, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self._owner:
            self._path.write_text("collected")


class _Collecting(Numbered):
    def __getitem__(self, index: int) -> Any:
        if index == 0:
            gc.collect()
        return super().__getitem__(index)


def test_what_the_program_has_dropped_is_not_freed_in_the_copy(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    gc.disable()
    try:
        _Traced(trace)
        loader = loader_of(_Collecting(2), num_workers=1)
        assert numbers(loader) == [[0, 1]]
        loader.terminate()
    finally:
        gc.enable()
        gc.collect()
    assert not trace.exists()


def test_handlers_of_the_program_do_not_run_in_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    before = signal.signal(signal.SIGTERM, lambda *_: trace.write_text("handled"))
    monkeypatch.setattr("podrun.poptorch.data.data_accessor.STOP_SECONDS", 0.2)
    try:
        loader = loader_of(Waiting(4, str(tmp_path / "loading")))
        iter(loader)
        wait_until((tmp_path / "loading").exists, 60, "the copy is inside the data set")
        loader.terminate()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not trace.exists()


def test_a_killed_process_that_is_slow_to_go_is_no_error() -> None:
    """On a busy host, or where the kernel waits for a device in its name."""
    ours, theirs = multiprocessing.Pipe()
    calls: list[str] = []

    def close() -> None:
        raise ValueError("Cannot close a process while it is still running.")

    process: Any = SimpleNamespace(
        terminate=lambda: calls.append("terminate"),
        kill=lambda: calls.append("kill"),
        join=lambda seconds: calls.append(f"join {seconds:g}"),
        close=close,
        exitcode=None,
    )
    data_accessor._Ending(ours, process)()
    theirs.close()
    assert calls == ["join 10", "terminate", "join 10", "kill", "join 60"]


@pytest.mark.system
@pytest.mark.slow
def test_workers_of_a_new_python_are_copies_of_it() -> None:
    """32 new Pythons that import everything took minutes."""
    loader = poptorch.DataLoader(
        poptorch.Options(),
        Started(8),
        2,
        num_workers=2,
        mode=poptorch.DataLoaderMode.Async,
        async_options={"sharing_strategy": poptorch.SharingStrategy.SharedMemory},
    )
    assert [started.tolist() for _, started in loader] == [[1, 1]] * 4
    loader.terminate()


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ForkServer", "SharedMemory", "FileSystem"])
@pytest.mark.parametrize("ending", ["", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_the_process_ends_with_the_program(tmp_path: Path, strategy: str, ending: str, commands: Any) -> None:
    text = (
        "import os, sys, torch, poptorch\n"
        "from tests.poptorch.data.data_sets import Numbered\n"
        "if __name__ == '__main__':\n"
        "    loader = poptorch.DataLoader(poptorch.Options(), Numbered(8), 2, num_workers=2,\n"
        "        mode=poptorch.DataLoaderMode.Async,\n"
        f"        async_options={{'sharing_strategy': poptorch.SharingStrategy.{strategy}}})\n"
        "    print([y.tolist() for x, y in loader], flush=True)\n"
        f"    {ending or 'pass'}\n"
    )
    (tmp_path / "load.py").write_text(text)
    done = commands.run(
        sys.executable, "-m", "podrun.compat", "load.py", timeout=120, env={"PYTHONPATH": str(ROOT)}
    )
    assert "[[0, 1], [2, 3], [4, 5], [6, 7]]" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr
