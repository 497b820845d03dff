"""The symbols of TensorFlow that podrun needs and TensorFlow does not promise."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")


@pytest.mark.slow
def test_the_installed_tensorflow_has_them_all() -> None:
    from podrun.private_apis.tensorflow import missing_symbols

    assert missing_symbols() == []


@pytest.mark.slow
def test_a_missing_one_is_named_with_its_purpose() -> None:
    from podrun.private_apis import tensorflow as private

    private.REQUIRED["framework.ops.never"] = "is not there"
    try:
        assert private.missing_symbols() == ["framework.ops.never"]
        with pytest.raises(ImportError, match=r"no tensorflow\.python\.framework\.ops\.never.*is not there"):
            private.symbol("framework.ops.never")
    finally:
        del private.REQUIRED["framework.ops.never"]
