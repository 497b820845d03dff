"""What TensorFlow's libraries write to standard error when they load: kept from users who did not ask for it.

TensorFlow writes these lines before it reads ``TF_CPP_MIN_LOG_LEVEL``, whatever the level is. Only lines about the
search for GPUs and about oneDNN are left out; all others, and Python's own, come out when TensorFlow has loaded.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog"
    rb"|[IWE]\d{4} .*\b(port|cudart_stub|cuda_platform|cuda_executor|cuda_diagnostics|cuda_dnn|cuda_blas|cuda_fft"
    rb"|computation_placer|cpu_feature_guard|gpu_device)\.cc:\d+\]"
)
_STDERR = 2


def without_noise(text: bytes) -> bytes:
    """Standard error without the lines that say which libraries TensorFlow looked for."""
    return b"".join(line for line in text.splitlines(keepends=True) if not _NOISE.search(line))


@contextlib.contextmanager
def quiet_start(*, shown: bool) -> Iterator[None]:
    """Hold standard error back inside, and write it without noise afterwards, also after an error. ``shown``: the user
    chose a level of logging, so that nothing is held back.
    """
    if shown:
        yield
        return
    try:
        own = os.dup(_STDERR)
    except OSError:  # The program has no standard error.
        yield
        return
    sys.stderr.flush()
    try:
        with tempfile.TemporaryFile() as held:
            os.dup2(held.fileno(), _STDERR)
            try:
                yield
            finally:
                sys.stderr.flush()
                os.dup2(own, _STDERR)
                held.seek(0)
                _write_whole(without_noise(held.read()))
    finally:
        os.close(own)


def _write_whole(text: bytes) -> None:
    while text:
        text = text[os.write(_STDERR, text) :]
