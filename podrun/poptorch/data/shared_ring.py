"""A ring of slots in memory that two processes share; each slot holds the tensors of one element.

The memory is an anonymous file (`memfd_create`) whose descriptor one process sends to the other, so nothing of it has
a name, and nothing is left when both have ended. The ring holds data only: who may write which slot is agreed on over
a pipe (`data_accessor`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def elements(self) -> int:
        """Numbers in the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return self.elements * self.torch_dtype.itemsize


def form_of(tensor: torch.Tensor) -> TensorForm:
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
        made = []
        for form, offset in zip(self._forms, self._offsets, strict=True):
            if not form.elements:
                made.append(torch.empty(form.shape, dtype=form.torch_dtype))
                continue
            flat = torch.frombuffer(
                self._memory,
                dtype=form.torch_dtype,
                count=form.elements,
                offset=slot * self._slot_bytes + offset,
            )
            made.append(flat.reshape(form.shape))
        return made
