"""Assertions that end a run on the device, and what events and reports tell of compilations."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
DEVICE = "/device:IPU:0"


@pytest.fixture
def tf(ipu: Any) -> Iterator[Any]:
    """TensorFlow 1 with a graph of its own; afterwards one IPU is configured again."""
    import tensorflow.compat.v1 as module

    with module.Graph().as_default():
        yield module
    ipu.config.IPUConfig().configure_ipu_system()


def test_events_tell_whether_a_program_was_compiled(tf: Any, ipu: Any) -> None:
    config = ipu.config.IPUConfig()
    ipu.test_utils.enable_ipu_events(config)
    config.configure_ipu_system()
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, [2])
        total = x + x
    with tf.Session() as session:
        report = ipu.test_utils.ReportJSON(tf.test.TestCase(), session)
        report.reset()
        session.run(total, {x: [1.0, 2.0]})
        report.parse_log(assert_len=4)
        report.assert_contains_one_compile_event()
        session.run(total, {x: [1.0, 2.0]})
        report.parse_log(assert_len=1)
        report.assert_contains_no_compile_event()
        with pytest.raises(AssertionError, match="no program was compiled"):
            report.assert_compiled_for_ipu()
    names = ["add/add.1/Add", "mul"]
    assert ipu.test_utils.missing_names_in_whitelist_entries(names, ["add*/Add"]) == ["mul"]
    assert ipu.test_utils.missing_whitelist_entries_in_names(names, ["mul", "sub"]) == ["*sub*"]
    assert ipu.test_utils.items_matching_at_least_one_pattern(names, ["add"]) == names[:1]


def test_assertions_end_a_run_and_lose_what_it_wrote(tf: Any, ipu: Any) -> None:
    def net(x: Any) -> Any:
        count = tf.get_variable("count", initializer=1.0, use_resource=True)
        held = tf.debugging.Assert(x > 0.0, [x])
        with tf.control_dependencies([count.assign_add(1.0), held]):
            return x + count.read_value()

    def loop(x: Any) -> Any:
        def body(i: Any, v: Any) -> Any:
            with tf.control_dependencies([tf.debugging.assert_less(v, 3.0)]):
                return i + 1, v + 1.0

        return tf.while_loop(lambda i, v: i < 4, body, [0, x])[1]

    x = tf.placeholder(tf.float32, [])
    with ipu.scopes.ipu_scope(DEVICE):
        (straight,) = ipu.ipu_compiler.compile(net, [x])
        (looped,) = ipu.ipu_compiler.compile(loop, [x])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InternalError, match="An assertion of the program failed"):
            session.run(straight, {x: -1.0})
        assert session.run(straight, {x: 1.0}) == 3.0
        assert session.run(looped, {x: -1.0}) == 3.0
        with pytest.raises(tf.errors.InternalError, match="application_runtime_error"):
            session.run(looped, {x: 1.0})


def test_reports_of_cached_programs_and_of_programs_with_the_host_in_their_middle(
    tf: Any, ipu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_POPLAR_FLAGS", f"--executable_cache_path={tmp_path}/cache")
    helper, config = ipu.test_utils.ReportHelper(), ipu.config.IPUConfig()
    helper.set_autoreport_options(config)

    def middle(x: Any) -> Any:
        y = x * x
        with ipu.scopes.outside_compilation_scope():
            z = y * 2.0
        return z + 2.0

    def middle_free(x: Any) -> Any:
        return x * x + 3.0

    counts = []
    for net in (middle, middle_free, middle_free):
        config.configure_ipu_system()
        with tf.Graph().as_default(), tf.Session() as session:
            x = tf.placeholder(tf.float32, [])
            with ipu.scopes.ipu_scope(DEVICE):
                (result,) = ipu.ipu_compiler.compile(net, [x])
            assert session.run(result, {x: 1.0}) == 4.0
        counts.append(len(helper.find_reports()))
        for path in helper.find_reports():
            framework = json.loads((Path(path).parent / "framework.json").read_text())
            assert framework["framework"] == "TensorFlow"
        helper.clear_reports()
    assert counts == [1, 1, 0]
    assert os.listdir(tmp_path / "cache")
    monkeypatch.delenv("TF_POPLAR_FLAGS")


def test_unknown_engine_options_are_refused_in_the_words_of_the_library(tf: Any, ipu: Any) -> None:
    config = ipu.config.IPUConfig()
    config.compilation_poplar_options = {"some_option": "some_value"}
    config.configure_ipu_system()
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, [4])
        total = x + x
    with (
        tf.Session() as session,
        pytest.raises(tf.errors.InternalError, match="invalid_option: Unrecognised option 'some_option'"),
    ):
        session.run(total, {x: np.zeros(4)})
