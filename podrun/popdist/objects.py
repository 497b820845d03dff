"""Python objects as bytes without pickle: JSON, with marks for what JSON has not.

A list stands for itself; every other container is ``{"kind": ..., "value": ...}``. Floats keep every bit (JSON's
text of a float in Python is exact), arrays their dtype and shape.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from podrun.errors import UnsupportedError


def encode(value: Any) -> bytes:
    """The object as bytes. UnsupportedError for what is no None, number, string, bytes, list, tuple, set, dictionary or
    array of numbers.
    """
    return json.dumps(_plain(value)).encode()


def decode(note: bytes) -> Any:
    """The object that `encode` was given."""
    return _rich(json.loads(note))


def _plain(value: Any) -> Any:
    import numpy as np

    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list or value.__class__.__name__ == "deque":
        return [_plain(item) for item in value]
    if type(value) in (tuple, set):
        return {"kind": type(value).__name__, "value": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"kind": "dict", "value": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if type(value) is bytes:
        return {"kind": "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return {"kind": kind, "value": [value.dtype.str, list(value.shape), data]}
    raise UnsupportedError(
        f"an object of type {type(value).__name__} cannot go between instances: it would have to be pickled",
        hint="Send its numbers: lists, dictionaries, strings and NumPy arrays travel.",
    )


def _rich(value: Any) -> Any:
    import numpy as np

    if isinstance(value, list):
        return [_rich(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = value["kind"], value["value"]
    if kind == "tuple":
        return tuple(_rich(item) for item in content)
    if kind == "set":
        return {_rich(item) for item in content}
    if kind == "dict":
        return {_rich(key): _rich(item) for key, item in content}
    if kind == "bytes":
        return base64.b64decode(content)
    dtype, shape, data = content
    array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
    return array[()] if kind == "scalar" else array.copy()
