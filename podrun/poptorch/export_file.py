"""Files of compiled models: what ``PoplarExecutor.save`` writes and ``poptorch.load`` reads.

A file is a ZIP archive: ``metadata.json`` (version, what is inside), ``executable`` (the compiled program), and
``model.pt`` (example inputs and, if the model was exported, the module, options, optimizer and random state).
``model.pt`` is written by torch.save and read with torch's restricted reader, which calls nothing that it was not
allowed: classes of torch.nn, of podrun and modules whose classes the program has imported already. Whatever else a file
names is refused, so opening a file runs no code of the file's choice.
"""

from __future__ import annotations

import collections
import copyreg
import io
import json
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from podrun.poptorch.errors import Error
from podrun.private_apis.torch import FUNCTION_MODULES

EXPORT_VERSION = "podrun-poptorch-1"
DEFAULT_NAME = "model.poptorch"
_PLAIN = (
    collections.OrderedDict,
    collections.defaultdict,
    dict,
    set,
    frozenset,
    slice,
    range,
    complex,
    object,
)
_METADATA, _EXECUTABLE, _MODEL = "metadata.json", "executable", "model.pt"


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """What a file holds. ``payload``: ``args``, ``kwargs``, ``rng_state``, and with a model ``model``,
    ``model_training``, ``options`` and ``optimizer``."""

    metadata: Mapping[str, Any]
    executable: bytes
    payload: Mapping[str, Any]


def export_path(filename: str) -> Path:
    """Where a file goes: ``model.poptorch`` in a folder. Folders above it are made."""
    path = Path(filename).expanduser()
    if path.is_dir():
        path /= DEFAULT_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_export(path: Path, made: ExportedModel) -> None:
    """Write a file. Error for a model that torch cannot save."""
    model = io.BytesIO()
    try:
        torch.save(dict(made.payload), model)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise Error(
            f"The model cannot be saved: {error}",
            hint="export_model=False saves the program alone; PoplarExecutor.loadExecutable reads it.",
        ) from error
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(_METADATA, json.dumps(dict(made.metadata), indent=1))
        archive.writestr(_EXECUTABLE, made.executable)
        archive.writestr(_MODEL, model.getvalue())


def read_metadata(filename: str) -> bytes:
    """The metadata of a file, as they stand in it. Error for a file that is none of these."""
    try:
        with zipfile.ZipFile(Path(filename).expanduser()) as archive:
            return archive.read(_METADATA)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise Error(f"{filename} is no file of a compiled model: {error}") from error


def read_export(filename: str) -> ExportedModel:
    """What a file holds. Error for a file that is none of these, is damaged, or names classes that are not allowed."""
    metadata = json.loads(read_metadata(filename))
    try:
        with zipfile.ZipFile(Path(filename).expanduser()) as archive:
            executable, model = archive.read(_EXECUTABLE), archive.read(_MODEL)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise Error(f"{filename} is damaged: {error}") from error
    allowed = [
        _allowed(name, filename)
        for name in torch.serialization.get_unsafe_globals_in_checkpoint(_file(model))
    ]
    with torch.serialization.safe_globals(allowed):
        payload = torch.load(_file(model), weights_only=True)
    return ExportedModel(metadata, executable, payload)


def _file(data: bytes) -> Any:
    return io.BytesIO(data)


def _allowed(name: str, filename: str) -> Any:
    """What a name in a file stands for. Error unless it is a class that may be made, or a function of torch.nn."""
    module, _, attribute = name.rpartition(".")
    while module and module not in sys.modules and not module.startswith(("torch.nn", "podrun.poptorch")):
        module, _, last = module.rpartition(".")
        attribute = f"{last}.{attribute}"
    found: Any = sys.modules.get(module)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and _harmless(found):
        return found
    if found is copyreg._reconstructor:  # type: ignore[attr-defined]  # It makes an object of an allowed class.
        return found
    if module in FUNCTION_MODULES and callable(found):
        return found
    if found is None:
        hint = f"Import {module or name} before poptorch.load."
    else:
        hint = "PoplarExecutor.loadExecutable reads the program alone, into a wrapper of the module that you make."
    raise Error(f"{filename} names {name}, which is not read from files", hint=hint)


def _harmless(kind: type) -> bool:
    ours = kind.__module__.startswith("podrun.poptorch.")
    return ours or kind in _PLAIN or issubclass(kind, (torch.nn.Module, torch.optim.Optimizer))
