"""What a piece may call: the operations and native functions that a machine takes, each with its shapes and types.

A custom call hands raw memory to a native function, which trusts the shapes that it is given. So each target that a
piece may name stands here with what its operands, results and attributes have to be, and a call that differs is refused
before anything is compiled. A target that is not here is refused by name: among those that XLA knows are some that take
an address to jump to.

The functions are LAPACK's, as jaxlib offers them (``lapack_sgetrf_ffi``: LU of float32). A signature names operands,
then results: an element type (``T`` of the call, ``R`` the real one of T, ``C`` the complex one of T, ``I`` int32) and
sizes. Before them all have the same batch sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from podrun.core.errors import ApplicationRuntimeError

if TYPE_CHECKING:
    from podrun.private_apis.mlir_types import MlirModule, MlirOperation, MlirType

NESTING = 64
"""Most regions inside of each other: loops in loops. Programs of podrun's compiler have less than ten."""
OPERATIONS = 2_000_000
"""Most operations of a piece."""
DIALECTS = frozenset(("builtin", "func", "stablehlo", "chlo"))
_BESIDES = frozenset(("sdy.mesh",))
"""What JAX adds to every module."""
_NOT_ON_A_MACHINE = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("infeed", "outfeed", "send", "recv", "all_gather", "all_reduce", "all_to_all", "reduce_scatter"),
        *("collective_permute", "collective_broadcast", "partition_id", "replica_id", "create_token"),
    )
)
_UPLO, _JOB = {"uplo": b"LU"}, {"mode": b"VN"}
_TYPED_CALL = 4
_TYPES = {
    "s": ("f32", "f32"),
    "d": ("f64", "f64"),
    "c": ("complex<f32>", "f32"),
    "z": ("complex<f64>", "f64"),
}
"""By letter of LAPACK: T and R, as StableHLO names them."""
_NAME = re.compile(r"lapack_([sdcz])(\w+)_ffi")
_REAL, _COMPLEX = "sd", "cz"

Signature = tuple[str, str, Mapping[str, bytes]]
"""Operands, results, and the values that attributes may have: of each the letters."""

SIGNATURES: Mapping[tuple[str, str], Signature] = {
    (_REAL + _COMPLEX, "potrf"): ("T n n", "T n n, I", _UPLO),
    (_REAL + _COMPLEX, "getrf"): ("T m n", "T m n, I min, I", {}),
    (_REAL + _COMPLEX, "geqrf"): ("T m n", "T m n, T min", {}),
    (_REAL, "orgqr"): ("T m n, T k", "T m n", {}),
    (_COMPLEX, "ungqr"): ("T m n, T k", "T m n", {}),
    (_REAL + _COMPLEX, "gesdd"): ("T m n", "T m n, R min, T m u, T v n, I", {"mode": b"ASN"}),
    (_REAL, "syevd"): ("T n n", "T n n, R n, I", {**_UPLO, **_JOB}),
    (_COMPLEX, "heevd"): ("T n n", "T n n, R n, I", {**_UPLO, **_JOB}),
    (_REAL, "geev"): ("T n n", "T n, T n, C n n, C n n, I", {"compute_left": b"VN", "compute_right": b"VN"}),
    (_COMPLEX, "geev"): ("T n n", "T n, T n n, T n n, I", {"compute_left": b"VN", "compute_right": b"VN"}),
    (_REAL, "gees"): ("T n n", "T n n, T n n, T n, T n, I, I", {**_JOB, "sort": b"N"}),
    (_COMPLEX, "gees"): ("T n n", "T n n, T n n, T n, I, I", {**_JOB, "sort": b"N"}),
    (_REAL + _COMPLEX, "trsm"): (
        "T a a, T m n",
        "T m n",
        {**_UPLO, "side": b"LR", "diag": b"UN", "trans_x": b"NTC"},
    ),
    (_REAL + _COMPLEX, "gehrd"): ("T n n", "T n n, T n-1, I", {"low": b"", "high": b""}),
    (_REAL, "sytrd"): ("T n n", "T n n, R n, R n-1, T n-1, I", _UPLO),
    (_COMPLEX, "hetrd"): ("T n n", "T n n, R n, R n-1, T n-1, I", _UPLO),
    (_REAL + _COMPLEX, "gtsv"): ("T n, T n, T n, T n k", "T n, T n, T n, T n k, I", {}),
}
"""By kind of numbers and function. jaxlib: ``jaxlib/cpu/lapack_kernels.cc``; LAPACK Users' Guide, third edition."""


class RefusedPiece(ApplicationRuntimeError):
    """A piece that a machine does not take."""


def check_operations(name: str, module: MlirModule) -> None:
    """Raise RefusedPiece for a module (StableHLO, as MLIR) of Computation ``name`` with anything that is not above."""
    for count, (op, depth) in enumerate(operations_inside(module.operation)):
        if depth > NESTING or count > OPERATIONS:
            raise _refused(name, f"has more than {NESTING} nested regions or {OPERATIONS} operations")
        kind = op.name
        if kind in _NOT_ON_A_MACHINE or (kind.split(".")[0] not in DIALECTS and kind not in _BESIDES):
            raise _refused(name, f"has the operation {kind!r}, which machines do not run")
        if kind == "stablehlo.custom_call":
            check_call(name, op)


def check_calls(name: str, module: MlirModule) -> None:
    """`check_operations` for a module of podrun's own compiler, in which only custom calls have to be looked at."""
    for op, _ in operations_inside(module.operation):
        if op.name == "stablehlo.custom_call":
            check_call(name, op)


def operations_inside(root: MlirOperation) -> Iterator[tuple[MlirOperation, int]]:
    """All operations nested in ``root``, at any depth, each with its depth: 1 for those directly in it."""
    waiting = [(root, 0)]
    while waiting:
        op, depth = waiting.pop()
        for region in op.regions:
            for block in region:
                for inner in block:
                    yield inner.operation, depth + 1
                    if len(inner.operation.regions):
                        waiting.append((inner.operation, depth + 1))


def check_call(name: str, op: MlirOperation) -> None:
    """Raise RefusedPiece for a custom call that is not in `SIGNATURES`, or whose shapes or attributes differ."""
    attributes = {key: op.attributes[key] for key in _keys(op)}
    target = str(attributes["call_target_name"]).strip('"')
    target_match = _NAME.fullmatch(target)
    signature = None if target_match is None else _signature(*target_match.groups())
    if target_match is None or signature is None:
        raise _refused(
            name, f"calls the native function {target!r}, which is not among those that machines have"
        )
    version = attributes.get("api_version")
    config = attributes.get("mhlo.backend_config" if version is None else "backend_config")
    # Typed calls have named attributes: as JAX writes them into files, and as it lowers them.
    typed = type(config).__name__ == "DictAttr" and (version is None or int(version.value) == _TYPED_CALL)
    if config is None or not typed or "called_computations" in attributes:
        raise _refused(name, f"calls {target!r} in another way than JAX does")
    values = {
        key: config[key]
        for key in (attribute if isinstance(attribute, str) else attribute.name for attribute in config)
    }
    operands, results = ([_parsed(v.type) for v in values_] for values_ in (op.operands, op.results))
    wrong = mismatch(
        signature, target_match[1], operands, results, {k: int(v.value) for k, v in values.items()}
    )
    if wrong:
        raise _refused(name, f"calls {target!r} with {wrong}")


def _keys(op: MlirOperation) -> list[str]:
    return [attribute if isinstance(attribute, str) else attribute.name for attribute in op.attributes]


def _signature(letter: str, function: str) -> Signature | None:
    return next((s for (kinds, f), s in SIGNATURES.items() if letter in kinds and f == function), None)


def _parsed(kind: MlirType) -> tuple[str, tuple[int, ...]]:
    """Element type and sizes of a tensor type; sizes that are not fixed are -1."""
    if not hasattr(kind, "shape") or not hasattr(kind, "element_type"):
        return str(kind), (-1,)
    return str(kind.element_type), tuple(
        -1 if kind.is_dynamic_dim(i) else n for i, n in enumerate(kind.shape)
    )


def mismatch(
    signature: Signature,
    letter: str,
    operands: list[tuple[str, tuple[int, ...]]],
    results: list[tuple[str, tuple[int, ...]]],
    attributes: Mapping[str, int],
) -> str:
    """What differs from a signature, for LAPACK's ``letter``; empty: nothing. Tensors are element types and sizes."""
    takes, gives, allowed = signature
    if attributes.keys() != allowed.keys():
        return f"attributes {sorted(attributes)}"
    for key, letters in allowed.items():
        if letters and not (0 <= attributes[key] < 256 and attributes[key] in letters):
            return f"{key} = {attributes[key]}"
    terms = [term.split() for text in (takes, gives) for term in text.split(", ")]
    tensors = [*operands, *results]
    if len(tensors) != len(terms) or len(operands) != len(takes.split(", ")):
        return f"{len(operands)} operands and {len(results)} results"
    element, real = _TYPES[letter]
    types = {"T": element, "R": real, "C": f"complex<{real}>", "I": "i32"}
    rank = len(terms[0]) - 1
    batch = tensors[0][1][: max(len(tensors[0][1]) - rank, 0)]
    sizes: dict[str, int] = {}
    for (kind, *names), (have, shape) in zip(terms, tensors, strict=True):
        inner = shape[len(batch) :]
        if (
            have != types[kind]
            or shape[: len(batch)] != batch
            or len(inner) != len(names)
            or min(shape, default=0) < 0
        ):
            return f"a tensor {have}{list(shape)}"
        for dimension, size in zip(names, inner, strict=True):
            if _size(dimension, sizes, attributes) not in (None, size):
                return f"a tensor {have}{list(shape)}"
            sizes.setdefault(dimension, size)
    return _beyond(sizes, attributes)


def _size(name: str, sizes: Mapping[str, int], attributes: Mapping[str, int]) -> int | None:
    """The size that a name stands for; None if any does."""
    least = min(sizes.get("m", 0), sizes.get("n", 0))
    if name == "min":
        return least
    if name == "n-1":
        return max(sizes["n"] - 1, 0)
    if (
        name in "uv"
    ):  # Of gesdd: all vectors (A; its shapes also where none are wanted), or as many as values (S).
        return least if attributes["mode"] == ord("S") else sizes["m" if name == "u" else "n"]
    if name in ("m", "n") and "a" in sizes and attributes.get("side") == ord("L" if name == "m" else "R"):
        return sizes["a"]
    return sizes.get(name)


def _beyond(sizes: Mapping[str, int], attributes: Mapping[str, int]) -> str:
    """What is wrong with sizes that fit each other."""
    if max(sizes.values(), default=0) >= 1 << 31:
        return f"a size of {max(sizes.values())}"
    if "k" in sizes and "m" in sizes and not sizes["k"] <= sizes["n"] <= sizes["m"]:  # orgqr, ungqr
        return f"{sizes['k']} reflectors for {sizes['m']} x {sizes['n']}"
    if "low" in attributes and not 1 <= attributes["low"] <= attributes["high"] <= max(
        sizes["n"], 1
    ):  # gehrd
        return f"rows {attributes['low']} to {attributes['high']}"
    return ""


def _refused(name: str, what: str) -> RefusedPiece:
    return RefusedPiece(
        f"Computation {name!r} {what}",
        hint="Compile the program again with podrun; do not load programs from sources that you do not trust.",
    )
