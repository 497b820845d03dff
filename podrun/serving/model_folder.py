"""A version's folder in a model repository: which file is the model, how its tensors are called, which versions there
are.

```
MODEL/1/executable.popef     or one .onnx file, which is compiled once into the user's cache
MODEL/1/name_map.json        anchor -> name for clients, where they differ
```
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from podrun.core.environment import environment, podrun_cache_directory
from podrun.core.errors import ConfigError, PodrunError
from podrun.serving.compiler import Compiler, CompilerOptions, ServedModel, model_proto

MODEL_FILE, NAMES_FILE = "executable.popef", "name_map.json"


def versions_of(model: Path) -> dict[int, Path]:
    """The versions of a model by number: folders whose names are numbers above 0."""
    folders = [path for path in model.iterdir() if path.is_dir() and path.name.isdecimal()]
    return {
        int(path.name): path for path in sorted(folders, key=lambda path: int(path.name)) if int(path.name)
    }


def compiled_file(version: Path) -> Path:
    """The compiled model in a version's folder; an ONNX file is compiled into the user's cache. ConfigError if there is
    neither, or more than one, and for a cache that cannot be written.
    """
    file = version / MODEL_FILE
    if file.is_file():
        return file
    models = sorted(version.glob("*.onnx"))
    if len(models) != 1:
        held = f"{len(models)} ONNX files" if models else "no ONNX file"
        raise ConfigError(
            f"{version} holds no {MODEL_FILE} and {held}",
            hint=f"Put one compiled model there ({MODEL_FILE}), or one .onnx file.",
        )
    cache = podrun_cache_directory(environment())
    if cache is None:
        raise ConfigError(f"{models[0]} cannot be compiled: podrun has no cache directory")
    try:
        return _compiled_once(models[0], cache / "serving")
    except PodrunError as error:
        raise ConfigError(f"{models[0]}: {error.message}", hint=error.hint) from error
    except OSError as error:
        raise ConfigError(
            f"{models[0]} cannot be compiled into {cache}: {error.strerror or error}",
            hint="Set PODRUN_CACHE_DIR to a directory with room, or compile the model: poprt --export_popef.",
        ) from error


def _compiled_once(model: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    data = model.read_bytes()
    target = folder / f"{hashlib.sha256(data).hexdigest()}.popef"
    if not target.is_file():
        from podrun.serving.convert.structure_passes import check_shapes_known

        proto = model_proto(data)
        check_shapes_known(proto)
        # Several instances may compile at once: each writes a file of its own, and whole files take the place.
        part = folder / f"{target.stem}.{os.getpid()}.popef"
        try:
            Compiler.compile_and_export(proto, None, part, CompilerOptions(partials_type="float"))
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    return target


def anchor_names(version: Path) -> dict[str, str]:
    """``name_map.json``: anchor -> name for clients; empty if there is none. ConfigError for a file that is none."""
    path = version / NAMES_FILE
    if not path.is_file():
        return {}
    try:
        names = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{path} does not map anchors to names")
    if len(set(names.values())) != len(names):
        raise ConfigError(f"{path} gives two anchors one name")
    return names


def served_model(version: Path) -> tuple[ServedModel, dict[str, str]]:
    """The model of a version, and the names of its anchors for clients. ConfigError names the file that is wrong."""
    names = anchor_names(version)
    model = ServedModel(compiled_file(version))
    known = {anchor.name for anchor in (*model.metadata.inputs(), *model.metadata.outputs())}
    if unknown := sorted(names.keys() - known):
        raise ConfigError(
            f"{version / NAMES_FILE} names {unknown[0]!r}; the compiled model has {sorted(known)}"
        )
    return model, names
