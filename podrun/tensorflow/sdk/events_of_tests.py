"""Events of compilations and runs for tests: ``ReportJSON``, which counts them, and functions that read them.

What a test needs of Poplar itself (compute sets, memory) is in the report files of `ReportHelper`.
"""

from __future__ import annotations

import collections
import fnmatch
import itertools
import json
import time
import unittest
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from podrun.core.quick_dataclass import dataclass
from podrun.tensorflow.execution.trace_events import (
    BACKWARD,
    FORWARD,
    INFERENCE,
    KINDS,
    TILES,
    UPDATE,
    IpuTraceEvent,
    taken_events,
)
from podrun.tensorflow.sdk.cases_of_tests import check_in_test

_TO_DEVICE = KINDS.index("HOST_TO_DEVICE_TRANSFER")
_COMPILED = KINDS.index("COMPILE_END")
_TO_HOST = KINDS.index("DEVICE_TO_HOST_TRANSFER")
_NOTHING_COMPILED = "no program was compiled"


def event_trace(name: str | None = None) -> tf.Tensor:
    """``gen_ipu_ops.ipu_event_trace``: the events since the last call, as bytes of ``IpuTraceEvent`` messages."""
    if tf.executing_eagerly():
        return tf.constant(np.array(taken_events(), object), tf.string)

    def take() -> np.ndarray:
        return np.array(taken_events(), object)

    result = tf.numpy_function(take, [], tf.string, stateful=True, name=name or "ipu_event_trace")
    result.set_shape([None])
    return result


def extract_all_events(events: Iterable[Any]) -> list[Any]:
    """The messages of a trace."""
    plain = (event.numpy() if hasattr(event, "numpy") else event for event in events)
    return [IpuTraceEvent.FromString(event) for event in plain]


def count_ipu_compilations(events: Iterable[Any]) -> int:
    """How many compilations a trace has."""
    return extract_all_types_from_event_trace(events).count(_COMPILED)


def extract_all_types_from_event_trace(events: Iterable[Any]) -> list[int]:
    """The type of each event of a trace."""
    return [event.type for event in extract_all_events(events)]


def extract_all_strings_from_event_trace(events: Iterable[Any]) -> str:
    """A trace as text: for each event its moment, type and fields."""
    lines = []
    for event in extract_all_events(events):
        moment = time.strftime("%F %T %z", time.localtime(event.timestamp))
        part = getattr(event, event.WhichOneof("msg"))
        fields = ", ".join(f"{field.name}: {value!r}" for field, value in part.ListFields())
        lines += ["-" * 70, f"=> @ {moment}: {KINDS[event.type].replace('_', ' ').capitalize()}: {fields}"]
    return "\n".join([*lines, ""])


class MappedTile(NamedTuple):
    """A tile, and how many elements of a tensor lie on it; 0 where that is not known."""

    tile: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of a program. ``tiles``: the first tile of its IPU, since the tile model knows no others; so its shape
    and the number of its elements are not known either.
    """

    inst: str
    index: int
    shape: list[int]
    dtype: str
    has_constant: bool
    has_aliases: bool
    num_elements: int
    tiles: list[MappedTile]
    name: str

    @property
    def id(self) -> str:
        """Its operation and its place among the results."""
        return f"{self.inst}:{self.index}"

    def tile_ids(self) -> set[int]:
        """The tiles on which it lies."""
        return {tile.tile for tile in self.tiles}


class MappedTensors:
    """The tensors of a program and their tiles, as the event of its compilation lists them, by computation: the
    program, or the stages of a pipeline.
    """

    def __init__(self, tensor_map: dict[str, Any], num_tiles_per_ipu: int = TILES) -> None:
        self.num_tiles_per_ipu = num_tiles_per_ipu
        self.mappings: dict[str, list[MappedTensor]] = {
            computation: [_mapped(*tensor) for tensor in tensors]
            for computation, tensors in tensor_map["mappings"].items()
        }

    def computation_names(self) -> list[str]:
        """The program, or the stages of a pipeline."""
        return list(self.mappings)

    def all_tensors(self) -> Iterator[MappedTensor]:
        """The tensors of all computations."""
        return itertools.chain.from_iterable(self.mappings.values())

    def tensor_inst_name_mappings(self) -> dict[str, str]:
        """Each tensor's operation with its place -> its name."""
        return {tensor.id: tensor.name for tensor in self.all_tensors()}

    def tile_ids(self, computation: str | Sequence[str] | None = None) -> set[int]:
        """The tiles of one or several computations; of all without a name."""
        names = [computation] if isinstance(computation, str) else computation or self.mappings
        return {tile for name in names for tensor in self.mappings[name] for tile in tensor.tile_ids()}

    def ipu_ids(self, computation: str | Sequence[str] | None = None) -> set[int]:
        """The IPUs of these tiles."""
        return {tile // self.num_tiles_per_ipu for tile in self.tile_ids(computation)}


def _mapped(
    inst: str,
    index: int,
    shape: list[int],
    dtype: str,
    has_constant: int,
    has_aliases: int,
    num_elements: int,
    tiles: Iterable[tuple[int, int]],
    name: str,
) -> MappedTensor:
    own = [MappedTile(*pair) for pair in tiles]
    return MappedTensor(
        inst, index, shape, dtype, bool(has_constant), bool(has_aliases), num_elements, own, name
    )


class ReportJSON:
    """What a test sees of the events since `reset`. Without a session or ``eager_mode`` the test brings the events."""

    def __init__(
        self, test: unittest.TestCase, sess: tf.compat.v1.Session | None = None, eager_mode: bool = False
    ) -> None:
        if eager_mode and sess is not None:
            raise AssertionError("Sessions can't be used in eager mode")
        self.test, self.sess, self.eager_mode = test, sess, eager_mode
        self.report: tf.Tensor | None = None
        self.events: dict[int, list[Any]] = {}
        self.num_events = 0
        self.compiled = False
        self.tensor_map: MappedTensors | None = None
        self.instruction_info: dict[str, Any] = {}
        if sess is not None:
            self.create_ipu_event_trace()

    def create_ipu_event_trace(self) -> None:
        """Make the operation that gives events."""
        with tf.device("cpu"):
            self.report = event_trace()

    def reset(self) -> None:
        """Forget the events so far."""
        self.get_event_trace()

    def get_event_trace(self, session: tf.compat.v1.Session | None = None) -> Any:
        """The events since the last call. AssertionError without a session or eager mode."""
        if self.eager_mode:
            return event_trace()
        chosen = session or self.sess
        if chosen is None or self.report is None:
            raise AssertionError("A session is needed to read events: give one to ReportJSON.")
        return chosen.run(self.report)

    def get_ipu_events(self, session: tf.compat.v1.Session | None = None) -> tuple[dict[int, int], list[Any]]:
        """How many events there are of each type, and the events."""
        return self.get_events_from_log(self.get_event_trace(session))

    def get_events_from_log(self, log: Iterable[Any]) -> tuple[dict[int, int], list[Any]]:
        """The same of events that the test brings."""
        events = extract_all_events(log)
        counts: dict[int, int] = collections.defaultdict(int)
        for event in events:
            counts[event.type] += 1
        return counts, events

    def parse_log(
        self,
        assert_len: int | None = None,
        assert_msg: str = "",
        session: tf.compat.v1.Session | None = None,
    ) -> dict[int, int]:
        """Read the events since the last call. Returns how many there are of each type."""
        return self.parse_events(self.get_event_trace(session), assert_len, assert_msg)

    def parse_events(
        self, events: Iterable[Any], assert_len: int | None = None, assert_msg: str = ""
    ) -> dict[int, int]:
        """The same of events that the test brings."""
        counts, messages = self.get_events_from_log(events)
        self.num_events, self.compiled = len(messages), counts[_COMPILED] > 0
        if assert_len:
            self.assert_num_events(assert_len, assert_msg)
        self.tensor_map, self.events, self.instruction_info = None, {}, {}
        for message in messages:
            if message.HasField("compile_end"):
                self.tensor_map = MappedTensors(json.loads(message.compile_end.tensor_map))
                self.instruction_info = json.loads(message.compile_end.instruction_info)
            if message.HasField("data_transfer"):
                data = json.loads(message.data_transfer.data_transfer)
                self.events.setdefault(message.type, []).append(data)
        return counts

    def get_tensor_map(self) -> MappedTensors | None:
        """The tensors of the program that was compiled."""
        return self.tensor_map

    def get_instruction_info(self) -> dict[str, Any]:
        """What its compilation says of instructions."""
        return self.instruction_info

    def assert_no_event(self, msg: str = "") -> None:
        """There is no event since the last call."""
        check_in_test(not self.get_ipu_events()[0], msg)

    def assert_num_events(self, num_expected: int, assert_msg: str = "") -> None:
        """So many events were read."""
        check_in_test(
            num_expected == self.num_events, f"{self.num_events} events, not {num_expected}. {assert_msg}"
        )

    def assert_compiled_for_ipu(self, msg: str = "") -> None:
        """A program was compiled since the last call."""
        check_in_test(self.get_ipu_events()[0][_COMPILED] > 0, msg or _NOTHING_COMPILED)

    def assert_contains_one_compile_event(self) -> None:
        """A program was compiled, in the events that were read."""
        check_in_test(self.compiled, _NOTHING_COMPILED)

    def assert_contains_no_compile_event(self) -> None:
        """No program was compiled, in the events that were read."""
        check_in_test(not self.compiled, "a program was compiled")

    def get_host_to_device_event_names(self, event_idx: int = 0) -> list[str]:
        """The variables that went to the device."""
        return [tensor["name"] for tensor in self.events[_TO_DEVICE][event_idx]["tensors"]]

    def assert_host_to_device_event_names(
        self, names: Sequence[str], msg: str | None = None, event_idx: int = 0
    ) -> None:
        """Each pattern fits one of the variables that went to the device, and there are no others."""
        if names:
            self.assert_contains_host_to_device_transfer_event()
            sent = self.get_host_to_device_event_names(event_idx)
            check_in_test(len(names) == len(sent), msg or f"{sent} went to the device")
            for name in names:
                check_in_test(
                    len(fnmatch.filter(sent, name)) == 1, msg or f"{sent} went to the device, not {name}"
                )

    def get_device_to_host_event_names(self, event_idx: int = 0) -> list[str]:
        """The variables that came back to the host."""
        return [tensor["name"] for tensor in self.events[_TO_HOST][event_idx]["tensors"]]

    def assert_device_to_host_event_names(
        self, names: Sequence[str], msg: str | None = None, event_idx: int = 0
    ) -> None:
        """Each pattern fits one of the variables that came back to the host, and there are no others."""
        came = self.get_device_to_host_event_names(event_idx) if self.events.get(_TO_HOST) else []
        fits = len(names) == len(came) and all(len(fnmatch.filter(came, name)) == 1 for name in names)
        check_in_test(fits, msg or f"{came} came back to the host, not {list(names)}")

    def assert_contains_device_to_host_transfer_event(self) -> None:
        """Variables came back to the host."""
        check_in_test(bool(self.events.get(_TO_HOST)), "no variables came back to the host")

    def get_ml_type_counts(self) -> list[int]:
        """How many products and convolutions there are for inference, the forward pass, gradients of inputs, and
        gradients of weights.
        """
        types = list(self.instruction_info.get("ml_types", {}).values())
        return [types.count(kind) for kind in (INFERENCE, FORWARD, BACKWARD, UPDATE)]

    def assert_contains_host_to_device_transfer_event(self) -> None:
        """Variables went to the device."""
        self.assert_num_host_to_device_transfer_events(None)

    def assert_num_host_to_device_transfer_events(self, num: int | None) -> None:
        """They did so ``num`` times; None: at least once."""
        count = len(self.events.get(_TO_DEVICE, ()))
        check_in_test(count > 0 if num is None else count == num, f"{count} transfers to the device")

    def assert_pipeline_stages_on_expected_ipu(self, expected_ipus: Sequence[Any], tile_per_ipu: int) -> None:
        """Each stage of a pipeline lies on its IPU; -1 and lists stand for any."""
        mapped = self.tensor_map
        if mapped is None:
            raise AssertionError("No program was compiled.")
        names = mapped.computation_names()
        beyond = fnmatch.filter(names, f"*_stage_{len(expected_ipus)}_*")
        check_in_test(not beyond, "The number of expected_ipus does not match the number of stages")
        for stage, expected in enumerate(expected_ipus):
            own = fnmatch.filter(names, f"*_stage_{stage}_*")
            if isinstance(expected, int) and expected != -1:
                ipus = {tile // tile_per_ipu for tile in mapped.tile_ids(own)} if own else set()
                check_in_test(ipus <= {expected}, f"Stage {stage} lies on IPUs {sorted(ipus)}")
