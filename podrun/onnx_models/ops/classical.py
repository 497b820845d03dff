"""Classical machine learning (ai.onnx.ml, TfIdfVectorizer) and signal processing (Fourier transforms, windows, mel).

Of ai.onnx.ml, the operators that take numbers and have static shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InputMismatch, UnsupportedError
from podrun.numerics.precision import rounds_once
from podrun.onnx_models.ops.common import Array, axis_in, onnx_dtype
from podrun.onnx_models.ops.registry import ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context

ML = "ai.onnx.ml"


@operator(ML, "ArrayFeatureExtractor", since=(1,))
def array_feature_extractor(ctx: Context, node: Node, x: Array, y: Array) -> Array:
    """The columns of x that y names, ``[..., n]`` to ``[..., k]``; a vector becomes one row (ONNX-ML)."""
    chosen = jnp.take(x, y.reshape(-1), axis=-1)
    return chosen.reshape(1, -1) if x.ndim == 1 else chosen


@operator(ML, "Binarizer", since=(1,))
def binarizer(ctx: Context, node: Node, x: Array) -> Array:
    """1 where x is greater than ``threshold``, else 0, in x's type (ONNX-ML Binarizer)."""
    return (x > np.asarray(node.get("threshold", 0.0)).astype(x.dtype)).astype(x.dtype)


@operator(ONNX, "TfIdfVectorizer", since=(9,))
def tf_idf_vectorizer(ctx: Context, node: Node, x: Array) -> Array:
    """How often each n-gram of a pool of integers occurs in a row, with gaps of up to ``max_skip_count``: ``[c]`` or
    ``[n, c]`` to one column for each n-gram (ONNX TfIdfVectorizer; modes TF, IDF, TFIDF). Pools of strings are refused.
    """
    if node.get("pool_strings"):
        raise UnsupportedError(f"{node.describe()} has a pool of strings, which are not computed on IPUs")
    columns, mode = np.asarray(node["ngram_indexes"]), node["mode"]
    weights = np.asarray(node.get("weights") or [1.0] * len(columns), np.float32)
    rows = x.reshape(1, -1) if x.ndim < 2 else x
    result = jnp.zeros((rows.shape[0], int(columns.max()) + 1), jnp.float32)
    first = 0
    for length, grams in enumerate(_grams(node["pool_int64s"], node["ngram_counts"]), start=1):
        places = slice(first, first + len(grams))
        first += len(grams)
        if not grams or not node["min_gram_length"] <= length <= node["max_gram_length"]:
            continue
        matches = sum(
            _occurrences(rows, np.asarray(grams), gap)
            for gap in range(1, 2 if length == 1 else node["max_skip_count"] + 2)
        )
        if mode == "IDF":
            matches = (matches > 0).astype(jnp.float32)
        scale = weights[places] if mode in ("IDF", "TFIDF") else np.ones(len(grams), np.float32)
        result = result.at[:, columns[places]].add(matches * scale)
    return result[0] if x.ndim < 2 else result


def _grams(pool: Sequence[int], starts: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """The pool's n-grams by length, from 1; ``starts[n - 1]`` is where those of length n begin."""
    ends = [*starts[1:], len(pool)]
    return [
        [tuple(pool[i : i + n]) for i in range(start, end, n)]
        for n, (start, end) in enumerate(zip(starts, ends, strict=True), start=1)
    ]


def _occurrences(rows: Array, grams: np.ndarray, gap: int) -> Array:
    """How often each of ``grams [g, n]`` occurs in ``rows [r, c]``, its items ``gap`` apart: float32 ``[r, g]``."""
    length = grams.shape[1]
    windows = rows.shape[1] - (length - 1) * gap
    if windows <= 0:
        return jnp.zeros((rows.shape[0], len(grams)), jnp.float32)
    items = jnp.stack([rows[:, j * gap : j * gap + windows] for j in range(length)], axis=-1)
    equal = (items[:, :, None, :] == jnp.asarray(grams, rows.dtype)).all(axis=-1)
    return equal.sum(axis=1).astype(jnp.float32)


_COMPARE: dict[int, Callable[[Any, Any], Any]] = {
    0: jnp.less_equal,
    1: jnp.less,
    2: jnp.greater_equal,
    3: jnp.greater,
    4: jnp.equal,
    5: jnp.not_equal,
}
_MEMBER = 6
_SUM, _AVERAGE = 1, 0


@operator(ML, "TreeEnsemble", since=(5,))
def tree_ensemble(ctx: Context, node: Node, x: Array) -> Array:
    """Sums (or averages) over decision trees of what the leaves that rows of ``x [n, features]`` reach say for their
    targets, ``[n, targets]`` (ONNX-ML TreeEnsemble; post_transform none, softmax or logistic).
    """
    aggregate, after = node.get("aggregate_function", _SUM), node.get("post_transform", 0)
    if aggregate not in (_SUM, _AVERAGE) or after not in (0, 1, 2):
        raise UnsupportedError(
            f"{node.describe()} aggregates or transforms in a way that is not computed here"
        )
    values, targets = np.asarray(node["leaf_weights"]), np.asarray(node["leaf_targetids"])
    following = _next_nodes(node)
    roots, lead = np.asarray(node["tree_roots"]), jnp.asarray(following)
    current = jnp.broadcast_to(jnp.asarray(roots, jnp.int32), (x.shape[0], len(roots)))
    for _ in range(_depth(following, roots)):
        inner = jnp.minimum(current, len(following) - 1)
        reached = jnp.where(_holds(node, x, inner), lead[inner, 0], lead[inner, 1])
        current = jnp.where(current < len(following), reached, current)
    leaf = current - len(following)
    share = jnp.asarray(values, x.dtype)[leaf]
    chosen = jnp.asarray(targets)[leaf][..., None] == jnp.arange(node["n_targets"])
    total = jnp.where(chosen, share[..., None], jnp.zeros((), x.dtype)).sum(axis=1)
    if aggregate == _AVERAGE:
        total = total / len(roots)
    if after == 1:
        return jax.nn.softmax(total, axis=-1)
    return jax.nn.sigmoid(total) if after == 2 else total


def _next_nodes(node: Node) -> np.ndarray:
    """``[nodes, 2]``: where a node leads if its condition holds and if not; leaves are counted on behind nodes."""
    count = len(node["nodes_featureids"])
    sides = (("nodes_truenodeids", "nodes_trueleafs"), ("nodes_falsenodeids", "nodes_falseleafs"))
    columns = [np.asarray(node[ids]) + count * np.asarray(node[leaf]) for ids, leaf in sides]
    return np.stack(columns, axis=-1).astype(np.int32)


def _depth(following: np.ndarray, roots: np.ndarray) -> int:
    """Steps from the roots until only leaves are left. ValueError for nodes that lead back to themselves."""
    reached, steps = set(roots.tolist()), 0
    while reached:
        if steps > len(following):
            raise InputMismatch("the trees' nodes lead in a circle")
        reached = {int(n) for i in reached for n in following[i] if n < len(following)}
        steps += 1
    return steps


def _holds(node: Node, x: Array, at: Array) -> Array:
    """Whether the condition of node ``at [n, trees]`` holds for each row."""
    features, modes = np.asarray(node["nodes_featureids"]), np.asarray(node["nodes_modes"])
    seen = jnp.take_along_axis(x, jnp.asarray(features)[at], axis=1)
    split, mode = jnp.asarray(np.asarray(node["nodes_splits"]), x.dtype)[at], jnp.asarray(modes)[at]
    held = jnp.zeros(at.shape, bool)
    for number, compare in _COMPARE.items():
        held = jnp.where(mode == number, compare(seen, split), held)
    members = _members(node, modes)
    if members is not None:
        within = (seen[..., None] == jnp.asarray(members, x.dtype)[at]).any(axis=-1)
        held = jnp.where(mode == _MEMBER, within, held)
    missing = node.get("nodes_missing_value_tracks_true")
    if missing:
        held = held | (jnp.isnan(seen) & jnp.asarray(np.asarray(missing, bool))[at])
    return held


def _members(node: Node, modes: np.ndarray) -> np.ndarray | None:
    """``[nodes, most]``: the set of each node that tests membership, filled up with NaN, which equals nothing."""
    if not (modes == _MEMBER).any():
        return None
    sets: list[list[float]] = [[]]
    for value in np.asarray(node["membership_values"], np.float64).tolist():
        if np.isnan(value):
            sets.append([])
        else:
            sets[-1].append(value)
    table = np.full((len(modes), max(map(len, sets)) or 1), np.nan)
    for place, members in zip(np.flatnonzero(modes == _MEMBER), sets, strict=False):
        table[place, : len(members)] = members
    return table


def _complex(x: Array) -> Array:
    """The last axis (1: real, 2: real and imaginary) as complex numbers."""
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _pairs(z: Array, dtype: Any) -> Array:
    return jnp.stack([jnp.real(z), jnp.imag(z)], axis=-1).astype(dtype)


def _dft(ctx: Context, node: Node, x: Array, axis: int, length: int | None) -> Array:
    """The transform in x's type; forward, where 64-bit types are to be had, computed in them and rounded once."""
    if ctx.x64 and x.dtype == jnp.float32 and not node.get("inverse", 0):
        return _dft(ctx, node, x.astype(jnp.float64), axis, length).astype(x.dtype)
    onesided, inverse = bool(node.get("onesided", 0)), bool(node.get("inverse", 0))
    size = x.shape[axis]
    if inverse and onesided:
        count = 2 * (size - 1) if length is None else length
        return jnp.fft.irfft(_complex(x), n=count, axis=axis)[..., None].astype(x.dtype)
    count = size if length is None else length
    z = _complex(x)
    spectrum = jnp.fft.ifft(z, n=count, axis=axis) if inverse else jnp.fft.fft(z, n=count, axis=axis)
    if onesided:
        spectrum = jnp.take(spectrum, np.arange(count // 2 + 1), axis=axis)
    return _pairs(spectrum, x.dtype)


@operator(ONNX, "DFT", since=(17,))
@rounds_once
def dft_attribute(ctx: Context, node: Node, x: Array, length: Array = None) -> Array:
    """Discrete Fourier transform along the attribute ``axis``; complex numbers in the last axis (ONNX DFT 17)."""
    count = None if length is None else int(ctx.constant(1).reshape(()))
    return _dft(ctx, node, x, axis_in(node.get("axis", 1), x.ndim), count)


@operator(ONNX, "DFT", since=(20,))
@rounds_once
def dft(ctx: Context, node: Node, x: Array, length: Array = None, axis: Array = None) -> Array:
    """Discrete Fourier transform along an axis given as input, -2 by default (ONNX DFT 20)."""
    count = None if length is None else int(ctx.constant(1).reshape(()))
    along = -2 if axis is None else int(ctx.constant(2).reshape(()))
    return _dft(ctx, node, x, axis_in(along, x.ndim), count)


@operator(ONNX, "STFT", since=(17,))
@rounds_once
def stft(
    ctx: Context, node: Node, x: Array, step: Array, window: Array = None, length: Array = None
) -> Array:
    """Fourier transforms of windows ``step`` apart: ``[N, frames, bins, 2]`` (ONNX STFT)."""
    hop = int(ctx.constant(1).reshape(()))
    if length is not None:
        size = int(ctx.constant(3).reshape(()))
    else:
        size = x.shape[-2] if window is None else window.shape[0]
    frames = 1 + (x.shape[-2] - size) // hop
    index = np.arange(frames)[:, None] * hop + np.arange(size)[None, :]
    z = _complex(x)[:, index]
    z = z if window is None else z * window
    spectrum = jnp.fft.fft(z, axis=-1)
    spectrum = spectrum[..., : size // 2 + 1] if node.get("onesided", 1) else spectrum
    return _pairs(spectrum, x.dtype)


def _window(name: str, terms: tuple[float, ...]) -> None:
    def apply(ctx: Context, node: Node, size: Array) -> Array:
        count = int(ctx.constant(0).reshape(()))
        intervals = count if node.get("periodic", 1) else count - 1
        n = np.arange(count, dtype=np.float64)
        values = sum(a * np.cos(2 * np.pi * k * n / intervals) for k, a in enumerate(terms))
        return jnp.asarray(np.asarray(values), onnx_dtype(node.get("output_datatype", 1), ctx))

    apply.__doc__ = (
        f"The {name} of a size known while tracing: a sum of cosines with weights {terms} (ONNX {name})."
    )
    apply.__name__ = name.lower()
    operator(ONNX, name, since=(17,))(apply)


_window("HannWindow", (0.5, -0.5))
_window("HammingWindow", (25 / 46, -21 / 46))
_window("BlackmanWindow", (0.42, -0.5, 0.08))


@operator(ONNX, "MelWeightMatrix", since=(17,))
def mel_weight_matrix(
    ctx: Context, node: Node, bins: Array, length: Array, rate: Array, low: Array, high: Array
) -> Array:
    """Triangular weights from spectrogram bins to mel bins ``[length / 2 + 1, bins]`` (ONNX MelWeightMatrix)."""
    count, size, sample, first, last = (float(ctx.constant(i).reshape(())) for i in range(5))
    mels = [2595 * np.log10(1 + f / 700) for f in (first, last)]
    points = np.arange(int(count) + 2) * ((mels[1] - mels[0]) / (count + 2)) + mels[0]
    edges = (((size + 1) * (700 * (10 ** (points / 2595) - 1))) // sample).astype(int)
    matrix = np.zeros((int(size) // 2 + 1, int(count)))
    for i in range(int(count)):
        a, b, c = (int(e) for e in edges[i : i + 3])
        if a == b:
            matrix[b, i] = 1
        else:
            matrix[a : b + 1, i] = (np.arange(a, b + 1) - a) / (b - a)
        if c > b:
            matrix[b:c, i] = (c - np.arange(b, c)) / (c - b)
    return jnp.asarray(matrix, onnx_dtype(node.get("output_datatype", 1), ctx))
