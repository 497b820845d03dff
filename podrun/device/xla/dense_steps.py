"""Steps of a dense network's training step for the C module, and where their values lie.

A step computes a new value of others: element by element, by a product, by a sum along axes. Each value is a
`DenseView` of a `DenseStorage`: what only moves or repeats elements (a transpose, a broadcast) makes another view and
no step. Elements have four bytes: float32, int32, and truths as the int32 1 and 0.

`podrun/device/xla/native/dense.c` says what the numbers mean. Nothing here knows MLIR.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field
from enum import IntEnum

from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.matrix_products import ProductCall

AXES, _ALIGNED = 4, 16
"""Axes of what is computed element by element, once neighbours are joined."""
BIG_MAP = 1 << 14
"""Elements of an operation, on average, from which on XLA, which joins operations, is faster."""


class DenseKind(IntEnum):
    """What a step does."""

    MAP = 0
    REDUCE = 1
    PRODUCT = 2
    PICK = 3
    ADD_AT = 4
    COUNT_UP = 5


class DenseOperation(IntEnum):
    """What is done with each element."""

    COPY = 0
    ADD = 1
    SUBTRACT = 2
    MULTIPLY = 3
    DIVIDE = 4
    MAXIMUM = 5
    MINIMUM = 6
    NEGATE = 7
    EXPONENTIAL = 8
    LOG = 9
    SQRT = 10
    TANH = 11
    LOGISTIC = 12
    SELECT = 13
    FLOAT = 14
    EQ = 15
    NE = 16
    LT = 17
    LE = 18
    GT = 19
    GE = 20
    INT_EQ = 21
    INT_NE = 22
    INT_LT = 23
    INT_LE = 24
    INT_GT = 25
    INT_GE = 26
    INT_ADD = 27
    AND = 28
    OR = 29
    NOT = 30


_COSTLY, _COST = range(DenseOperation.EXPONENTIAL, DenseOperation.SELECT), 8
"""Operations that cost so much for an element, where others cost 1."""


class DenseReduction(IntEnum):
    """How elements along axes become one."""

    SUM = 0
    LARGEST = 1
    ALL = 2
    ANY = 3


@dataclass(slots=True, eq=False)
class DenseStorage:
    """Memory of a value: of an operand or a result, by position, a number that every element has, by its bits, or in
    the arena."""

    elements: int
    operand: int | None = None
    result: int | None = None
    bits: int | None = None


@dataclass(frozen=True, slots=True)
class DenseView:
    """Elements of a storage: from ``first`` on, ``strides`` apart along axes of these ``sizes``."""

    storage: DenseStorage
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int = 0

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.sizes)

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie one after the other."""
        pairs = zip(self.sizes, self.strides, row_by_row(self.sizes), strict=True)
        return all(size == 1 or stride == wanted for size, stride, wanted in pairs)

    @property
    def is_whole(self) -> bool:
        """Whether it is its storage as it lies."""
        return self.is_dense and self.first == 0 and self.elements == self.storage.elements

    def broadcast(self, sizes: Sequence[int], axes: Sequence[int]) -> DenseView:
        """With further axes, along which elements repeat. ``axes``: where the view's own are among them."""
        strides = [0] * len(sizes)
        for axis, size, stride in zip(axes, self.sizes, self.strides, strict=True):
            strides[axis] = stride if size == sizes[axis] else 0
        return DenseView(self.storage, tuple(sizes), tuple(strides), self.first)

    def transpose(self, order: Sequence[int]) -> DenseView:
        """With axes in another order."""
        sizes, strides = (tuple(values[axis] for axis in order) for values in (self.sizes, self.strides))
        return DenseView(self.storage, sizes, strides, self.first)

    def cut(self, starts: Sequence[int], ends: Sequence[int], steps: Sequence[int]) -> DenseView:
        """Every so manieth element of a range along each axis."""
        sizes = tuple(-(-(end - at) // by) for at, end, by in zip(starts, ends, steps, strict=True))
        first = self.first + sum(at * stride for at, stride in zip(starts, self.strides, strict=True))
        strides = tuple(stride * by for stride, by in zip(self.strides, steps, strict=True))
        return DenseView(self.storage, sizes, strides, first)

    def reshape(self, sizes: Sequence[int]) -> DenseView | None:
        """The same elements in order with axes of other sizes; None where that takes a copy."""
        if self.is_dense:
            return DenseView(self.storage, tuple(sizes), row_by_row(sizes), self.first)
        own = [(n, s) for n, s in zip(self.sizes, self.strides, strict=True) if n != 1]
        if [n for n in sizes if n != 1] == [n for n, _ in own]:
            left = iter(own)
            return DenseView(
                self.storage, tuple(sizes), tuple(0 if n == 1 else next(left)[1] for n in sizes), self.first
            )
        if not any(stride for _, stride in own):
            return DenseView(self.storage, tuple(sizes), (0,) * len(sizes), self.first)
        return None


def row_by_row(sizes: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each axis of a dense array."""
    return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


@dataclass(frozen=True, slots=True)
class DenseStep:
    """A step. ``what``: of MAP and REDUCE. ``sizes``: of axes; see `native/dense.c`."""

    kind: DenseKind
    read: tuple[DenseView, ...]
    to: DenseStorage
    what: int = 0
    sizes: tuple[int, ...] = ()
    product: ProductCall | None = None


@dataclass(slots=True)
class DenseSteps:
    """A training step that grows."""

    operands: list[DenseStorage] = field(default_factory=list)
    results: list[DenseStorage] = field(default_factory=list)
    steps: list[DenseStep] = field(default_factory=list)

    def operand(self, sizes: Sequence[int]) -> DenseView:
        """The next operand."""
        storage = DenseStorage(math.prod(sizes), operand=len(self.operands))
        self.operands.append(storage)
        return DenseView(storage, tuple(sizes), row_by_row(sizes))

    def number(self, bits: int, sizes: Sequence[int]) -> DenseView:
        """A value all of whose elements have these bits."""
        return DenseView(DenseStorage(1, bits=bits), tuple(sizes), (0,) * len(sizes))

    def map(self, what: DenseOperation, *read: DenseView) -> DenseView | None:
        """Compute element by element; None if that takes more axes than there are. What repeats is computed once."""
        sizes = read[0].sizes
        varies = [any(view.strides[axis] for view in read) for axis in range(len(sizes))]
        once = tuple(size if varied else 1 for size, varied in zip(sizes, varies, strict=True))
        narrow = tuple(DenseView(view.storage, once, view.strides, view.first) for view in read)
        if len(_joined(once, narrow)[0]) > AXES:
            return None
        return self._new(DenseKind.MAP, narrow, once, what).broadcast(sizes, range(len(sizes)))

    def dense(self, view: DenseView) -> DenseView | None:
        """The view itself if its elements lie one after the other, or a copy."""
        if view.is_dense:
            return view
        moved = DenseView(DenseStorage(view.elements), view.sizes, row_by_row(view.sizes))
        if len(_joined(view.sizes, (view,))[0]) > AXES:
            return None
        self.steps.append(
            DenseStep(DenseKind.MAP, (view,), moved.storage, DenseOperation.COPY, sizes=view.sizes)
        )
        return moved

    def reshape(self, view: DenseView, sizes: Sequence[int]) -> DenseView | None:
        """The same elements in order with axes of other sizes."""
        reshaped = view.reshape(sizes)
        if reshaped is None:
            moved = self.dense(view)
            reshaped = None if moved is None else moved.reshape(sizes)
        return reshaped

    def reduce(self, what: DenseReduction, view: DenseView, axes: Sequence[int]) -> DenseView | None:
        """Join the elements along axes; None if these are apart from one another."""
        left = tuple(size for axis, size in enumerate(view.sizes) if axis not in axes)
        wide = [axis for axis, size in enumerate(view.sizes) if size > 1]
        gone = [axis for axis in wide if axis in axes]
        if not gone:
            return self.reshape(view, left)
        between = [axis for axis in wide if gone[0] < axis < gone[-1] and axis not in gone]
        source = self.dense(view)
        if between or source is None:
            return None
        count = math.prod(view.sizes[axis] for axis in gone)
        inner = math.prod(view.sizes[gone[-1] + 1 :])
        split = (view.elements // count // inner, count, inner)
        to = self._new(DenseKind.REDUCE, (source,), (math.prod(left),), what, split)
        return to.reshape(left)

    def product(self, call: ProductCall, read: Sequence[DenseView], sizes: Sequence[int]) -> DenseView | None:
        """A product, with what follows it."""
        sources = [self.dense(view) for view in read]
        if any(source is None for source in sources) or call.adds:
            return None
        to = DenseStorage(call.rows * call.columns)
        dense = tuple(source for source in sources if source is not None)
        self.steps.append(DenseStep(DenseKind.PRODUCT, dense, to, product=call))
        return DenseView(to, tuple(sizes), row_by_row(sizes))

    def pick(self, source: DenseView, index: DenseView) -> DenseView | None:
        """Of each row ``source [..., width]`` the elements at ``index [..., count]``, the nearest for one outside."""
        rows, places = self.dense(source), self.dense(index)
        if rows is None or places is None:
            return None
        sizes = _rows(source, index)
        return self._new(DenseKind.PICK, (rows, places), index.sizes, sizes=sizes)

    def add_at(self, base: DenseView, index: DenseView, more: DenseView) -> DenseView | None:
        """To a copy of each row ``base [..., width]`` add ``more [..., count]`` at ``index``, but not outside."""
        addends, places = self.dense(more), self.dense(index)
        if addends is None or places is None or len(_joined(base.sizes, (base,))[0]) > AXES:
            return None
        sizes = base.sizes
        whole = self._new(DenseKind.MAP, (base,), sizes, DenseOperation.COPY)
        read = (addends, places, whole)
        self.steps.append(DenseStep(DenseKind.ADD_AT, read, whole.storage, sizes=_rows(base, index)))
        return whole

    def count_up(self, sizes: Sequence[int], axis: int) -> DenseView:
        """An int32 array of ``sizes`` whose elements are their own index along ``axis``."""
        line = self._new(DenseKind.COUNT_UP, (), (sizes[axis],), sizes=(sizes[axis],))
        return line.broadcast(sizes, [axis])

    def give(self, view: DenseView) -> bool:
        """Make a view the next result; False if it cannot be brought there."""
        storage = view.storage
        if not view.is_whole or storage.bits is not None or (storage.operand, storage.result) != (None, None):
            if len(_joined(view.sizes, (view,))[0]) > AXES:
                return False
            storage = self._new(DenseKind.MAP, (view,), view.sizes, DenseOperation.COPY).storage
        storage.result = len(self.results)
        self.results.append(storage)
        return True

    @property
    def is_worth_it(self) -> bool:
        """Whether what stands between products is so little that XLA's starts would cost more."""
        small = [step for step in self.steps if step.kind is not DenseKind.PRODUCT]
        costs = [
            max(step.to.elements, *(view.elements for view in step.read), 0)
            * (_COST if step.kind is DenseKind.MAP and step.what in _COSTLY else 1)
            for step in small
        ]
        return sum(costs) <= BIG_MAP * len(small)

    def _new(
        self,
        kind: DenseKind,
        read: tuple[DenseView, ...],
        shape: Sequence[int],
        what: int = 0,
        sizes: tuple[int, ...] | None = None,
    ) -> DenseView:
        to = DenseStorage(math.prod(shape))
        self.steps.append(DenseStep(kind, read, to, what, tuple(shape) if sizes is None else sizes))
        return DenseView(to, tuple(shape), row_by_row(shape))

    def numbers(self) -> list[int]:
        """The numbers for the C module. Decides where values lie in the arena."""
        views = [view for step in self.steps for view in step.read]
        constants = list(dict.fromkeys(v.storage.bits for v in views if v.storage.bits is not None))
        places, arena = _arena(self.steps, len(constants))
        buffers = len(self.operands), len(self.results)

        def place(storage: DenseStorage, first: int = 0) -> tuple[int, int]:
            if storage.operand is not None:
                return storage.operand, first
            if storage.result is not None:
                return buffers[0] + storage.result, first
            if storage.bits is not None:
                return sum(buffers), constants.index(storage.bits)
            return sum(buffers), places[id(storage)] + first

        numbers = [*buffers, arena, len(constants), len(self.steps)]
        numbers += [storage.elements for storage in (*self.operands, *self.results)]
        for at, bits in enumerate(constants):
            numbers += [at, bits]
        for step in self.steps:
            body = list(_body(step, [place(v.storage, v.first) for v in step.read], place(step.to)))
            numbers += [step.kind, len(body), *body]
        return numbers


def _rows(wide: DenseView, index: DenseView) -> tuple[int, int, int]:
    width, count = wide.sizes[-1], index.sizes[-1]
    return wide.elements // width, width, count


def _joined(sizes: Sequence[int], read: Sequence[DenseView]) -> tuple[list[int], list[list[int]]]:
    """Sizes and the strides of each view, with axes joined that lie one in the other for all of them."""
    joined: list[int] = []
    strides: list[list[int]] = [[] for _ in read]
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        own = [view.strides[axis] for view in read]
        if joined and all(s[-1] == o * size for s, o in zip(strides, own, strict=True)):
            joined[-1] *= size
            for s, o in zip(strides, own, strict=True):
                s[-1] = o
            continue
        joined.append(size)
        for s, o in zip(strides, own, strict=True):
            s.append(o)
    return joined, strides


def _body(step: DenseStep, read: Sequence[tuple[int, int]], to: tuple[int, int]) -> Iterator[int]:
    """The numbers of a step."""
    if step.kind is DenseKind.MAP:
        sizes, strides = _joined(step.sizes, step.read)
        more = AXES - len(sizes)
        yield from (step.what, *([1] * more), *sizes)
        for place, own in zip(read, strides, strict=True):
            yield from (*place, *([0] * more), *own)
        yield from to
        return
    if step.kind is DenseKind.REDUCE:
        yield step.what
    if step.product is not None:
        *numbers, parts = step.product.numbers()[:8]
        yield from (*numbers[:5], parts, step.product.follows)
    yield from step.sizes
    for place in read[:2] if step.kind is DenseKind.ADD_AT else read:
        yield from place
    yield from to


def _arena(steps: Sequence[DenseStep], first: int) -> tuple[dict[int, int], int]:
    """Where storages lie in the arena, behind ``first`` constants, and its elements."""
    lives: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    for at, step in enumerate(steps):
        for storage in (step.to, *(view.storage for view in step.read)):
            if (storage.operand, storage.result, storage.bits) == (None, None, None):
                lengths[id(storage)] = -(-storage.elements // _ALIGNED) * _ALIGNED
                lives.setdefault(id(storage), [at, at])[1] = at
    begin = size = -(-first // _ALIGNED) * _ALIGNED
    places: dict[int, int] = {}
    for key, (born, dies) in sorted(lives.items(), key=lambda item: item[1][0]):
        length = lengths[key]
        others = sorted(
            (places[k], places[k] + lengths[k]) for k in places if lives[k][0] <= dies and born <= lives[k][1]
        )
        at = begin
        for low, high in others:
            if at + length <= low:
                break
            at = max(at, high)
        places[key] = at
        size = max(size, at + length)
    return places, size
