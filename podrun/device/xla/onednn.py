"""The oneDNN that computes convolutions: where it is, whether it may be used, how XLA calls it.

The library is the one of the package ``onednn-cpu-gomp``; ``podrun.device.xla._onednn``, podrun's own C module, loads
it and is called by XLA through its foreign function interface. The library runs on one thread; a large call is divided
in two by the module, whose one kind of thread it understands (`podrun/device/xla/native`). Before it is first used it
computes some small convolutions, compared with NumPy. Where anything is missing or wrong, XLA's convolutions are used,
and one message says so.
"""

from __future__ import annotations

import functools
import importlib
import logging
import platform
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from podrun.core.environment import environment
from podrun.core.errors import UsageError
from podrun.device.xla.convolutions import ConvolutionCall, Kind
from podrun.private_apis.jax import convolutions_problem

_log = logging.getLogger(__name__)
TARGET = "podrun_convolution"
"""The name of the call in a program."""
VARIABLE = "PODRUN_CONVOLUTIONS"
"""An environment variable; ``xla`` keeps to XLA's convolutions."""
PACKAGE, LIBRARY = "onednn-cpu-gomp", "libdnnl.so.3"
_starting = threading.Lock()


def wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the library is to be used if it can. Raises UsageError for a value that has no meaning."""
    choice = environment(environ).get(VARIABLE, "onednn")
    if choice not in ("onednn", "xla"):
        raise UsageError(
            f"{VARIABLE} is {choice!r}; set it to xla (XLA's own convolutions) or onednn, or unset it"
        )
    return choice == "onednn"


def formulation() -> str:
    """What is to compute convolutions, as caches of compiled programs name it. Loads nothing."""
    return "onednn" if wanted() else "xla"


def available() -> bool:
    """Whether the library is there and computes right. Says once what is wrong."""
    if not wanted():
        return False
    with _starting:
        return _started()


@functools.cache
def _started() -> bool:
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    try:
        _start()
    except Exception as error:  # whatever a file, a library or another jaxlib can do
        _log.warning(
            "convolutions are XLA's own and slower (twice as long or more, in training up to forty times): %s. "
            "To repair it: pip install --force-reinstall podrun %s; to hide this message: export %s=xla.",
            error,
            PACKAGE,
            VARIABLE,
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
    module.load(_path())
    check(module.compute)
    jax: Any = importlib.import_module("jax")
    jax.ffi.register_ffi_target(TARGET, module.handler(), platform="cpu")


def _path() -> str:
    """The library's file. It lies beside Python's own libraries, not among its packages."""
    metadata: Any = importlib.import_module("importlib.metadata")
    try:
        files = metadata.distribution(PACKAGE).files or ()
    except metadata.PackageNotFoundError as error:
        raise RuntimeError(f"the package {PACKAGE} is not installed") from error
    for file in files:
        if file.name == LIBRARY:
            return str(file.locate().resolve())
    raise RuntimeError(f"the package {PACKAGE} holds no {LIBRARY}")


def algorithms(numbers: list[int]) -> str:
    """The names of the library's algorithms for a call; empty if it has none that is worth using."""
    module: Any = importlib.import_module("podrun.device.xla._onednn")
    try:
        names = str(module.prepare(numbers))
    except ValueError:
        return ""
    return "" if "ref" in names else names


def check(compute: Any) -> None:
    """Compute small convolutions of each kind on integers, whose sums are exact. RuntimeError: one is wrong."""
    src, dst, kernel, steps = (2, 5, 6, 8), (2, 3, 3, 16), (3, 2), ((2, 2), (1, 1), (1, 0))
    for groups in (1, 8):
        x, y = _integers(src, 3), _integers(dst, 5)
        w = _integers((16, 8 // groups, *kernel), 7)
        given = {Kind.FORWARD: (x, w), Kind.OF_IMAGE: (y, w), Kind.OF_WEIGHTS: (x, y)}
        steps_of_w = [step // w.itemsize for step in w.strides]
        order = (16 // groups * steps_of_w[0], *steps_of_w)
        for (kind, operands), right in zip(given.items(), _plainly(x, w, y, groups), strict=True):
            got = np.empty_like(right)
            numbers = ConvolutionCall(kind, src, dst, kernel, *steps, groups).numbers(order, (False,) * 3, 1)
            for parts in (1, 2):
                compute([*numbers[:-1], parts], operands, got)
                if not np.array_equal(got, right):
                    raise RuntimeError("oneDNN computes wrong numbers on this processor")


def _integers(shape: tuple[int, ...], step: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (np.arange(np.prod(shape)) * step % 11 - 5).astype(np.float32).reshape(shape)


def _plainly(x: Any, w: Any, y: Any, groups: int) -> tuple[Any, Any, Any]:
    """The convolution of `check` and its gradients by x and w, from patches."""
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
