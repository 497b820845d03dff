"""The child process of `podrun.device.xla.vetting`: reads and compiles pieces that podrun did not export.

Requests come through standard input: two lengths, a header as JSON, the piece. Each answer is a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import IO, Any

from podrun.core.errors import PodrunError
from podrun.core.executable import Computation
from podrun.device.xla.pieces import PieceCache
from podrun.device.xla.vetting import LENGTHS, LONGEST

LONGEST_HEADER = 16 << 20


def answer_requests() -> None:
    """Read pieces from standard input until it ends; answer each with a line of JSON: what is wrong, or nothing."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What libraries print is no answer.
    pieces = PieceCache(Path(sys.argv[1]) if sys.argv[1] else None, own_process=True, vets=False)
    while (request := _received(sys.stdin.buffer)) is not None:
        answers.write(json.dumps(_verdict(pieces, *request)).encode() + b"\n")
        answers.flush()


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
