"""Where the tensors of one machine's runs lie, in memory that host process and machine share.

Runs of one shape use it again and again. It has as many *slots* as runs may be in flight: run ``n`` uses slot
``n % slots``, and each slot has room for the inputs, the anchors and the answer of one run. The doorbell that starts
runs lies at its beginning.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from podrun.core.executable import Array
from podrun.core.shared_region import SharedRegion
from podrun.device.host.ports import RunArrays
from podrun.device.service import wire
from podrun.device.service.doorbell import BLOCK_BYTES, Doorbell
from podrun.device.service.handover import lay_out, view
from podrun.protos import ipuof_pb2 as pb

RunShape = tuple[int, list[tuple[str, tuple[int, ...], "np.dtype[np.generic]"]]]
"""Batches, and names, shapes and dtypes of the arrays."""


class RunMemory:
    """The tensors of one machine's runs, in memory that host process and machine share. ``give``: hands a region over
    to the machine.
    """

    def __init__(self, arrays: RunArrays, give: Callable[[SharedRegion], pb.Region]) -> None:
        self._shape, self._plan, self.slots = _shape_of(arrays), arrays.plan, arrays.depth
        tensors = [*arrays.inputs.items(), *arrays.outputs.items()]
        offsets, size = lay_out([BLOCK_BYTES, *(array.nbytes for _, array in tensors)])
        offsets = offsets[1:]
        whole = -(-size // BLOCK_BYTES) * BLOCK_BYTES  # Slots begin as aligned as the region does.
        self._region = SharedRegion.create("ipuof", size if self.slots == 1 else whole * self.slots)
        parts = [self._region.bytes[whole * slot :] for slot in range(self.slots)]
        self.doorbell = Doorbell([part[:BLOCK_BYTES] for part in parts])
        wires = [wire.tensor_to_wire(n, a, offset=o) for (n, a), o in zip(tensors, offsets, strict=True)]
        count = len(arrays.inputs)
        self._inputs: list[dict[str, Array]] = []
        self._outputs: list[dict[str, Array]] = []
        for part in parts:
            views = [
                view(part, offset, str(array.dtype), array.shape)
                for (_, array), offset in zip(tensors, offsets, strict=True)
            ]
            self._inputs.append(dict(zip(arrays.inputs, views[:count], strict=True)))
            self._outputs.append(dict(zip(arrays.outputs, views[count:], strict=True)))
        self.bind = pb.BindRequest(
            batches=arrays.batches,
            region=give(self._region),
            inputs=wires[:count],
            outputs=wires[count:],
            doorbell=True,
            slots=self.slots,
            slot_bytes=whole,
        )

    def fits(self, arrays: RunArrays) -> bool:
        """True iff the run has the arrays that this memory was made for, and as many may be in flight."""
        if arrays.depth > self.slots:
            return False
        if self._plan is not None and self._plan is arrays.plan:
            return True
        return bool(self._shape == _shape_of(arrays))

    def start(self, arrays: RunArrays) -> int:
        """Copy the inputs in and ring for the run; returns its number. Its slot's earlier run has been given out."""
        for name, place in self._inputs[self.doorbell.next_number % self.slots].items():
            np.copyto(place, arrays.inputs[name])
        return self.doorbell.ring()

    def give_outputs(self, number: int, arrays: RunArrays) -> None:
        """Copy the anchors of a run out."""
        for name, place in self._outputs[number % self.slots].items():
            np.copyto(arrays.outputs[name], place)


def _shape_of(arrays: RunArrays) -> RunShape:
    tensors = [*arrays.inputs.items(), *arrays.outputs.items()]
    return arrays.batches, [(name, array.shape, array.dtype) for name, array in tensors]
