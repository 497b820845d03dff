"""What a program asks of the tile model: how to plan, what to recompute, where variables live.

Values only: programs whose cost is kept have settings too, and import nothing that computes a cost.
"""

from __future__ import annotations

import functools

from podrun.core.names import parse_scope
from podrun.core.quick_dataclass import dataclass

DEFAULT_PROPORTION = 0.6
"""availableMemoryProportion: share of a tile's memory that one operation may use for temporary data."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How to plan: partials type and memory proportion of products.

    ``loop_trips``: turns assumed for a ``while`` loop, whose trip count a trace does not say.
    ``convolution_partials``: partials type of convolutions, where it is another.
    """

    partials_type: str = "float32"
    proportion: float = DEFAULT_PROPORTION
    loop_trips: int = 1
    product_type: str | None = None
    convolution_partials: str | None = None
    proportions: tuple[tuple[str, float], ...] = ()
    """Memory proportions of operators' products that have one of their own, by label."""

    def proportion_in(self, scope: str) -> float:
        """The memory proportion of a product, by the scope that it stands in."""
        if not self.proportions:
            return self.proportion
        own = _by_label(self.proportions)
        label = parse_scope(scope).within(frozenset(own))
        return self.proportion if label is None else own[label]


@functools.lru_cache(maxsize=64)
def _by_label(proportions: tuple[tuple[str, float], ...]) -> dict[str, float]:
    return dict(proportions)


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which values are recomputed.

    ``rule``: ``"none"``; ``"standard"``: all but checkpoints chosen so that peak memory is small; ``"pipeline"``:
    everything in all forward stages but the last; ``"all"``: everything. Whatever the rule, operators whose scope is in
    ``scopes`` are recomputed, and those in ``kept`` are checkpoints.
    """

    rule: str = "none"
    scopes: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    outlined: bool = True

    @property
    def active(self) -> bool:
        """True iff anything is recomputed."""
        return self.rule != "none" or bool(self.scopes)


NOTHING = Recompute()


@dataclass(frozen=True, slots=True)
class Location:
    """Where a kind of variable lives (SessionOptions' tensor location settings).

    ``off_chip``: in streaming memory between uses, if it has at least ``min_off_chip`` elements.
    ``shards``: replicas among which each variable of at least ``min_sharded`` elements is cut (replicated
    tensor sharding); 1: each replica has all of it. The two limits are PopART's defaults.
    """

    off_chip: bool = False
    shards: int = 1
    min_off_chip: int = 2
    min_sharded: int = 8192

    def elements(self, elements: int) -> int:
        """Elements of a variable that one replica handles."""
        return -(-elements // self.shards) if self.shards > 1 and elements >= self.min_sharded else elements

    def on_chip(self, elements: int, width: int) -> int:
        """Bytes that last in the IPU's memory."""
        return 0 if self.streamed(elements) else width * self.elements(elements)

    def streamed(self, elements: int) -> bool:
        """True iff it comes from streaming memory for each use."""
        return self.off_chip and elements >= self.min_off_chip


ON_CHIP = Location()
