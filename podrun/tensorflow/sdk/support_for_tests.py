"""``ipu.test_utils``: what tests of programs for IPUs use. Datasets that count, sessions, folders of reports, and how
many IPUs a test may have.

`TF_IPU_COUNT` says how many IPUs tests may take, as for the SDK's own; without it there are as many as a test asks for.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import pathlib
import shutil
import tempfile
import unittest
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from podrun.tensorflow.sdk.cases_of_tests import add_checks_of_reports
from podrun.tensorflow.sdk.config import DeviceConnectionType, IPUConfig
from podrun.tensorflow.sdk.utils import (
    move_variable_initialization_to_cpu as move_variable_initialization_to_cpu,
)

add_checks_of_reports()
VARIABLE = "TF_IPU_COUNT"
_PLENTY = 64


def create_multi_increasing_dataset(
    value: int,
    shapes: Sequence[Sequence[int]] | None = None,
    dtypes: Sequence[tf.DType] | None = None,
    repeat: bool = True,
) -> tf.data.Dataset:
    """Elements 0 to ``value - 1``, each a tuple of tensors that are filled with the number."""
    chosen = shapes or [[1, 32, 32, 4], [1, 8]]
    kinds = dtypes or [tf.float32] * len(chosen)

    def element(number: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return tuple(
            tf.cast(tf.broadcast_to(number, shape), kind) for shape, kind in zip(chosen, kinds, strict=True)
        )

    dataset = tf.data.Dataset.range(value).map(element)
    return dataset.repeat() if repeat else dataset


def create_dual_increasing_dataset(
    value: int,
    data_shape: Sequence[int] | None = None,
    label_shape: Sequence[int] | None = None,
    dtype: tf.DType = tf.float32,
    repeat: bool = True,
) -> tf.data.Dataset:
    """Data and labels that are filled with the number of their element."""
    shapes = [data_shape or [1, 32, 32, 4], label_shape or [1, 8]]
    return create_multi_increasing_dataset(value, shapes, [dtype, dtype], repeat)


def create_single_increasing_dataset(
    value: int, shape: Sequence[int] | None = None, dtype: tf.DType = tf.float32, repeat: bool = True
) -> tf.data.Dataset:
    """Tensors that are filled with the number of their element."""
    shapes = [[1, 32, 32, 4] if shape is None else shape]
    return create_multi_increasing_dataset(value, shapes, [dtype], repeat)


@contextlib.contextmanager
def ipu_session(disable_grappler_optimizers: Sequence[str] | None = None) -> Iterator[Any]:
    """A session without some of TensorFlow's optimizers of graphs."""
    options = tf.compat.v1.ConfigProto()
    rewriting = options.graph_options.rewrite_options
    for name in disable_grappler_optimizers or ():
        setattr(rewriting, name, rewriting.OFF)
    with tf.compat.v1.Session(config=options) as session:
        yield session


def add_hw_ci_connection_options(opts: IPUConfig) -> None:
    """Attach at the first run."""
    opts.device_connection.enable_remote_buffers = True
    opts.device_connection.type = DeviceConnectionType.ON_DEMAND


def enable_ipu_events(opts: IPUConfig) -> None:
    """Ask for events of compilations and runs, which ``gen_ipu_ops.ipu_event_trace`` gives."""
    opts._profiling.enable_ipu_events = True


def get_ci_num_ipus() -> int:
    """IPUs that tests may take."""
    return int(os.environ.get(VARIABLE, _PLENTY))


def has_ci_ipus() -> bool:
    """Whether tests run on IPUs: emulated ones are."""
    return get_ci_num_ipus() > 0


def skip_if_not_enough_ipus(self: unittest.TestCase, num_ipus: int) -> None:
    """Skip a test that takes more IPUs than there are."""
    if get_ci_num_ipus() < num_ipus:
        self.skipTest(f"Requested {num_ipus} IPUs, but only {get_ci_num_ipus()} are available.")


def uses_ipus(num_ipus: int, allow_ipu_model: bool = False, func: Callable[..., Any] | None = None) -> Any:
    """A decorator for tests that take so many IPUs."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def decorated(self: unittest.TestCase, *args: Any, **kwargs: Any) -> Any:
            if not allow_ipu_model:
                skip_if_not_enough_ipus(self, num_ipus)
            return function(self, *args, **kwargs)

        return decorated

    return decorate if func is None else decorate(func)


def may_use_ipus_or_model(num_ipus: int, func: Callable[..., Any] | None = None) -> Any:
    """A decorator for tests that run on so many IPUs, or on the IPU Model."""
    return uses_ipus(num_ipus, allow_ipu_model=True, func=func)


def skip_on_hw(func: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for tests that IPUs are too many for: emulated ones are none of these."""
    return func


class ReportHelper:
    """A folder for reports of programs, which is removed with the object."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="tf_")
        weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)

    def set_autoreport_options(
        self,
        cfg: IPUConfig,
        *,
        output_graph_profile: bool = True,
        output_execution_profile: bool = False,
        max_execution_reports: int = 1000,
    ) -> None:
        """Let programs write their reports to the folder."""
        cfg.compilation_poplar_options = {
            "autoReport.directory": self._directory,
            "autoReport.outputGraphProfile": str(output_graph_profile).lower(),
            "autoReport.outputExecutionProfile": str(output_execution_profile).lower(),
            "autoReport.executionProfileProgramRunCount": str(max_execution_reports),
        }

    def find_reports(self) -> list[str]:
        """The reports, oldest first."""
        paths = pathlib.Path(self._directory).glob("tf_report_*/*.pop")
        return [str(path) for path in sorted(paths, key=lambda p: (p.stat().st_ctime_ns, str(p)))]

    def find_report(self) -> str:
        """The only report. AssertionError if there are more or none."""
        self.assert_num_reports(1)
        return self.find_reports()[0]

    def assert_num_reports(self, n: int) -> None:
        """AssertionError for another number of reports."""
        count = len(self.find_reports())
        if count != n:
            raise AssertionError(f"Expected {n} report(s) but found {count}")

    def clear_reports(self) -> None:
        """Remove all reports."""
        for folder in pathlib.Path(self._directory).glob("tf_report_*"):
            shutil.rmtree(folder)


def count_matches_in_list(input_list: Iterable[str], to_match: str) -> int:
    """How many texts fit a pattern with ``*``."""
    return sum(fnmatch.fnmatch(text, to_match) for text in input_list)


def _fitting(items: Iterable[str], patterns: Iterable[str]) -> list[str]:
    chosen = list(patterns)
    return [item for item in items if any(fnmatch.fnmatch(item, pattern) for pattern in chosen)]


def items_matching_at_least_one_pattern(items: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The texts that begin as one of the patterns says."""
    return _fitting(items, [pattern + "*" for pattern in patterns])


def missing_names_in_whitelist_entries(names: Iterable[str], whitelist: Iterable[str]) -> list[str]:
    """The names that fit no pattern, wherever in them."""
    chosen = list(names)
    fitting = set(_fitting(chosen, [f"*{pattern}*" for pattern in whitelist]))
    return [name for name in chosen if name and name not in fitting]


def missing_whitelist_entries_in_names(names: Iterable[str], whitelist: Iterable[str]) -> list[str]:
    """The patterns, as they are looked for, that no name fits."""
    chosen = list(names)
    return [pattern for pattern in (f"*{entry}*" for entry in whitelist) if not _fitting(chosen, [pattern])]


def skip_with_asan(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for tests that do not run with an address sanitizer. TypeError for a reason that is no text."""
    if not isinstance(reason, str):
        raise TypeError(f"'reason' should be string, got {type(reason)}")
    return unittest.skipIf("ASAN_OPTIONS" in os.environ, reason)
