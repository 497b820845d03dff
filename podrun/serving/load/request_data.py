"""What a request sends: random numbers, zeros, or the arrays of a file."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from podrun.core.errors import ConfigError, UsageError
from podrun.serving.load.servers import ModelForm

TYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "u2",
    "UINT32": "u4",
    "UINT64": "u8",
    "INT8": "i1",
    "INT16": "i2",
    "INT32": "i4",
    "INT64": "i8",
    "FP16": "f2",
    "FP32": "f4",
    "FP64": "f8",
}
"""Types of the protocol that have arrays, by name."""


def request_arrays(
    form: ModelForm, batch: int, shapes: Mapping[str, Sequence[int]], kind: str, seed: int
) -> dict[str, np.ndarray]:
    """Arrays of one request: ``kind`` is random or zero. Raises UsageError for types without arrays, for open
    dimensions that ``shapes`` leaves open, and for a batch that the model does not take."""
    if batch > max(1, form.max_batch):
        raise UsageError(
            f"{form.name} takes {max(1, form.max_batch)} rows at most, not {batch}", hint="--batch-size 1"
        )
    known = [tensor.name for tensor in form.inputs]
    for name in shapes:
        if name not in known:
            raise UsageError(f"{form.name} has no input {name!r}", hint=f"It has {', '.join(known)}.")
    draw = np.random.default_rng(seed)
    arrays = {}
    for tensor in form.inputs:
        if tensor.datatype not in TYPES:
            raise UsageError(
                f"input {tensor.name!r} of {form.name} is {tensor.datatype}, which has no arrays of numbers",
                hint=f"Types that can be sent: {', '.join(TYPES)}.",
            )
        inner = list(shapes.get(tensor.name, tensor.shape[1:] if form.max_batch else tensor.shape))
        if any(size < 0 for size in inner):
            raise UsageError(
                f"input {tensor.name!r} of {form.name} leaves a dimension open: {inner}",
                hint=f"Say it: --shape {tensor.name}:{','.join(str(max(size, 1)) for size in inner)}",
            )
        arrays[tensor.name] = _values(
            [batch, *inner] if form.max_batch else inner, np.dtype(TYPES[tensor.datatype]), kind, draw
        )
    return arrays


def _values(shape: Sequence[int], dtype: np.dtype, kind: str, draw: np.random.Generator) -> np.ndarray:
    if kind == "zero":
        return np.zeros(shape, dtype)
    if dtype.kind == "f":
        return draw.standard_normal(shape).astype(dtype)
    return draw.integers(0, 2, shape).astype(dtype)


def arrays_of_file(form: ModelForm, path: Path, batch: int) -> dict[str, np.ndarray]:
    """Arrays of an ``.npz`` file by the names of the inputs; where the model batches, the first rows of each.
    Raises ConfigError for a file that holds others, and never unpickles what is in it."""
    hint = "Write one: numpy.savez('data.npz', x=array)"
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is no file of arrays: {error}", hint=hint) from None
    sent: dict[str, np.ndarray] = {}
    for tensor in form.inputs:
        if tensor.name not in arrays:
            raise ConfigError(f"{path} has no array {tensor.name!r}; it has {', '.join(arrays)}", hint=hint)
        array = arrays[tensor.name][:batch] if form.max_batch else arrays[tensor.name]
        wanted = (batch, *tensor.shape[1:]) if form.max_batch else tensor.shape
        fits = array.ndim == len(wanted) and all(
            size in (-1, have) for size, have in zip(wanted, array.shape, strict=True)
        )
        dtype = np.dtype(TYPES.get(tensor.datatype, "O"))
        if not fits or array.dtype != dtype:
            raise ConfigError(
                f"{path}: {tensor.name!r} is {array.dtype} {list(array.shape)}, and {form.name} takes"
                f" {dtype} {list(wanted)}",
                hint=hint,
            )
        sent[tensor.name] = array
    return sent
