"""Events of compilations and runs, as ``gen_ipu_ops.ipu_event_trace`` gives them: the SDK's messages.

A configuration asks for them with ``ipu.test_utils.enable_ipu_events``. A program gives four: its compilation begins
and ends, it is loaded, it runs. Variables that go to the device give one more before the run, with their names and
bytes; those that the host fetches after a program wrote them, one as well.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Node, Place, reads
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.step_values import MOVES

if TYPE_CHECKING:
    import tensorflow as tf

    from podrun.tensorflow.execution.step_program import ReadStep, StepSource

KINDS = (
    "COMPILE_BEGIN", "COMPILE_END", "HOST_TO_DEVICE_TRANSFER", "DEVICE_TO_HOST_TRANSFER", "LOAD_ENGINE", "EXECUTE",
)  # fmt: skip
_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "podrun.tensorflow"
_PARTS: dict[str, tuple[int, tuple[tuple[str, int, int], ...]]] = {
    "compile_begin": (5, (("module_name", 2, _Field.TYPE_BYTES),)),
    "compile_end": (
        6,
        (
            ("duration", 1, _Field.TYPE_INT64),
            ("module_name", 2, _Field.TYPE_BYTES),
            ("tensor_map", 3, _Field.TYPE_BYTES),
            ("instruction_info", 4, _Field.TYPE_BYTES),
        ),
    ),
    "data_transfer": (7, (("data_transfer", 1, _Field.TYPE_BYTES),)),
    "load_engine": (8, (("module_name", 1, _Field.TYPE_BYTES),)),
    "execute": (9, (("activity_trace", 1, _Field.TYPE_BYTES), ("module_name", 2, _Field.TYPE_BYTES))),
}
"""The parts of an event, of which it has one: number, and fields with their numbers and types."""


def _message_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="podrun/tensorflow/trace.proto", package=_PACKAGE, syntax="proto3"
    )
    event = file.message_type.add(name="IpuTraceEvent")
    event.oneof_decl.add(name="msg")
    kinds = event.enum_type.add(name="Type")
    for number, name in enumerate(KINDS):
        kinds.value.add(name=name, number=number)
    optional = _Field.LABEL_OPTIONAL
    event.field.add(name="timestamp", number=1, type=_Field.TYPE_DOUBLE, label=optional)
    event.field.add(name="ordinal", number=2, type=_Field.TYPE_INT32, label=optional)
    kind = f".{_PACKAGE}.IpuTraceEvent.Type"
    event.field.add(name="type", number=3, type=_Field.TYPE_ENUM, type_name=kind, label=optional)
    for name, (number, fields) in _PARTS.items():
        part = file.message_type.add(name=f"Event{name.title().replace('_', '')}")
        for own, place, type in fields:
            part.field.add(name=own, number=place, type=type, label=optional)
        event.field.add(
            name=name,
            number=number,
            type=_Field.TYPE_MESSAGE,
            type_name=f".{_PACKAGE}.{part.name}",
            label=optional,
            oneof_index=0,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.IpuTraceEvent"))


IpuTraceEvent: Any = _message_class()
"""An event: ``timestamp``, ``ordinal``, ``type`` and the part of its type."""
TILES = 1472
"""Tiles of an IPU where the configuration does not say how many an IPU model has."""
MOST_EVENTS = 100_000
"""So many events wait for a program that reads them; the oldest go first."""
_lock = threading.Lock()
_events: list[bytes] = []


def events_wanted() -> bool:
    """Whether the configuration asks for events."""
    profiling = getattr(DEVICES.config, "_profiling", None)
    return bool(getattr(profiling, "enable_ipu_events", False))


def _note(kind: str, ordinal: int, part: str, **fields: object) -> None:
    event = IpuTraceEvent(
        timestamp=time.time(), ordinal=ordinal, type=KINDS.index(kind), **{part: dict(fields)}
    )
    with _lock:
        _events.append(event.SerializeToString())
        del _events[:-MOST_EVENTS]


def note_compilation(source: StepSource, step: ReadStep, seconds: float) -> None:
    """Record the event of a compilation that took ``seconds``."""
    if events_wanted():
        name, ordinal = source.name, source.ordinal
        places = step.places or {node.label: Place() for node in step.nodes if node.op_type not in MOVES}
        module = name.encode()
        tiles = _tensor_map(name, places, int(DEVICES.config.ipu_model.tiles_per_ipu or TILES))
        _note("COMPILE_BEGIN", ordinal, "compile_begin", module_name=module)
        duration = round(seconds * 1e6)
        _note(
            "COMPILE_END",
            ordinal,
            "compile_end",
            module_name=module,
            duration=duration,
            tensor_map=json.dumps({"mappings": tiles}).encode(),
            instruction_info=json.dumps({"ml_types": ml_types(step.nodes)}).encode(),
        )


def _tensor_map(name: str, places: Mapping[str, Place], tiles: int) -> dict[str, list[list[Any]]]:
    """Tensors by computation: the program, or ``<program>_stage_<n>_`` of a pipeline. Each is an operation's result on
    the first tile of its IPU: the tile model knows the IPU, not the tiles of each tensor.
    """
    computations: dict[str, list[list[Any]]] = {}
    stages = {place.stage: place.ipu for place in places.values() if place.stage is not None}
    order = str(DEVICES.config.selection_order.name)
    snake = order == "SNAKE" or (order == "AUTO" and all(stage == ipu for stage, ipu in stages.items()))
    for operation, place in places.items():
        computation = name if place.stage is None else f"{name}_stage_{place.stage}_"
        tensor = [operation, 0, [], "", 0, 0, 0, [[_selected(place.ipu or 0, snake) * tiles, 0]], operation]
        computations.setdefault(computation, []).append(tensor)
    return computations


def _selected(ipu: int, snake: bool) -> int:
    """The number in its device of a pipeline's IPU: a snake order visits pairs of linked IPUs back and forth."""
    place = ipu % 4
    return ipu - place + (5 - place) if snake and place > 1 else ipu


def note_load(name: str, ordinal: int) -> None:
    """Record the event of loading a program on a device."""
    if events_wanted():
        _note("LOAD_ENGINE", ordinal, "load_engine", module_name=name.encode())


def note_run(name: str, ordinal: int) -> None:
    """Record the event of one run of a program."""
    if events_wanted():
        _note("EXECUTE", ordinal, "execute", module_name=name.encode())


INFERENCE, FORWARD, BACKWARD, UPDATE = range(1, 5)
"""What a product or convolution is for: inference, or in training the forward pass, the gradient of its input, or the
gradient of its weight.
"""
_PRODUCTS = ("MatMul", "BatchMatMulV2", "Conv2D", "Conv3D", "DepthwiseConv2dNative")


def ml_types(nodes: Sequence[Node]) -> dict[str, int]:
    """Product or convolution of a step -> what it is for. The gradient of the input of a convolution without strides is
    two of the forward pass, because it is a convolution with the weights turned around.
    """
    types: dict[str, int] = {}
    for node in nodes:
        if node.op_type in _PRODUCTS:
            types[node.label] = INFERENCE
        if node.op_type != "Differentiate":
            continue
        graph = node["graph"]
        varying = set(graph.inputs[: node["sources"]])
        for inner in graph.nodes:
            if inner.op_type in _PRODUCTS:
                types[inner.label] = FORWARD
                turned = "Conv" in inner.op_type and set(inner.get("strides", (1,))) == {1}
                if inner.inputs[0] in varying and turned:
                    types |= {f"{inner.label}/turned": FORWARD, f"{inner.label}/input": FORWARD}
                elif inner.inputs[0] in varying:
                    types[f"{inner.label}/input"] = BACKWARD
                if inner.inputs[1] in varying:
                    types[f"{inner.label}/weight"] = UPDATE
            if varying & reads(inner):
                varying.update(inner.outputs)
    return types


def note_variables_sent(source: StepSource, values: Mapping[str, np.ndarray]) -> None:
    """Variables went to the device. They are named by their number among what the program takes: first what is fed,
    then variables.
    """
    if events_wanted() and values:
        ordered = sorted(source.resources, key=lambda key: int(key.rpartition("/")[2]))
        first = len(set(source.names.values()) - source.resources)
        sizes = [(f"{first + ordered.index(key)}.0", int(value.nbytes)) for key, value in values.items()]
        _note_transfer("HOST_TO_DEVICE_TRANSFER", source.ordinal, sizes)


def _note_transfer(kind: str, ordinal: int, sizes: Sequence[tuple[str, int]]) -> None:
    tensors = [{"name": name, "size": size} for name, size in sizes]
    data = {"tensors": tensors, "total_size": sum(size for _, size in sizes)}
    _note(kind, ordinal, "data_transfer", data_transfer=json.dumps(data).encode())


@dataclass(slots=True)
class WrittenVariables:
    """Variables of a graph that programs wrote and the host has not fetched since, by name: all that the program wrote
    that wrote it, by name, each with its name among the outputs and its bytes. ``generation``: the configuration's.
    """

    generation: int
    groups: dict[str, dict[str, tuple[str, int]]] = field(default_factory=dict)


_written: WeakKeyDictionary[tf.Graph, WrittenVariables] = WeakKeyDictionary()


def note_written(graph: tf.Graph, written: Mapping[str, int], outputs: int) -> None:
    """A program wrote variables of a graph, by name with their bytes, behind so many other outputs."""
    if events_wanted() and written:
        own = _written.get(graph)
        if own is None or own.generation != DEVICES.generation:
            own = _written[graph] = WrittenVariables(DEVICES.generation)
        group = {name: (f"out_{outputs + rank}.0", size) for rank, (name, size) in enumerate(written.items())}
        own.groups.update(dict.fromkeys(written, group))


def note_fetched(graph: tf.Graph, names: Sequence[str], ordinal: int = 0) -> None:
    """The host fetches variables of a graph: what the program wrote that wrote one of them comes back as a whole."""
    own = _written.get(graph) if events_wanted() else None
    if own is None or own.generation != DEVICES.generation:
        return
    for name in names:
        group = own.groups.get(name, {})
        if group:
            _note_transfer("DEVICE_TO_HOST_TRANSFER", ordinal, list(group.values()))
        for key in group:
            own.groups.pop(key, None)


def taken_events() -> list[bytes]:
    """The events since the last call, each as the bytes of its message."""
    with _lock:
        events = list(_events)
        _events.clear()
    return events
