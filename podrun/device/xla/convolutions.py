"""Convolutions for oneDNN: which of its three kinds a StableHLO convolution is, and the numbers of its call.

oneDNN computes a convolution forward, the gradient of the image, and the gradient of the weights.

XLA's own convolutions run on one thread at half of the library's speed or less. Those with a kernel larger than the
image (gradients of weights) run at a hundredth of it. A StableHLO convolution names neither its kind nor the meaning of
its axes to the library; `convolution_call` derives both.

The library is that of the package ``onednn-cpu-gomp``. podrun's own C module ``podrun.device.xla._onednn`` loads it,
and XLA calls the module through its foreign function interface. The library runs on the calling thread; the module
divides a large call over two threads of its own (`podrun/device/xla/native`). A process checks the library against
NumPy on small convolutions before it first uses it. If anything is missing or wrong, XLA's convolutions are used, and
one message says so.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import platform
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from podrun.core.environment import PODRUN_CONVOLUTIONS, environment
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.matrix_products import PRODUCT_TARGET, FloatArray, check_products
from podrun.device.xla.own_functions import RANDOM_WORDS_TARGET
from podrun.device.xla.roundings import ROUNDING_TARGET
from podrun.private_apis.jax import convolutions_problem

LEAST_PRODUCTS = 1 << 16
"""Fewest products of a convolution that oneDNN computes; XLA computes smaller ones."""
WORTH_DIVIDING = 1 << 20
"""Fewest products of a call that is divided over two threads, in a piece that two threads share."""


class Kind(IntEnum):
    """Which of the three arrays of ``dst = src * weights`` a call computes."""

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
        """Number of multiplications, including those with padding and spread."""
        return self.image[0] // self.batch_groups * math.prod(self.out) * math.prod(self.weights)


@dataclass(frozen=True, slots=True)
class ConvolutionCall:
    """A call of the library. ``src`` is ``[N, *in, C]`` and ``dst`` ``[N, *out, M]``, channels last; weights and their
    gradient may have any order of axes.

    ``crop``: rows and columns to cut off the image first, (before, after) for each. ``every``: of those left, each so
    many-th is taken. ``flipped``: the kernel has to be reversed first.
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
    every: tuple[int, ...] = (1, 1)
    flipped: bool = False

    @property
    def products(self) -> int:
        """Number of multiplications, including those with padding."""
        return math.prod(self.dst) * math.prod(self.kernel) * self.src[3] // self.groups

    def numbers(
        self,
        weights: tuple[int, ...],
        follows: tuple[bool, bool, bool],
        parts: int,
        worth_dividing: int = WORTH_DIVIDING,
    ) -> list[int]:
        """Arguments of the native module. ``weights``: elements between neighbouring (groups, outputs, inputs, rows,
        columns). ``follows``: whether a bias, another image and a cut at 0 follow. The last but one, at `SHUFFLE`, is
        1: the result's channels stay in their order."""
        if self.products < worth_dividing:
            parts = 1
        flags = sum(1 << at for at, on in enumerate(follows) if on)
        sizes = (*self.src, *self.dst[1:], *self.kernel)
        steps = (*self.strides, *self.dilation, *self.before)
        return [self.kind, flags, self.groups, *sizes, *steps, *weights, 1, parts]


def convolution_call(c: Convolution) -> ConvolutionCall | None:
    """The call that computes a convolution, or None where it is too small or the library has none."""
    if min((*c.out, *c.image, *c.weights)) < 1 or c.products < LEAST_PRODUCTS:
        return None
    if c.batch_groups > 1 or (c.batch_inside and c.groups == 1):
        return _of_weights(c)
    if max(c.strides) == 1 and (max(c.spread) > 1 or c.reversed_weights):
        of_image = _of_image(c)
        if of_image is not None:
            return of_image
    return _forward(c)


def _forward(c: Convolution) -> ConvolutionCall | None:
    if max(c.spread) > 1:
        return None
    call = ConvolutionCall(
        Kind.FORWARD, c.image, c.result, c.weights[:2], c.strides, c.dilation, (0, 0), c.groups
    )
    return _cropped(call, c)


def _of_weights(c: Convolution) -> ConvolutionCall | None:
    """The call for a gradient of weights: the image's batch is the weights' input axis, its channels are the batch,
    and the kernel is the gradient of dst."""
    if max(c.spread) > 1 or c.groups > 1:
        return None
    call = ConvolutionCall(
        Kind.OF_WEIGHTS,
        (c.image[3], *c.image[1:3], c.image[0]),
        (c.weights[2], *c.weights[:2], c.weights[3]),
        c.out,
        c.dilation,
        c.strides,
        (0, 0),
        c.batch_groups,
    )
    return _thinned(_cropped(call, c))


def _thinned(call: ConvolutionCall) -> ConvolutionCall:
    """A gradient of 1x1 weights reads only the pixels at multiples of the stride: the call gets those alone.

    The library copies them for itself, and where there are fewer channels than a vector has elements it writes beyond
    the end of that copy (oneDNN's ``jit_1x1`` with AVX2 and with AVX-512).
    """
    if call.kernel != (1, 1) or max(call.strides) == 1 or max(call.before) > 0:
        return call
    n, *sizes, channels = call.src
    taken = (-(-size // step) for size, step in zip(sizes, call.strides, strict=True))
    return replace(call, src=(n, *taken, channels), strides=(1, 1), every=call.strides)


def _cropped(call: ConvolutionCall, c: Convolution) -> ConvolutionCall:
    """The call with its image cropped by negative padding and by trailing pixels that the library cannot skip."""
    crop, src, before = [], [*call.src], []
    for axis, (pad, _) in enumerate(c.pads):
        out, k, s, d = call.dst[1 + axis], call.kernel[axis], call.strides[axis], call.dilation[axis]
        first = max(-pad, 0)
        unread = src[1 + axis] - first + max(pad, 0) - ((out - 1) * s + (k - 1) * d + 1)
        last = unread if unread >= s else 0
        crop.append((first, last))
        src[1 + axis] -= first + last
        before.append(max(pad, 0))
    return replace(call, src=tuple(src), before=tuple(before), crop=tuple(crop))


def _of_image(c: Convolution) -> ConvolutionCall | None:
    """The call for a gradient of the image: the image is the gradient of dst, dilated by the stride, and the kernel is
    reversed."""
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


_log = logging.getLogger(__name__)
TARGET = "podrun_convolution"
"""The name of the call in a program."""
NETWORK_TARGET = "podrun_network"
"""The name of the call of a chain of layers (`podrun.device.xla.networks`)."""
FORM = 10
"""The form of the numbers of all calls, in the C module too. Programs compiled with another one are compiled again."""
SHUFFLE = -2
"""Which of a call's numbers says that channels are shuffled: as a matrix of so many rows they are stored transposed."""
PACKAGE, LIBRARY = "onednn-cpu-gomp", "libdnnl.so.3"
_starting = threading.Lock()


def wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the library is to be used if it can. Raises UsageError for a value that has no meaning."""
    choice = environment(environ).get(PODRUN_CONVOLUTIONS, "onednn")
    if choice not in ("onednn", "xla"):
        raise UsageError(
            f"{PODRUN_CONVOLUTIONS} is {choice!r}; set it to xla (XLA's own convolutions) or onednn, or unset it"
        )
    return choice == "onednn"


def formulation() -> str:
    """The name, in keys of compiled programs, of the library that computes convolutions. Loads nothing."""
    return f"onednn, {FORM}" if wanted() else "xla"


def available() -> bool:
    """Whether the library is installed and passes its check. Reports once what is wrong."""
    if not wanted():
        return False
    if _was_started():
        return _started()  # Without the lock, which a fork may leave taken in the child.
    with _starting:
        return _started()


def _was_started() -> bool:
    return bool(_started.cache_info().currsize)


def failed_to_load() -> bool:
    """Whether the library was asked for in this process and is not there. Loads nothing."""
    return _was_started() and not _started()


@functools.cache
def _started() -> bool:
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    try:
        _start()
    except Exception as error:  # whatever a file, a library or another jaxlib can do
        _log.warning(
            "convolutions and products are XLA's own and slower (convolutions twice as long or more, in training up to "
            "forty times): %s. "
            "To repair it: pip install --force-reinstall podrun %s; to hide this message: export %s=xla.",
            error,
            PACKAGE,
            PODRUN_CONVOLUTIONS,
        )
        return False
    return True


def _start() -> None:
    problem = convolutions_problem()
    if problem:
        raise RuntimeError(problem)
    try:
        module = importlib.import_module("podrun.device.xla._onednn")
    except ImportError as error:
        raise RuntimeError(f"podrun was installed without its C module ({error})") from error
    if getattr(module, "FORM", 0) != FORM:
        raise RuntimeError("its C module was built from an earlier checkout (there: make)")
    module.load(_path())
    check_convolutions(module.compute)
    check_products(module.multiply)
    import jax

    jax.ffi.register_ffi_target(TARGET, module.handler(), platform="cpu")
    jax.ffi.register_ffi_target(NETWORK_TARGET, module.network_handler(), platform="cpu")
    jax.ffi.register_ffi_target(PRODUCT_TARGET, module.product_handler(), platform="cpu")
    jax.ffi.register_ffi_target(ROUNDING_TARGET, module.rounding_handler(), platform="cpu")
    jax.ffi.register_ffi_target(RANDOM_WORDS_TARGET, module.random_words_handler(), platform="cpu")


def _path() -> str:
    """Path of the library, which is installed beside Python's own libraries and not among its packages."""
    from importlib import metadata

    try:
        files = metadata.distribution(PACKAGE).files or ()
    except metadata.PackageNotFoundError as error:
        raise RuntimeError(f"the package {PACKAGE} is not installed") from error
    for file in files:
        if file.name == LIBRARY:
            return str(Path(file.locate()).resolve())
    raise RuntimeError(f"the package {PACKAGE} holds no {LIBRARY}")


def algorithms(numbers: list[int]) -> str:
    """The names of the library's algorithms for a call; empty if it has none that is worth using."""
    module: Any = importlib.import_module("podrun.device.xla._onednn")
    try:
        names = str(module.prepare(numbers))
    except ValueError:
        return ""
    return "" if "ref" in names else names


def check_convolutions(
    compute: Callable[[list[int], tuple[FloatArray, FloatArray], FloatArray], None],
) -> None:
    """Compare small convolutions of each kind on integers, whose sums are exact. RuntimeError if one is wrong."""
    src, dst, kernel, steps = (2, 5, 6, 8), (2, 3, 3, 16), (3, 2), ((2, 2), (1, 1), (1, 0))
    for groups in (1, 8):
        x, y = _integers(src, 3), _integers(dst, 5)
        w = _integers((16, 8 // groups, *kernel), 7)
        operands_of = {Kind.FORWARD: (x, w), Kind.OF_IMAGE: (y, w), Kind.OF_WEIGHTS: (x, y)}
        steps_of_w = [step // w.itemsize for step in w.strides]
        order = (16 // groups * steps_of_w[0], *steps_of_w)
        for (kind, operands), right in zip(operands_of.items(), _plainly(x, w, y, groups), strict=True):
            got = np.empty_like(right)
            numbers = ConvolutionCall(kind, src, dst, kernel, *steps, groups).numbers(order, (False,) * 3, 1)
            for parts in (1, 2):
                compute([*numbers[:-1], parts], operands, got)
                if not np.array_equal(got, right):
                    raise RuntimeError("oneDNN computes wrong numbers on this processor")


def _integers(shape: tuple[int, ...], step: int) -> FloatArray:
    return (np.arange(np.prod(shape)) * step % 11 - 5).astype(np.float32).reshape(shape)


def _plainly(
    x: FloatArray, w: FloatArray, y: FloatArray, groups: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """NumPy's convolution of `check_convolutions`, with its gradients by x and w, computed from patches."""
    wide = np.zeros((2, 7, 6, 8), np.float32)
    wide[:, 1:6] = x
    at = [(slice(None), slice(i, i + 5, 2), slice(j, j + 5, 2)) for i in range(3) for j in range(2)]
    patches = np.stack([wide[place] for place in at], -1).reshape(2, 3, 3, groups, -1, 6)
    kernels, wanted = w.reshape(groups, -1, 8 // groups, 6), y.reshape(2, 3, 3, groups, -1)
    forward = np.einsum("nhwgcp,gmcp->nhwgm", patches, kernels).reshape(y.shape)
    of_weights = np.einsum("nhwgcp,nhwgm->gmcp", patches, wanted).reshape(w.shape)
    back = np.einsum("nhwgm,gmcp->nhwgcp", wanted, kernels).reshape(2, 3, 3, 8, 6)
    of_image = np.zeros_like(wide)
    for number, place in enumerate(at):
        of_image[place] += back[..., number]
    return forward, of_image[:, 1:6], of_weights
