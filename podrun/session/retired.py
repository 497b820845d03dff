"""Names that programs for earlier PopARTs use and PopART 3 has no more: what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

_LOSS = "is PopART 1's: losses are operators. {instead}, and give its output to TrainingSession as the loss."
_MODULE = {
    "L1Loss": _LOSS.format(instead="Write builder.aiGraphcore.l1loss([x], scale)"),
    "NllLoss": _LOSS.format(instead="Write builder.aiGraphcore.nllloss([probabilities, labels])"),
    "IdentityLoss": _LOSS.format(instead="Write builder.aiGraphcore.identityloss([x])"),
    "SessionOptionsCore": "is PopART 1's: write popart.SessionOptions().",
    "ir": "is the interface that has become popxl, which podrun does not have: make the model with popart.Builder().",
    "DataFeed": "is PopART 0's: write popart.DataFlow(batchesPerStep, anchors).",
    "DotCheck": "is PopART 2's: SessionOptions.dotChecks is a set of strings, such as {'Fwd0', 'Final'}.",
    "PreAliasPatternType": "is PopART 2's: write popart.Patterns(['PostNRepl', ...]), with names as strings.",
}
_RUN = "is PopART 0's: write session.run(stepio)."
_REPORT = "is PopART 2's: write session.getReport(), or session.getSummaryReport() for text."
_SESSION = {
    "optimizerFromHost": "is PopART 1's: session.updateOptimizerFromHost(optimizer) sends the values too.",
    "updateOptimizer": "is PopART 1's: write session.updateOptimizerFromHost(optimizer).",
    "train": _RUN,
    "evaluate": _RUN,
    "infer": _RUN,
    "getGraphReport": _REPORT,
    "getExecutionReport": _REPORT,
    "getTensorTileMap": "is PopART 1's, and the tile model spreads tensors over tiles without naming places: "
    "session.getReport().compilation.tiles has the bytes of each tile.",
    "getHostReduceStreamIds": "is PopART 2's: IPUs reduce gradients among themselves, no stream goes through hosts.",
}
_KEYWORDS = {
    "dataFeed": "It is dataFlow now.",
    "losses": "It is loss now: the name of one scalar tensor, such as builder.aiGraphcore.l1loss([x], scale) gives.",
    "passes": "It is patterns now.",
}
"""Arguments that sessions took."""
_BUILDER = {"pingPongPhase": "is PopART 1's: write builder.executionPhase(ids, phase)."}


def missing(name: str) -> AttributeError:
    """What ``popart.name`` raises where there is no such name."""
    return _error("module 'popart'", f"popart.{name}", _MODULE, name)


class Formerly:
    """Base of classes that had more names once: says what has taken their place."""

    __slots__ = ()
    _FORMERLY: ClassVar[Mapping[str, str]]

    if not TYPE_CHECKING:  # Type checkers are to report what is not there.

        def __getattr__(self, name: str) -> Any:
            """Only for names that are not there."""
            kind = type(self).__name__
            raise _error(f"{kind!r} object", f"{kind}.{name}", self._FORMERLY, name)


class FormerSession(Formerly):
    """Names and arguments that sessions had."""

    _FORMERLY = _SESSION

    def __new__(cls, *_: object, **given: object) -> Self:
        for name in given.keys() & _KEYWORDS:
            raise TypeError(
                f"{cls.__name__}() got an unexpected keyword argument {name!r}. {_KEYWORDS[name]}"
            )
        return super().__new__(cls)


class FormerBuilder(Formerly):
    """Names that builders had."""

    __slots__ = ()
    _FORMERLY = _BUILDER


def _error(owner: str, whole: str, table: Mapping[str, str], name: str) -> AttributeError:
    hint = f". {whole} {table[name].rstrip('.')}" if name in table else ""
    # Without a full stop at the end: Python may put a guess of its own behind it.
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")
