"""Events of compilations and runs, as ``gen_ipu_ops.ipu_event_trace`` gives them: the SDK's messages.

A configuration asks for them with ``ipu.test_utils.enable_ipu_events``. A program gives four: its compilation begins
and ends, it is loaded, it runs. Variables that go to the device give one more before the run, with their names and
bytes. What the host reads back gives none: podrun returns the variables with each run.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from podrun.runtime.graph import Place
from podrun.tensorflow.execution.device_table import DEVICES

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


def note_compilation(name: str, ordinal: int, seconds: float, places: Mapping[str, Place]) -> None:
    """A program was compiled in so many seconds. ``places``: where its operations lie."""
    if events_wanted():
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
            instruction_info=b'{"ml_types": {}}',
        )


def _tensor_map(name: str, places: Mapping[str, Place], tiles: int) -> dict[str, list[list[Any]]]:
    """Tensors by computation: the program, or ``<program>_stage_<n>_`` of a pipeline. Each is an operation's result on
    the first tile of its IPU: the tile model knows the IPU, not the tiles of each tensor.
    """
    computations: dict[str, list[list[Any]]] = {}
    for operation, place in places.items():
        computation = name if place.stage is None else f"{name}_stage_{place.stage}_"
        tensor = [operation, 0, [], "", 0, 0, 0, [[(place.ipu or 0) * tiles, 0]], operation]
        computations.setdefault(computation, []).append(tensor)
    return computations


def note_load(name: str, ordinal: int) -> None:
    """A program was loaded."""
    if events_wanted():
        _note("LOAD_ENGINE", ordinal, "load_engine", module_name=name.encode())


def note_run(name: str, ordinal: int) -> None:
    """A program ran."""
    if events_wanted():
        _note("EXECUTE", ordinal, "execute", module_name=name.encode())


def note_variables_sent(ordinal: int, values: Mapping[str, np.ndarray]) -> None:
    """Variables went to the device."""
    if events_wanted() and values:
        tensors = [{"name": name, "size": int(value.nbytes)} for name, value in values.items()]
        data = {"tensors": tensors, "total_size": sum(int(value.nbytes) for value in values.values())}
        _note("HOST_TO_DEVICE_TRANSFER", ordinal, "data_transfer", data_transfer=json.dumps(data).encode())


def taken_events() -> list[bytes]:
    """The events since the last call, each as the bytes of its message."""
    with _lock:
        events = list(_events)
        _events.clear()
    return events
