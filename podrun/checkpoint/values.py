"""State of a program as plain data: a tree of containers, numbers, texts and arrays, to JSON and back.

JSON has no tuples, no bytes, no keys but texts and no infinities, so each value that JSON cannot hold as it is becomes
an object with one key, its tag (`encode_values` lists them). Arrays lie beside the JSON, by number. Nothing is
unpickled:
a reader accepts these types and no others.
"""

from __future__ import annotations

import base64
import binascii
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrun.core.errors import UsageError
from podrun.core.executable import Array

DTYPES = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    }
)
"""Types of arrays that a checkpoint can hold."""
DEEPEST = 64
"""Most containers inside each other."""


class CheckpointError(UsageError):
    """A checkpoint that cannot be written, found or used."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose bytes are not the written ones; names the file."""


def encode_values(values: Mapping[str, Any]) -> tuple[Any, list[Array]]:
    """The JSON tree of values by name, and its arrays.

    Tags: ``map`` (pairs), ``tuple``, ``bytes`` (base64), ``float`` (not finite), ``array`` and ``scalar`` (NumPy's; a
    number of the list of arrays). Raises CheckpointError that names the place of what is none of these.
    """
    arrays: list[Array] = []
    return {"map": [[name, _encode(value, arrays, name, 0)] for name, value in values.items()]}, arrays


def _encode(value: object, arrays: list[Array], place: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise CheckpointError(f"{place}: containers lie more than {DEEPEST} deep inside each other.")
    if value is None or isinstance(value, str) or type(value) in (bool, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic):
        return _encode_array(value, arrays, place)
    if type(value) is list:
        return [_encode(item, arrays, f"{place}[{n}]", depth + 1) for n, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, arrays, f"{place}[{n}]", depth + 1) for n, item in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise CheckpointError(f"{place}: the key {key!r} is neither a text nor an integer.")
            pairs.append([key, _encode(item, arrays, f"{place}[{key!r}]", depth + 1)])
        return {"map": pairs}
    raise CheckpointError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold.",
        hint="Give numbers, texts, bytes, None, NumPy arrays, and lists, tuples and dicts of them.",
    )


def _encode_array(value: Array | np.generic, arrays: list[Array], place: str) -> Any:
    array = np.asarray(value)
    if str(array.dtype) not in DTYPES:
        raise CheckpointError(
            f"{place} is an array of {array.dtype}, which a checkpoint cannot hold.",
            hint="Give an array of numbers.",
        )
    arrays.append(array)
    return {"scalar" if isinstance(value, np.generic) else "array": len(arrays) - 1}


def decode_values(tree: object, arrays: Sequence[Array]) -> Any:
    """The value of a JSON tree and its arrays. Raises CheckpointError for anything that `encode_values` does not
    write.
    """
    return _decode(tree, arrays, 0)


def _decode(tree: object, arrays: Sequence[Array], depth: int) -> Any:
    if depth > DEEPEST:
        raise CheckpointError(f"the state's containers lie more than {DEEPEST} deep inside each other")
    if tree is None or isinstance(tree, str | bool | int | float):
        return tree
    if isinstance(tree, list):
        return [_decode(branch, arrays, depth + 1) for branch in tree]
    if isinstance(tree, dict) and len(tree) == 1:
        ((tag, inner),) = tree.items()
        tagged = _decode_tagged(tag, inner, arrays, depth)
        if tagged is not None:
            return tagged[0]
    raise CheckpointError(f"the state has an entry that cannot be kept: {str(tree)[:80]}")


def _decode_tagged(tag: str, inner: object, arrays: Sequence[Array], depth: int) -> tuple[Any] | None:
    """The value in a tuple of one; None if this is not a tagged value."""
    if tag == "float" and inner in ("inf", "-inf", "nan"):
        return (float(inner),)
    if tag == "bytes" and isinstance(inner, str):
        try:
            return (base64.b64decode(inner, validate=True),)
        except binascii.Error:
            return None
    if tag in ("array", "scalar") and type(inner) is int and 0 <= inner < len(arrays):
        return (arrays[inner] if tag == "array" else arrays[inner][()],)
    if tag == "tuple" and isinstance(inner, list):
        return (tuple(_decode(branch, arrays, depth + 1) for branch in inner),)
    if tag == "map" and isinstance(inner, list):
        pairs = [pair for pair in inner if isinstance(pair, list) and len(pair) == 2]
        if len(pairs) == len(inner) and all(type(key) in (str, int) for key, _ in pairs):
            return ({key: _decode(branch, arrays, depth + 1) for key, branch in pairs},)
    return None


def random_state(*generators: np.random.Generator) -> dict[str, Any]:
    """The state of this process's random numbers: Python's, NumPy's global generator, and ``generators``."""
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": {
            "kind": str(kind),
            "keys": keys,
            "place": place,
            "has_gauss": has_gauss,
            "gauss": float(gauss),
        },
        "generators": [generator.bit_generator.state for generator in generators],
    }


def set_random_state(state: Mapping[str, Any], *generators: np.random.Generator) -> None:
    """Continue all random numbers from what `random_state` returned. Raises CheckpointError if it does not fit."""
    try:
        numpy, saved = state["numpy"], state["generators"]
        if len(saved) != len(generators):
            raise CheckpointError(
                f"The checkpoint has the state of {len(saved)} NumPy generators, not of {len(generators)}.",
                hint="Pass the same generators to set_random_state as to random_state.",
            )
        random.setstate(state["python"])
        np.random.set_state(
            (numpy["kind"], numpy["keys"], numpy["place"], numpy["has_gauss"], numpy["gauss"])
        )
        for generator, generator_state in zip(generators, saved, strict=True):
            generator.bit_generator.state = generator_state
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"This is no state of random numbers: {error}.") from error
