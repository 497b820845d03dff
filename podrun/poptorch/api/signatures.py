"""Arguments of PopTorch's API are checked against its own annotations, where a program gives them.

Without that a wrong argument ends in an error of torch or of a comparison somewhere below, or in none at all.
`checks_arguments` wraps a function, `checks_methods` the public methods and the constructor of a class. The check is
generous: whole numbers are numbers, tensors with one element too, lists are tuples; what an annotation cannot say is
not checked.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from podrun.poptorch.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


Annotation = Any
"""An annotation as `typing.get_type_hints` gives it: a class, or a form of typing, which has no type of its own."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of another type than the API takes."""


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises ArgumentTypeError for arguments that its signature does not take."""
    return _checked(function, ())


def checks_arguments_but(*apart: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """As `checks_arguments`. ``apart``: arguments that the function refuses itself, with the SDK's own errors."""
    return lambda function: _checked(function, apart)


def _checked(function: Callable[P, R], apart: Sequence[str]) -> Callable[P, R]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        name = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
        try:
            values = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ArgumentTypeError(f"{name}: {error}") from None
        hints = _hints(function)
        for parameter, value in values.items():
            several = signature.parameters[parameter].kind is inspect.Parameter.VAR_POSITIONAL
            hint = Any if parameter in apart else hints.get(parameter, Any)
            for one in value if several else (value,):
                if not _fits(one, hint):
                    raise ArgumentTypeError(_refusal(name, parameter, hint, one))
        return function(*args, **kwargs)

    return call


def _refusal(name: str, parameter: str, hint: Annotation, value: object) -> str:
    """What is wrong: for plain types first the SDK's words, which programs and tests look for, with podrun's behind."""
    ours = f"{name}: {parameter} is {_words(hint)}, not {value!r}"
    if hint not in (int, float, bool, str):
        return ours
    return f"Unexpected type {type(value).__name__} for option {parameter}: expected {hint.__name__}. {ours}"


def checks_methods(*apart: str) -> Callable[[C], C]:
    """A decorator of a class: its own constructor and public methods check their arguments. ``apart``: methods that do
    not, because they refuse what they do not take with the SDK's own errors.
    """

    def check(kind: C) -> C:
        for name, member in list(vars(kind).items()):
            own = name == "__init__" or not name.startswith("_")
            if own and name not in apart and isinstance(member, types.FunctionType):
                setattr(kind, name, checks_arguments(member))
        return kind

    return check


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return {
        name: hint
        for name, hint in typing.get_type_hints(function).items()
        if inspect.signature(function).parameters.get(name, _NONE).kind is not inspect.Parameter.VAR_KEYWORD
    }


_NONE = inspect.Parameter("none", inspect.Parameter.POSITIONAL_ONLY)
_SEQUENCES = (list, tuple, collections.abc.Sequence)


def _fits(value: object, hint: Annotation) -> bool:
    if hint is Any:
        return True
    origin: Annotation = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in inner)
    if origin in _SEQUENCES or hint in _SEQUENCES:
        return isinstance(value, (list, tuple)) and _members_fit(value, origin, inner)
    if origin is collections.abc.Mapping or origin is dict:
        key, item = inner
        return isinstance(value, Mapping) and all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is os.PathLike:
        return isinstance(value, os.PathLike)
    if hint in (int, bool):
        return isinstance(value, numbers.Integral) or type(value).__name__ == "bool_"
    if hint is float:
        return isinstance(value, numbers.Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return not isinstance(hint, type) or origin is not None or isinstance(value, hint)


def _members_fit(value: Sequence[object], origin: Annotation, inner: tuple[Any, ...]) -> bool:
    if origin is tuple and Ellipsis not in inner:
        return len(value) == len(inner) and all(map(_fits, value, inner))
    return all(_fits(member, inner[0]) for member in value) if inner else True


_PLAIN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    type(None): "None",
    tuple[float, float]: "a pair of numbers",
    list[str]: "a list of texts",
    Mapping[str, float]: "a dictionary of numbers by name",
    Sequence[torch.Tensor]: "a list of tensors",
    torch.Tensor: "a tensor",
    torch.nn.Module: "a torch.nn.Module",
}


def _words(hint: Annotation) -> str:
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin: Annotation = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        # What an optional argument may be besides None says what to give.
        return " or ".join(_words(choice) for choice in inner if choice is not type(None))
    if origin in _SEQUENCES:
        return "a list"
    if origin is collections.abc.Mapping or origin is dict:
        return "a dictionary"
    if origin is collections.abc.Callable:
        return "a function"
    name = getattr(origin or hint, "__name__", str(hint))
    ours = isinstance(hint, type) and (issubclass(hint, enum.Enum) or hint.__module__.startswith("podrun."))
    package = "poptorch." if ours else ""
    package = "torch." if hint is torch.dtype else package
    return "a path" if name == "PathLike" else f"a {package}{name}"
