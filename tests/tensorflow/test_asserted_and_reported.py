"""Assertions that end a run on the device, and what events and reports tell of compilations."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import UnsupportedError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
DEVICE = "/device:IPU:0"


@pytest.fixture
def tf(ipu: Any) -> Iterator[Any]:
    """TensorFlow 1 with a graph of its own."""
    import tensorflow.compat.v1 as module

    with module.Graph().as_default():
        yield module


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


def test_scalars_and_what_only_passes_are_no_programs_to_events_and_reports(tf: Any, ipu: Any) -> None:
    config, helper = ipu.config.IPUConfig(), ipu.test_utils.ReportHelper()
    helper.set_autoreport_options(config, output_execution_profile=True)
    ipu.test_utils.enable_ipu_events(config)
    config.configure_ipu_system()
    a, b, row = tf.placeholder(tf.int32, []), tf.placeholder(tf.int32, []), tf.placeholder(tf.float32, [2])
    with tf.device(DEVICE):
        counter = tf.get_variable("counter", initializer=5, use_resource=True)
        scalar, doubled = tf.maximum(a + b, 1) * 3, row * 2.0
        counted = counter.assign_add(2)
        (compiled,) = ipu.ipu_compiler.compile(lambda value: value, [row])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        report = ipu.test_utils.ReportJSON(tf.test.TestCase(), session)
        report.reset()
        assert session.run(scalar, {a: 4, b: 2}) == 18
        assert [session.run(counted), session.run(counted)] == [7, 9]
        np.testing.assert_array_equal(session.run(compiled, {row: [1.0, 2.0]}), [1.0, 2.0])
        report.assert_no_event()
        helper.assert_num_reports(0)
        np.testing.assert_array_equal(session.run(doubled, {row: [1.0, 2.0]}), [2.0, 4.0])
        report.parse_log(assert_len=4)
        helper.assert_num_reports(1)
        tensors = list(report.get_tensor_map().all_tensors())
        assert {tensor.id for tensor in tensors} == set(report.get_tensor_map().tensor_inst_name_mappings())
        assert report.get_tensor_map().ipu_ids() == {0}


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
            x = tf.placeholder(tf.float32, [1])
            with ipu.scopes.ipu_scope(DEVICE):
                (result,) = ipu.ipu_compiler.compile(net, [x])
            assert session.run(result, {x: [1.0]}) == [4.0]
        counts.append(len(helper.find_reports()))
        for path in helper.find_reports():
            framework = json.loads((Path(path).parent / "framework.json").read_text())
            assert framework["framework"] == "TensorFlow"
        helper.clear_reports()
    assert counts == [1, 1, 0]
    files = os.listdir(tmp_path / "cache")
    assert files
    assert all(name.endswith(".poplar_exec") for name in files)


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


def test_initial_values_are_not_computed_on_an_ipu_that_is_never_attached(tf: Any, ipu: Any) -> None:
    config = ipu.config.IPUConfig()
    config.device_connection.type = ipu.config.DeviceConnectionType.NEVER
    config.device_connection.version = "ipu2"
    config.configure_ipu_system()
    with ipu.scopes.ipu_scope(DEVICE):
        tf.get_variable("w", [2, 2])
    with tf.Session() as session:
        with pytest.raises(tf.errors.InvalidArgumentError, match="configured for compilation only"):
            session.run(tf.global_variables_initializer())
        ipu.utils.move_variable_initialization_to_cpu()
        session.run(tf.global_variables_initializer())


def test_loops_that_place_their_bodies_and_results_without_elements(tf: Any, ipu: Any) -> None:
    """A program needs no scope around it whose loop has one; ``top_k`` of none gives tensors without elements."""

    def body(value: Any) -> Any:
        with ipu.scopes.ipu_scope(DEVICE):
            return value + 1.0

    looped = ipu.ipu_compiler.compile(lambda value: ipu.loops.repeat(3, body, [value]), [2.0])
    with tf.device(DEVICE):
        x, count = tf.placeholder(tf.float32, [2, 3]), tf.placeholder(tf.int32, [])
        values, places = tf.nn.top_k(x, count)
    with tf.Session() as session:
        assert session.run(looped) == [5.0]
        for k in (0, 2):
            own = session.run([values, places], {x: [[1, 3, 2], [6, 4, 5]], count: k})
            assert [r.tolist() for r in own] == [[[3, 2][:k], [6, 5][:k]], [[1, 2][:k], [0, 2][:k]]]


def test_what_the_host_prints_in_the_middle_of_a_program(
    tf: Any, ipu: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def net(x: Any) -> Any:
        y = x * x
        with ipu.scopes.outside_compilation_scope():
            tf.print("square", y)
        return y

    x = tf.placeholder(tf.float32, [])
    with ipu.scopes.ipu_scope(DEVICE):
        (result,) = ipu.ipu_compiler.compile(net, [x])
    with tf.Session() as session:
        assert session.run(result, {x: 3.0}) == 9.0
    assert "square 9" in capfd.readouterr().err


def test_accumulation_needs_no_initializer(tf: Any, ipu: Any) -> None:
    """``gen_poputil_ops``: sums of five calls, the second scaled with the first by momentum."""
    operations = importlib.import_module("tensorflow.compiler.plugin.poplar.ops.gen_poputil_ops")
    total = tf.get_variable("total", initializer=[0.0], use_resource=True)

    def body(step: Any, x: Any, y: Any) -> Any:
        one = tf.ones_like(x)
        x += operations.ipu_stateful_gradient_accumulate(one, num_mini_batches=5, verify_usage=False)
        y += operations.ipu_stateful_gradient_accumulate_with_momentum(
            total.handle, one, momentum=0.8, num_mini_batches=5
        )
        return step + 1, x, y

    def net(x: Any) -> Any:
        return tf.while_loop(lambda step, x, y: step < 10, body, (0, x, x))

    with ipu.scopes.ipu_scope(DEVICE):
        results = ipu.ipu_compiler.compile(net, [tf.constant([10.0])])
    with tf.Session() as session:
        session.run(total.initializer)
        step, x, y = session.run(results)
        assert (step, x.tolist()) == (10, [20.0])
        np.testing.assert_allclose(y, [24.0])
        np.testing.assert_allclose(session.run(total), [9.0])


def test_events_say_which_variables_cross_and_what_products_are_for(tf: Any, ipu: Any) -> None:
    """What is fed has the first numbers; what a program wrote comes back as a whole when a part of it is fetched."""
    config = ipu.config.IPUConfig()
    ipu.test_utils.enable_ipu_events(config)
    config.configure_ipu_system()
    with ipu.scopes.ipu_scope(DEVICE):
        x = tf.placeholder(tf.float32, [1, 4, 4, 2])
        kernel = tf.get_variable("kernel", initializer=np.ones((3, 3, 2, 2), np.float32))
        strided = tf.get_variable("strided", initializer=np.ones((3, 3, 2, 2), np.float32))
        frozen = tf.get_variable("frozen", initializer=np.ones((8, 3), np.float32), trainable=False)
        y = tf.nn.conv2d(x, kernel, 1, "SAME")
        y = tf.nn.conv2d(tf.nn.conv2d(y, kernel, 1, "SAME"), strided, 2, "SAME")
        loss = tf.reduce_sum(tf.reshape(y, [1, 8]) @ frozen)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        report = ipu.test_utils.ReportJSON(tf.test.TestCase(), session)
        report.reset()
        for _ in range(2):
            session.run([train, loss], {x: np.ones((1, 4, 4, 2))})
        report.parse_log(assert_len=6)
        report.assert_host_to_device_event_names(["1.0", "2.0", "3.0"])
        report.assert_device_to_host_event_names([])
        assert report.get_ml_type_counts() == [0, 6, 2, 3]
        session.run(kernel)
        report.parse_log(assert_len=1)
        report.assert_device_to_host_event_names(["out_1.0", "out_2.0"])
        session.run([kernel, strided])
        report.assert_no_event()
        session.run(y, {x: np.ones((1, 4, 4, 2))})
        report.parse_log()
        assert report.get_ml_type_counts() == [3, 0, 0, 0]


def test_scopes_of_cases_lie_on_the_ipu(tf: Any) -> None:
    cases = importlib.import_module("tensorflow.compiler.tests.xla_test")

    class Case(cases.XLATestCase):  # type: ignore[misc, name-defined]
        """A case of its own."""

        def test_place(self) -> None:
            """An operation in the scope lies on the IPU."""
            with self.session() as session, self.test_scope():
                x = tf.placeholder(tf.float16, [])
                assert "device:IPU:0" in x.device
                assert session.run(x * x, {x: 1000.0}) == 65504.0

    Case("test_place").debug()


def test_flags_ask_for_tables_of_compiled_programs(
    tf: Any, ipu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"--save_vertex_graph={tmp_path} --save_interval_report={tmp_path}"
    monkeypatch.setenv("TF_POPLAR_FLAGS", flags)
    ipu.config.IPUConfig().configure_ipu_system()
    x = tf.placeholder(tf.float32, [2048])
    with ipu.scopes.ipu_scope(DEVICE):
        (total,) = ipu.ipu_compiler.compile(lambda v: v + v + 1.0, [x])
    with tf.Session() as session:
        session.run(total, {x: np.ones(2048)})
    (graph,), (table,) = tmp_path.glob("*.vertex_graph"), tmp_path.glob("*.csv")
    assert graph.read_text().count("/op:Add") == 2
    rows = [line.split(",") for line in table.read_text().splitlines()[1:]]
    assert sum(int(size) for *_, size in rows) > 0


def test_an_outfeed_has_no_last_value_under_synthetic_data(
    tf: Any, ipu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue(outfeed_mode=ipu.ipu_outfeed_queue.IPUOutfeedMode.LAST)
    with ipu.scopes.ipu_scope(DEVICE):
        run = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(2, lambda: queue.enqueue(tf.constant(1.0))))
    last = queue.dequeue()
    with tf.Session() as session:
        session.run(run)
        assert session.run(last) == 1.0
        monkeypatch.setenv("TF_POPLAR_FLAGS", "--use_synthetic_data")
        with pytest.raises(tf.errors.FailedPreconditionError, match="when using synthethic data"):
            session.run(last)


def test_sharded_programs_minimize_a_loss_of_several_numbers(tf: Any, ipu: Any) -> None:
    """The report is of the forward pass, which the gradients took into themselves."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()

    def net(x: Any) -> Any:
        with ipu.scopes.ipu_shard(0):
            weight = tf.get_variable("w", initializer=np.ones((3, 2), np.float32), use_resource=True)
            losses = tf.reduce_sum(tf.square(x @ weight), 1)
            mean = tf.reduce_mean(losses)
        with ipu.scopes.ipu_shard(1):
            train = tf.train.GradientDescentOptimizer(0.1).minimize(losses)
        return mean, train

    x = tf.placeholder(tf.float32, [2, 3])
    with ipu.scopes.ipu_scope(DEVICE):
        mean, _ = [*ipu.ipu_compiler.compile(net, [x]), None]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run(mean, {x: np.ones((2, 3))}) == 18.0
        np.testing.assert_allclose(
            session.run(tf.global_variables()[0]), np.full((3, 2), 1 - 0.1 * 12), rtol=1e-5
        )


@pytest.mark.parametrize(
    "less_by_flags",
    [
        {"--use_synthetic_data --synthetic_data_initializer=2": 4 * 5000},
        pytest.param(
            {
                "--synthetic_data_categories='infeed,  seed'": 4 * 4000,
                "--synthetic_data_categories=outfeed": 4 * 1000,
                "--synthetic_data_categories=infeed --synthetic_data_initializer=normal": 0,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["all", "categories"],
)
def test_what_synthetic_data_stand_for_takes_no_memory(
    tf: Any, ipu: Any, monkeypatch: pytest.MonkeyPatch, less_by_flags: dict[str, int]
) -> None:
    from podrun.compat import pva

    def usage(flags: str) -> int:
        monkeypatch.setenv("TF_POPLAR_FLAGS", flags)
        helper, config = ipu.test_utils.ReportHelper(), ipu.config.IPUConfig()
        helper.set_autoreport_options(config)
        config.configure_ipu_system()
        with tf.Graph().as_default(), tf.Session() as session:
            infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(
                tf.data.Dataset.from_tensors(np.ones(4000, np.float32))
            )
            outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
            with ipu.scopes.ipu_scope(DEVICE):
                loop = ipu.ipu_compiler.compile(
                    lambda: ipu.loops.repeat(1, lambda x: outfeed.enqueue(x[:1000] * 2.0), [], infeed)
                )
            session.run(infeed.initializer)
            session.run(loop)
        tiles = pva.openReport(helper.find_report()).compilation.tiles
        helper.clear_reports()
        return sum(tile.memory.total.includingGaps for tile in tiles)

    whole = usage("")
    for flags, less in less_by_flags.items():
        # Reports give whole bytes for each tile.
        assert whole - usage(flags) == pytest.approx(less, abs=1472 if less else 0)


def test_lists_that_would_have_to_grow_are_refused_with_what_to_type(tf: Any, ipu: Any) -> None:
    def net(x: Any, size: int) -> Any:
        items = tf.TensorArray(tf.float32, size=size, dynamic_size=not size, element_shape=[])
        _, items = tf.while_loop(
            lambda i, items: i < 3,
            lambda i, items: (i + 1, items.write(i, x * tf.cast(i, tf.float32))),
            [0, items],
            maximum_iterations=3,
        )
        return items.stack()

    x = tf.placeholder(tf.float32, [])
    with tf.Session() as session:
        with ipu.scopes.ipu_scope(DEVICE):
            sized, growing = (ipu.ipu_compiler.compile(lambda x, n=n: net(x, n), [x]) for n in (3, 0))
        assert np.ravel(session.run(sized, {x: 2.0})).tolist() == [0.0, 2.0, 4.0]
        with pytest.raises(UnsupportedError, match="list of size 0") as refused:
            session.run(growing, {x: 2.0})
    assert "size=N" in refused.value.hint
