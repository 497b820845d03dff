"""Data sets that tests load in other processes, which import this module."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


class Numbered(torch.utils.data.Dataset[Any]):
    """Element i is ``([i, i, i], i)``. ``trace``: a file that gets a byte for every element that is loaded."""

    def __init__(self, count: int, trace: str = "") -> None:
        self.count, self.trace = count, trace

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.trace:
            with open(self.trace, "ab") as file:
                file.write(b".")
        return torch.full((3,), float(index)), torch.tensor(index)


class Started(Numbered):
    """Element i is 1 if a process that a worker starts would be a copy of it, as is the default here."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, _ = super().__getitem__(index)
        return x, torch.tensor(int(multiprocessing.get_start_method() == "fork"))


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Numbers from 0, shared by workers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.count, step):
            yield torch.tensor([float(index)])


class Failing(Numbered):
    """Fails at its sixth element: with an exception, or as a killed process does."""

    def __init__(self, killed: bool = False, at: int = 5) -> None:
        super().__init__(20)
        self.killed, self.at = killed, at

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"element {index} is damaged")
        return super().__getitem__(index)


class Waiting(Numbered):
    """Leaves its trace and waits for ever at its third element."""

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            Path(self.trace).touch()
            threading.Event().wait()
        return torch.tensor(index)


class Uneven(Numbered):
    """Elements of different lengths."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1 + index % 2)


def loads(path: Path) -> int:
    """Elements that were loaded so far."""
    return path.stat().st_size if path.exists() else 0
