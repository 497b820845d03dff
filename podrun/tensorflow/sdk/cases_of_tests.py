"""What the SDK's own tests inherit: checks of reports on every test of TensorFlow, and ``XLATestCase``."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

from podrun.private_apis.tensorflow import private_module
from podrun.tensorflow.execution.device_table import DEVICES

if TYPE_CHECKING:

    class NamedSet(Protocol):
        """A compute set of a report."""

        name: str

    class ReportOfTest(Protocol):
        """A report as ``pva`` opens it."""

        compilation: tf.Module
        execution: tf.Module

    class FolderOfReports(Protocol):
        """A ``ReportHelper``, as far as it is used here."""

        def find_reports(self) -> Sequence[str]:
            """The reports, oldest first."""


def _unmatched(names: Sequence[str], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names that fit no pattern, and the patterns that no name fits. A pattern may fit anywhere in a name."""
    wide = [f"*{pattern}*" for pattern in patterns]
    others = [name for name in names if not any(fnmatch.fnmatch(name, p) for p in wide)]
    return others, [p for p in wide if not any(fnmatch.fnmatch(name, p) for name in names)]


def _set_names(report: ReportOfTest) -> list[str]:
    sets: list[NamedSet] = report.compilation.computeSets
    return [one.name for one in sets]


def check_in_test(holds: bool, message: str) -> None:
    """Raise AssertionError with the message unless ``holds``."""
    if not holds:
        raise AssertionError(message)


def _within(actual: Sequence[int], expected: int, tolerance: float) -> None:
    low, high = int(expected * (1.0 - tolerance)), int(expected * (1.0 + tolerance))
    wrong = [value for value in actual if not low <= value <= high]
    check_in_test(not wrong, f"{wrong} not in [{low}, {high}]")


class ReportChecks:
    """Methods that every TensorFlow test case gets. Each raises AssertionError unless what its first line says holds.

    ``report``: of ``pva``; patterns are those of file names; ``tolerance``: a share of the expected value.
    """

    def assert_all_compute_sets_and_list(self, report: ReportOfTest, ok: Sequence[str]) -> None:
        """Each compute set fits a pattern, and each pattern a compute set."""
        others, missing = _unmatched(_set_names(report), ok)
        check_in_test(not others + missing, f"compute sets not in the list: {others}; without one: {missing}")

    def assert_compute_sets_contain_list(self, report: ReportOfTest, ok: Sequence[str]) -> None:
        """Each pattern fits a compute set."""
        missing = _unmatched(_set_names(report), ok)[1]
        check_in_test(not missing, f"patterns that no compute set fits: {missing}")

    def assert_compute_sets_not_in_blacklist(self, report: ReportOfTest, blacklist: Sequence[str]) -> None:
        """No compute set fits a pattern."""
        names = _set_names(report)
        fitting = [name for name in names if any(fnmatch.fnmatch(name, f"*{p}*") for p in blacklist)]
        check_in_test(not fitting, f"compute sets in the list: {fitting}")

    def assert_compute_sets_matches(
        self, report: ReportOfTest, expr: str, num_matches: int, msg: str | None = None
    ) -> None:
        """``num_matches`` compute sets fit the pattern ``expr``."""
        count = sum(fnmatch.fnmatch(name, expr) for name in _set_names(report))
        check_in_test(count == num_matches, msg or f"{count} compute sets fit {expr!r}, not {num_matches}")

    def assert_each_tile_memory_is_less_than(
        self, report: ReportOfTest, max_expected: int, tolerance: float = 0.01
    ) -> None:
        """No tile has more than ``max_expected`` bytes, gaps not counted."""
        most = max(tile.memory.total.excludingGaps for tile in report.compilation.tiles)
        check_in_test(
            most <= max_expected * (1.0 + tolerance), f"{most} bytes on a tile, more than {max_expected}"
        )

    def assert_total_tile_memory(self, report: ReportOfTest, expected: int, tolerance: float = 0.01) -> None:
        """All tiles together have ``expected`` bytes, gaps not counted."""
        total = sum(tile.memory.total.excludingGaps for tile in report.compilation.tiles)
        _within([total], expected, tolerance)

    def assert_max_tile_memory(self, report: ReportOfTest, expected: int, tolerance: float = 0.01) -> None:
        """The fullest tile has ``expected`` bytes, gaps not counted."""
        most = max(tile.memory.total.excludingGaps for tile in report.compilation.tiles)
        _within([most], expected, tolerance)

    def assert_always_live_memory(self, report: ReportOfTest, expected: int, tolerance: float = 0.01) -> None:
        """All tiles together have ``expected`` bytes that are always live."""
        held = sum(tile.memory.alwaysLiveBytes for tile in report.compilation.tiles)
        _within([held], expected, tolerance)

    def assert_execution_report_cycles(
        self, report: ReportOfTest, expected: int, tolerance: float = 0.01, expected_executions: int = 1
    ) -> None:
        """The report has ``expected_executions`` runs, which take ``expected`` cycles in all."""
        self.assert_number_of_executions(report, expected_executions)
        _within([report.execution.totalCycles.total], expected, tolerance)

    def assert_number_of_executions(self, report: ReportOfTest, n: int) -> None:
        """The report has ``n`` runs."""
        runs = len(report.execution.runs)
        check_in_test(runs == n, f"{runs} runs in the report, not {n}")

    def assert_num_reports(self, report_helper: FolderOfReports, n: int) -> None:
        """The folder of a ``ReportHelper`` has ``n`` reports."""
        count = len(report_helper.find_reports())
        check_in_test(count == n, f"{count} reports in the folder, not {n}")


class XLATestCase(tf.test.TestCase):  # type: ignore[misc]
    """A test case whose `session` has a new graph each time. The other two ways to a session are refused."""

    device = "IPU"

    @contextlib.contextmanager
    def session(self) -> Iterator[tf.compat.v1.Session]:
        """A session of a new graph."""
        graph = tf.Graph()
        with tf.compat.v1.Session(graph=graph) as session, graph.as_default():
            yield session

    @contextlib.contextmanager
    def device_scope(self, compilation_device: str) -> Iterator[None]:
        """Operations made here lie on a device, by its name or number 0 of its kind."""
        name = compilation_device if "/" in compilation_device else f"/device:{compilation_device}:0"
        with tf.device(name):
            yield

    @contextlib.contextmanager
    def test_scope(self) -> Iterator[None]:
        """Operations made here lie on the IPU."""
        with self.device_scope(self.device):
            yield

    def cached_session(self) -> None:
        """NotImplementedError: tests take `session`."""
        raise NotImplementedError("cached_session not supported on XLATestCase, please use session")

    def test_session(self) -> None:
        """NotImplementedError, as in TensorFlow: tests take `session`."""
        if self._testMethodName != "test_session":
            raise NotImplementedError("test_session not supported on XLATestCase, please use session")
        self.skipTest("Not a test.")


class OptimizerTest(tf.test.TestCase, parameterized.TestCase):  # type: ignore[misc]
    """The base class of the SDK's tests of optimizers."""

    def keras_mixed_precision_test_helper(
        self, optimizer: tf.keras.optimizers.Optimizer, mixed_prec_policy: str
    ) -> tf.Variable:
        """Train a small model for a step with a policy, which stays set. Returns the first weight."""
        tf_keras.mixed_precision.set_global_policy(mixed_prec_policy)
        inputs = tf_keras.Input((5,))
        layer = tf_keras.layers.Dense(5, activation="relu")
        outputs = tf_keras.layers.Activation("softmax", dtype="float32")(layer(inputs))
        model = tf_keras.Model(inputs, outputs)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(np.ones((1, 5), np.float32), np.ones(1, np.float32), batch_size=1, verbose=0)
        return layer.trainable_variables[0]


def add_checks_of_reports() -> None:
    """Let every test of TensorFlow have the checks."""
    case = private_module("framework.test_util").TensorFlowTestCase
    for name, check in vars(ReportChecks).items():
        if name.startswith("assert"):
            setattr(case, name, check)


def clear_compiled_programs() -> tf.Operation:
    """An operation after which programs are compiled again when they run next."""

    def clear() -> np.int32:
        with DEVICES.turns:
            DEVICES.compiled.clear()
            DEVICES.generation += 1
        return np.int32(0)

    return tf.group(tf.numpy_function(clear, [], tf.int32, stateful=True))
