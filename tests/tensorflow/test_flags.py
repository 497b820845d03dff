"""``TF_POPLAR_FLAGS`` (semantics section 13), read without TensorFlow."""

from __future__ import annotations

import ast
import importlib
import sys
import types

import numpy as np
import pytest

from podrun.compat._tensorflow import SdkFinder
from podrun.compat._tensorflow_contrib import contrib_module
from podrun.compat._tensorflow_version import uses_rarer_names, uses_sessions_alone, uses_version_1
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
    first = "import tensorflow.compat.v1 as tf\nfrom tensorflow.python import ipu"
    drawn = "import tensorflow as tf2\ntf.Session(); tf2.random.uniform([2])"
    for rest, expected in [
        ("tf.Session(graph=graph)", True),
        ("x = tf.placeholder(tf.float32, [])", True),
        ("tf.train.AdamOptimizer(0.1)", False),
        ("tf.Session(); ipu.ipu_strategy.IPUStrategy()", False),
        ("tf.enable_eager_execution(); tf.Session()", False),
        ("tf.Session(); model.fit(x)", False),
        ("tf.Session(); tf.keras.layers.Dense(1)", True),
        ("tf.Session(); tf.keras.layers.Dense(1); model.predict(x)", False),
        (
            "tf.Session(); tf.keras.layers.Dense(1)\n"
            "ipu.ipu_pipeline_estimator.IPUPipelineEstimator(fn).evaluate(x)",
            True,
        ),
        ("tf.Session(); tf.keras.layers.Dense(1); tf.estimator.Estimator(fn).fit(x)", False),
        ("from tensorflow import keras\ntf.Session(); keras.layers.Dense(1)", True),
        ("from tensorflow import keras\ntf.Session(); keras.models.load_model('m')", False),
        ("tf.Session(); print(x.numpy())", False),
        ("tf.Session(); next(data.as_numpy_iterator())", False),
        ("import tensorflow as tf2\ntf.Session(); print(tf2.constant(1) + 1)", False),
        ("from tensorflow import constant\ntf.Session(); print(int(constant(1)))", False),
        ("from tensorflow import *\ntf.Session()", False),
        (f"{drawn}\nipu.ipu_compiler.compile(net)", True),
        (f"{drawn}\nfrom tensorflow.python.ipu.ipu_compiler import compile\ncompile(net)", True),
        (f"{drawn}\nmodel.compile(loss)", False),
        (f"{drawn}\nwith graph.as_default():\n    ipu.ipu_compiler.compile(net)", False),
        (f"{drawn}\ntf.disable_eager_execution(); ipu.ipu_compiler.compile(net)", False),
        ("import tensorflow.keras\ntf.Session()", True),
        ("import tensorflow.python\ntf.Session(); tensorflow.add(1, 2)", False),
        ("import tensorflow as tf2\ntf.Session()\nwith tf2.control_dependencies([x]):\n    pass", True),
        ("import tensorflow as tf2\ntf.Session(); tf2.float32; tf2.compat.v1.add(x, y)", True),
    ]:
        trees = [ast.parse(first), ast.parse(f"{first}\n{rest}")]
        assert uses_sessions_alone(trees) is expected, rest
        assert uses_sessions_alone(trees[::-1]) is expected, rest


def test_rarer_names_of_version_1_tell_a_program_that_is_built_before_it_runs() -> None:
    tf = pytest.importorskip("tensorflow")
    first = "import tensorflow as tf\nfrom tensorflow.python import ipu"
    for rest, expected in [
        ("tf.gfile.FastGFile(path)", True),
        ("tf.train.AdamOptimizer(0.1)", True),
        ("tf.losses.sparse_softmax_cross_entropy(x, y)", True),
        ("tf.nn.rnn_cell.LSTMCell(4)", True),
        ("tf.div(a, b)", True),
        ("tf.train.Checkpoint(); tf.nn.relu(x); tf.io.gfile.GFile(path)", False),
        ("tf.compat.v1.train.AdamOptimizer(0.1)", False),
        ("tf.keras.optimizers.Adam(0.1); tf.nosuchname", False),
        ("tf.gfile.GFile(path); model.fit(x)", False),
        ("tf.log(x); print(x.numpy())", False),
        ("tf.train.AdamOptimizer(0.1)\n@tf.function\ndef step(): pass", False),
    ]:
        trees = [ast.parse("import model"), ast.parse(f"{first}\n{rest}")]
        assert uses_rarer_names(trees, tf) is expected, rest
    assert not uses_rarer_names([ast.parse("import tensorflow as tf\ntf.log(x)")], tf)
    assert uses_version_1(ast.parse("from tensorflow.contrib.seq2seq import dynamic_decode"))
    assert not uses_version_1(ast.parse("from tensorflow.contributed import names"))


FOR_BOTH_VERSIONS = [
    "try:\n    from tensorflow.contrib import tpu\nexcept ImportError:\n    tpu = None",
    "try:\n    import tensorflow.contrib.tpu\nexcept:\n    pass",
    "try:\n    tf.Session\nexcept (AttributeError, ValueError):\n    pass",
    "if options.tpu:\n    import tensorflow.contrib.tpu",
    "if tf.__version__.startswith('1.'):\n    saver = tf.train.Saver(); tf.Session()",
    "if hasattr(tf, 'set_random_seed'):\n    tf.set_random_seed(1)\nelse:\n    tf.random.set_seed(1)",
    "seed = tf.set_random_seed if tf.version.VERSION < '2' else tf.random.set_seed",
]


@pytest.mark.parametrize("text", FOR_BOTH_VERSIONS)
def test_a_program_for_both_versions_is_of_the_installed_one(text: str) -> None:
    tf = pytest.importorskip("tensorflow")
    tree = ast.parse(f"import tensorflow as tf\nfrom tensorflow.python import ipu\n{text}")
    assert not uses_version_1(tree)
    assert not uses_rarer_names([tree], tf)


def test_names_that_only_version_2_has_are_signs_of_it() -> None:
    tf = pytest.importorskip("tensorflow")
    for text in (
        "tf.optimizers.Adam(); tf.train.AdamOptimizer(0.1)",
        "tf.random.set_seed(1); tf.log(x)",
        "from tensorflow.python.ipu.ipu_strategy import IPUStrategy\ntf.log(x)",
    ):
        tree = ast.parse(f"import tensorflow as tf\nfrom tensorflow.python import ipu\n{text}")
        assert not uses_rarer_names([tree], tf), text
    tree = ast.parse(
        "import tensorflow as tf\nfrom tensorflow.python.framework import function\n"
        "import tensorflow.python.ipu\ntf.log(x)"
    )
    assert uses_rarer_names([tree], tf)
    main = "import tensorflow as tf\nif __name__ == '__main__':\n    import tensorflow.contrib.rnn"
    assert uses_version_1(ast.parse(main))
    both = "import tensorflow as tf\ntry:\n    tf.Session()\nexcept ValueError:\n    pass"
    assert uses_version_1(ast.parse(both))


def test_parts_of_contrib_that_are_not_here_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    tf = pytest.importorskip("tensorflow")
    monkeypatch.setattr(sys, "meta_path", [SdkFinder(), *sys.meta_path])
    for name in ("tensorflow.contrib", "tensorflow.contrib.rnn"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    contrib = contrib_module(tf.compat.v1)
    assert not hasattr(contrib, "tpu")
    with pytest.raises(NotImplementedError, match=r"podrun does not have tf\.contrib\.tpu"):
        _ = contrib.tpu
    missing = r"tf\.contrib\.tpu: .* no contrib since 2\.0"
    with pytest.raises(ImportError, match=missing):
        importlib.import_module("tensorflow.contrib.tpu")
    with pytest.raises(ImportError, match=missing):
        __import__("tensorflow.contrib", fromlist=["tpu"])
    assert contrib.rnn.GRUCell is tf.compat.v1.nn.rnn_cell.GRUCell
    xla = contrib.compiler.xla  # The module whose `compile` the front end makes one for IPUs.
    assert xla is importlib.import_module("tensorflow.python.compiler.xla.xla")


def test_a_session_of_version_1_in_a_plain_program_leaves_tensorflow_as_it_is() -> None:
    """A program that is not for IPUs, or has the session in one file and results of version 2 in another."""
    session = "import tensorflow.compat.v1 as tf1\ntf1.Session(graph=g)"
    assert not uses_sessions_alone([ast.parse(session)])
    assert not uses_sessions_alone([ast.parse("import tensorflow as tf\ntf.compat.v1.Session()")])
    beside = ast.parse(
        "import tensorflow as tf\nfrom tensorflow.python import ipu\nprint(tf.constant(1) + 1)"
    )
    assert not uses_sessions_alone([ast.parse(session), beside])
    for device in (
        "import tensorflow.python.ipu.utils",
        "from tensorflow.compiler.plugin.poplar.ops import x",
    ):
        assert uses_sessions_alone([ast.parse(session), ast.parse(device)])
