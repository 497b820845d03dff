"""Names with a meaning: tensors that PopART reserves, keys of operators' attributes, and names of earlier PopARTs.

**Reserved names** are prefixes of gradients, optimizer state and streamed scalars. Each prefix has an accessor function
``reserved<Name>Prefix()`` under PopART's name; `ACCESSORS` holds them all. Source: graphcore/popart,
willow/include/popart/tensornames.hpp.

**Attribute keys** are what a front end notes on the operators of a model, and on the model itself, for the session to
read. Names that start with two underscores are PopART's own (graphcore/popart, willow/include/popart/builder.hpp and
opidentifier.hpp); ONNX's checker leaves them alone.

**Retired names** are those that programs for earlier PopARTs use and PopART 3 does not have: the error says what to
write instead.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Self, cast

from podrun.runtime.tensor_names import PREFIXES, SCALARS

P = ParamSpec("P")


def _accessor(name: str, prefix: str) -> Callable[[], str]:
    def accessor() -> str:
        return prefix

    accessor.__name__ = accessor.__qualname__ = name
    accessor.__doc__ = f'The reserved prefix "{prefix}".'
    return accessor


def _accessors() -> dict[str, Callable[[], str]]:
    pairs = {f"reserved{name}Prefix": prefix for name, prefix in PREFIXES.items()}
    for name, parameter in SCALARS.items():
        for kind in ("Default", "Specific"):
            pairs[f"reserved{kind}{name}Prefix"] = f"{parameter}___{kind.lower()}___"
    return {name: _accessor(name, prefix) for name, prefix in pairs.items()}


ACCESSORS = _accessors()
"""``reservedGradientPrefix`` and all the others, by name."""


UNNAMED = "BuilderGraph"
"""The name of a graph that the program has given none."""


_MODULE = {
    "SessionOptionsCore": "is PopART 1's: write popart.SessionOptions().",
    "ir": "is the interface that has become popxl, which podrun does not have: make the model with popart.Builder().",
    "DataFeed": "is PopART 0's: write popart.DataFlow(batchesPerStep, anchors).",
    "DotCheck": "is PopART 2's: SessionOptions.dotChecks is a set of strings, such as {'Fwd0', 'Final'}.",
    "PreAliasPatternType": "is PopART 2's: write popart.Patterns(['PostNRepl', ...]), with names as strings.",
}
_RUN = "is PopART 0's: write session.run(stepio)."
_REPORT = "is PopART 2's: write session.getReport(), or session.getSummaryReport() for text."
_SESSION = {
    "train": _RUN,
    "evaluate": _RUN,
    "infer": _RUN,
    "getGraphReport": _REPORT,
    "getExecutionReport": _REPORT,
    "getTensorTileMap": "is PopART 1's, and the tile model spreads tensors over tiles without naming places: "
    "session.getReport().compilation.tiles has the bytes of each tile.",
    "getHostReduceStreamIds": "is PopART 2's: IPUs reduce gradients among themselves, no stream goes through hosts.",
}
_FORMER = {
    "dataFeed": "It is dataFlow now.",
    "losses": "It is loss now: the name of one scalar tensor, such as builder.aiGraphcore.l1loss([x], scale) gives.",
}
"""Arguments of earlier PopARTs that sessions still take."""
_KEYWORDS = {
    "passes": "It is patterns now.",
}
"""Arguments of earlier PopARTs that sessions no longer take."""
_BUILDER = {"pingPongPhase": "is PopART 1's: write builder.executionPhase(ids, phase)."}


def missing(name: str, known: Iterable[str]) -> AttributeError:
    """The error of ``popart.name`` for a name that does not exist."""
    error = _error("module 'popart'", f"popart.{name}", _MODULE, name)
    near = difflib.get_close_matches(name, known, n=1)
    return AttributeError(f"{error}. Did you mean {near[0]!r}?") if near and name not in _MODULE else error


def takes_former_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Let a session's ``__init__`` also take PopART 1's arguments, with a DeprecationWarning: ``dataFeed``, and
    ``losses``, a list of loss objects, by name or in the place of ``loss``.
    """

    names = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def call(*args: P.args, **keywords: P.kwargs) -> None:
        if not any(name in keywords for name in _FORMER) and not any(isinstance(arg, list) for arg in args):
            init(*args, **keywords)
        else:
            cast(Any, init)(**_present(names, args, keywords))

    return call


def _present(names: Sequence[str], args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments under their present names, by the parameters' ``names``. The losses have been added to the model."""
    arguments = dict(zip(names, args, strict=False)) | dict(keywords)
    asked = [name for name in _FORMER if name in keywords]
    if "dataFeed" in arguments:
        arguments["dataFlow"] = arguments.pop("dataFeed")
    losses = arguments.pop("losses", None)
    if isinstance(arguments.get("loss"), (list, tuple)):
        losses, asked = arguments.pop("loss"), [*asked, "losses"]
    if losses:
        arguments["fnModel"], total = losses[0].into(arguments["fnModel"], losses)
        if "loss" in names:
            arguments["loss"] = total
    for name in asked:
        warnings.warn(f"{name} is PopART 1's. {_FORMER[name]}", DeprecationWarning, stacklevel=4)
    return arguments


class Formerly:
    """Base of classes that once had more names: the error says what replaced them."""

    __slots__ = ()
    _FORMERLY: ClassVar[Mapping[str, str]]

    if not TYPE_CHECKING:  # Type checkers must still report unknown names.

        def __getattr__(self, name: str) -> Any:
            """Called only for names that do not exist."""
            kind = type(self).__name__
            raise _error(f"{kind!r} object", f"{kind}.{name}", self._FORMERLY, name)


class FormerSession(Formerly):
    """The names and arguments that sessions had in earlier PopARTs: using one says what to write instead."""

    _FORMERLY = _SESSION

    def __new__(cls, *_: object, **keywords: object) -> Self:
        for name in keywords.keys() & _KEYWORDS:
            raise TypeError(
                f"{cls.__name__}() got an unexpected keyword argument {name!r}. {_KEYWORDS[name]}"
            )
        return super().__new__(cls)


class FormerBuilder(Formerly):
    """The names that builders had in earlier PopARTs: asking for one says what to write instead."""

    __slots__ = ()
    _FORMERLY = _BUILDER


def _error(owner: str, whole: str, table: Mapping[str, str], name: str) -> AttributeError:
    hint = f". {whole} {table[name].rstrip('.')}" if name in table else ""
    # No full stop at the end, because Python may add a guess of its own.
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")
