"""Networks for the C module: which steps compute a chain of layers, where their images lie, and what waits for what.

A network is one call. Its steps read and write images ``[N, H, W, C]`` of float32 in operands, results and an arena.
The parts of a concatenation are written where the whole lies, if those who read them can step over what lies between
their pixels. An image of the arena lies where one lay that nobody reads any more.

`podrun/device/xla/native/network.h` says what the numbers mean. Nothing here knows MLIR.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace
from enum import IntEnum

from podrun.core.quick_dataclass import dataclass

WORTH_TWO_PARTS = 1 << 13
"""Fewest elements of a layer other than a convolution that is divided over two threads."""
MOST_OPERATIONS = 8
"""Operations in a chain, as in ``native/layers.h``."""
_ALIGNED = 16
_FOLLOWS, _BIAS, _OTHER, _SHUFFLE = 1, 1, 2, -2
_CALL = 25
"""Numbers of a convolution's call."""


class StepKind(IntEnum):
    """What a step does."""

    CONVOLVE = 0
    POOL = 1
    CHAIN = 2
    TURN = 3
    SUM = 4
    SOFTMAX = 5
    PLANES = 6
    """A convolution of few channels that lie one after the other."""


class ChainOperation(IntEnum):
    """An operation on each value of an image and another value. ``CUT`` keeps what is greater."""

    ADD = 0
    SUBTRACT = 1
    MULTIPLY = 2
    DIVIDE = 3
    MAXIMUM = 4
    CUT = 5


class ChainOperand(IntEnum):
    """How many values the other operand has."""

    NUMBER = 0
    CHANNEL = 1
    PIXEL = 2
    ELEMENT = 3


@dataclass(frozen=True, slots=True)
class ChainLink:
    """An operation of a chain. ``value``: the bits of a number, an operand's position, or for ELEMENT an image's."""

    operation: ChainOperation
    by: ChainOperand
    value: int


@dataclass(slots=True)
class NetworkImage:
    """An image: its sizes, and where it lies: in an operand, in a result, in a wider image, else in the arena."""

    sizes: tuple[int, ...]
    operand: int | None = None
    result: int | None = None
    wider: int | None = None
    channel: int = 0
    """The first of its channels in the wider image."""

    @property
    def pixels(self) -> int:
        return math.prod(self.sizes[:3])

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class NetworkStep:
    """A step from image to image. ``numbers``: a convolution's; a window's kind, kernel, strides and padding; where
    planes are convolved, perhaps both."""

    kind: StepKind
    src: int
    dst: int
    numbers: tuple[int, ...] = ()
    weights: int = 0
    bias: int = 0
    other: int | None = None
    links: tuple[ChainLink, ...] = ()

    def read(self) -> Iterator[int]:
        """The images that it reads."""
        yield self.src
        if self.other is not None:
            yield self.other
        yield from (link.value for link in self.links if link.by is ChainOperand.ELEMENT)

    @property
    def lengthens(self) -> bool:
        """Whether it may do operations on what it computes."""
        windows = self.kind is StepKind.PLANES and len(self.numbers) > _CALL
        return windows or self.kind in (StepKind.POOL, StepKind.CHAIN, StepKind.SUM)

    @property
    def steps_over(self) -> bool:
        """Whether it writes pixels at any distance from one another."""
        if self.kind is StepKind.CONVOLVE:
            return self.other is None and self.numbers[_SHUFFLE] == 1
        return True


@dataclass(frozen=True, slots=True)
class _Span:
    """A part of a buffer, or channels of an image in it."""

    root: int
    channels: tuple[int, int]
    buffer: int
    elements: tuple[int, int]

    def meets(self, other: _Span) -> bool:
        if self.buffer != other.buffer:
            return False
        mine, theirs = (
            (self.channels, other.channels) if self.root == other.root else (self.elements, other.elements)
        )
        return mine[0] < theirs[1] and theirs[0] < mine[1]


@dataclass(slots=True)
class LayerNetwork:
    """The layers of a network in the order in which they are computed, and their images."""

    parts: int = 2
    """Into how many a large layer is divided that is no convolution."""
    images: list[NetworkImage] = field(default_factory=list)
    steps: list[NetworkStep] = field(default_factory=list)
    operands: int = 0
    results: int = 0
    _joined: list[tuple[int, tuple[int, ...], int]] = field(default_factory=list)
    """Concatenations: the whole, its parts, and how many steps stand before it."""

    def image(self, sizes: Iterable[int], operand: int | None = None) -> int:
        """A new image; its position."""
        self.images.append(NetworkImage(tuple(sizes), operand))
        return len(self.images) - 1

    def concatenate(self, parts: Sequence[int], whole: int) -> None:
        """Let images be the channels of another one, one after the other."""
        self._joined.append((whole, tuple(parts), len(self.steps)))

    def lengthen(self, src: int, link: ChainLink, dst: int) -> bool:
        """Let the step that computes an image, which nothing else reads, do one operation more. False if it cannot."""
        at = next((at for at, step in enumerate(self.steps) if step.dst == src), None)
        if at is None or not self.steps[at].lengthens:
            return False
        if len(self.steps[at].links) >= MOST_OPERATIONS:
            return False
        step = self.steps.pop(at)
        self._joined = [(whole, parts, n - (n > at)) for whole, parts, n in self._joined]
        self.steps.append(replace(step, links=(*step.links, link), dst=dst))
        return True

    def unturned(self, image: int) -> int | None:
        """The planes of which an image, that nothing else reads, is the pixels; the step between them goes. None: it is
        no such image."""
        at = next((at for at, step in enumerate(self.steps) if step.dst == image), None)
        if at is None or self.steps[at].kind is not StepKind.TURN:
            return None
        self._joined = [(whole, parts, n - (n > at)) for whole, parts, n in self._joined]
        return self.steps.pop(at).src

    def window(self, src: int, dst: int, numbers: Sequence[int], *, lone: bool) -> None:
        """Combine windows of an image. ``lone``: nothing else reads it, so planes' convolution need not store it."""
        at = next((at for at, step in enumerate(self.steps) if step.dst == src), None)
        step = NetworkStep(StepKind.POOL, src, dst, tuple(numbers))
        if (
            lone
            and at is not None
            and self.steps[at].kind is StepKind.PLANES
            and len(self.steps[at].numbers) == _CALL
        ):
            before = self.steps.pop(at)
            self._joined = [(whole, parts, n - (n > at)) for whole, parts, n in self._joined]
            step = replace(before, dst=dst, numbers=(*before.numbers[:_CALL], *numbers))
        self.steps.append(step)

    def numbers(self) -> list[int]:
        """The numbers of the call. Decides where images lie."""
        self._place_parts()
        roots = sorted({self._root(step.dst)[0] for step in self.steps})
        places, arena = self._arena([root for root in roots if self.images[root].result is None])
        spans = [self._spans(step, places) for step in self.steps]
        numbers = [self.operands, self.results, arena]
        for at, step in enumerate(self.steps):
            body = self._body(step, places)
            numbers += [step.kind, _after(spans, at), len(body), *body]
        return numbers

    def _place_parts(self) -> None:
        """Put the parts of concatenations into the wholes, or copies of them."""
        copies: list[tuple[int, NetworkStep]] = []
        readers = self._readers()
        for whole, parts, before in reversed(self._joined):
            channel = 0
            for part in parts:
                place, sizes = part, self.images[part].sizes
                if self._stays_apart(part, readers):
                    place = self.image(sizes)
                    copies.append((before, NetworkStep(StepKind.CHAIN, part, place)))
                self.images[place].wider, self.images[place].channel = whole, channel
                channel += sizes[3]
        for before, step in copies:  # from the last to the first, so that positions stay
            self.steps.insert(before, step)

    def _readers(self) -> dict[int, list[NetworkStep | None]]:
        """By image, the steps that read it; None for a concatenation."""
        readers: dict[int, list[NetworkStep | None]] = {}
        for step in self.steps:
            for image in step.read():
                readers.setdefault(image, []).append(step)
        for _, parts, _ in self._joined:
            for part in parts:
                readers.setdefault(part, []).append(None)
        return readers

    def _stays_apart(self, part: int, readers: dict[int, list[NetworkStep | None]]) -> bool:
        """Whether a part of a concatenation has to lie by itself."""
        image = self.images[part]
        if image.operand is not None or image.result is not None or image.wider is not None:
            return True
        makers = [step for step in self.steps if step.dst == part]
        wholes = [parts for whole, parts, _ in self._joined if whole == part]
        if not all(step.steps_over for step in makers) or not (makers or wholes):
            return True
        dense = (r for r in readers[part] if r is not None and (r.kind is StepKind.CONVOLVE))
        return any(True for _ in dense) or readers[part].count(None) > 1

    def _root(self, image: int) -> tuple[int, int]:
        """The widest image that holds one, and the first channel there."""
        channel = 0
        while (wider := self.images[image].wider) is not None:
            channel += self.images[image].channel
            image = wider
        return image, channel

    def _arena(self, roots: Sequence[int]) -> tuple[dict[int, int], int]:
        """Where images lie in the arena, and its elements."""
        lives: dict[int, list[int]] = {root: [] for root in roots}
        for at, step in enumerate(self.steps):
            for image in (step.dst, *step.read()):
                root = self._root(image)[0]
                if root in lives:
                    lives[root].append(at)
        places: dict[int, int] = {}
        size = 0
        for root in sorted(roots, key=lambda r: lives[r][0]):
            begin, end = lives[root][0], lives[root][-1]
            length = -(-self.images[root].elements // _ALIGNED) * _ALIGNED
            taken = sorted(
                (places[r], places[r] + self.images[r].elements)
                for r in places
                if lives[r][0] <= end and begin <= lives[r][-1]
            )
            at = 0
            for first, last in taken:
                if at + length <= first:
                    break
                at = max(at, -(-last // _ALIGNED) * _ALIGNED)
            places[root] = at
            size = max(size, at + length)
        return places, size

    def _spans(self, step: NetworkStep, places: dict[int, int]) -> tuple[list[_Span], _Span]:
        """What a step reads, and what it writes."""
        return [self._span(image, places) for image in step.read()], self._span(step.dst, places)

    def _span(self, image: int, places: dict[int, int]) -> _Span:
        root, channel = self._root(image)
        buffer, element = self._buffer(root, places)
        channels = (channel, channel + self.images[image].sizes[3])
        return _Span(root, channels, buffer, (element, element + self.images[root].elements))

    def _buffer(self, root: int, places: dict[int, int]) -> tuple[int, int]:
        image = self.images[root]
        if image.operand is not None:
            return image.operand, 0
        if image.result is not None:
            return self.operands + image.result, 0
        return self.operands + self.results, places[root]

    def _place(self, image: int, places: dict[int, int]) -> tuple[list[int], int]:
        """The two numbers of an image's place, and the elements between neighbouring pixels."""
        root, channel = self._root(image)
        buffer, element = self._buffer(root, places)
        return [buffer, element + channel], self.images[root].sizes[3]

    def _links(self, step: NetworkStep, places: dict[int, int]) -> list[int]:
        """The numbers of the operations after a step."""
        links = [len(step.links)]
        for link in step.links:
            row, where = 0, [link.value, 0]
            if link.by is ChainOperand.ELEMENT:
                where, row = self._place(link.value, places)
            links += [link.operation, link.by, row, *where]
        return links

    def _body(self, step: NetworkStep, places: dict[int, int]) -> list[int]:
        image = self.images[step.dst]
        (src, src_row), (dst, dst_row) = self._place(step.src, places), self._place(step.dst, places)
        parts = self.parts if image.elements >= WORTH_TWO_PARTS else 1
        if step.kind is StepKind.CONVOLVE:
            other = [0, 0] if step.other is None else self._place(step.other, places)[0]
            return [*step.numbers, src_row, dst_row, *src, step.weights, 0, step.bias, 0, *other, *dst]
        if step.kind is StepKind.PLANES:
            call, (*window,) = step.numbers[:_CALL], step.numbers[_CALL:]
            where = [*call, dst_row, *src, step.weights, 0, step.bias, 0]
            if not window:
                return [*where, 0, *dst]
            return [*where, 1, window[0], *image.sizes[1:3], *window[1:], *dst, *self._links(step, places)]
        if step.kind is StepKind.TURN:
            return [image.pixels, image.sizes[3], dst_row, *src, *dst, parts]
        if step.kind is StepKind.SOFTMAX:
            return [image.elements, *src, *dst]
        links = self._links(step, places)
        if step.kind is StepKind.CHAIN:
            return [image.pixels, image.sizes[3], src_row, dst_row, *src, *dst, *links, parts]
        if step.kind is StepKind.SUM:
            source = self.images[step.src]
            parts = self.parts if source.elements >= WORTH_TWO_PARTS and image.elements > 1 else 1
            return [source.pixels, image.elements, src_row, *src, *dst, *links, parts]
        sums, *window = step.numbers
        n, height, width, channels = self.images[step.src].sizes
        sizes = [n, height, width, channels, *image.sizes[1:3], *window]
        return [sums, *sizes, src_row, dst_row, *src, *dst, *links, parts]


def _after(spans: Sequence[tuple[list[_Span], _Span]], at: int) -> int:
    """How many steps have to be done before one: up to the last that writes what it reads or writes, or reads what it
    writes."""
    reads, write = spans[at]
    for before in range(at - 1, -1, -1):
        earlier_reads, earlier = spans[before]
        if any(earlier.meets(span) for span in (*reads, write)) or any(write.meets(r) for r in earlier_reads):
            return before + 1
    return 0
