"""``connectStreamToCallback``: a function of the program's in place of the step's data, for one stream of one replica.

Streams have PopART's handles: ``h2d_<input>`` into the device, ``anchor_d2h_<anchor>`` out of it. The function gets
what pybind11 makes of a ``void *``, a capsule, whose pointer is the buffer of one transfer (one micro-batch of one
replica): it is to be filled, or read. ``ctypes.pythonapi.PyCapsule_GetPointer(capsule, None)`` gives the address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np

from podrun.session.exceptions import popart_runtime_error
from podrun.session.step_data.stepio import StepTensor

Callback = Callable[[object], None]
TO_DEVICE, TO_HOST = "h2d_", "anchor_d2h_"


class StreamCallbacks:
    """The functions that are connected, by stream handle and replica of this process."""

    def __init__(self) -> None:
        self._connected: dict[str, dict[int, Callback]] = {}

    def connect(self, handle: str, callback: Callback, index: int, streams: Mapping[str, int]) -> None:
        """popart_runtime_error for a stream, or a replica, that there is not. ``streams``: replicas by handle."""
        if not callable(callback):
            raise TypeError(
                f"connectStreamToCallback(): incompatible function arguments. {callback!r} is no function."
            )
        if handle not in streams:
            raise popart_runtime_error(
                f"There is no stream {handle!r}; the session's streams are {', '.join(sorted(streams))}."
            )
        if not 0 <= index < streams[handle]:
            raise popart_runtime_error(f"Stream {handle!r} has {streams[handle]} replicas, but no {index}.")
        self._connected.setdefault(handle, {})[index] = callback

    def replaces(self, handle: str, replicas: int) -> bool:
        """True iff no replica takes step data any more."""
        return len(self._connected.get(handle, {})) == replicas

    def fill(self, tensor: StepTensor, data: np.ndarray, replicas: int) -> np.ndarray:
        """An input's data of a step, with what the functions fill in. ``replicas``: that have data of their own."""
        connected = self._connected.get(TO_DEVICE + tensor.name, {})
        return _transfer(connected, tensor, data.copy(), replicas) if connected else data

    def show(self, tensor: StepTensor, value: np.ndarray, replicas: int) -> None:
        """Let the functions see an anchor's values of a step."""
        connected = self._connected.get(TO_HOST + tensor.name, {})
        if connected:
            _transfer(connected, tensor, value.copy(), replicas)


def _transfer(
    connected: Mapping[int, Callback], tensor: StepTensor, data: np.ndarray, replicas: int
) -> np.ndarray:
    for transfer in data.reshape(-1, replicas, *tensor.info.shape()):
        for index, callback in sorted(connected.items()):
            callback(_capsule(transfer[index : index + 1]))
    return data


def _capsule(buffer: np.ndarray) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule: object = new(buffer.ctypes.data, None, None)
    return capsule
