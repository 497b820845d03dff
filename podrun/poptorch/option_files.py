"""Options from text: each line is a call, ``Training.gradientAccumulation(4)``. Nothing of it is evaluated."""

from __future__ import annotations

import ast
from typing import Any

from podrun.poptorch import enums


def apply_line(options: Any, text: str) -> None:
    """Make the call that a line describes on ``options``. SyntaxError for a line that is no call with plain values."""
    tree = ast.parse(text.removeprefix("options.").removeprefix("opts."), mode="eval").body
    if not isinstance(tree, ast.Call):
        raise SyntaxError("a call of an option was expected")
    arguments = [_value(each) for each in tree.args]
    keywords = {each.arg: _value(each.value) for each in tree.keywords if each.arg is not None}
    _target(options, tree.func)(*arguments, **keywords)


def _target(options: Any, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return _option(options, node.id)
    if isinstance(node, ast.Attribute):
        return _option(_target(options, node.value), node.attr)
    raise SyntaxError("the name of an option was expected")


def _option(owner: Any, name: str) -> Any:
    if name.startswith("__") or not hasattr(owner, name):
        raise SyntaxError(f"there is no option {name}")
    return getattr(owner, name)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Attribute):
        return _named(ast.unparse(node))
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {_value(k): _value(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise SyntaxError(f"{ast.unparse(node)} is no plain value") from error


def _named(text: str) -> Any:
    parts = text.removeprefix("poptorch.").split(".")
    if parts[0] == "torch" and len(parts) == 2:
        import torch

        found = getattr(torch, parts[1], None)
        if isinstance(found, torch.dtype):
            return found
    kind = getattr(enums, parts[0], None)
    if kind is not None and len(parts) == 2 and parts[1] in getattr(kind, "__members__", {}):
        return kind[parts[1]]
    raise SyntaxError(f"{text} is no value that options have")
