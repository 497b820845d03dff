"""An instance of a served model: the compiled file on IPUs, under the names, types and parameters of a configuration.

What a server of any protocol needs and Triton's own module is not needed for. A configuration is Triton's, as JSON.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrun.core.errors import ConfigError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.fused_models import fused_graphs, graph_of
from podrun.serving.loaded_model import DataDescription
from podrun.serving.model_folder import served_model
from podrun.serving.request_incidents import IncidentLog
from podrun.serving.runtime.config import FOREVER, RuntimeConfig
from podrun.serving.runtime.live_runner import LiveRunner
from podrun.serving.runtime.requests import QueuedRequest, RunFuture

TYPES: Mapping[str, str] = {
    "TYPE_BOOL": "bool",
    "TYPE_UINT8": "uint8",
    "TYPE_UINT16": "uint16",
    "TYPE_UINT32": "uint32",
    "TYPE_INT8": "int8",
    "TYPE_INT16": "int16",
    "TYPE_INT32": "int32",
    "TYPE_FP16": "float16",
    "TYPE_FP32": "float32",
    "TYPE_INT64": "int64",
}
"""Triton's types that models may have, with NumPy's names. TYPE_INT64 stands for the int32 of the device."""
TIME_OUTPUT = "ipu_time_us"
"""An output that a configuration may have beside the model's: TYPE_FP32, 3 values in us for each row: modelled
computation, modelled transfer, wait for the run. (Python backends of Triton 2.51 cannot set
parameters of responses: the library calls no function for them.)
"""


@dataclass(frozen=True, slots=True)
class TensorBinding:
    """A tensor of a configuration and the anchor behind it. ``dtype``: what clients send and get."""

    name: str
    anchor: DataDescription
    dtype: np.dtype[Any]


def bindings(
    config: Mapping[str, Any], key: str, anchors: Sequence[DataDescription], names: Mapping[str, str]
) -> list[TensorBinding]:
    """The inputs or outputs (``key``) of a configuration. ConfigError names the tensor that does not fit the file."""
    known = {names.get(anchor.name, anchor.name): anchor for anchor in anchors}
    entries = {entry["name"]: entry for entry in config.get(key, ()) if entry["name"] != TIME_OUTPUT}
    if key == "input" and entries.keys() != known.keys():
        raise ConfigError(
            f"config.pbtxt has inputs {sorted(entries)}; the compiled model has {sorted(known)}"
        )
    return [_binding(entry, key, known, config) for entry in entries.values()]


def _binding(
    entry: Mapping[str, Any], key: str, known: Mapping[str, DataDescription], config: Mapping[str, Any]
) -> TensorBinding:
    name, kind = entry["name"], entry["data_type"]
    if name not in known:
        raise ConfigError(f"config.pbtxt has {key} {name!r}; the compiled model has {sorted(known)}")
    if kind not in TYPES:
        raise ConfigError(
            f"{key} {name!r} has {kind}, which IPUs do not compute", hint=f"One of {', '.join(TYPES)}."
        )
    anchor, dtype = known[name], np.dtype(TYPES[kind])
    if dtype != anchor.dtype and (kind, anchor.dtype.name) != ("TYPE_INT64", "int32"):
        raise ConfigError(f"{key} {name!r} has {kind}; the compiled model has {anchor.dtype}")
    batched = int(config.get("max_batch_size", 0)) > 0
    dims = [int(size) for size in entry.get("dims", ())]
    shape = list(anchor.shape[1:] if batched else anchor.shape) or [1]
    if len(dims) != len(shape) or any(a not in (-1, b) for a, b in zip(dims, shape, strict=True)):
        raise ConfigError(f"{key} {name!r} has dims {dims}; the compiled model has {shape}")
    return TensorBinding(name, anchor, dtype)


def _check_batch(
    config: Mapping[str, Any], outputs: Sequence[TensorBinding], rows_behind: Callable[[str], int]
) -> None:
    """ConfigError for requests that share a batch of a model that does not say what belongs to each."""
    for binding in outputs:
        rows = rows_behind(binding.anchor.name)
        if int(config.get("max_batch_size", 0)) > 0 and binding.anchor.shape[:1] != (rows,):
            raise ConfigError(
                f"output {binding.name!r} is {list(binding.anchor.shape)} for a batch of {rows}: max_batch_size "
                "above 0 needs the batch as the first dimension",
                hint="Change the model's output, or write max_batch_size: 0 and the whole shapes as dims.",
            )


def _check_optional(config: Mapping[str, Any], inputs: Sequence[TensorBinding]) -> None:
    """ConfigError for inputs of a fused model that each request would have to have."""
    optional = {entry["name"] for entry in config.get("input", ()) if entry.get("optional")}
    for binding in inputs:
        if binding.name not in optional:
            raise ConfigError(
                f"input {binding.name!r} is not optional: a request to a fused model has the inputs of one model",
                hint=f'Write it so: {{ name: "{binding.name}", ..., optional: true }}',
            )


def as_anchor(value: np.ndarray, binding: TensorBinding) -> np.ndarray:
    """A client's array as the anchor takes it. UsageError for 64-bit integers that 32 bits do not hold."""
    if value.dtype == binding.anchor.dtype:
        return value
    if value.dtype != np.int64 or binding.anchor.dtype != np.int32:
        raise UsageError(
            f"input {binding.name!r} has type {value.dtype}; the model takes {binding.anchor.dtype}"
        )
    bounds = np.iinfo(np.int32)
    if value.size and (value.min() < bounds.min or value.max() > bounds.max):
        raise UsageError(f"input {binding.name!r} has values that 32 bits do not hold")
    return value.astype(np.int32)


PARAMETERS = ("synchronous_execution", "timeout_ns", "auto_reset", "time_scale")
"""Parameters of a model that are the backend's."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """Parameters of a configuration.

    ``synchronous``: each request is a run of its own, else those that Triton's batcher puts together share runs.
    ``timeout_ns``: how long an incomplete run waits for other requests before zeros fill it; None: not at all.
    ``auto_reset``: after an error of IPUs the program is loaded again, else all later requests get that error.
    ``time_scale``: runs take their modelled time, times this; 0: as long as their emulation.
    """

    synchronous: bool = False
    timeout_ns: int | None = None
    auto_reset: bool = True
    time_scale: float = 0.0

    @staticmethod
    def of(config: Mapping[str, Any]) -> BackendSettings:
        """ConfigError for a value that cannot be."""
        values = {
            name: str(entry.get("string_value", ""))
            for name, entry in (config.get("parameters") or {}).items()
            if name in PARAMETERS
        }
        for name in ("synchronous_execution", "auto_reset"):
            if values.get(name, "0") not in ("0", "1"):
                raise ConfigError(f"parameter {name} is {values[name]!r}: 0 or 1 is taken")
        timeout = values.get("timeout_ns")
        if timeout is not None and not (timeout.isdecimal() and 0 < int(timeout) < FOREVER):
            raise ConfigError(
                f"parameter timeout_ns is {timeout!r}: nanoseconds above 0 are taken",
                hint="Without the parameter nothing waits; Triton's batcher has a delay of its own.",
            )
        return BackendSettings(
            values.get("synchronous_execution") == "1",
            None if timeout is None else int(timeout),
            values.get("auto_reset", "1") == "1",
            _time_scale(values.get("time_scale", "0")),
        )

    def runtime_config(self) -> RuntimeConfig:
        """The settings of the runner that stand for these parameters."""
        return RuntimeConfig(
            batching_dim=0,
            auto_reset=self.auto_reset,
            timeout_ns=self.timeout_ns or 1,
            time_scale=self.time_scale,
        )


def _time_scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = -1.0
    if not 0 <= scale < float("inf"):
        raise ConfigError(
            f"parameter time_scale is {text!r}: a number is taken", hint='"1" is the speed of IPUs.'
        )
    return scale


class PoplarInstance:
    """An instance of a model on IPUs. ``name``: for incidents."""

    def __init__(
        self, folder: str | os.PathLike[str], config: Mapping[str, Any], name: str = "the model"
    ) -> None:
        model, names = served_model(Path(folder))
        self.settings = BackendSettings.of(config)
        self.runner = LiveRunner(model, self.settings.runtime_config(), IncidentLog(name))
        try:
            self.inputs = bindings(config, "input", self.runner.get_execute_inputs(), names)
            self.outputs = bindings(config, "output", self.runner.get_execute_outputs(), names)
            _check_batch(config, self.outputs, self.runner.rows_behind)
            self._fused = bool(fused_graphs(a.name for a in model.metadata.inputs()))
            if self._fused:
                _check_optional(config, self.inputs)
            self._tells_time = any(entry["name"] == TIME_OUTPUT for entry in config.get("output", ()))
        except BaseException:
            self.runner.close()
            raise

    def prepared(self, inputs: Mapping[str, np.ndarray], label: str = "") -> QueuedRequest:
        """A request for the runner, by the names of the configuration. UsageError if it does not fit; ``label``: the
        client's id of it. A request to a fused model has the inputs of one of its models, and gets that one's outputs.
        """
        arrays = {b.anchor.name: as_anchor(inputs[b.name], b) for b in self.inputs if b.name in inputs}
        if not arrays:
            raise UsageError(f"the request has none of the inputs {sorted(b.name for b in self.inputs)}")
        first, value = next(iter(arrays.items()))
        rows = value.shape[0]
        wanted = [b for b in self.outputs if not self._fused or graph_of(b.anchor.name) == graph_of(first)]
        outputs = {b.anchor.name: np.empty(self._shape(b, rows), b.anchor.dtype) for b in wanted}
        return self.runner.prepared(arrays, outputs, label)

    def answer(self, requests: Sequence[QueuedRequest]) -> None:
        """Answer requests that came together, as the settings say; their futures have the results."""
        groups = [[request] for request in requests] if self.settings.synchronous else [list(requests)]
        for group in groups:
            if self.settings.timeout_ns is None:
                self.runner.run_now(group)
            else:
                self.runner.run_queued(group)

    def results(self, request: QueuedRequest) -> dict[str, np.ndarray]:
        """The outputs of an answered request, by the names of the configuration. Raises its error."""
        request.future.wait(0)
        results = {
            b.name: request.outputs[b.anchor.name].astype(b.dtype, copy=False)
            for b in self.outputs
            if b.anchor.name in request.outputs
        }
        if self._tells_time:
            results[TIME_OUTPUT] = np.tile(times_us(request.future), (request.rows, 1))
        return results

    def _shape(self, binding: TensorBinding, rows: int) -> tuple[int, ...]:
        shape = binding.anchor.shape or (1,)
        return (rows * shape[0] // self.runner.rows_behind(binding.anchor.name), *shape[1:])


def times_us(future: RunFuture) -> np.ndarray:
    """Modelled computation, modelled transfer and wait of an answered request, microseconds: float32 ``[3]``."""
    cost = future.modelled
    compute, transfer = (cost.compute_s, cost.transfer_s) if cost is not None else (0.0, 0.0)
    return np.array([compute * 1e6, transfer * 1e6, future.queue_seconds * 1e6], np.float32)
