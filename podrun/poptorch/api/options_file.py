"""Options as text: in a file one call a line, as ``Training.gradientAccumulation(4)``, or JSON. Nothing is evaluated.

The arguments of a line are plain values, members of PopTorch's enumerations, torch's types, and the objects that
options take: execution strategies with their stages, and locations of tensors.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from podrun.core.documents import parse_json, read_text
from podrun.core.errors import ConfigError
from podrun.poptorch.api import enums, strategies
from podrun.poptorch.api.tensor_locations import TensorLocationSettings
from podrun.poptorch.errors import ArgumentError

_OBJECTS: dict[str, Callable[..., Any]] = {
    "PipelinedExecution": strategies.PipelinedExecution,
    "ShardedExecution": strategies.ShardedExecution,
    "SerialPhasedExecution": strategies.SerialPhasedExecution,
    "ParallelPhasedExecution": strategies.ParallelPhasedExecution,
    "Stage": strategies.Stage,
    "Phase": strategies.Phase,
    "TensorLocationSettings": TensorLocationSettings,
}
"""What a line may make, by the name that it has in poptorch."""
_UNFINISHED = ("was never closed", "unterminated")


class ConfigFileError(Exception):
    """A line of an options file that is not a call of an option."""


def load_options(options: object, path: Path) -> None:
    """Make the calls of a file on ``options``; ``#`` begins a comment. ConfigFileError for a line that is no call of an
    option. Its text counts lines with an option, as the SDK's does, and then names the line of the file.
    """
    number = 0
    for place, line in enumerate(read_text(path).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        number += 1
        try:
            _apply(options, text)
        except (SyntaxError, ArgumentError) as error:
            raise ConfigFileError(
                f"SyntaxError at line {number} of {path.name}: {_told(error)}\n> options.{text}\n({path}:{place})"
            ) from None


def _told(error: SyntaxError | ArgumentError) -> str:
    """What is wrong with a line; where it ends too early, in the words of the SDK's Python."""
    if isinstance(error, ArgumentError):
        return error.message
    message = str(error.msg)
    return "unexpected EOF while parsing" if any(part in message for part in _UNFINISHED) else message


def _apply(options: object, text: str) -> None:
    tree = ast.parse(text.removeprefix("options.").removeprefix("opts."), mode="eval").body
    if not isinstance(tree, ast.Call):
        raise SyntaxError("a call of an option was expected")
    _called(_target(options, tree.func), tree)


def _called(function: Callable[..., Any], node: ast.Call) -> Any:
    keywords = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    return function(*[_value(argument) for argument in node.args], **keywords)


def _target(options: object, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return _member(options, node.id)
    if isinstance(
        node, ast.Call
    ):  # A setter gives the options themselves: deviceIterations(2).replicationFactor(4).
        return _called(_target(options, node.func), node)
    if isinstance(node, ast.Attribute):
        return _member(_target(options, node.value), node.attr)
    raise SyntaxError("the name of an option was expected")


def _member(owner: object, name: str) -> Any:
    # `_Popart` is an option of one's own; what begins otherwise with an underscore is not.
    if (name.startswith("_") and name != "_Popart") or not hasattr(owner, name):
        raise SyntaxError(f"there is no option {name}")
    return getattr(owner, name)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        return _object(node)
    if isinstance(node, ast.Attribute):
        return _named(ast.unparse(node))
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_value(k): _value(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise SyntaxError(f"{ast.unparse(node)} is no plain value") from error


def _object(node: ast.Call) -> Any:
    """One of `_OBJECTS`, or what a method of one gives."""
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
        return _called(_member(_object(node.func.value), node.func.attr), node)
    constructor = _OBJECTS.get(ast.unparse(node.func).removeprefix("poptorch."))
    if constructor is None:
        raise SyntaxError(f"{ast.unparse(node)} is no value that options have")
    return _called(constructor, node)


def _named(text: str) -> Any:
    parts = text.removeprefix("poptorch.").removeprefix("enums.").split(".")
    if parts[0] == "torch" and len(parts) == 2:
        dtype = getattr(torch, parts[1], None)
        if isinstance(dtype, torch.dtype):
            return dtype
    kind = getattr(enums, parts[0], None)
    if kind is not None and len(parts) == 2 and parts[1] in getattr(kind, "__members__", {}):
        return kind[parts[1]]
    raise SyntaxError(f"{text} is no value that options have")


def apply_json(options: object, string: str) -> None:
    """Call the options that a JSON object names (`Options.from_json`). ConfigError for text that is no JSON object,
    AttributeError for an unknown option.
    """
    values = parse_json(string, "the text of options")
    if not isinstance(values, dict):
        raise ConfigError("the text of options is no JSON object", hint='As in {"deviceIterations": 2}')
    for accessor, value in values.items():
        *parts, name = accessor.split(".")
        target = options
        for part in parts:
            target = getattr(target, part)
        if not hasattr(target, name):
            raise AttributeError(f"There is no option {accessor!r}")
        arguments = value if isinstance(value, list) else [value]
        getattr(target, name)(*[_enum_member(argument) for argument in arguments])


def _enum_member(value: object) -> object:
    """The member of an enumeration that a text like ``OutputMode.All`` names; anything else unchanged."""
    if isinstance(value, str) and "." in value:
        kind, _, name = value.partition(".")
        enumeration = getattr(enums, kind, None)
        if enumeration is not None and name in getattr(enumeration, "__members__", {}):
            return enumeration[name]
    return value
