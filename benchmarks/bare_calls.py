"""Bare calls of oneDNN in processes of their own, with nothing of podrun: what benchmarks take *limits* from.

A worker is a script that computes the same for every line that it reads, and then writes the seconds of processor time
that it took. Workers keep to cores as machines do.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

Call = Callable[[], object]
Product = Callable[..., Call]


def library() -> str:
    """oneDNN's file, of the package that podrun uses."""
    files = importlib.metadata.files("onednn-cpu-gomp") or ()
    return str(next(Path(str(file.locate())) for file in files if file.name == "libdnnl.so.3").resolve())


def product_of(file: str) -> Product:
    """``product(turned, a, b, c, adds=False)`` prepares ``c = a @ b``, or ``c += a @ b``, of the library in ``file``.

    ``turned``: ``TN`` if ``a`` lies as its transpose, ``NT`` if ``b`` does, ``NN`` if none. Arrays are float32, row by
    row, or some of an array's columns.
    """
    multiply = ctypes.CDLL(file).dnnl_sgemm

    def product(turned: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, *, adds: bool = False) -> Call:
        (m, n), k = c.shape, a.shape[0 if turned[0] == "T" else 1]
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, c)]
        call = [ctypes.c_char(letter.encode()) for letter in turned] + [ctypes.c_int64(s) for s in (m, n, k)]
        row_a, row_b, row_c = (ctypes.c_int64(array.strides[0] // 4) for array in (a, b, c))
        call += [ctypes.c_float(1), pointers[0], row_a, pointers[1], row_b]
        call += [ctypes.c_float(adds), pointers[2], row_c]
        kept = a, b, c  # the library has their addresses alone
        return lambda: (multiply(*call), kept)

    return product


def normal(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Random numbers, float32, in memory aligned to 64 bytes as podrun's is: other addresses cost up to a tenth."""
    memory = np.empty(4 * math.prod(shape) + 64, np.uint8)
    first = -memory.ctypes.data % 64
    array = memory[first : first + 4 * math.prod(shape)].view(np.float32).reshape(shape)
    generator.standard_normal(out=array, dtype=np.float32)
    return array


@contextlib.contextmanager
def workers(script: str, processes: int, *words: object) -> Iterator[Callable[[], tuple[float, float]]]:
    """Start ``script`` with ``words``, ``processes`` and its rank, once for each rank. Gives a function that has all of
    them compute once: seconds until the last has, and processor time of all.
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *map(str, words), str(processes)]
    started = [
        subprocess.Popen(
            [*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        for rank in range(processes)
    ]

    def compute() -> tuple[float, float]:
        begin, used = time.perf_counter(), 0.0
        try:
            for worker in started:
                print(file=worker.stdin, flush=True)
            for worker in started:
                used += float((worker.stdout and worker.stdout.readline()) or "nan")
        except OSError:
            used = math.nan
        if math.isnan(used):
            raise SystemExit("a process of the bare calls ended")
        return time.perf_counter() - begin, used

    try:
        yield compute
    finally:
        for worker in started:
            with contextlib.suppress(OSError):  # It has ended, and what it was told is still here.
                worker.stdin.close()
        for worker in started:
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:  # It waits for one that ended.
                worker.kill()
                worker.wait()


def serve(processes: int, rank: int, prepare: Callable[[], Sequence[Call]]) -> None:
    """The work of a worker: make all calls that ``prepare`` gives, in order, for every line that it reads."""
    cores = sorted(os.sched_getaffinity(0))
    if 1 < len(cores) <= processes:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    calls = prepare()
    for _ in sys.stdin:
        begin = time.process_time()
        for call in calls:
            call()
        print(time.process_time() - begin, flush=True)
