"""Keeps cut programs on disk, so that a piece that was compiled before is not traced, rewritten and cut again."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from podrun.device.xla.cutting import Step, Steps

_MAKERS = (
    "channels_last",
    "clients",
    "convolutions",
    "cutting",
    "epilogues",
    "pieces",
    "rewrite",
    "stablehlo",
)
"""Files of this folder that decide what the steps are: steps made by other versions of them are not read."""


@functools.cache
def version() -> str:
    """A name for what these files say."""
    digest = hashlib.sha256()
    for name in _MAKERS:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def write(steps: Steps, threads: int, path: Path) -> None:
    """Write them with the number of threads that compute them; a reader sees all of the file or none of it."""
    texts = {text: place for place, text in enumerate(dict.fromkeys(step.text for step in steps.steps))}
    plain = asdict(steps) | {"texts": list(texts), "threads": threads}
    for step in plain["steps"]:
        step["text"] = texts[step["text"]]
    data = json.dumps(plain).encode()
    whole = hashlib.sha256(data).hexdigest().encode() + b"\n" + data
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(whole)
    part.replace(path)


def read(path: Path) -> tuple[Steps, int] | None:
    """What `write` wrote; None if there is nothing that can be read, or not all of it."""
    try:
        digest, _, data = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(data).hexdigest().encode() != digest:
        return None
    plain = json.loads(data)
    steps = tuple(
        Step(
            text=plain["texts"][s["text"]],
            takes=tuple((kind, tuple(shape)) for kind, shape in s["takes"]),
            gives=tuple((kind, tuple(shape)) for kind, shape in s["gives"]),
            reads=tuple(s["reads"]),
            makes=tuple(s["makes"]),
            call=s["call"],
        )
        for s in plain["steps"]
    )
    return Steps(plain["arguments"], steps, tuple(plain["results"])), plain["threads"]
