"""The one splitter of graphs: where each operation runs, in which order, and where one place's work ends.

`DependencyGraph` knows operations by number and the values between them. From the place that a program gives to
some of its operations (`Spot`) it derives a place for all of them and cuts the graph into groups, each of which runs
on one place without a break. The compiler cuts the jaxpr that runs with it, the cost model the flat graph that it
prices. `cut_chain` cuts a chain of layers into consecutive runs, one for each IPU.

Nothing here knows JAX, equations or costs of anything.

An operation without a spot joins the producer of the highest rank that has one, else the consumer of the lowest
rank: by rank, because programs may name the work of a later stage first. Groups are then cut greedily: of the
operations that can run, take the place of the one of lowest rank, and run everything of that place that can run. For
a chain of stages 0, 1, 2 in training this gives 0, 1, 2 (forward and backward), 1, 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from podrun.core.quick_dataclass import dataclass

Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where and when an operation runs: ``rank`` orders the work, None leaves it in program order.

    ``late``: the operation does not run with work of a lower rank, even if all its operands are there.
    """

    place: int
    rank: int | None = None
    late: bool = False


@dataclass(frozen=True, slots=True)
class RankedPlace:
    """The place and rank that an operation was given."""

    place: int
    rank: int
    late: bool = False


class DependencyGraph(Generic[Value]):
    """Operations in program order, by number, and the values that they read and write.

    ``repeated[i]``: operation *i* is not placed; every group that reads its results runs it again (constants, views).
    ``reads[i]`` holds the values that operation *i* needs from operations that are not repeated, and ``producers[i]``
    the operations that make these.
    """

    def __init__(
        self, reads: Sequence[Iterable[Value]], writes: Sequence[Sequence[Value]], repeated: Sequence[bool]
    ) -> None:
        self.repeated = repeated
        self.writes = writes
        self.producer = {value: i for i, written in enumerate(writes) for value in written}
        self._direct = [tuple(values) for values in reads]
        self.reads: list[list[Value]] = []
        for values in self._direct:
            self.reads.append(list(dict.fromkeys(w for v in values for w in self.sources(v))))
        self.indices = [i for i in range(len(writes)) if not repeated[i]]
        self.producers = [
            sorted({self.producer[v] for v in values if v in self.producer}) for values in self.reads
        ]

    def sources(self, value: Value) -> list[Value]:
        """The values that ``value`` follows from: itself, or the inputs of the repeated operation that makes it."""
        producer = self.producer.get(value)
        return [value] if producer is None or not self.repeated[producer] else self.reads[producer]

    def add_dependency(self, operation: int, producer: int) -> None:
        """Let ``operation`` wait for ``producer``, although it reads none of its results."""
        self.producers[operation] = [*self.producers[operation], producer]

    def consumers(self) -> dict[int, list[int]]:
        """The operations that read results of an operation, in program order."""
        readers: dict[int, list[int]] = {}
        for i in self.indices:
            for producer in dict.fromkeys(self.producers[i]):
                readers.setdefault(producer, []).append(i)
        return readers

    def placed(
        self, spot: Callable[[int], Spot | None], joins: Collection[int] = ()
    ) -> dict[int, RankedPlace]:
        """The place and rank of every operation that is not repeated. ``spot(i)`` is the program's statement about
        operation *i*.

        Operations in ``joins`` (sums of gradients) run where the last of their operands is made, whatever the program
        says. An operation without any hint runs where its arguments are first read, else on place 0.
        """
        places: dict[int, RankedPlace] = {}
        for i in self.indices:
            said = spot(i)
            if said is not None:
                places[i] = RankedPlace(said.place, i if said.rank is None else said.rank, said.late)
            if said is None or i in joins:
                self._follow(i, places)
        consumers = self.consumers()
        for i in reversed(self.indices):
            placed = [places[c] for c in consumers.get(i, ()) if c in places]
            if i not in places and placed:
                first = min(placed, key=_rank)
                places[i] = RankedPlace(first.place, first.rank)
        homes: dict[Value, RankedPlace] = {}
        for i in self.indices:
            for value in self.reads[i] if i in places else ():
                homes.setdefault(value, places[i])
        for i in self.indices:
            if i not in places:
                self._follow(i, places)
            if i not in places:
                home = next((homes[v] for v in self.reads[i] if v in homes), RankedPlace(0, 0))
                places[i] = RankedPlace(home.place, home.rank)
        return places

    def _follow(self, index: int, places: dict[int, RankedPlace]) -> None:
        """Give an operation the place of its placed producer of highest rank, unless its own is later."""
        placed = [places[p] for p in (*self.producers[index], index) if p in places]
        if placed:
            latest = max(placed, key=_rank)
            late = index in places and places[index].late
            places[index] = RankedPlace(latest.place, latest.rank, late)

    def groups(self, spots: Mapping[int, RankedPlace]) -> list[list[int]]:
        """The operations of each group, in program order; groups in an order in which they can run."""
        waits = {i: len(set(self.producers[i])) for i in self.indices}
        consumers = self.consumers()
        left = list(self.indices)
        groups: list[list[int]] = []
        while left:
            first = spots[min((i for i in left if not waits[i]), key=lambda i: (spots[i].rank, i))]
            group = []
            for i in left:
                here = spots[i]
                if here.place == first.place and not waits[i] and (not here.late or here.rank <= first.rank):
                    group.append(i)
                    for consumer in consumers.get(i, ()):
                        waits[consumer] -= 1
            groups.append(group)
            done = set(group)
            left = [i for i in left if i not in done]
        return groups or [[]]

    def crossing(self, groups: Sequence[Sequence[int]]) -> list[Value]:
        """The values that one group makes and another one reads, in program order."""
        where = {i: number for number, group in enumerate(groups) for i in group}
        values: set[Value] = set()
        for number, group in enumerate(groups):
            for value in (value for i in group for value in self.reads[i]):
                producer = self.producer.get(value)
                if producer is not None and where[producer] != number:
                    values.add(value)
        return sorted(values, key=lambda v: (self.producer[v], self.writes[self.producer[v]].index(v)))

    def with_repeated(self, group: Iterable[int], results: Iterable[Value]) -> list[int]:
        """The group and the repeated operations that it and ``results`` need, in program order."""
        chosen = set(group)
        wanted = [v for i in chosen for v in self._direct[i]] + list(results)
        while wanted:
            producer = self.producer.get(wanted.pop())
            if producer is not None and self.repeated[producer] and producer not in chosen:
                chosen.add(producer)
                wanted += self._direct[producer]
        return sorted(chosen)


def earliest(group: Iterable[int], spots: Mapping[int, RankedPlace]) -> RankedPlace:
    """The place of a group, with the lowest rank of its operations; place 0 for an empty group."""
    return min((spots[i] for i in group), key=_rank, default=RankedPlace(0, 0))


def _rank(spot: RankedPlace) -> int:
    return spot.rank


# --- Chains of layers --------------------------------------------------------------------------------------------

Fits = Callable[[int, int, int], bool]
"""``fits(ipu, first, end)``: does IPU ``ipu`` hold layers ``[first, end)``?"""


def cut_chain(
    costs: Sequence[float],
    ipus: int,
    fits: Fits = lambda ipu, first, end: True,
    *,
    last: Sequence[float] | None = None,
) -> tuple[int, ...] | None:
    """Where each IPU's layers end, so that the IPU with the highest cost has the lowest possible one.

    Every IPU has at least one layer. ``last``: the layers' costs on the last IPU, where they are lower. The result is
    None if there are fewer layers than IPUs, or if no cut fits. The highest cost is found by bisection; for each bound
    the IPUs take in turn as many layers as the bound and ``fits`` allow.
    """
    if len(costs) < ipus:
        return None
    costs_of = (*(costs for _ in range(ipus - 1)), costs if last is None else last)
    low, high = max(map(min, zip(costs, costs_of[-1], strict=True))), sum(costs)
    return lowest_bound(lambda bound: _filled(costs_of, bound, fits), low, high)


def lowest_bound(
    attempt: Callable[[float], tuple[int, ...] | None], low: float, high: float
) -> tuple[int, ...] | None:
    """The result of ``attempt`` at the lowest bound at which it has one, by bisection; None if it has none at
    ``high``.
    """
    best = attempt(high)
    if best is None:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        chain = attempt(middle)
        if chain is None:
            low = middle
        else:
            best, high = chain, middle
    return best


def _filled(costs_of: Sequence[Sequence[float]], bound: float, fits: Fits) -> tuple[int, ...] | None:
    """A cut in which no IPU costs more than ``bound``; None if there is none. ``each``: the layers' costs on
    each IPU.
    """
    ends: list[int] = []
    first, layers = 0, len(costs_of[0])
    for ipu, costs in enumerate(costs_of):
        most = layers - (len(costs_of) - 1 - ipu)
        end, held = first, 0.0
        while end < most and held + costs[end] <= bound * (1 + 1e-12) and fits(ipu, first, end + 1):
            held += costs[end]
            end += 1
        if end == first:
            return None
        ends.append(end)
        first = end
    return tuple(ends) if first == layers else None
