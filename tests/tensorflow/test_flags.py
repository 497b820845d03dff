"""``TF_POPLAR_FLAGS`` (semantics section 13), read without TensorFlow."""

from __future__ import annotations

import ast

import numpy as np
import pytest

from podrun.compat._tensorflow import uses_sessions_alone
from podrun.core.errors import UsageError
from podrun.runtime.graph import TensorType
from podrun.tensorflow.execution.poplar_flags import CATEGORIES, CurrentFlags, read_flags, synthetic_elements

KINDS = {"x": TensorType(np.dtype(np.float16), (2, 3))}


def test_flags_are_read_with_one_dash_or_two() -> None:
    flags = read_flags(
        {"TF_POPLAR_FLAGS": "--use_synthetic_data -executable_cache_path=/a --log_cycle_count=2"}
    )
    assert flags.synthetic == frozenset(CATEGORIES)
    assert (flags.cache_directory, flags.counted_runs, flags.ipu_model) == ("/a", 2, False)
    assert read_flags({"TF_POPLAR_FLAGS": "--use_ipu_model --max_infeed_threads=8"}).ipu_model
    assert read_flags({}).synthetic == frozenset()


def test_flags_that_a_program_sets_later_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--use_ipu_model")
    flags = CurrentFlags()
    assert flags().ipu_model
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--executable_cache_path=/a")
    assert (flags().cache_directory, flags().ipu_model) == ("/a", False)
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--unknown")
    with pytest.raises(UsageError, match="unknown flag"):
        flags()


def test_categories_choose_synthetic_data() -> None:
    text = "--use_synthetic_data --synthetic_data_categories=infeed,host_embedding"
    assert read_flags({"TF_POPLAR_FLAGS": text}).synthetic == {"infeed", "hostembedding"}


@pytest.mark.parametrize(
    "text",
    [
        "--use_synthetic_dta",
        "word",
        "--synthetic_data_categories=weights",
        "--synthetic_data_initializer=x",
        "--log_cycle_count=-1",
    ],
)
def test_what_is_unknown_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="TF_POPLAR_FLAGS"):
        read_flags({"TF_POPLAR_FLAGS": text})


@pytest.mark.parametrize(("initializer", "low", "high"), [("3", 3, 3), ("uniform", 0, 1), ("", 0, 0)])
def test_synthetic_elements_are_what_the_initializer_says(initializer: str, low: float, high: float) -> None:
    value = next(synthetic_elements(KINDS, initializer))["x"]
    assert value.shape == (2, 3)
    assert value.dtype == np.float16
    assert low <= value.min() <= value.max() <= high
    assert next(synthetic_elements(KINDS, "normal"))["x"].min() < 0


def test_programs_with_sessions_alone_are_of_version_1() -> None:
    first = "import tensorflow.compat.v1 as tf"
    for rest, expected in [
        ("tf.Session(graph=graph)", True),
        ("x = tf.placeholder(tf.float32, [])", True),
        ("tf.train.AdamOptimizer(0.1)", False),
        ("tf.Session(); ipu.ipu_strategy.IPUStrategy()", False),
        ("tf.enable_eager_execution(); tf.Session()", False),
    ]:
        assert uses_sessions_alone([ast.parse(first), ast.parse(f"{first}\n{rest}")]) is expected, rest
    assert not uses_sessions_alone([ast.parse("import tensorflow as tf\ntf.compat.v1.Session()")])
