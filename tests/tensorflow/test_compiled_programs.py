"""When a program of TensorFlow is compiled, reported and checked, and when an earlier compilation is enough."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from podrun.core.errors import GraphMemoryAllocationError
from podrun.runtime.graph import Node, TensorType
from podrun.tensorflow.execution.device_table import DEVICES

if TYPE_CHECKING:
    import tensorflow as tf

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


@pytest.fixture
def helper(ipu: Any) -> Any:
    """A folder for the reports of programs."""
    reports = ipu.test_utils.ReportHelper()
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    reports.set_autoreport_options(config)
    config.configure_ipu_system()
    return reports


def test_a_program_that_was_refused_is_refused_again(
    ipu: Any, helper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that does not fit its tiles is refused at each call, and so is an equal one that is built later."""
    import tensorflow as tf

    def refuse(report: object, profile_path: str) -> None:
        raise GraphMemoryAllocationError("it does not fit")

    def build() -> Callable[[tf.Tensor], tf.Tensor]:
        return tf.function(lambda x: x * 5.0, autograph=False)

    first, second = build(), build()
    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        with monkeypatch.context() as patch:
            patch.setattr("podrun.runtime.session_reports.check_report_fits", refuse)
            for function in (first, first, second):
                with pytest.raises(tf.errors.InternalError, match="it does not fit"):
                    strategy.run(function, args=[tf.constant([1.0])])
        assert strategy.run(first, args=[tf.constant([1.0])]).numpy() == [5.0]


def test_a_program_for_another_size_is_reported(ipu: Any, helper: Any) -> None:
    """An input that decides shapes is a constant of the program: for each value there is a program with a report,
    whose numbers are right."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def total(count: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.zeros([count]) + 2.0)

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        for count, reports in ((4, 1), (4, 1), (64, 2), (4, 2)):
            assert strategy.run(total, args=[tf.constant(count)]) == 2.0 * count
            helper.assert_num_reports(reports)


@pytest.mark.slow
def test_what_a_program_says_of_recomputation_changes_the_memory_of_its_report(ipu: Any, helper: Any) -> None:
    """Suggested tensors are computed again for gradients, checkpoints are kept, and the loss is the same."""
    pva = importlib.import_module("podrun.compat.pva")
    import tensorflow as tf

    strategy = ipu.ipu_strategy.IPUStrategyV1()
    weights = [tf.Variable(tf.ones([64, 64]) * 0.01 * (i + 1)) for i in range(4)]

    def measured(said: Callable[[Any], Any], recomputes: bool) -> tuple[float, int]:
        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                for weight in weights:
                    hidden = x @ weight
                    left, right = said([tf.sin(hidden), tf.cos(hidden * 2)])
                    x = left * right
                loss = tf.reduce_sum(x)
            for gradient, weight in zip(tape.gradient(loss, weights), weights, strict=True):
                weight.assign_sub(0.0 * gradient)
            return loss

        DEVICES.config.allow_recompute = recomputes
        helper.clear_reports()
        with strategy.scope():
            loss = float(strategy.run(step, args=[tf.ones([2048, 64])]))
        tiles = pva.openReport(helper.find_report()).compilation.tiles
        return loss, max(tile.memory.total.excludingGaps for tile in tiles)

    plain = measured(lambda tensors: tensors, False)
    suggested = measured(ipu.internal_ops.recompute_suggestion, False)
    again = measured(lambda tensors: tensors, True)
    kept = measured(ipu.pipelining_ops.recomputation_checkpoint, True)
    assert [v for v, _ in (suggested, again, kept)] == pytest.approx([plain[0]] * 3, rel=1e-6)
    assert suggested[1] < 0.95 * plain[1]
    assert again[1] < 0.95 * kept[1]


@pytest.mark.parametrize("tiles", [1, 4, 128])
def test_the_tiles_of_a_modelled_ipu_are_those_of_the_configuration(
    ipu: Any, helper: Any, tiles: int
) -> None:
    """They reach the report's tiles, memory and cycles; 0 means as many as an IPU has."""
    pva = importlib.import_module("podrun.compat.pva")
    import tensorflow as tf

    @tf.function(autograph=False)
    def product(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.softmax(x @ x)

    def reported(count: int) -> tuple[Any, int]:
        config = ipu.config.IPUConfig()
        config.auto_select_ipus, config.ipu_model.tiles_per_ipu = 1, count
        helper.set_autoreport_options(config, output_execution_profile=True)
        config.configure_ipu_system()
        with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
            strategy.run(product, args=[tf.ones([64, 64])])
        report = pva.openReport(helper.find_report())
        helper.clear_reports()
        steps = report.execution.runs[0].steps
        return report.compilation, sum(ipu.cycles for step in steps for ipu in step.ipus)

    small, longer = reported(tiles)
    whole, shorter = reported(0)
    assert (small.target.numTiles, small.target.tilesPerIpu, len(small.tiles)) == (tiles, tiles, tiles)
    assert len(whole.tiles) == 1472
    used = [sum(tile.memory.total.excludingGaps for tile in c.tiles) for c in (small, whole)]
    assert used[0] < 0.5 * used[1]  # Each tile of an IPU has code.
    assert longer > shorter or tiles > 4


def content_of(feeds: dict[str, tuple[int, ...]], baked: int = 0) -> str:
    """The content of a step that adds what two feeds of these names and shapes give."""
    from podrun.tensorflow.execution.modelling import ModelledStep

    node = Node("Add", "tensorflow", "sum", tuple(feeds), ("sum",))
    types = {name: TensorType(np.dtype(np.float32), shape) for name, shape in feeds.items()}
    step = ModelledStep("step", (node,), {}, {}, (), ("sum",), None)
    return step.content(types, {"input/0": np.array(0)}, {"input/0": np.array(baked)}, (0, ""))


def test_programs_are_equal_whichever_numbers_their_queues_have() -> None:
    one = content_of({"infeed3/0": (2, 1), "infeed4/0": (3,)})
    assert one == content_of({"infeed9/0": (2, 1), "infeed10/0": (3,)})
    assert one != content_of({"infeed3/0": (3,), "infeed4/0": (2, 1)})
    assert one != content_of({"infeed3/0": (2, 1), "infeed4/0": (3,)}, baked=1)


def test_threads_trace_gradients_by_themselves() -> None:
    """What one thread differentiates does not change what another one traces."""
    from concurrent.futures import ThreadPoolExecutor
    from types import SimpleNamespace

    import jax
    import jax.numpy as jnp

    from podrun.tensorflow.operators.table import TensorFlowOperators, tracing_gradients

    node = Node("Neg", "tensorflow", "y", ("x",), ("y",))
    operator = TensorFlowOperators().lookup(node)

    def traced() -> str:
        context: Any = SimpleNamespace(xp=jnp)
        return str(jax.make_jaxpr(lambda x: operator.function(context, node, x))(jnp.ones(1, jnp.float16)))

    plain = traced()
    with tracing_gradients(), ThreadPoolExecutor(1) as other:
        assert other.submit(traced).result(60) == plain
        assert traced() != plain
    assert traced() == plain


def test_attaching_and_compiling_are_written_as_the_sdk_does(
    ipu: Any, helper: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Published programs are checked by these lines: ALWAYS attaches before a program is compiled, ON_DEMAND after it,
    the other connections never.
    """
    import tensorflow as tf

    kinds = ipu.config.DeviceConnectionType
    orders = {kinds.ALWAYS: "ac", kinds.ON_DEMAND: "ca", kinds.PRE_COMPILE: "c", kinds.NEVER: "c"}
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    for kind, order in orders.items():
        DEVICES.said.clear()
        config = ipu.config.IPUConfig()
        config.auto_select_ipus = 2
        config.device_connection.type, config.device_connection.version = kind, "ipu2"
        config.serialization_output_folder = str(tmp_path)
        config.configure_ipu_system()
        program = tf.function(lambda x: x + 1.0, autograph=False)
        with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
            for _ in range(2):
                if kind is kinds.NEVER:
                    with pytest.raises(
                        tf.errors.InvalidArgumentError, match="configured for compilation only"
                    ):
                        strategy.run(program, args=[tf.constant([1.0])])
                else:
                    strategy.run(program, args=[tf.constant([1.0])])
        output = capsys.readouterr()
        written = re.findall("Compiled |attached to 2 IPUs with Poplar device IDs: 0,1", output.err)
        assert "".join(line[0].lower() for line in written) == order
        assert output.out.count("was pre-compiled to") == (2 if kind is kinds.PRE_COMPILE else 0)
