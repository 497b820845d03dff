"""Random convolutions, each in a fresh process, against XLA's own: ``make stress MINUTES=10``.

    python -m tests.stress.convolutions [--minutes M | --cases N] [--seed S] [--first K]
    python -m tests.stress.convolutions --seed S --case K        one case again

A case is a crash, a hang or a wrong number if a process that computes it dies, does not end within the deadline, or
gives results that differ from XLA's by more than the rounding of sums of that length, or from one repeat, machine or
process to the next by a single bit. Processes are forked from one that has imported everything and started nothing;
each `FRESH_EVERY`-th case starts Python anew. ``XLA_FLAGS=--xla_cpu_max_isa=AVX`` and ``ONEDNN_MAX_CPU_ISA=AVX`` make
another instruction set of this host's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.stress.cases import Arrays, Case, case

DEADLINE = 120.0
"""Seconds that a process may take for a case, on a busy host."""
FRESH_EVERY = 50


@dataclass(frozen=True, slots=True)
class Verdict:
    """``wrong``: what went wrong, empty if nothing did. ``library``: convolutions that were not XLA's."""

    wrong: str
    library: int = 0


def verdict(chosen: Case, *, fresh: bool = False, deadline: float = DEADLINE) -> Verdict:
    """Compute a case in processes of its own."""
    begin = _start_fresh if fresh else _fork
    started = [begin(chosen) for _ in range(chosen.processes)]
    end = time.monotonic() + deadline
    answers = [_answer(pid, pipe, end) for pid, pipe in started]
    bad = next((answer for answer in answers if answer["wrong"]), None)
    if bad is not None:
        return Verdict(str(bad["wrong"]), int(bad.get("library", 0)))
    if len({answer["digest"] for answer in answers}) > 1:
        return Verdict("two processes got different bits", int(answers[0]["library"]))
    return Verdict("", int(answers[0]["library"]))


def compute(chosen: Case) -> dict[str, Any]:
    """Compute a case here: its digest, and what is wrong."""
    import jax

    from podrun.core import executable_file
    from podrun.core.executable import Computation
    from podrun.device.xla import clients, pieces

    clients.WORTH_SHARING = 0 if chosen.threads == clients.SHARED_BY else 1 << 62
    pieces.WORTH_COMPILING = 0
    library: list[int] = []
    rewrite = pieces.rewrite_convolutions
    pieces.rewrite_convolutions = lambda *given: library.append(rewrite(*given)) or library[-1]  # type: ignore[func-returns-value]
    arrays = chosen.arrays()
    with jax.enable_x64(True):
        specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        exported = jax.export.export(jax.jit(chosen.function()), platforms=["cpu"])(*specs)
        names = tuple(f"in:{n}" for n in range(len(arrays)))
        outputs = tuple(f"out:{n}" for n in range(len(exported.out_avals)))
        text = bytes(exported.serialize())
        executable_file.remember(text)
        piece = pieces.PieceCache(None).piece(Computation("case", text, names, outputs), ())
    results: list[Arrays] = []
    errors: list[str] = []

    def machine() -> None:
        try:
            with jax.enable_x64(True):
                results.extend(
                    [np.asarray(r).copy() for r in piece.call(*arrays)] for _ in range(chosen.repeats)
                )
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    machines = [threading.Thread(target=machine) for _ in range(chosen.machines)]
    for one in machines:
        one.start()
    for one in machines:
        one.join()
    digests = {hashlib.sha256(b"".join(r.tobytes() for r in each)).hexdigest() for each in results}
    wrong = errors[0] if errors else "a repeat or machine got different bits" if len(digests) > 1 else ""
    return {
        "wrong": wrong or _difference(chosen, arrays, results[0]),
        "digest": min(digests, default=""),
        "library": sum(library),
    }


def _difference(chosen: Case, arrays: Arrays, results: Arrays) -> str:
    """How results differ from XLA's by more than rounding, if they do.

    The same program on absolute values gives the sum of what each result adds up, which bounds its error.
    """
    import jax

    plain = jax.jit(chosen.function(padded=True))
    expected = [np.asarray(r) for r in plain(*arrays)]
    sizes = [np.asarray(r) for r in plain(*map(np.abs, arrays))]
    allowed = float(ml_dtypes.finfo(arrays[0].dtype).eps) * (4 + 0.5 * chosen.terms**0.5)
    for place, (got, right, size) in enumerate(zip(results, expected, sizes, strict=True)):
        if got.shape != right.shape:
            return f"result {place} has shape {got.shape}, not {right.shape}"
        excess = np.abs(got.astype(np.float64) - right.astype(np.float64)) / np.maximum(
            size.astype(np.float64), 1e-30
        )
        worst = float(excess.max(initial=0.0)) / allowed
        if not worst <= 1:
            return f"result {place} is off by {worst:.3g} times what rounding allows"
    return ""


def _fork(chosen: Case) -> tuple[int, int]:
    read, write = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        os.close(read)
        os.write(write, json.dumps(_safely(chosen)).encode())
    finally:
        os._exit(0)


def _start_fresh(chosen: Case) -> tuple[int, int]:
    words = ["--seed", str(chosen.seed), "--case", str(chosen.number), "--here"]
    return started([sys.executable, "-m", "tests.stress.convolutions", *words])


def started(command: Sequence[str]) -> tuple[int, int]:
    """A process, and where to read what it prints; `verdict` waits for it."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    read = os.dup(process.stdout.fileno())
    process.stdout.close()
    process.returncode = 0  # waited for by its number
    return process.pid, read


def _safely(chosen: Case) -> dict[str, Any]:
    try:
        return compute(chosen)
    except Exception as error:
        return {"wrong": f"{type(error).__name__}: {error}"}


def _answer(pid: int, pipe: int, end: float) -> dict[str, Any]:
    """The output of a process, or how it ended."""
    said = b""
    try:
        while True:
            if not select.select([pipe], [], [], max(end - time.monotonic(), 0))[0]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return {"wrong": "a process did not end within the deadline"}
            if not (more := os.read(pipe, 1 << 16)):
                break
            said += more
    finally:
        os.close(pipe)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        return {"wrong": f"a process died by {signal.Signals(-code).name}"}
    try:
        answer: dict[str, Any] = json.loads(said)
    except ValueError:
        return {"wrong": f"a process ended with code {code} without an answer"}
    return answer


def _import_all() -> None:
    """What every case needs; no client of XLA's starts by it."""
    import jax.export
    import jaxlib.mlir.dialects.stablehlo

    import podrun.device.xla.pieces

    _ = jax, jaxlib, podrun
    # Children only compute and exit: nothing of this process's is touched by threads that they do not have.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.0, help="how long to go on")
    parser.add_argument("--cases", type=int, default=0, help="how many cases, if there is no time given")
    parser.add_argument("--seed", type=int, default=None, help="of the cases (default: the time)")
    parser.add_argument("--first", type=int, default=0, help="the first case's number")
    parser.add_argument("--case", type=int, default=None, help="this case alone, told in full")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    _import_all()
    seed = int(time.time()) if given.seed is None else given.seed
    if given.here:
        print(json.dumps(_safely(case(seed, given.case))))
        return 0
    if given.case is not None:
        chosen = case(seed, given.case)
        print(chosen)
        found = verdict(chosen, fresh=True)
        print(found.wrong or f"right; {found.library} convolutions of the library's")
        return bool(found.wrong)
    return _search(seed, given.first, given.minutes, given.cases)


def _search(seed: int, first: int, minutes: float, cases: int) -> int:
    begin, said = time.monotonic(), time.monotonic()
    number, failures, library = first, 0, 0
    while number - first < cases if not minutes else time.monotonic() - begin < 60 * minutes:
        found = verdict(case(seed, number), fresh=number % FRESH_EVERY == FRESH_EVERY - 1)
        library += bool(found.library)
        if found.wrong:
            failures += 1
            print(f"seed {seed} case {number}: {found.wrong}; again: {_again(seed, number)}", flush=True)
        number += 1
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"{number - first} cases, {failures} wrong", flush=True)
    print(
        f"seed {seed}, cases {first} to {number - 1}: {number - first} in {time.monotonic() - begin:.0f} s, "
        f"{library} with the library's convolutions, {failures} wrong"
    )
    return bool(failures)


def _again(seed: int, number: int) -> str:
    return f"python -m tests.stress.convolutions --seed {seed} --case {number}"


if __name__ == "__main__":
    sys.exit(main())
