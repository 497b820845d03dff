"""Feeds: the inputs of a loop, drawn from an iterator that need not end, by a thread that is ahead of the device.

An element is what one replica takes in one micro-batch: an array for each input. A loop of *n* iterations takes
``n * micro-batches * replicas`` elements, in order of iterations, then micro-batches, then replicas; the next loop goes
on where it ended::

    with DataFeed(samples(), ahead=8) as feed:
        parts.batches.loop(100, feed, results)
        parts.batches.loop(50, feed, results)

The thread puts elements where a loop reads them (`_Block`): a loop of as many iterations as the one before copies none.

Nothing is drawn before the first loop. An error of the iterator is raised by the loop that needs the element, after the
iterations before it. ``close`` ends the thread and closes the iterator, if it is a generator.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from types import TracebackType

import numpy as np

from podrun.core.aligned_memory import aligned_empty, aligned_stack, is_aligned
from podrun.core.errors import CallError, DeadlineError, UnsupportedError, UsageError
from podrun.core.executable import numpy_dtype
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.settings import StepData, StepTensor

Element = Mapping[str, np.ndarray]
"""The inputs of one replica in one micro-batch, by name."""
Results = Callable[[str, np.ndarray], None]
"""Takes values of one tensor that come back, by name."""

CLOSE_SECONDS = 10.0
"""Longest wait for a thread that is inside the iterator when its feed is closed."""


class FeedEndedError(CallError):
    """The iterator of a feed ended before a loop had all its elements."""


class _BlockRow(dict[str, np.ndarray]):
    """An element whose arrays are row ``place`` of a block."""

    __slots__ = ("block", "place")

    def __init__(self, block: _Block, place: int) -> None:
        super().__init__({name: array[place, ...] for name, array in block.arrays.items()})
        self.block, self.place = block, place


class _Block:
    """Memory for ``size`` elements of a feed: an array ``[size, *shape]`` for each input of ``first``, in its dtype."""

    def __init__(self, first: Element, size: int) -> None:
        self.arrays = {
            name: aligned_empty((size, *value.shape), value.dtype) for name, value in first.items()
        }
        self.left, self._size = size, size

    def add(self, element: Element) -> Element | None:
        """The element as the next row; None for one of other inputs, shapes or types."""
        if element.keys() != self.arrays.keys() or not all(
            _alike(value, self.arrays[name]) for name, value in element.items()
        ):
            return None
        place = self._size - self.left
        for name, value in element.items():
            self.arrays[name][place] = value
        self.left -= 1
        return _BlockRow(self, place)


def _is_plain(value: object) -> bool:
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def _alike(value: object, rows: np.ndarray) -> bool:
    return isinstance(value, np.ndarray) and (value.shape, value.dtype) == (rows.shape[1:], rows.dtype)


@dataclass(slots=True)
class _Drawn:
    """What a feed and its thread share. The thread has no reference to the feed, so a feed that is dropped ends it."""

    ahead: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[Element] = field(default_factory=deque)
    number: int = 0
    """Elements that the iterator has given."""
    stopped: bool = False
    ended: bool = False
    error: BaseException | None = None
    taken: int = 0
    """Elements that loops had taken when the last one asked for ``count``."""
    count: int = 1
    block: _Block | None = None
    """Where the thread puts elements."""

    def placed(self, element: Element) -> Element:
        """The element where a loop reads it, if the next loops take as many as the last one."""
        if self.block is None or not self.block.left:
            with self.changed:
                size = self.count - (self.number - self.taken) % self.count
            arrays = size > 1 and element and all(map(_is_plain, element.values()))
            self.block = _Block(element, size) if arrays else None
        row = None if self.block is None else self.block.add(element)
        if row is None:
            self.block = None
        return element if row is None else row

    def stop(self) -> None:
        """Let the thread end when the iterator returns."""
        with self.changed:
            self.stopped = True
            self.waiting.clear()
            self.changed.notify_all()

    def put(self, element: Element) -> bool:
        """Hand over an element when there is room. False if no more are wanted."""
        with self.changed:
            self.number += 1
            self.changed.wait_for(lambda: self.stopped or len(self.waiting) < self.ahead)
            if not self.stopped:
                self.waiting.append(element)
                self.changed.notify_all()
            return not self.stopped

    def end(self, error: BaseException | None) -> None:
        """Say that there are no more elements, and why."""
        with self.changed:
            self.ended, self.error = True, error
            self.changed.notify_all()


def _draw(source: Iterable[Element], drawn: _Drawn) -> None:
    """The thread: draw elements until the iterator ends or nobody wants more."""
    error: BaseException | None = None
    try:
        iterator = iter(source)
        try:
            for element in iterator:
                if not drawn.put(drawn.placed(element)):
                    break
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
    except (
        BaseException
    ) as raised:  # It belongs to the user's iterator, and goes to the loop that waits for it.
        error = raised
    drawn.block = None
    drawn.end(error)


class DataFeed:
    """The inputs of a loop, drawn from an iterator by a thread that is ahead of the device. ``ahead``: most elements
    that are drawn before they are needed. ``seconds``: longest wait for one element. ``name`` is for messages.
    """

    def __init__(
        self, source: Iterable[Element], *, ahead: int = 8, seconds: float = 600.0, name: str = "feed"
    ) -> None:
        if ahead < 1:
            raise UsageError(f"The feed {name!r} must draw at least 1 element ahead, not {ahead}.")
        self.name, self._seconds = name, seconds
        self._source: Iterable[Element] | None = source
        self._drawn = _Drawn(ahead)
        self._thread: threading.Thread | None = None
        self._closed = False
        self.taken = 0
        """Elements that loops have taken."""
        weakref.finalize(self, self._drawn.stop).atexit = False

    def take(self, count: int) -> list[Element]:
        """The next elements: ``count``, or as many as there are before the iterator ends or raises.

        CallError for a feed that is closed, DeadlineError if the iterator gives none for too long.
        """
        if self._closed:
            raise CallError(f"The feed {self.name!r} is closed.")
        elements: list[Element] = []
        drawn = self._drawn
        with drawn.changed:
            drawn.taken, drawn.count = self.taken, max(count, 1)
            self._start()
            while len(elements) < count:
                if not drawn.changed.wait_for(lambda: drawn.waiting or drawn.ended, self._seconds):
                    raise DeadlineError(
                        f"The feed {self.name!r} waited {self._seconds:g} s for element {drawn.number} (from 0) of its "
                        "iterator.",
                        hint="Look at what the iterator waits for, or give the feed more seconds.",
                    )
                if not drawn.waiting:
                    break
                while drawn.waiting and len(elements) < count:
                    elements.append(drawn.waiting.popleft())
                drawn.changed.notify_all()
        self.taken += len(elements)
        return elements

    def reason(self, iterations: int, done: int) -> BaseException:
        """Why a loop of ``iterations``, of which ``done`` ran, got too few elements: the iterator's own error, or its
        end.
        """
        error = self._drawn.error
        if error is not None:
            note = (
                f"raised by the iterator of feed {self.name!r} for its element {self._drawn.number} (from 0)"
            )
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            return error
        return FeedEndedError(
            f"The feed {self.name!r} ended after {self._drawn.number} elements: {done} of {iterations} iterations ran.",
            hint="Repeat the data, or run fewer iterations.",
        )

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_draw, args=(self._source, self._drawn), name=f"podrun-{self.name}", daemon=True
            )
            self._source = None
            self._thread.start()

    def close(self) -> None:
        """End the thread. DeadlineError if the iterator does not return. Idempotent."""
        self._closed = True
        self._drawn.stop()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(CLOSE_SECONDS)
        if thread.is_alive():
            raise DeadlineError(
                f"The feed {self.name!r} was closed, but its iterator has not returned for {CLOSE_SECONDS:g} s.",
                hint="Let the iterator end its waits, for example by a timeout.",
            )

    def __enter__(self) -> DataFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True)
class FedData(StepData):
    """The data of one run of a loop: elements of a feed, the first of which has the number ``first``."""

    elements: Sequence[Element]
    results: Results
    first: int = 0

    def check(self, inputs: Mapping[str, StepTensor], outputs: Mapping[str, StepTensor]) -> None:
        """Each element has all inputs, with shape and type of one micro-batch."""
        alike = self._block() is not None
        for number, element in enumerate(self.elements[:1] if alike else self.elements, self.first):
            for name, tensor in inputs.items():
                if name not in element:
                    raise CallError(
                        f"Element {number} of the feed lacks the input {name!r}; it has {sorted(element)}."
                    )
                value, wanted = element[name], (numpy_dtype(tensor.spec.dtype), tensor.spec.shape)
                if (value.dtype, value.shape) != wanted:
                    raise CallError(
                        f"Element {number} of the feed has {value.dtype}{list(value.shape)} for the input {name!r}, "
                        f"which takes {wanted[0]}{list(wanted[1])} for each replica and micro-batch."
                    )
        for name, tensor in inputs.items():
            if tensor.elements != len(self.elements) * tensor.spec.size:
                raise UnsupportedError(
                    f"The input {name!r} is the same for all replicas, and a feed gives each replica an element of its "
                    "own.",
                    hint="DataFeed every replica its own input, or make it a variable.",
                )

    def input_names(self) -> Sequence[str]:
        return list(self.elements[0]) if self.elements else []

    def _block(self) -> tuple[_Block, int] | None:
        """The block of which the elements are rows, one after the other, and the first row."""
        first = self.elements[0] if self.elements else None
        if not isinstance(first, _BlockRow):
            return None
        places = enumerate(self.elements, first.place)
        together = all(
            isinstance(e, _BlockRow) and e.block is first.block and e.place == at for at, e in places
        )
        return (first.block, first.place) if together else None

    def fetch(self, tensor: StepTensor) -> np.ndarray:
        block = self._block()
        if block is not None:
            rows = block[0].arrays[tensor.name][block[1] : block[1] + len(self.elements)]
            if is_aligned(rows):
                return rows.reshape(tensor.layout)
        return aligned_stack([element[tensor.name] for element in self.elements]).reshape(tensor.layout)

    def store(self, tensor: StepTensor, value: np.ndarray) -> None:
        self.results(tensor.name, value)
