"""Signal processing: Fourier transforms, windows, mel weights."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from podrun.onnx_models.ops.common import Array, axis_in, onnx_dtype, rounds_once
from podrun.onnx_models.ops.registry import ONNX, Context, Node, operator


def _complex(x: Array) -> Array:
    """The last axis (1: real, 2: real and imaginary) as complex numbers."""
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _pairs(z: Array, dtype: Any) -> Array:
    return jnp.stack([jnp.real(z), jnp.imag(z)], axis=-1).astype(dtype)


def _dft(ctx: Context, node: Node, x: Array, axis: int, length: int | None) -> Array:
    """The transform in x's type; forward, where 64-bit types are to be had, computed in them and rounded
    once.
    """
    if ctx.x64 and x.dtype == jnp.float32 and not node.get("inverse", 0):
        return _dft(ctx, node, x.astype(jnp.float64), axis, length).astype(x.dtype)
    onesided, inverse = bool(node.get("onesided", 0)), bool(node.get("inverse", 0))
    size = x.shape[axis]
    if inverse and onesided:
        count = 2 * (size - 1) if length is None else length
        return jnp.fft.irfft(_complex(x), n=count, axis=axis)[..., None].astype(x.dtype)
    count = size if length is None else length
    z = _complex(x)
    made = jnp.fft.ifft(z, n=count, axis=axis) if inverse else jnp.fft.fft(z, n=count, axis=axis)
    if onesided:
        made = jnp.take(made, np.arange(count // 2 + 1), axis=axis)
    return _pairs(made, x.dtype)


@operator(ONNX, "DFT", since=(17,))
@rounds_once
def dft_attribute(ctx: Context, node: Node, x: Array, length: Array = None) -> Array:
    """Discrete Fourier transform along the attribute ``axis``; complex numbers in the last axis (ONNX DFT
    17).
    """
    count = None if length is None else int(ctx.constant(1).reshape(()))
    return _dft(ctx, node, x, axis_in(node.get("axis", 1), x.ndim), count)


@operator(ONNX, "DFT", since=(20,))
@rounds_once
def dft(ctx: Context, node: Node, x: Array, length: Array = None, axis: Array = None) -> Array:
    """Discrete Fourier transform along an axis given as input, -2 by default (ONNX DFT 20)."""
    count = None if length is None else int(ctx.constant(1).reshape(()))
    over = -2 if axis is None else int(ctx.constant(2).reshape(()))
    return _dft(ctx, node, x, axis_in(over, x.ndim), count)


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
    made = jnp.fft.fft(z, axis=-1)
    made = made[..., : size // 2 + 1] if node.get("onesided", 1) else made
    return _pairs(made, x.dtype)


def _window(name: str, terms: tuple[float, ...]) -> None:
    def apply(ctx: Context, node: Node, size: Array) -> Array:
        count = int(ctx.constant(0).reshape(()))
        over = count if node.get("periodic", 1) else count - 1
        n = np.arange(count, dtype=np.float64)
        made = sum(a * np.cos(2 * np.pi * k * n / over) for k, a in enumerate(terms))
        return jnp.asarray(np.asarray(made), onnx_dtype(node.get("output_datatype", 1), ctx))

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
    """Triangular weights from spectrogram bins to mel bins ``[length / 2 + 1, bins]`` (ONNX
    MelWeightMatrix).
    """
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
