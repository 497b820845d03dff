"""The child process of `podrun.device.xla.vetting`: reads and compiles pieces that podrun did not export.

Requests come through standard input: two lengths, a header as JSON, the piece. Each answer is a line of JSON. The
process ends when the other end of its input is closed, also while it compiles: a parent that was killed asks for
nothing more, and a piece may compile for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import sys
import threading
from pathlib import Path
from typing import IO, Any

from podrun.core.errors import PodrunError
from podrun.core.executable import Computation
from podrun.device.xla.pieces import PieceCache
from podrun.device.xla.vetting import LENGTHS, LONGEST, PATIENCE_S

LONGEST_HEADER = 16 << 20


def answer_requests() -> None:
    """Read pieces from standard input until it ends; answer each with a line of JSON: what is wrong, or nothing."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with_parent, name="podrun-parent-watch", daemon=True).start()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What libraries print is no answer.
    pieces = PieceCache(Path(sys.argv[1]) if sys.argv[1] else None, own_process=True, vets=False)
    while (request := _received(sys.stdin.buffer)) is not None:
        _limit_processor_time()
        answers.write(json.dumps(_verdict(pieces, *request)).encode() + b"\n")
        answers.flush()


def _end_with_parent() -> None:
    poll = select.poll()
    poll.register(0, 0)  # The other end is closed, which is told without being asked for.
    poll.poll()
    os._exit(0)


def _limit_processor_time() -> None:
    """Let the kernel end this process where the piece keeps Python's lock for longer than its parent waits."""
    used = sum(os.times()[:2])
    limit = int(used + PATIENCE_S * (os.cpu_count() or 1)) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard < 0 else min(limit, hard), hard))


def _received(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    head = stream.read(LENGTHS.size)
    if len(head) < LENGTHS.size:
        return None
    length, size = LENGTHS.unpack(head)
    if length > LONGEST_HEADER or size > LONGEST:
        return None
    return json.loads(stream.read(length)), stream.read(size)


def _verdict(pieces: PieceCache, header: dict[str, Any], stablehlo: bytes) -> str:
    computation = Computation(header["name"], stablehlo, tuple(header["inputs"]), tuple(header["outputs"]))
    try:
        pieces.piece(computation, tuple(header["donated"]), dict(header["in_place"]))
    except PodrunError as error:
        return error.message
    except Exception as error:
        first = str(error).partition("\n")[0][:300]
        return f"Computation {computation.name!r} cannot be compiled: {type(error).__name__}: {first}"
    finally:
        pieces.forget()
    return ""


if __name__ == "__main__":
    answer_requests()
