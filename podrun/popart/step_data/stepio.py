"""PyStepIO, PyStepIOCallback, PyWeightsIO: step data and weights as NumPy arrays, the checks on them, and callbacks.

Arrays are referenced, not copied: anchors are filled in place. Source of the checks: graphcore/popart,
willow/include/popart/stepio_generic.hpp and stepio_size_assertion.hpp.

**Stream callbacks** (``connectStreamToCallback``) are functions of the program's in place of the step's data, for one
stream of one replica. Streams have PopART's handles: ``h2d_<input>`` into the device, ``anchor_d2h_<anchor>`` out of
it. The function gets what pybind11 makes of a ``void *``, a capsule, whose pointer is the buffer of one transfer (one
micro-batch of one replica): it is to be filled, or read. ``ctypes.pythonapi.PyCapsule_GetPointer(capsule, None)`` gives
the address.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from podrun.popart.values.exceptions import incompatible, popart_exception, popart_runtime_error
from podrun.popart.values.tensor_info import info_of
from podrun.runtime.settings import StepData, StepTensor
from podrun.runtime.step_arrays import as_device_type, tensor_dtype


class IStepIO(StepData):
    """What `session.run` takes: hands over one tensor's data of a whole step, and takes one tensor's results."""


def _contiguous(arrays: Mapping[str, Any], what: str) -> dict[str, np.ndarray]:
    if not isinstance(arrays, Mapping):
        raise incompatible("__init__", f"A PyStepIO's {what}s are a dict of arrays, not {arrays!r}.")
    checked = {}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise incompatible(
                "__init__", f"{what} {name!r} must be a numpy.ndarray, not {type(array).__name__}."
            )
        if not array.flags["C_CONTIGUOUS"]:
            raise popart_exception(
                f"PyStepIO {what} {name!r} is not C-contiguous: pass numpy.ascontiguousarray(array)."
            )
        checked[name] = array
    return checked


def _check_writable(outputs: Mapping[str, np.ndarray]) -> None:
    """Raise popart_exception for an anchor's array that cannot be written, or whose memory another anchor has too."""
    for name, array in outputs.items():
        if not array.flags["WRITEABLE"]:
            raise popart_exception(f"PyStepIO output {name!r} is read-only: pass array.copy().")
    names = sorted(outputs, key=lambda name: _extent(outputs[name])[0])
    for first, second in itertools.pairwise(names):
        if _extent(outputs[second])[0] < _extent(outputs[first])[1]:
            raise popart_exception(
                f"PyStepIO outputs {first!r} and {second!r} share memory, so one would overwrite the other: "
                "pass an array of its own for each."
            )


def _extent(array: np.ndarray) -> tuple[int, int]:
    """First address of a contiguous array, and the one after its last."""
    return array.ctypes.data, array.ctypes.data + array.nbytes


def _separate(inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> frozenset[str]:
    """The outputs that share no memory with an input or another output: the device may write to them during a run."""
    arrays = [*inputs.items(), *outputs.items()]
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes, index) for index, (_, a) in enumerate(arrays))
    shared: set[int] = set()
    end, last = 0, -1
    for start, stop, index in spans:
        if start < end:
            shared |= {index, last}
        if stop > end:
            end, last = stop, index
    return frozenset(
        name for index, (name, _) in enumerate(arrays) if index >= len(inputs) and index not in shared
    )


class PyStepIO(IStepIO):
    """Step data in arrays: ``PyStepIO({input: array}, anchors)``; the anchor arrays are filled in place.

    Any shape with the right number of elements will do; the logical order is batch, micro-batch, replica, tensor.
    """

    def __init__(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        self._inputs = _contiguous(inputs, "input")
        self._outputs = _contiguous(outputs, "output")
        _check_writable(self._outputs)
        self._separate = _separate(self._inputs, self._outputs)
        self._asserts = True
        self._checked = False

    def enableRuntimeAsserts(self, enable: bool = True) -> None:
        """Switch the check of element counts on or off."""
        self._asserts = enable

    def check(self, inputs: Mapping[str, StepTensor], outputs: Mapping[str, StepTensor]) -> None:
        """Names and element counts; counts on the first run only (as PopART does)."""
        for name, tensor in inputs.items():
            if name not in self._inputs:
                raise popart_runtime_error(
                    f"No data for input {name!r} ({info_of(tensor.spec)}) in the PyStepIO; it has inputs "
                    f"{sorted(self._inputs)}."
                )
        for name, tensor in outputs.items():
            if name not in self._outputs:
                raise popart_runtime_error(
                    f"No array for anchor {name!r} ({info_of(tensor.spec)}) in the PyStepIO; it has outputs "
                    f"{sorted(self._outputs)}. session.initAnchorArrays() makes them all."
                )
        for name in self._outputs:
            if name not in outputs:
                raise popart_runtime_error(
                    f"PyStepIO output {name!r} is not an anchor of this session; the anchors are {sorted(outputs)}."
                )
        if self._asserts and not self._checked:
            for tensors, arrays, what in (
                (inputs, self._inputs, "input"),
                (outputs, self._outputs, "output"),
            ):
                for name, tensor in tensors.items():
                    _check_count(tensor, arrays[name], what)
            self._checked = True

    def input_names(self) -> list[str]:
        """Names of the inputs given."""
        return list(self._inputs)

    def fetch(self, tensor: StepTensor) -> np.ndarray:
        array = self._inputs[tensor.name]
        if array.size != tensor.elements:
            array = _wrapped(array, tensor)
        return as_device_type(array, tensor).reshape(tensor.layout)

    def target(self, tensor: StepTensor) -> np.ndarray | None:
        array = self._outputs[tensor.name]
        fits = array.size == tensor.elements and array.dtype == tensor_dtype(tensor)
        usable = fits and array.flags.writeable and tensor.name in self._separate
        return array.reshape(tensor.layout) if usable else None

    def store(self, tensor: StepTensor, value: np.ndarray) -> None:
        array = self._outputs[tensor.name]
        if array.size != tensor.elements:
            _check_count(tensor, array, "output")
        if array.dtype != value.dtype:
            raise popart_runtime_error(
                f"Type discrepancy for anchor {tensor.name!r}: the device gives {value.dtype}, the array is "
                f"{array.dtype}."
            )
        array.reshape(-1)[...] = value.reshape(-1)


def _check_count(tensor: StepTensor, array: np.ndarray, what: str) -> None:
    if array.size != tensor.elements:
        raise popart_runtime_error(
            f"PyStepIO {what} {tensor.name!r} has the wrong number of elements: expected {tensor.elements}, "
            f"received {array.size} (array of {array.dtype}, shape {list(array.shape)}). {tensor.explain()}."
        )


def _wrapped(array: np.ndarray, tensor: StepTensor) -> np.ndarray:
    """Data of another size with the runtime asserts off: read from the start again when it is used up."""
    if not array.size or tensor.elements % array.size:
        _check_count(tensor, array, "input")
    return np.tile(array.reshape(-1), tensor.elements // array.size)


class PyStepIOCallback(IStepIO):
    """Step data from functions, called once per micro-batch and replica.

    ``input_callback(id, prefetch) -> array | None``, ``input_complete_callback(id)``, ``output_callback(id)
    -> array``, ``output_complete_callback(id)``. podrun never prefetches, so ``prefetch`` is always False
    and None is an error.
    """

    def __init__(
        self,
        input_callback: Callable[[str, bool], np.ndarray | None],
        input_complete_callback: Callable[[str], None],
        output_callback: Callable[[str], np.ndarray],
        output_complete_callback: Callable[[str], None],
    ) -> None:
        _check_callable("input_callback", input_callback, "tensor id", "prefetch")
        _check_callable("input_complete_callback", input_complete_callback, "tensor id")
        _check_callable("output_callback", output_callback, "tensor id")
        _check_callable("output_complete_callback", output_complete_callback, "tensor id")
        self._input = input_callback
        self._input_complete = input_complete_callback
        self._output = output_callback
        self._output_complete = output_complete_callback

    def fetch(self, tensor: StepTensor) -> np.ndarray:
        shape = tensor.spec.shape
        crossings = tensor.layout[: len(tensor.layout) - len(shape)]
        data = np.empty((int(np.prod(crossings, dtype=np.int64)), *shape), tensor_dtype(tensor))
        for index in range(len(data)):
            array = self._input(tensor.name, False)
            if array is None:
                raise popart_runtime_error(
                    f"The input callback gave None for {tensor.name!r}; None is allowed only when prefetching."
                )
            array = np.asarray(array)
            if not array.flags["C_CONTIGUOUS"]:
                raise popart_runtime_error(
                    f"The input callback's array for {tensor.name!r} is not C-contiguous: give "
                    "numpy.ascontiguousarray(array)."
                )
            if array.size != data[index].size:
                raise popart_runtime_error(
                    f"The input callback gave {array.size} elements for {tensor.name!r}; one micro-batch of "
                    f"one replica has {data[index].size} ({info_of(tensor.spec)})."
                )
            data[index] = as_device_type(array, tensor).reshape(shape)
            self._input_complete(tensor.name)
        return data.reshape(tensor.layout)

    def store(self, tensor: StepTensor, value: np.ndarray) -> None:
        shape = tensor.spec.shape
        for piece in value.reshape(-1, *shape):
            array = self._output(tensor.name)
            if array.size != piece.size or array.dtype != piece.dtype:
                raise popart_runtime_error(
                    f"The output callback gave an array of {array.size} {array.dtype} for {tensor.name!r}; "
                    f"one result has {piece.size} {piece.dtype}."
                )
            if not (array.flags["C_CONTIGUOUS"] and array.flags["WRITEABLE"]):
                raise popart_runtime_error(
                    f"The output callback's array for {tensor.name!r} is not C-contiguous, or is read-only."
                )
            array.reshape(-1)[...] = piece.reshape(-1)
            self._output_complete(tensor.name)


def _check_callable(name: str, function: object, *takes: str) -> None:
    """TypeError for a callback that is no function, or that cannot be called with these arguments."""
    asked = f"{name} is called with ({', '.join(takes)})"
    if not callable(function):
        raise incompatible("__init__", f"{asked}; got {function!r}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # A function of C does not say what it takes.
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        raise incompatible("__init__", f"{asked}; this one takes {signature}.") from error


class IWeightsIO:
    """What readWeights and writeWeights take."""

    weights: dict[str, np.ndarray]


class PyWeightsIO(IWeightsIO):
    """Weights by name, for `session.readWeights` (filled in place) and `session.writeWeights`."""

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        for name, array in weights.items():
            if not isinstance(array, np.ndarray):
                raise incompatible(
                    "__init__", f"Weight {name!r} must be a numpy.ndarray, not {type(array).__name__}."
                )
            if not array.flags["C_CONTIGUOUS"]:
                raise popart_exception(
                    f"Weight {name!r} cannot be in a PyWeightsIO, because it is not c-contiguous.",
                    hint="numpy.ascontiguousarray(array), or numpy.empty_like(array, order='C')",
                )
        self.weights = dict(weights)


Callback = Callable[[object], None]
TO_DEVICE, TO_HOST = "h2d_", "anchor_d2h_"


class StreamCallbacks:
    """The functions that are connected, by stream handle and replica of this process."""

    def __init__(self) -> None:
        self._connected: dict[str, dict[int, Callback]] = {}

    def connect(
        self,
        handle: str,
        callback: Callback,
        index: int,
        rows: tuple[Mapping[str, int], Mapping[str, int]],
    ) -> None:
        """popart_runtime_error for a stream, or a replica, that there is not. ``rows``: replicas with streams of their
        own, by input and by anchor.
        """
        streams = {TO_DEVICE + name: count for name, count in rows[0].items()}
        streams |= {TO_HOST + name: count for name, count in rows[1].items()}
        if not callable(callback):
            raise incompatible("connectStreamToCallback", f"{callback!r} is no function.")
        if handle not in streams:
            raise popart_runtime_error(
                f"There is no stream {handle!r}; the session's streams are {', '.join(sorted(streams))}."
            )
        if not 0 <= index < streams[handle]:
            raise popart_runtime_error(f"Stream {handle!r} has {streams[handle]} replicas, but no {index}.")
        self._connected.setdefault(handle, {})[index] = callback

    def replaces(self, name: str, replicas: int) -> bool:
        """True iff no replica takes an input's step data any more."""
        return len(self._connected.get(TO_DEVICE + name, {})) == replicas

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
    for transfer in data.reshape(-1, replicas, *tensor.spec.shape):
        for index, callback in sorted(connected.items()):
            callback(_capsule(transfer[index : index + 1]))
    return data


def _capsule(buffer: np.ndarray) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule: object = new(buffer.ctypes.data, None, None)
    return capsule
