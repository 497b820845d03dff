"""Options of ``poprt`` from a YAML file, and other YAML that people write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podrun.core.documents import read_document
from podrun.core.errors import ConfigError

FUSION = "model_fusion"


def read_yaml(path: Path, option: str) -> Any:
    """What a YAML file holds. Raises NotFoundError if there is no such file, ConfigError for one that cannot be read or
    is no YAML, with the line.
    """
    return read_document(path, hint=f"{option} takes a YAML file.").value


def read_options(path: Path, known: Mapping[str, bool]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Options of a file and the maps of its models (``model_fusion``). ``known``: names, and whether each is a list of
    words. ConfigError for a name that is none.
    """
    held = read_yaml(path, "--config_yaml")
    if not isinstance(held, Mapping):
        raise ConfigError(
            f"--config_yaml: {path} is no map of options", hint="As in: input_model: model.onnx"
        )
    models = held.get(FUSION)
    if models is not None and not (
        isinstance(models, list) and len(models) > 1 and all(isinstance(m, Mapping) for m in models)
    ):
        raise ConfigError(f"--config_yaml: {path}: {FUSION} is a list of two or more maps of options")
    plain = _checked({k: v for k, v in held.items() if k != FUSION}, known, str(path))
    return plain, [_checked(dict(m), known, f"{path}, model {i}") for i, m in enumerate(models or (), 1)]


def _checked(options: Mapping[str, Any], known: Mapping[str, bool], label: str) -> dict[str, Any]:
    import difflib

    checked: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            raise ConfigError(
                f"--config_yaml: {label}: there is no option {name!r}",
                hint=f"Did you mean {near[0]}?" if near else "Names are those of poprt --help.",
            )
        if known[name]:
            checked[name] = _words(name, value, label)
        elif isinstance(value, list):
            checked[name] = ",".join(str(one) for one in value)
        elif isinstance(value, Mapping):
            raise ConfigError(f"--config_yaml: {label}: {name} takes one value, not a map")
        else:
            checked[name] = value
    return checked


def _words(name: str, value: object, label: str) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        return tuple(f"{key}={_joined(one)}" for key, one in value.items())
    if isinstance(value, list):
        words: list[str] = []
        for one in map(str, value):
            if name == "input_shape" and words and "=" not in one:
                words[-1] += f",{one}"  # YAML takes [x=1,8] for two words.
            else:
                words.append(one)
        return tuple(words)
    if isinstance(value, str):
        return tuple(value.split())
    raise ConfigError(f"--config_yaml: {label}: {name} is a list of words, not {value!r}")


def _joined(value: object) -> str:
    return ",".join(str(one) for one in value) if isinstance(value, list) else str(value)
