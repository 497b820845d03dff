"""Damages Executables' files, mends their checksums, and loads and runs what is accepted; for one process of a test.

    python -m tests.device.hostile_executables FIRST STOP     # prints how often each outcome came

Each number is one mutation, always the same. An outcome is ``ran``, the class of podrun's own error, or, which is a
failure of the test, anything else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core import executable_file
from podrun.core.errors import PodrunError
from podrun.core.executable import Executable
from podrun.core.layout import IpuRange
from podrun.device.connection import AttachRequest
from podrun.device.host.client import InProcessMachines
from podrun.device.xla.pieces import PieceCache
from tests.device.programs import computation, data, first_weights, inference, linear

DIGEST = 32


@functools.cache
def files() -> tuple[bytes, ...]:
    """The files that are damaged."""
    from dataclasses import replace

    base = linear(2)
    steps = computation(
        "steps",
        lambda x: (jax.lax.scan(lambda c, y: (c + y, jnp.sin(c)), x[0], x)[1],),
        {"s": ((6, 3), "float32")},
        ("t",),
    )
    root = computation("root", lambda x: (jnp.linalg.cholesky(x),), {"a": ((4, 4), "float32")}, ("l",))
    more = replace(base, computations={**base.computations, "steps": steps, "root": root})
    return tuple(map(executable_file.dumps, (base, inference(2), more)))


def mutated(number: int) -> bytes:
    """The file of a number: header or pieces damaged, the checksum right."""
    rng = random.Random(number)
    body = bytearray(rng.choice(files())[:-DIGEST])
    length = int.from_bytes(body[12:20], "little")
    first, stop = (20, 20 + length) if rng.random() < 0.3 else (20 + length, len(body))
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = min(rng.randrange(first, stop), len(body) - 1)
        match rng.randrange(6):
            case 0:
                body[at] ^= 1 << rng.randrange(8)
            case 1:
                body[at] = rng.randrange(256)
            case 2:
                del body[at : at + rng.randrange(1, 16)]
            case 3:
                body[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                body[at : at + 8] = rng.choice((b"\xff", b"\0", b"\x7f", b"9")) * 8
            case _:
                other, count = rng.randrange(first, len(body)), rng.randrange(1, 32)
                body[at : at + count] = body[other : other + count]
    if rng.random() < 0.5:  # the length of the header too
        body[12:20] = length.to_bytes(8, "little")
    return bytes(body) + hashlib.sha256(body).digest()


def outcome(number: int, pieces: PieceCache) -> str:
    """The outcome of a mutation."""
    try:
        found = executable_file.loads(mutated(number))
        if found.layout != linear(2).layout:
            return "another layout"
        for each in found.computations.values():  # also those that no instruction names
            pieces.piece(each, ())
        _run(found, pieces)
    except PodrunError as error:
        return type(error).__name__
    except MemoryError:
        return "MemoryError"
    return "ran"


def _run(executable: Executable, pieces: PieceCache) -> None:
    machines = InProcessMachines(2, pieces, grace=0.1)
    connection = machines.connect(threaded=False)
    try:
        everything = IpuRange(0, 2)
        assert connection.try_attach(AttachRequest(everything, everything, os.getpid(), "u", "c")) is None
        connection.host_sync_timeout = 5.0
        connection.load(executable)
        if executable.variables.keys() >= first_weights().keys():
            connection.write_variables(first_weights())
        connection.run(1, {n: np.asarray(a) for n, a in data(executable, 1).items()})
    finally:
        connection.close()


def main() -> None:
    """See the module."""
    first, stop = map(int, sys.argv[1:])
    pieces = PieceCache(None)
    counts: Counter[str] = Counter()
    for number in range(first, stop):
        print(f"{number}", file=sys.stderr, flush=True)
        counts[outcome(number, pieces)] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
