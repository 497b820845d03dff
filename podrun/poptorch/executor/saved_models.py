"""Compiled models in files, which ``PoplarExecutor.save`` writes and ``poptorch.load`` reads; and checkpoints.

A file is PopEF (`podrun.popef`): the compiled program with its variables, which model servers take as it is, and two
blobs of PopTorch's: ``metadata.json`` (version, what is inside) and ``model.pt`` (example inputs and, if the model was
exported, the module, options, optimizer and random state).
``model.pt`` is written by torch.save and read with torch's restricted reader, which calls nothing that it was not
allowed: classes of torch.nn, of podrun and modules whose classes the program has imported already. Whatever else a file
names is refused, so opening a file runs no code of the file's choice.

A checkpoint (`podrun.checkpoint`) has the state on IPUs (parameters, buffers, optimizer state, random state), which is
the session's, and state of the host: the optimizer's ``param_groups``, which schedulers change, and the state
of torch's random numbers.
"""

from __future__ import annotations

import collections
import copyreg
import io
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from podrun.core.documents import parse_json
from podrun.core.errors import ConfigError
from podrun.core.quick_dataclass import dataclass
from podrun.popef.reader import PopefReader
from podrun.popef.writer import write_with_blobs
from podrun.poptorch.api.optim import ProgramOptimizer
from podrun.poptorch.api.user_modules import weights_changed
from podrun.poptorch.errors import Error, translated
from podrun.poptorch.executor.torch_session import PROGRAM_NAME
from podrun.private_apis.torch import FUNCTION_MODULES

if TYPE_CHECKING:
    from podrun.poptorch.executor.executor import PoplarExecutor
    from podrun.poptorch.executor.torch_session import TorchSession

EXPORT_VERSION = "podrun-poptorch-3"
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
_METADATA, _MODEL = "metadata.json", "model.pt"


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """The content of a file. ``executable``: the bytes of a PopEF file with the program. ``payload``: ``args``,
    ``kwargs``, ``rng_state``, and with a model ``model``, ``model_training``, ``options`` and ``optimizer``.
    """

    metadata: Mapping[str, Any]
    executable: bytes
    payload: Mapping[str, Any]


def export_path(filename: str) -> Path:
    """The path of a file to write: ``model.poptorch`` in a folder. Folders above it are made."""
    path = Path(filename).expanduser()
    if path.is_dir():
        path /= DEFAULT_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_export(path: Path, exported: ExportedModel) -> None:
    """Write a file. Error for a model that torch cannot save."""
    model = io.BytesIO()
    try:
        torch.save(dict(exported.payload), model)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise Error(
            f"The model cannot be saved: {error}",
            hint="export_model=False saves the program alone; PoplarExecutor.loadExecutable reads it.",
        ) from error
    metadata = json.dumps(dict(exported.metadata), indent=1).encode()
    with translated("saving the model"):
        blobs = {_METADATA: metadata, _MODEL: model.getvalue()}
        write_with_blobs(exported.executable, blobs, path, executable=PROGRAM_NAME)


def read_metadata(filename: str) -> bytes:
    """The metadata in a file. Error for a file that is not of this kind."""
    return _blob(_parsed(filename), _METADATA, filename)


def read_export(filename: str) -> ExportedModel:
    """The content of a file. Error for a file that is not of this kind, is damaged, or names classes that are not
    allowed.
    """
    reader = _parsed(filename)
    try:
        metadata = parse_json(_blob(reader, _METADATA, filename).decode(), filename)
    except (ConfigError, UnicodeDecodeError) as error:
        raise Error(f"{filename} is damaged: {error}") from error
    model = _blob(reader, _MODEL, filename)
    executable = Path(filename).expanduser().read_bytes()
    allowed: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        _allowed(name, filename)
        for name in torch.serialization.get_unsafe_globals_in_checkpoint(_file(model))
    ]
    with torch.serialization.safe_globals(allowed):
        payload = torch.load(_file(model), weights_only=True)
    return ExportedModel(metadata, executable, payload)


def _parsed(filename: str) -> PopefReader:
    try:
        return PopefReader().parseFile(Path(filename).expanduser())
    except ConfigError as error:
        raise Error(
            f"{filename} is no file of a compiled model: {error.message}", hint=error.hint or ""
        ) from error


def _blob(reader: PopefReader, name: str, filename: str) -> bytes:
    data = reader.blob(name)
    if data is None:
        raise Error(f"{filename} is no file of a compiled model: it holds no {name} of PopTorch's")
    return data


def _file(data: bytes) -> Any:
    return io.BytesIO(data)


def _allowed(name: str, filename: str) -> Callable[..., Any]:
    """The object that a name in a file stands for. Error unless it is an allowed class, or a function of torch.nn."""
    module, _, attribute = name.rpartition(".")
    while module and module not in sys.modules and not module.startswith(("torch.nn", "podrun.poptorch")):
        module, _, last = module.rpartition(".")
        attribute = f"{last}.{attribute}"
    owner: object = sys.modules.get(module)
    for part in attribute.split("."):
        owner = getattr(owner, part, None)
    if isinstance(owner, type) and _harmless(owner):
        return owner
    # copyreg's function makes an object of an allowed class.
    makes_objects = owner is copyreg._reconstructor  # type: ignore[attr-defined]
    if callable(owner) and (makes_objects or module in FUNCTION_MODULES):
        return owner
    if owner is None:
        hint = f"Import {module or name} before poptorch.load."
    else:
        hint = "PoplarExecutor.loadExecutable reads the program alone, into a wrapper of the module that you make."
    raise Error(f"{filename} names {name}, which is not read from files", hint=hint)


def _harmless(kind: type) -> bool:
    ours = kind.__module__.startswith("podrun.poptorch.")
    return ours or kind in _PLAIN or issubclass(kind, (torch.nn.Module, torch.optim.Optimizer))


def checkpoint_state(executor: PoplarExecutor) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of a compiled model's session, and its values. poptorch.Error for a model that is not compiled."""
    session = _session(executor, "saved")
    with translated("saving a checkpoint"):
        tensors, values = session.parts.transfer.checkpoint()
    return tensors, {
        "session": values,
        "groups": [_plain_group(group) for group in _groups(executor._optimizer)],
        "torch": torch.get_rng_state().numpy().copy(),
    }


def restore_checkpoint(
    executor: PoplarExecutor, tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]
) -> None:
    """Continue from what `checkpoint_state` returned. poptorch.Error for a checkpoint of another kind of program."""
    session = _session(executor, "resumed")
    groups = _groups(executor._optimizer)
    if values.keys() != {"session", "groups", "torch"} or len(values["groups"]) != len(groups):
        raise Error("the checkpoint was not saved by a PopTorch model with this optimizer")
    with translated("resuming from a checkpoint"):
        session.parts.transfer.restore(tensors, values["session"])
    for group, saved in zip(groups, values["groups"], strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
    torch.set_rng_state(torch.from_numpy(np.array(values["torch"], np.uint8)))
    executor.copyWeightsToHost()
    weights_changed(executor._user_model)
    executor._state_is_newer = True
    if executor._optimizer is not None:
        if hasattr(executor._optimizer, "_state_dirty"):
            executor._optimizer._state_dirty = False  # The session's present state is the newer one.
        executor.setOptimizer(executor._optimizer)


def _session(executor: PoplarExecutor, doing: str) -> TorchSession:
    if executor._compiled is None or not executor.isAttachedToDevice():
        raise Error(
            f"a model is {doing} when it is compiled and attached to its IPUs: call model.compile(*inputs) first"
        )
    session: TorchSession | None = getattr(executor._compiled, "session", None)
    if session is None:
        raise Error(f"a model that calls poptorch.CPU cannot be {doing}: it only infers")
    return session


def _groups(optimizer: ProgramOptimizer | None) -> list[dict[str, Any]]:
    return [] if optimizer is None else list(optimizer.param_groups)


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's attributes without its parameters, tensors of one element as numbers."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
