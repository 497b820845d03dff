"""What TensorFlow writes when it loads, and which of it users see."""

from __future__ import annotations

import os

import pytest

from podrun.compat._tensorflow_log import quiet_start

NOISE = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    "I0000 00:00:1795811038.215809   20970 cudart_stub.cc:31] Could not find cuda drivers on your machine.\n"
    "E0000 00:00:1795811063.816436   21634 cuda_platform.cc:52] failed call to cuInit: UNKNOWN ERROR (303)\n"
)
OTHERS = "E0000 00:00:1795811063.816436   21634 session.cc:5] out of memory\nDeprecationWarning: old\n"


@pytest.mark.parametrize(("shown", "expected"), [(False, OTHERS), (True, NOISE + OTHERS)])
def test_only_the_search_for_devices_is_left_out(
    capfd: pytest.CaptureFixture[str], shown: bool, expected: str
) -> None:
    with quiet_start(shown=shown):
        os.write(2, (NOISE + OTHERS).encode())
    assert capfd.readouterr().err == expected


def test_an_error_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    def load() -> None:
        with quiet_start(shown=False):
            os.write(2, OTHERS.encode())
            raise ImportError("no library")

    with pytest.raises(ImportError):
        load()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == OTHERS + "after\n"
