"""The arithmetic of reductions: one place, so that every kind of group gives the same bits.

Values are combined in rank order, ``((x0 + x1) + x2) + ...``. float16, bfloat16 and the float8 kinds are
widened to float32, combined there, and rounded once at the end. Integers wrap around as NumPy's do. Minimum
and maximum propagate NaN. The mean is the sum divided by the number of ranks, in the wide type.

Where podrun was built with its C module, the module does some reductions (`kernel`), with the same bits: half types
several times faster, because NumPy widens and rounds them one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrun.collectives import linux
from podrun.collectives.group import as_bytes
from podrun.core.errors import UnsupportedError
from podrun.core.executable import Array, Reduction

BLOCK_BYTES = 128 * 1024
"""Reductions work in blocks of this size in bytes of the wide type, so that a block's running result stays in L2."""

_CACHE_BYTES = 1024 * 1024
"""Most bytes of the blocks of all ranks together that are overwritten in place: half of a usual L2 cache."""
_LEAST_BLOCK = 16 * 1024
_PREPARED_BLOCKS = 64

_UFUNCS: dict[Reduction, Any] = {
    Reduction.SUM: np.add,
    Reduction.MEAN: np.add,
    Reduction.MIN: np.minimum,
    Reduction.MAX: np.maximum,
    Reduction.PRODUCT: np.multiply,
}


@functools.cache
def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which values of ``dtype`` are combined: float32 for floats narrower than that."""
    narrow_float = dtype.itemsize < 4 and (dtype.kind == "f" or dtype.name.startswith(("bfloat", "float")))
    return np.dtype(np.float32) if narrow_float else dtype


_IN_C = frozenset(
    (kind, reduction)
    for kinds, reductions in (
        (("float32", "float16", "bfloat16"), _UFUNCS),
        (("float64",), (Reduction.SUM, Reduction.MEAN)),
        (("int32", "int64"), (Reduction.SUM,)),
    )
    for kind in kinds
    for reduction in reductions
)
_KINDS = {"uint32": "int32", "uint64": "int64"}  # sums wrap around alike
_SPECIAL = (0.0, 1.0, 1.0009765625, 3.1e-5, 6e-8, 4.1e-8, 2049.0, 65504.0, 33.3, float("inf"), float("nan"))


@functools.cache
def kernel(dtype: np.dtype[Any], reduction: Reduction) -> tuple[str, str] | None:
    """The C module's names for this reduction; None if there is no module or NumPy does the reduction.

    The module is used if it gives the same bits as NumPy on this processor, including the sign of zeros, whose order
    depends on the processor that NumPy was built for.
    """
    kind = _KINDS.get(dtype.name, dtype.name)
    if linux.c_module is None or not dtype.isnative or (kind, reduction) not in _IN_C:
        return None
    names = kind, reduction.value
    numbers = np.array([sign * x for x in _SPECIAL for sign in (1, -1)], np.float64)
    if dtype.kind in "iu":
        return names
    with np.errstate(all="ignore"):
        parts = [x.astype(dtype) for x in (np.repeat(numbers, numbers.size), np.tile(numbers, numbers.size))]
        ours, theirs = np.empty_like(parts[0]), np.empty_like(parts[0])
        reduce_in_numpy(theirs, parts, reduction)
    linux.c_module.reduce(in_c(names, parts, [ours]))
    same = (as_bytes(ours) == as_bytes(theirs)).reshape(ours.size, -1).all(axis=1)
    return names if bool((same | (np.isnan(ours) & np.isnan(theirs))).all()) else None


def in_c(
    kernel_names: tuple[str, str], parts: Sequence[Array], outs: Sequence[Array]
) -> tuple[str, str, list[Array], list[Array]]:
    """A reduction as the C module takes it: its `kernel`, and the memory of its operands and results."""
    return *kernel_names, [as_bytes(part) for part in parts], [as_bytes(out) for out in outs]


def check_reduction(dtype: np.dtype[Any], reduction: Reduction) -> None:
    """Raise UnsupportedError for a reduction that has no meaning for the dtype."""
    if reduction is Reduction.MEAN and dtype.kind in "iub":
        raise UnsupportedError(
            f"the mean of {dtype.name} is not defined",
            hint="Reduce with SUM and divide, or use a float type.",
        )
    if dtype.kind not in "iufV" or (dtype.kind == "V" and wide_dtype(dtype) == dtype):
        raise UnsupportedError(
            f"collectives do not reduce {dtype.name}", hint="Use an integer or a float type."
        )


def combining_ufunc(reduction: Reduction) -> Callable[..., Any]:
    """The ufunc ``f(a, b, out=...)`` that combines two values (the sum's for the mean)."""
    return _UFUNCS[reduction]  # type: ignore[no-any-return]


def reduce_into(out: Array, parts: Sequence[Array], reduction: Reduction) -> None:
    """``out[:] = parts[0] (+) parts[1] (+) ...``, in order. Flat arrays of one dtype and size, without overlap.

    Callers handle ``Reduction.LOCAL`` themselves.
    """
    if wide_dtype(out.dtype) != out.dtype and (names := kernel(out.dtype, reduction)) is not None:
        linux.c_module.reduce(in_c(names, parts, [out]))
    else:
        reduce_in_numpy(out, parts, reduction)


def reduce_in_numpy(out: Array, parts: Sequence[Array], reduction: Reduction) -> None:
    """`reduce_into` without the C module."""
    wide = wide_dtype(out.dtype)
    step = BLOCK_BYTES // wide.itemsize
    if out.size <= step and wide == out.dtype:
        _reduce_block(out, parts, reduction)
        return
    scratch = np.empty((2, min(step, out.size)), wide) if wide != out.dtype else None
    for start in range(0, out.size, step):
        block = slice(start, min(start + step, out.size))
        if scratch is None:
            _reduce_block(out[block], [part[block] for part in parts], reduction)
        else:
            _reduce_narrow(out[block], [part[block] for part in parts], reduction, scratch)


def prepared(out: Array, parts: Sequence[Array], reduction: Reduction) -> Callable[[], None]:
    """`reduce_into` prepared for repeated use: for few blocks, only the calls of their ufuncs remain."""
    plain = wide_dtype(out.dtype) == out.dtype and reduction is not Reduction.MEAN
    step = BLOCK_BYTES // out.itemsize
    if len(parts) < 2 or not plain or out.size > _PREPARED_BLOCKS * step:
        return lambda: reduce_into(out, parts, reduction)
    ufunc = combining_ufunc(reduction)
    cuts = [slice(start, start + step) for start in range(0, out.size, step)]
    blocks = [(out[cut], parts[0][cut], parts[1][cut], [part[cut] for part in parts[2:]]) for cut in cuts]
    if len(parts) == 2 and len(blocks) == 1:
        if ufunc is np.add:
            return functools.partial(np.add, parts[0], parts[1], out)  # cheaper than with keywords
        return functools.partial(ufunc, parts[0], parts[1], out=out)

    def run() -> None:
        for total, first, second, rest in blocks:
            ufunc(first, second, out=total)
            for part in rest:
                ufunc(total, part, out=total)

    return run


def fastest(out: Array, parts: Sequence[Array], reduction: Reduction) -> Callable[[], object]:
    """`reduce_into` prepared for repeated use, by the C module where it has this reduction: it reads each value once,
    where NumPy stores and reads a sum for each part."""
    names = kernel(out.dtype, reduction)
    if names is None:
        return prepared(out, parts, reduction)
    return functools.partial(linux.c_module.reduce, in_c(names, parts, [out]))


def prepared_in_place(parts: Sequence[Array], reduction: Reduction) -> Callable[[], None]:
    """Write the result of `reduce_into` to every part, block by block.

    The values are still in the cache when they are overwritten, so this costs little more than reading them once.
    """
    step = max(_LEAST_BLOCK, _CACHE_BYTES // (len(parts) + 1)) // parts[0].itemsize
    size = parts[0].size
    scratch = np.empty(min(step, size), parts[0].dtype)

    def block(start: int) -> tuple[Callable[[], None], Array, list[Array]]:
        views = [part[start : start + step] for part in parts]
        total = scratch[: views[0].size]
        return prepared(total, views, reduction), total, views

    starts = range(0, size, step)
    ready = [block(start) for start in starts] if len(starts) <= _PREPARED_BLOCKS else None

    def run() -> None:
        for reduce, total, views in ready if ready is not None else map(block, starts):
            reduce()
            for view in views:
                view[:] = total

    return run


def finish_mean(total: Array, count: int) -> None:
    """Divide the wide total by the number of ranks, in place."""
    np.divide(total, total.dtype.type(count), out=total)


def _reduce_block(out: Array, parts: Sequence[Array], reduction: Reduction) -> None:
    ufunc = _UFUNCS[reduction]
    if len(parts) == 1:
        out[:] = parts[0]
    else:
        ufunc(parts[0], parts[1], out=out)
        for part in parts[2:]:
            ufunc(out, part, out=out)
    if reduction is Reduction.MEAN:
        finish_mean(out, len(parts))


def _reduce_narrow(out: Array, parts: Sequence[Array], reduction: Reduction, scratch: Array) -> None:
    ufunc = _UFUNCS[reduction]
    total, widened = scratch[0, : out.size], scratch[1, : out.size]
    total[:] = parts[0]
    for part in parts[1:]:
        widened[:] = part
        ufunc(total, widened, out=total)
    if reduction is Reduction.MEAN:
        finish_mean(total, len(parts))
    out[:] = total
