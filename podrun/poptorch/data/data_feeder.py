"""The process that loads data ahead: it iterates over a data set and puts elements into the slots of a ring.

The ring is memory that two processes share, an anonymous file; each slot holds the tensors of one element.
Messages to the process: ``("ring", slots)`` followed by a descriptor, ``("credit", slot)`` when a slot may be written
again, ``("reset", epoch)`` to begin anew, ``("stop",)``. Messages from it: ``("first", layout, forms)`` when it has
loaded the first element, ``("item", epoch, slot, size)``, ``("end", epoch)``, ``("error", text)``. ``size``: the
length of dimension 0 of a last element that is not full; -1 for a full one.
"""

from __future__ import annotations

import mmap
import os
import signal
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection, parent_process, reduction
from typing import Any, Protocol

import torch

from podrun.core.errors import InternalError
from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.capture import graph
from podrun.private_apis.torch import end_workers, watch_workers

ALIGNMENT = 64
"""Bytes: tensors begin at multiples of a cache line."""


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Shape and type of one tensor of an element. ``dtype``: torch's name without ``torch.``."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type as torch's."""
        dtype = getattr(torch, self.dtype)
        if not isinstance(dtype, torch.dtype):
            raise InternalError("a tensor's type is none of torch's")
        return dtype

    @property
    def elements(self) -> int:
        """How many numbers the tensor has."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return self.elements * self.torch_dtype.itemsize


def tensor_form(tensor: torch.Tensor) -> TensorForm:
    """The form of a tensor."""
    return TensorForm(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class SharedRing:
    """``slots`` times the tensors that ``forms`` describe.

    `create` makes the memory and gives the descriptor to send; `SharedRing(descriptor, ...)` is the other process's
    view of it.
    """

    def __init__(self, descriptor: int, forms: Sequence[TensorForm], slots: int) -> None:
        self._forms, self.slots = list(forms), slots
        self._offsets = []
        size = 0
        for form in self._forms:
            self._offsets.append(size)
            size += -(-form.bytes // ALIGNMENT) * ALIGNMENT
        self._slot_bytes = max(size, ALIGNMENT)
        self._memory = mmap.mmap(descriptor, self._slot_bytes * slots)

    @classmethod
    def create(cls, forms: Sequence[TensorForm], slots: int) -> tuple[SharedRing, int]:
        """New memory, and its descriptor; the caller closes it when the other process has it."""
        size = sum(-(-form.bytes // ALIGNMENT) * ALIGNMENT for form in forms)
        descriptor = os.memfd_create("podrun-data", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(size, ALIGNMENT) * slots)
        return cls(descriptor, forms, slots), descriptor

    def tensors(self, slot: int) -> list[torch.Tensor]:
        """The tensors of a slot: views of the memory."""
        tensors = []
        for form, offset in zip(self._forms, self._offsets, strict=True):
            if not form.elements:
                tensors.append(torch.empty(form.shape, dtype=form.torch_dtype))
                continue
            flat = torch.frombuffer(
                self._memory,
                dtype=form.torch_dtype,
                count=form.elements,
                offset=slot * self._slot_bytes + offset,
            )
            tensors.append(flat.reshape(form.shape))
        return tensors


class IndexedDataset(Protocol):
    """A data set of the program's with a length and indices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


ProgramDataset = Iterable[Any] | IndexedDataset
"""A loader, an iterable, or a data set with a length."""
Layout = tuple[Any, ...]
"""How the tensors of an element form it: a kind, and what the kind needs (`flattened`)."""


@dataclass(frozen=True, slots=True)
class FeederPlan:
    """What the process that loads data is to do. ``rebatched``: elements of dimension 0 that it joins to one element;
    None: elements are passed on unchanged. ``random_state``: torch's, so that samplers draw the same numbers as in the
    caller.
    """

    dataset: ProgramDataset
    load_indefinitely: bool
    early_preload: bool
    rebatched: int | None
    drop_last: bool
    random_state: torch.Tensor
    parsers: Mapping[type, graph.StructureParser]


class WrongElement(AssertionError):
    """An element that cannot go through the ring."""


def flattened(element: object, layout: Layout | None = None) -> tuple[list[torch.Tensor], Layout]:
    """The tensors of an element, and its layout: ``("tensor",)``, ``("dict", keys)``, ``("tuple", length)``, the same
    for a list, or ``("custom", element)`` for a type with a registered parser. WrongElement for anything else.

    ``layout``: of the elements before it; a dictionary then gives its tensors in their order of keys.
    """
    if isinstance(element, torch.Tensor):
        return [element], ("tensor",)
    if graph.has_parser(element):
        leaves, _ = graph.flatten(element)
        return _tensors(leaves), ("custom", element)
    if isinstance(element, Mapping):
        keys = list(element) if layout is None or layout[0] != "dict" else layout[1]
        if element.keys() != set(keys):
            raise WrongElement(
                f"An element has the keys {', '.join(map(repr, element))}; the first one had "
                f"{', '.join(map(repr, keys))}"
            )
        return _tensors([element[key] for key in keys]), ("dict", keys)
    if isinstance(element, (tuple, list)):
        kind = "list" if isinstance(element, list) else "tuple"
        return _tensors(list(element)), (kind, len(element))
    raise WrongElement(
        f"AsynchronousDataAccessor takes tensors, flat tuples, lists and dictionaries of tensors, not "
        f"{type(element).__name__}. Register other types with poptorch.registerCustomArgParser."
    )


def _tensors(leaves: list[Any]) -> list[torch.Tensor]:
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise WrongElement(
                f"AsynchronousDataAccessor takes tensors without further nesting, not {type(leaf).__name__}"
            )
    return leaves


def assembled(layout: Layout, tensors: list[torch.Tensor]) -> Any:
    """The element of a layout with these tensors."""
    kind = layout[0]
    if kind == "tensor":
        return tensors[0]
    if kind == "dict":
        return dict(zip(layout[1], tensors, strict=True))
    if kind == "custom":
        return graph.unflatten(graph.flatten(layout[1])[1], tensors)
    return tensors if kind == "list" else tuple(tensors)


def feed(pipe: connection.Connection, plan: FeederPlan) -> None:
    """The main function of the process: runs until it is told to stop, or until its parent has ended."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent ends this process.
    torch.random.set_rng_state(plan.random_state)
    graph.adopt_parsers(plan.parsers)
    try:
        _Feeder(pipe, plan).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except WrongElement as error:
        _send_last(pipe, str(error))
    except Exception:
        # The user must see whatever error the data set raises, in the process that asked for data.
        _send_last(pipe, traceback.format_exc())
    finally:
        end_workers()


def _send_last(pipe: connection.Connection, text: str) -> None:
    try:
        pipe.send(("error", text))
    except (BrokenPipeError, ConnectionResetError):
        return


class _Stopped(EOFError):
    """The parent has asked the process to stop, or has ended."""


class _Reset(Exception):
    """Begin the data set again."""


class _Feeder:
    def __init__(self, pipe: connection.Connection, plan: FeederPlan) -> None:
        self._pipe, self._plan = pipe, plan
        self._ring: SharedRing | None = None
        self._credits: list[int] = []
        self._epoch = 0
        self._started = plan.early_preload
        parent = parent_process()
        self._parent = None if parent is None else parent.sentinel

    def run(self) -> None:
        """Epoch after epoch."""
        elements = self._elements()
        first = next(elements, None)
        if first is None:
            raise WrongElement("The data set is empty: AsynchronousDataAccessor has nothing to load.")
        tensors, layout = flattened(first)
        forms = [tensor_form(tensor) for tensor in tensors]
        self._pipe.send(("first", layout, forms))
        while self._ring is None:
            self._receive(forms)
        all_elements: Iterator[Any] = _chained(first, elements)
        while True:
            try:
                self._epoch_of(all_elements, forms, layout)
                if not self._plan.load_indefinitely:
                    while True:
                        self._receive(forms)
            except _Reset:
                pass
            all_elements = self._elements()

    def _epoch_of(self, elements: Iterator[Any], forms: list[TensorForm], layout: Layout) -> None:
        while not self._started:
            self._receive(forms)
        for element in elements:
            tensors, _ = flattened(element, layout)
            size = self._size_of(tensors, forms)
            while not self._credits:
                self._receive(forms)
            slot = self._credits.pop(0)
            if self._ring is None:
                raise InternalError("an element is loaded before there is a ring")
            for source, target in zip(tensors, self._ring.tensors(slot), strict=True):
                (target if size < 0 or not target.dim() else target[:size]).copy_(source)
            self._pipe.send(("item", self._epoch, slot, size))
            while self._pipe.poll():
                self._receive(forms)
        self._pipe.send(("end", self._epoch))
        self._epoch += 1

    def _size_of(self, tensors: list[torch.Tensor], forms: list[TensorForm]) -> int:
        """-1 for an element like the first one, else the length of its dimension 0."""
        own = [tensor_form(tensor) for tensor in tensors]
        if own == forms:
            return -1
        partial = len(own) == len(forms) and all(
            a.dtype == b.dtype and a.shape[1:] == b.shape[1:] and (a.shape < b.shape or not b.shape)
            for a, b in zip(own, forms, strict=True)
        )
        if partial and self._plan.rebatched is not None:
            return next(a.shape[0] for a in own if a.shape)
        raise WrongElement(
            f"All elements must have the shapes and types of the first one, {_told(forms)}; there is one with "
            f"{_told(own)}. Use drop_last=True, or DataLoaderMode.AsyncRebatched."
        )

    def _receive(self, forms: list[TensorForm]) -> None:
        waited: list[Any] = [self._pipe] if self._parent is None else [self._pipe, self._parent]
        ready = connection.wait(waited)
        if self._pipe not in ready:
            raise _Stopped
        message = self._pipe.recv()
        if message[0] == "stop":
            raise _Stopped
        if message[0] == "ring":
            descriptor = reduction.recv_handle(self._pipe)
            self._ring = SharedRing(descriptor, forms, message[1])
            os.close(descriptor)
            self._credits = list(range(message[1]))
        elif message[0] == "start":
            self._started = True
        elif message[0] == "credit":
            self._credits.append(message[1])
        elif message[0] == "reset":
            self._epoch, self._started = message[1], True
            raise _Reset

    def _elements(self) -> Iterator[Any]:
        elements = _in_order(self._plan.dataset)
        if self._plan.rebatched is None:
            return elements
        return _rebatched(elements, self._plan.rebatched, self._plan.drop_last)


def _in_order(dataset: ProgramDataset) -> Iterator[Any]:
    """The elements of a loader, an iterable, or a data set with a length, whose indices need not end in IndexError."""
    if isinstance(dataset, Iterable):
        iterator: Iterator[Any] = iter(dataset)
        watch_workers(iterator)
        return iterator
    return (dataset[index] for index in range(len(dataset)))


def _told(forms: list[TensorForm]) -> str:
    return ", ".join(f"{form.dtype} {list(form.shape)}" for form in forms)


def _chained(first: object, rest: Iterator[object]) -> Iterator[object]:
    yield first
    yield from rest


def _rebatched(elements: Iterator[Any], size: int, drop_last: bool) -> Iterator[Any]:
    """Elements of ``size`` along dimension 0, whatever the sizes of the incoming ones."""
    waiting: list[list[torch.Tensor]] = []
    held = 0
    layout: Layout | None = None
    for element in elements:
        tensors, layout = flattened(element, layout)
        waiting.append(tensors)
        held += tensors[0].shape[0]
        while held >= size:
            joined = [torch.cat(parts) for parts in zip(*waiting, strict=True)]
            yield assembled(layout, [tensor[:size] for tensor in joined])
            held -= size
            waiting = [[tensor[size:] for tensor in joined]] if held else []
    if layout is not None and held and not drop_last:
        yield assembled(layout, [torch.cat(parts) for parts in zip(*waiting, strict=True)])
