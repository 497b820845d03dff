"""Convolutions as oneDNN computes them: forward, the gradient of images, the gradient of weights.

XLA's own convolutions run on one thread at half of the library's speed or less, and those whose kernel is larger than
the image, as gradients of weights are, at a hundredth. A StableHLO convolution says neither which of the three it is
nor which axis is what to the library; `call` finds out. `podrun.device.xla.onednn` makes the calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

LEAST_PRODUCTS = 1 << 16
"""Products of a convolution below which a call is not worth while."""
WORTH_DIVIDING = 1 << 20
"""Products from which on a call of a piece that two threads share is divided in two parts."""


class Kind(IntEnum):
    """What a call computes, of ``dst = src * weights``."""

    FORWARD = 0
    OF_IMAGE = 1
    OF_WEIGHTS = 2


@dataclass(frozen=True, slots=True)
class Convolution:
    """A StableHLO convolution of float32 with two spatial axes: ``[N, *in, C] * [*kernel, C/groups, M] -> [N, *out,
    M]``.

    ``dilation`` spreads the kernel, ``spread`` the image (the gradient of a stride). ``pads`` are (before, after);
    negative ones crop. ``batch_groups``: parts of the batch, each with its own part of M. ``reversed_weights``: the
    kernel's rows and columns are an array's read backwards. ``batch_inside``: the channels are the outermost axis of
    the image.
    """

    image: tuple[int, ...]
    weights: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    spread: tuple[int, ...] = (1, 1)
    groups: int = 1
    batch_groups: int = 1
    reversed_weights: bool = False
    batch_inside: bool = False

    @property
    def out(self) -> tuple[int, ...]:
        """Spatial sizes of the result."""
        return tuple(
            ((n - 1) * u + 1 + before + after - (k - 1) * d - 1) // s + 1
            for n, u, (before, after), k, d, s in zip(
                self.image[1:3],
                self.spread,
                self.pads,
                self.weights[:2],
                self.dilation,
                self.strides,
                strict=True,
            )
        )

    @property
    def result(self) -> tuple[int, ...]:
        """Sizes of the result, channels last."""
        return (self.image[0] // self.batch_groups, *self.out, self.weights[3])

    @property
    def products(self) -> int:
        """Multiplications, those by padding and spread counted."""
        return self.image[0] // self.batch_groups * math.prod(self.out) * math.prod(self.weights)


@dataclass(frozen=True, slots=True)
class ConvolutionCall:
    """A call of the library: `sizes` of ``src`` ``[N, *in, C]`` and of ``dst`` ``[N, *out, M]``, channels last; the
    weights' gradient and the weights lie in any order.

    ``crop``: what is cut off the image before, (before, after) of rows and columns. ``flipped``: the kernel has to be
    reversed before.
    """

    kind: Kind
    src: tuple[int, ...]
    dst: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    groups: int
    crop: tuple[tuple[int, int], ...] = ((0, 0), (0, 0))
    flipped: bool = False

    @property
    def products(self) -> int:
        """Multiplications, those by padding counted."""
        return math.prod(self.dst) * math.prod(self.kernel) * self.src[3] // self.groups

    def numbers(self, weights: tuple[int, ...], follows: tuple[bool, bool, bool], parts: int) -> list[int]:
        """What the native module is told. ``weights``: elements between neighbouring (groups, outputs, inputs, rows,
        columns). ``follows``: whether a bias, another image, a cut at 0 come after."""
        if self.products < WORTH_DIVIDING:
            parts = 1
        flags = sum(1 << at for at, on in enumerate(follows) if on)
        sizes = (*self.src, *self.dst[1:], *self.kernel)
        steps = (*self.strides, *self.dilation, *self.before)
        return [self.kind, flags, self.groups, *sizes, *steps, *weights, parts]


def call(c: Convolution) -> ConvolutionCall | None:
    """The call that computes a convolution, or None where it is too small or the library has none."""
    if min((*c.out, *c.image, *c.weights)) < 1 or c.products < LEAST_PRODUCTS:
        return None
    if c.batch_groups > 1 or (c.batch_inside and c.groups == 1):
        return _of_weights(c)
    if max(c.strides) == 1 and (max(c.spread) > 1 or c.reversed_weights):
        found = _of_image(c)
        if found is not None:
            return found
    return _forward(c)


def _forward(c: Convolution) -> ConvolutionCall | None:
    if max(c.spread) > 1:
        return None
    made = ConvolutionCall(
        Kind.FORWARD, c.image, c.result, c.weights[:2], c.strides, c.dilation, (0, 0), c.groups
    )
    return _cropped(made, c)


def _of_weights(c: Convolution) -> ConvolutionCall | None:
    """The image's batch are the weights' inputs, its channels the batch, and the kernel is the gradient of dst."""
    if max(c.spread) > 1 or c.groups > 1:
        return None
    made = ConvolutionCall(
        Kind.OF_WEIGHTS,
        (c.image[3], *c.image[1:3], c.image[0]),
        (c.weights[2], *c.weights[:2], c.weights[3]),
        c.out,
        c.dilation,
        c.strides,
        (0, 0),
        c.batch_groups,
    )
    return _cropped(made, c)


def _cropped(made: ConvolutionCall, c: Convolution) -> ConvolutionCall:
    """Negative padding, and pixels behind the last that is read, cut off where the library cannot leave them out."""
    crop, src, before = [], [*made.src], []
    for axis, (pad, _) in enumerate(c.pads):
        out, k, s, d = made.dst[1 + axis], made.kernel[axis], made.strides[axis], made.dilation[axis]
        first = max(-pad, 0)
        unread = src[1 + axis] - first + max(pad, 0) - ((out - 1) * s + (k - 1) * d + 1)
        last = unread if unread >= s else 0
        crop.append((first, last))
        src[1 + axis] -= first + last
        before.append(max(pad, 0))
    return replace(made, src=tuple(src), before=tuple(before), crop=tuple(crop))


def _of_image(c: Convolution) -> ConvolutionCall | None:
    """The image is the gradient of dst, spread by the stride; the kernel is read backwards."""
    ends = [(k - 1) * d for k, d in zip(c.weights[:2], c.dilation, strict=True)]
    before = tuple(end - pad for end, (pad, _) in zip(ends, c.pads, strict=True))
    after = [
        (n - 1) * s + end + 1 - size - pad
        for n, s, end, size, pad in zip(c.image[1:3], c.spread, ends, c.out, before, strict=True)
    ]
    if min(before) < 0 or any(pad <= -s for pad, s in zip(after, c.spread, strict=True)):
        return None
    return ConvolutionCall(
        Kind.OF_IMAGE,
        c.result,
        c.image,
        c.weights[:2],
        c.spread,
        c.dilation,
        before,
        c.groups,
        flipped=max(c.weights[:2]) > 1,
    )
