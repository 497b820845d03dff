"""The arithmetic of a step of 784-512-512-10 by bare calls of oneDNN in several processes, with nothing of podrun.

Each process computes the five large products of its samples, all add up their slices of the gradients and update their
slices of the weights with NumPy, block by block, and wait for each other awake. Bias, activations, loss, inputs and the
three products with ten columns are left out. So no step that is divided like this takes less time: a *limit* of
`step_time`. Processes keep to cores as machines do.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROWS, COLUMNS = (784, 512), 512
WEIGHTS = sum(ROWS) * COLUMNS
BLOCK = 16384
"""Elements that NumPy adds up at a time: their sum stays in the cache."""
_LINE = 8  # words between the counters of two processes


@contextlib.contextmanager
def bare_steps(processes: int, samples: int, steps: int) -> Iterator[Callable[[], float]]:
    """A function that gives the seconds of one of ``steps`` such steps, of ``samples`` samples in each process."""
    library = _library()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        memory = Path(folder, "memory")
        memory.write_bytes(bytes(_bytes(processes)))
        command = [
            sys.executable,
            __file__,
            str(library),
            str(memory),
            str(processes),
            str(samples),
            str(steps),
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        workers = [
            subprocess.Popen(
                [*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
            )
            for rank in range(processes)
        ]

        def block() -> float:
            begin = time.perf_counter()
            for worker in workers:
                print(file=worker.stdin, flush=True)
            for worker in workers:
                if worker.stdout is None or not worker.stdout.readline():
                    raise SystemExit("a process of the bare step ended")
            return (time.perf_counter() - begin) / steps

        try:
            yield block
        finally:
            for worker in workers:
                if worker.stdin is not None:
                    worker.stdin.close()
            for worker in workers:
                try:
                    worker.wait(30)
                except subprocess.TimeoutExpired:  # It waits for one that ended.
                    worker.kill()
                    worker.wait()


def _library() -> str:
    """oneDNN's file, of the package that podrun uses."""
    files = importlib.metadata.files("onednn-cpu-gomp") or ()
    return str(next(Path(str(file.locate())) for file in files if file.name == "libdnnl.so.3").resolve())


def _bytes(processes: int) -> int:
    return 8 * _LINE * processes + 4 * WEIGHTS * (processes + 1)


def _work(library: str, memory: str, processes: int, samples: int, steps: int, rank: int) -> None:
    """One process: as many steps for every line that it reads."""
    cores = sorted(os.sched_getaffinity(0))
    if 1 < len(cores) <= processes:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    with open(memory, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    counters = np.frombuffer(shared, np.int64, _LINE * processes)[::_LINE]
    arrays = np.frombuffer(shared, np.float32, offset=8 * _LINE * processes).reshape(processes + 1, WEIGHTS)
    weights, gradients = arrays[0], arrays[1:]
    products = _products(library, weights, gradients[rank], samples)
    ends = [WEIGHTS * at // processes for at in (rank, rank + 1)]
    blocks = [slice(at, min(at + BLOCK, ends[1])) for at in range(ends[0], ends[1], BLOCK)]

    def wait() -> None:
        counters[rank] += 1
        deadline = time.monotonic() + 60
        while counters.min() < counters[rank]:
            os.sched_yield()
            if time.monotonic() > deadline:
                raise SystemExit("another process of the bare step ended")

    for _ in sys.stdin:
        for _ in range(steps):
            for product in products:
                product()
            wait()
            for part in blocks:
                total = gradients[0, part] + gradients[1, part]
                for other in gradients[2:, part]:
                    total += other
                total *= 1e-6
                weights[part] -= total
            wait()
        print(flush=True)


def _products(
    library: str, weights: np.ndarray, gradient: np.ndarray, samples: int
) -> list[Callable[[], object]]:
    """The five products: two forward, the gradient of the second weights, that of its input, of the first weights."""
    multiply = ctypes.CDLL(library).dnnl_sgemm
    first = ROWS[0] * COLUMNS
    generator = np.random.default_rng(0)
    weights[:] = generator.normal(size=WEIGHTS).astype(np.float32) * 0.03
    x, *layers = (generator.normal(size=(samples, n)).astype(np.float32) for n in (ROWS[0], *[COLUMNS] * 4))
    hidden, output, of_output, of_hidden = layers

    def prepared(
        turned: str, m: int, n: int, k: int, a: np.ndarray, b: np.ndarray, c: np.ndarray
    ) -> Callable[[], object]:
        rows = m if turned[0] == "T" else k, k if turned[1] == "T" else n
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, c)]
        call = [ctypes.c_char(letter.encode()) for letter in turned] + [ctypes.c_int64(s) for s in (m, n, k)]
        call += [
            ctypes.c_float(1),
            pointers[0],
            ctypes.c_int64(rows[0]),
            pointers[1],
            ctypes.c_int64(rows[1]),
        ]
        call += [ctypes.c_float(0), pointers[2], ctypes.c_int64(n)]
        kept = a, b, c  # the library has their addresses alone
        return lambda: (multiply(*call), kept)

    width = COLUMNS
    calls = [
        prepared("NN", samples, width, ROWS[0], x, weights, hidden),
        prepared("NN", samples, width, width, hidden, weights[first:], output),
        prepared("TN", width, width, samples, hidden, of_output, gradient[first:]),
        prepared("NT", samples, width, width, of_output, weights[first:], of_hidden),
        prepared("TN", ROWS[0], width, samples, x, of_hidden, gradient),
    ]
    calls[0]()
    expected = x @ weights[:first].reshape(ROWS[0], width)
    if not np.allclose(hidden, expected, atol=1e-3):
        raise SystemExit("the bare products are wrong")
    return calls


if __name__ == "__main__":
    _work(*sys.argv[1:3], *map(int, sys.argv[3:]))
