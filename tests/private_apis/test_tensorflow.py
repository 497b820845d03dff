"""The symbols of TensorFlow that podrun needs and TensorFlow does not promise."""

from __future__ import annotations

import os
from typing import Any

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


@pytest.mark.slow
def test_a_function_is_converted_unless_it_is_told_not_to_be() -> None:
    import tensorflow as tf

    from podrun.private_apis.tensorflow import original_of

    def double(x: Any) -> Any:
        return x * 2.0

    traced = tf.function(double).get_concrete_function(tf.TensorSpec([], tf.float32))
    assert original_of(tf.function(double)) == (double, True)
    assert original_of(tf.function(double, autograph=False)) == (double, False)
    assert original_of(double) == (double, True)
    assert original_of(traced) == (traced, False)


def test_without_the_name_a_function_is_converted() -> None:
    from podrun.private_apis.tensorflow import original_of

    class OtherFunction:
        python_function = max

    assert original_of(OtherFunction()) == (max, True)
