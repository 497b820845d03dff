"""What a process keeps of programs that it no longer has, and what programs leave in folders and graphs."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import UsageError
from podrun.tensorflow.execution import written_reports
from podrun.tensorflow.execution.device_table import DEVICES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
LIBRARIES = "tensorflow.compiler.plugin.poplar.ops."


@pytest.fixture
def configured(ipu: Any) -> Iterator[Any]:
    """One IPU with events; afterwards without."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    ipu.test_utils.enable_ipu_events(config)
    config.configure_ipu_system()
    yield config
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.configure_ipu_system()


def test_reports_of_programs_do_not_keep_their_executables(ipu: Any, configured: Any) -> None:
    import tensorflow as tf

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        assert strategy.run(tf.function(lambda x: x * 3.0), args=[tf.constant(2.0)]) == 6.0
    assert DEVICES.compiled
    for reports in DEVICES.compiled.values():
        with pytest.raises(UsageError):
            reports.profile()


def test_tables_of_the_host_end(ipu: Any, configured: Any) -> None:
    """Another table may have the name then; before, one of another shape is refused. Graphs do not stay for tables."""
    import tensorflow as tf

    operations = importlib.import_module(LIBRARIES + "gen_pop_datastream_ops")
    for rows in (4, 8):
        variable = tf.Variable(tf.ones([rows, 2]) * rows)
        operations.ipu_host_embedding_register(variable, "table")
        with pytest.raises(
            ValueError, match=r"'table' is float32 \[\d, 2\], not float32 \[3, 2\]: deregister it"
        ):
            operations.ipu_device_embedding_lookup([0], "table", [3, 2], tf.float32)
        operations.ipu_host_embedding_deregister(variable, "table")
        np.testing.assert_array_equal(variable, np.full([rows, 2], rows))

    def inside() -> weakref.ref[tf.Graph]:
        with tf.Graph().as_default() as graph:
            for rows in (2, 3):
                value = tf.compat.v1.get_variable(f"v{rows}", initializer=tf.ones([rows, 2]))
                operations.ipu_host_embedding_register(value, "table")
                operations.ipu_host_embedding_deregister(value, "table")
        return weakref.ref(graph)

    graph = inside()
    gc.collect()
    assert graph() is None


def test_few_markers_of_the_host_stay_compiled(
    ipu: Any, configured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that went are compiled again, also behind functions of the host."""
    import tensorflow as tf

    from podrun.tensorflow.capture.markers import on_host
    from podrun.tensorflow.sdk import host_markers
    from podrun.tensorflow.sdk.layer_ops import ipu_group_norm

    (markers,) = [run.__self__ for run in on_host]  # type: ignore[attr-defined]
    monkeypatch.setattr(host_markers, "MOST_KEPT", 1)
    function = tf.function(lambda x: ipu_group_norm(x, 2, -1, center=False, scale=False, epsilon=0.0))
    for rows in (2, 3, 2):
        x = np.float32([[1, 3, 5, 9]] * rows)
        for result in (
            function(tf.constant(x)),
            ipu_group_norm(tf.constant(x), 2, -1, center=False, scale=False, epsilon=0.0),
        ):
            np.testing.assert_allclose(np.abs(result), np.ones_like(x), atol=1e-4)
        assert len(markers._kept) <= 1


def test_tables_in_folders_overwrite_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the count of files is that of one that is there, and for programs with a folder in their name."""
    flags = SimpleNamespace(vertex_graphs=str(tmp_path), interval_reports="")
    monkeypatch.setattr(written_reports, "flags", lambda: flags)
    (tmp_path / "2_scope_net.vertex_graph").write_text("first")
    (tmp_path / "7_other.vertex_graph").write_text("second")
    written_reports._write_table(str(tmp_path), "scope/net", "vertex_graph", ["own"])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "2_scope_net.vertex_graph": "first",
        "7_other.vertex_graph": "second",
        "3_scope_net.vertex_graph": "own\n",
    }


def test_variables_of_other_graphs_and_configurations_do_not_come_back(ipu: Any, configured: Any) -> None:
    """Events know of a graph as long as it lives, and only of what was written since the configuration."""
    import tensorflow as tf

    events = importlib.import_module("podrun.tensorflow.execution.trace_events")
    graph = tf.Graph()
    events.taken_events()
    events.note_written(graph, {"v": 4}, 1)
    configured.configure_ipu_system()
    events.note_fetched(graph, ["v"])
    assert events.taken_events() == []
    events.note_written(graph, {"v": 4, "w": 8}, 1)
    events.note_fetched(graph, ["w"])
    events.note_fetched(graph, ["v"])
    (event,) = events.taken_events()
    told = events.IpuTraceEvent.FromString(event).data_transfer.data_transfer
    assert b'"total_size": 12' in told
    held = weakref.ref(graph)
    events.note_written(graph, {"v": 4}, 1)
    del graph
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("loops", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tables_of_host_embeddings_take_no_memory_of_an_ipu(ipu: Any, configured: Any, loops: bool) -> None:
    """However many rows they have. The host looks them up, from a loop with a queue and from a program without one."""
    import tensorflow.compat.v1 as tf

    from podrun.compat import pva

    helper = ipu.test_utils.ReportHelper()
    helper.set_autoreport_options(configured)

    def usage(rows: int) -> int:
        configured.configure_ipu_system()
        with tf.Graph().as_default(), tf.Session() as session:
            start = tf.ones_initializer()
            spec = ipu.embedding_ops.HostEmbeddingOptimizerSpec(0.25)
            table = ipu.embedding_ops.create_host_embedding(
                "rows", [rows, 16], tf.float32, optimizer_spec=spec, initializer=start
            )
            outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

            def step() -> Any:
                weight = tf.get_variable("weight", [16, 2], initializer=start, use_resource=True)
                loss = tf.reduce_sum(tf.matmul(table.lookup(tf.constant([2, 5])), weight))
                with tf.control_dependencies([tf.train.GradientDescentOptimizer(0.0).minimize(loss)]):
                    return outfeed.enqueue(tf.identity(loss))

            with ipu.scopes.ipu_scope("/device:IPU:0"):
                run = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(2, step) if loops else step())
            session.run(tf.global_variables_initializer())
            with table.register(session):
                session.run(run)
            assert session.run(outfeed.dequeue()).tolist() == ([64.0, 32.0] if loops else [64.0])
        tiles = pva.openReport(helper.find_report()).compilation.tiles
        helper.clear_reports()
        return sum(tile.memory.total.excludingGaps for tile in tiles)

    assert usage(100_000) == pytest.approx(usage(1000), rel=0.01)
