"""Plans on disk: an answer that one process computed is read in every later process, found by its question alone.

An entry is one JSON file named by a digest of its question (a flat jaxpr, options and chip, or a request in
words of its own such as a model file's digest and a layout) and of podrun's version and the text of the
tile model itself, so that no other version's answer is ever read. Nothing is unpickled. A file that is
damaged or belongs to another user is ignored and written anew; the oldest files go when the folder is
found to be beyond `MOST_BYTES` or `MOST_FILES`.

The folder is ``$PODRUN_PLAN_CACHE`` (``off`` or empty: no cache), else ``plans`` in ``$PODRUN_CACHE_DIR``,
else ``podrun/plans`` under ``$XDG_CACHE_HOME`` or ``~/.cache``.
"""

from __future__ import annotations

import enum
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import podrun
from podrun.core.documents import OthersFileError, parse_json, read_text, write_whole
from podrun.core.environment import PODRUN_PLAN_CACHE, environment, podrun_cache_directory
from podrun.core.errors import ConfigError, NotFoundError
from podrun.core.kept_files import KeptFolder
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    from podrun.costmodel.equations import FlatJaxpr

MOST_BYTES = 256 << 20
"""Size to which the folder is cut back when an entry is written."""
MOST_FILES = 20_000
FEWEST_EQUATIONS = 64
"""Steps with fewer equations are planned faster than read."""
SUFFIX = ".plan.json"
_log = logging.getLogger(__name__)


class Unkeyed(Exception):
    """A question holds a value that has no stable name; it is answered each time."""


def folder(environ: Mapping[str, str]) -> Path | None:
    """The folder of plans; None: plans are not kept."""
    named = environ.get(PODRUN_PLAN_CACHE)
    if named is not None:
        return Path(named).expanduser() if named not in ("", "off") else None
    directory = podrun_cache_directory(environ)
    return None if directory is None else directory / "plans"


@cache
def version() -> str:
    """podrun's version and a digest of the tile model's own text."""
    digest = hashlib.sha256(podrun.__version__.encode())
    here = Path(__file__).resolve().parent
    for path in sorted(here.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def sources(*rooms: str) -> str:
    """A digest of the text of rooms of podrun (``"models"``) that also decide the answers to some questions."""
    digest = hashlib.sha256()
    root = Path(podrun.__file__).resolve().parent
    for room in rooms:
        for path in sorted((root / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def remembered(question: object, answer: Callable[[], Any], environ: Mapping[str, str] | None = None) -> Any:
    """``answer()``, or the earlier answer to an equal ``question``. Answers are plain data.

    ``question``: tuples, lists, mappings, text, numbers, enums, dtypes and `FlatJaxpr`. Any other value makes no key,
    and ``answer()`` is called each time.
    """
    entry = plan_entry(question, environ)
    if entry is None:
        return answer()
    stored = entry.read()
    if stored is None:
        stored = answer()
        entry.write(stored)
    return stored


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """Where the answer to one question is kept."""

    path: Path
    level: int = logging.WARNING
    """At which it is logged that the folder cannot be used."""

    def read(self) -> Any:
        """The answer; None if there is none, or none that can be read. What it holds is for the reader to check."""
        return _read(self.path, self.level)

    def write(self, answer: object) -> None:
        """Keep an answer, which is plain data, in place of any that is there."""
        _write(self.path, answer, self.level)


def plan_entry(
    question: object, environ: Mapping[str, str] | None = None, level: int = logging.WARNING
) -> PlanEntry | None:
    """Where the answer to a question is kept; None if answers are not kept, or the question has no name. ``level``:
    at which a folder that cannot be used is logged, a warning where that costs the user noticeable time.
    """
    directory = folder(environment(environ))
    if directory is None:
        return None
    try:
        return PlanEntry(directory / f"{question_digest(question)}{SUFFIX}", level)
    except Unkeyed as error:
        _log.debug("not kept: %s", error)
        return None


def question_digest(question: object) -> str:
    """The name of a question. Raises Unkeyed."""
    digest = hashlib.sha256(version().encode())
    for part in _words(question):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _words(value: object) -> Iterator[str]:
    """A value as words that differ if the value differs."""
    if value is None or isinstance(value, (bool, int, float, str)):
        yield f"{type(value).__name__}={value!r}"
    elif isinstance(value, enum.Enum):
        yield f"enum={type(value).__name__}.{value.name}"
    elif isinstance(value, Mapping):
        yield f"mapping={len(value)}"
        for name in sorted(value, key=str):
            yield str(name)
            yield from _words(value[name])
    elif isinstance(value, (tuple, list, set, frozenset)):
        fields = getattr(value, "_fields", ())
        yield f"sequence={len(value)} {','.join(fields)}"
        for item in sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value:
            yield from _words(item)
    else:
        yield from _other_words(value)


_NAMED = ("dtype", "ShapeDtypeStruct", "_ScalarMeta", "GatherScatterMode", "ConvDimensionNumbers")
"""Types of equation parameters whose text is complete."""


def _other_words(value: object) -> Iterator[str]:
    kind = type(value).__name__
    if kind == "FlatJaxpr":  # By its name: what makes one need not be imported.
        yield from _flat_words(cast("FlatJaxpr", value))
        return
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        yield f"jaxpr={kind}"  # A loop's body: it stands, flat, in the equation's bodies.
        return
    text = repr(value)
    if " at 0x" in text or (callable(value) and kind not in _NAMED):
        raise Unkeyed(f"{kind} {text[:80]}")
    yield f"{kind}={text}"


def _flat_words(flat: FlatJaxpr) -> Iterator[str]:
    yield f"flat={len(flat.equations)}"
    yield repr((flat.arguments, flat.constants, flat.outputs))
    used = {*flat.arguments, *flat.constants}
    for equation in flat.equations:
        used.update(equation.outputs)
        yield repr((equation.primitive, equation.inputs, equation.outputs, equation.scope, equation.outlined))
        yield repr([(t.shape, t.dtype) for t in (*equation.operands, *equation.results)])
        yield from _words(equation.params)
        for body in equation.bodies:
            yield from _flat_words(body)
    yield repr([(n, flat.tensors[n].shape, flat.tensors[n].dtype) for n in sorted(used)])


def _read(path: Path, level: int) -> Any:
    """The answer in a file; None if there is no file or it cannot be read."""
    try:
        text = read_text(path, MOST_BYTES, own=True)
    except NotFoundError:
        return None
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            _say_once(path.parent, os.strerror(error.__cause__.errno or 0), level)
        else:
            others = isinstance(
                error, OthersFileError
            )  # Nobody asked for plans of a folder that others share.
            _log.log(
                logging.INFO if others else logging.WARNING,
                "a kept plan is not used: %s; planning anew",
                error.message,
            )
        return None
    try:
        # The first line is a digest of the rest: a file that was cut short or changed does not count.
        check, _, body = text.partition("\n")
        if check != hashlib.sha256(body.encode()).hexdigest():
            raise ValueError("its digest is another")
        answer = parse_json(body, path.name)
    except (ValueError, ConfigError) as error:
        _log.warning("the kept plan %s is damaged (%s); planning anew", path.name, error)
        return None
    _kept(path.parent).used(path.name)
    return answer


def _write(path: Path, answer: object, level: int) -> None:
    """Put an answer beside the others. If the folder cannot be written nothing is kept, which is not an error."""
    body = json.dumps(answer, separators=(",", ":"))
    if len(body) > MOST_BYTES:
        return
    text = f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(text.encode(), path)
        _kept(path.parent).note_written(len(text))
    except OSError as error:
        _say_once(path.parent, str(error.strerror or error), level)


_said: set[tuple[Path, int]] = set()


def _say_once(folder: Path, reason: str, level: int) -> None:
    """Say once that plans cannot be kept, although a program may compile many steps."""
    if (folder, level) in _said:
        return
    _said.add((folder, level))
    _log.log(level, "plans cannot be kept in %s: %s (export PODRUN_CACHE_DIR=DIRECTORY)", folder, reason)


def _kept(directory: Path) -> KeptFolder:
    return KeptFolder(directory, SUFFIX, MOST_BYTES, MOST_FILES)
