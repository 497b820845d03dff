"""``ipu.config._ConfigBase``: trees of options that a program writes as classes.

    class Sizes(ipu.config._ConfigBase):
        def __init__(self):
            '''How many rows.'''
            self.rows: typing.Union[int, list] = 8

An attribute that ``__init__`` assigns is an option: of the type of its annotation, or of its first value, described by
the string above it. One that is such an object itself is a category. The outermost class ends its ``__init__`` with
``self._finalize_base_config()``, which writes its docstring. Attributes that begin with ``_`` are options too, which no
docstring shows. `IPUConfig` is a tree with the same methods, but no instance of this class; its ``_create_protobuf`` is
not here.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Self

from podrun.core.quick_dataclass import dataclass
from podrun.tensorflow.sdk.config_options import NO_DESCRIPTION, AttributeMetadata, OptionCategory

_deprecated: dict[tuple[type, str], str] = {}


def deprecate_config_attribute(name: str, msg: str) -> Callable[[type], type]:
    """A decorator of a class of options, which returns the class: warn with ``msg`` where the option or category
    ``name`` is set. A second message for a name replaces the first.
    """
    return deprecate_config_attributes({name: msg})


def deprecate_config_attributes(
    to_deprecate: Mapping[str, str] | Iterable[tuple[str, str]],
) -> Callable[[type], type]:
    """`deprecate_config_attribute` for several, given as messages by name or as pairs of a name and a message."""

    def decorate(kind: type) -> type:
        _deprecated.update({(kind, name): message for name, message in dict(to_deprecate).items()})
        return kind

    return decorate


@dataclass(frozen=True)
class HintedMetadata(AttributeMetadata):
    """What an option of a program's class is. ``hint``: its annotation, None for a category; ``text``: as written."""

    hint: object = None
    text: str | None = None

    @property
    def type(self) -> str | None:
        """The type as the program wrote it, or the class of the first value; None for a category."""
        return self.text

    def check_type(self, value: object) -> None:
        """TypeError unless ``value`` fits the annotation."""
        if self.hint is not None and not fits_hint(value, self.hint):
            raise TypeError(f"Trying to set {self.name} to {value}, but it must be of type {self.type}")


def fits_hint(value: object, hint: object) -> bool:
    """Whether a value is of exactly the type, list, tuple or union that an annotation names, and so are the items of
    lists and tuples. ``hint``: an evaluated annotation that passed `check_hint`.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits_hint(value, part) for part in parts)
    if origin is None or not parts:
        return type(value) is (origin or hint)
    if type(value) is not origin:
        return False
    if origin is list:
        return all(fits_hint(item, parts[0]) for item in typing.cast("list[object]", value))
    items = typing.cast("tuple[object, ...]", value)
    if parts[1:] == (...,):
        return all(fits_hint(item, parts[0]) for item in items)
    return len(items) == len(parts) and all(map(fits_hint, items, parts))


def check_hint(hint: object) -> None:
    """TypeError, in the SDK's words, for an annotation that no value can be compared with."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType, list, tuple):
        for part in parts:
            if part is not ...:
                check_hint(part)
    elif parts or hint is typing.Any or not isinstance(origin or hint, type):
        name = getattr(hint, "_name", None) or getattr(hint, "__name__", None) or repr(hint)
        raise TypeError(
            f"Unsupported 'typing' attribute {name}: an option is of a class, or of typing.List, typing.Tuple or "
            "typing.Union of classes"
        )


@dataclass(frozen=True, slots=True)
class WrittenAssignment:
    """An assignment in a program's source: its annotation and the string above it."""

    annotation: ast.expr | None
    description: str


@functools.lru_cache(maxsize=64)
def _assignments(filename: str) -> dict[int, WrittenAssignment]:
    """The assignments of a source file by each of their lines. Empty without a source, as in a console."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return {}
    written = {}
    fields = (value for block in ast.walk(tree) for _, value in ast.iter_fields(block))
    for body in (value for value in fields if isinstance(value, list)):
        before: ast.AST | None = None
        for statement in body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                entry = WrittenAssignment(getattr(statement, "annotation", None), _string(before))
                written.update(dict.fromkeys(range(statement.lineno, (statement.end_lineno or 0) + 1), entry))
            before = statement
    return written


def _string(statement: ast.AST | None) -> str:
    value = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return inspect.cleandoc(value.value)
    return NO_DESCRIPTION


class _ConfigBase(OptionCategory):
    """A category of options whose ``__init__`` assigns them. Setting one later is ValueError for an unknown name and
    TypeError for a value of another type; TypeError in ``__init__`` for an annotation that is not supported.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        new = super().__new__(cls)
        for name, value in (("_name", ""), ("_values", {}), ("_metadata", {})):
            object.__setattr__(new, name, value)
        return new

    def __init__(self) -> None:
        """A category without options."""

    def __setattr__(self, name: str, value: object) -> None:
        frame = sys._getframe(1)
        first = frame.f_code.co_varnames[:1]
        inside = frame.f_code.co_name == "__init__" and first and frame.f_locals.get(first[0]) is self
        if name in self._values or not inside:
            super().__setattr__(name, value)
            return
        written = _assignments(frame.f_code.co_filename).get(frame.f_lineno)
        hint: object = None if isinstance(value, OptionCategory) else type(value)
        text = None if isinstance(value, OptionCategory) else type(value).__name__
        if written and written.annotation is not None and hint is not None:
            code = compile(ast.Expression(written.annotation), frame.f_code.co_filename, "eval")
            hint = eval(code, frame.f_globals, frame.f_locals)  # noqa: S307 - the running program's own line
            check_hint(hint)
            text = ast.unparse(written.annotation)
        changes = isinstance(value, (list, tuple, dict, set))
        self._metadata[name] = HintedMetadata(
            name=name,
            default=None if hint is None else copy.deepcopy(value) if changes else value,
            deprecated_msg=_deprecated.get((type(self), name)),
            description=written.description if written else NO_DESCRIPTION,
            hint=hint,
            text=text,
        )
        self._values[name] = value
        if isinstance(value, _ConfigBase):
            value._put_below(name)

    def _put_below(self, name: str) -> None:
        """Write the name of this category in front of all names in it."""
        object.__setattr__(self, "_name", f"{name}.{self._name}" if self._name else name)
        for key, metadata in self._metadata.items():
            self._metadata[key] = replace(metadata, name=f"{name}.{metadata.name}")
            if isinstance(self._values[key], _ConfigBase):
                self._values[key]._put_below(name)

    def _get_full_name(self, attr: str) -> str:
        """The dotted name of an option."""
        return self._full(attr)

    def _to_protobuf(self, pb: object) -> None:
        """Write the options of all categories into a message; classes with options of their own do this first."""
        for value in self._values.values():
            if isinstance(value, _ConfigBase):
                value._to_protobuf(pb)

    def _finalize_base_config(self) -> None:
        """Deprecate what is in deprecated categories, and write the class's docstring."""
        type(self).__doc__ = "".join(self._described(None))

    def _described(self, above: str | None) -> Iterable[str]:
        for place, (key, own) in enumerate(self._metadata.items()):
            if key.startswith("_"):
                continue  # As in the SDK: an option, but neither described nor deprecated with its category.
            if own.deprecated_msg is None:
                self._metadata[key] = own = replace(own, deprecated_msg=above)
            value = self._values[key]
            repeats = place == 0 and own._depth > 2  # Sphinx cuts the first name of a deeper category.
            yield _paragraph(own, f"{own.name.rsplit('.', 2)[0]}." if repeats else "")
            if isinstance(value, _ConfigBase):
                yield from value._described(own.deprecated_msg)


def _paragraph(own: AttributeMetadata, before: str) -> str:
    """The text of an option in the docstring of its class, as Sphinx reads it."""
    default = f'"{own.default}"' if isinstance(own.default, str) else own.default
    typed = [f"   :type: {own.type}", f"   :value: {default}"] if own.type is not None else []
    note = ["   .. note::", f"      DEPRECATED: {own.deprecated_msg}"] if own.deprecated else []
    described = [f"   {line}" for line in own.description.split("\n")]
    lines = [f".. _{own.name}:", f".. py:attribute:: {before}{own.name}", *typed, "", *note, *described]
    return "\n".join("   " * (own._depth + 1) + line for line in lines) + "\n\n"
