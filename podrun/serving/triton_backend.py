"""Triton's backend ``poplar``: the genuine server loads it for models whose configuration says ``backend: "poplar"``.

Runs in a process that Triton starts for each instance of a model. `TritonPythonModel` is the class that Triton's Python
backend looks for; it finds the model's file (``VERSION/executable.popef``, or an ``.onnx`` file that is compiled once
and kept), holds the configuration against it, and answers the requests of a batch in one run. Arrays cross by DLPack:
Triton's own way expects NumPy 1. Requests that are cancelled are given back, requests that do not fit are answered with
an error of their own; the others of the batch are served.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from podrun.core.environment import environment, podrun_cache_directory
from podrun.core.errors import ConfigError, PodrunError, UsageError
from podrun.serving.compiler import Compiler, CompilerOptions, ServedModel
from podrun.serving.loaded_model import DataDescription
from podrun.serving.runner import ModelRunner, QueuedRequest, RunFuture, RuntimeConfig

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
computation, modelled transfer, wait for the run. (Triton 2.51 has no parameters in responses of Python backends.)
"""
MODEL_FILE, NAMES_FILE = "executable.popef", "name_map.json"


@dataclass(frozen=True, slots=True)
class TensorBinding:
    """A tensor of a configuration and the anchor behind it. ``dtype``: what clients send and get."""

    name: str
    anchor: DataDescription
    dtype: np.dtype[Any]


def compiled_file(version: Path) -> Path:
    """The compiled model in a version's folder; an ONNX file is compiled into the user's cache. ConfigError if there is
    neither, or more than one.
    """
    file = version / MODEL_FILE
    if file.is_file():
        return file
    models = sorted(version.glob("*.onnx"))
    if len(models) != 1:
        held = f"{len(models)} ONNX files" if models else "no ONNX file"
        raise ConfigError(
            f"{version} holds no {MODEL_FILE} and {held}",
            hint=f"Put one compiled model there ({MODEL_FILE}), or one .onnx file.",
        )
    cache = podrun_cache_directory(environment())
    if cache is None:
        raise ConfigError(f"{models[0]} cannot be compiled: podrun has no cache directory")
    folder = cache / "serving"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{hashlib.sha256(models[0].read_bytes()).hexdigest()}.popef"
    if not target.is_file():
        Compiler.compile_and_export(models[0], None, target, CompilerOptions(partials_type="float"))
    return target


def anchor_names(version: Path) -> dict[str, str]:
    """``name_map.json``: anchor -> name in the configuration; empty if there is none."""
    path = version / NAMES_FILE
    if not path.is_file():
        return {}
    try:
        names = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{path} does not map anchors to names")
    return names


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
    shape = list(anchor.shape[1:] if batched else anchor.shape)
    if len(dims) != len(shape) or any(a not in (-1, b) for a, b in zip(dims, shape, strict=True)):
        raise ConfigError(f"{key} {name!r} has dims {dims}; the compiled model has {shape}")
    return TensorBinding(name, anchor, dtype)


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


class PoplarInstance:
    """An instance of a model: what is independent of Triton's own module."""

    def __init__(self, folder: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
        version = Path(folder)
        names = anchor_names(version)
        self.runner = ModelRunner(
            ServedModel(compiled_file(version)), RuntimeConfig(batching_dim=0, auto_reset=True)
        )
        try:
            self.inputs = bindings(config, "input", self.runner.get_execute_inputs(), names)
            self.outputs = bindings(config, "output", self.runner.get_execute_outputs(), names)
            self._tells_time = any(entry["name"] == TIME_OUTPUT for entry in config.get("output", ()))
        except BaseException:
            self.runner.close()
            raise

    def prepared(self, inputs: Mapping[str, np.ndarray]) -> QueuedRequest:
        """A request for the runner, by the names of the configuration. UsageError if it does not fit."""
        arrays = {b.anchor.name: as_anchor(inputs[b.name], b) for b in self.inputs}
        rows = next(iter(arrays.values())).shape[0]
        outputs = {b.anchor.name: np.empty(self._shape(b, rows), b.anchor.dtype) for b in self.outputs}
        return self.runner.prepared(arrays, outputs)

    def results(self, request: QueuedRequest) -> dict[str, np.ndarray]:
        """The outputs of an answered request, by the names of the configuration. Raises its error."""
        request.future.wait(0)
        results = {b.name: request.outputs[b.anchor.name].astype(b.dtype, copy=False) for b in self.outputs}
        if self._tells_time:
            results[TIME_OUTPUT] = np.tile(times_us(request.future), (request.rows, 1))
        return results

    def _shape(self, binding: TensorBinding, rows: int) -> tuple[int, ...]:
        shape = binding.anchor.shape
        return (rows * shape[0] // self.runner.compiled_rows, *shape[1:])


def times_us(future: RunFuture) -> np.ndarray:
    """Modelled computation, modelled transfer and wait of an answered request, microseconds: float32 ``[3]``."""
    cost = future.modelled
    compute, transfer = (cost.compute_s, cost.transfer_s) if cost is not None else (0.0, 0.0)
    return np.array([compute * 1e6, transfer * 1e6, future.queue_seconds * 1e6], np.float32)


class TritonPythonModel:
    """The class that Triton's Python backend calls. Its methods have that backend's names."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """The configuration as it is: `podrun serve` writes one where there is none."""
        return auto_complete_model_config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model onto IPUs. Whatever is wrong is Triton's reason for the model not to be ready."""
        import triton_python_backend_utils as pb  # type: ignore[import-not-found]

        self._pb = pb
        folder = Path(args["model_repository"], args["model_version"])
        try:
            self._instance = PoplarInstance(folder, json.loads(args["model_config"]))
        except PodrunError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise pb.TritonModelException(f"podrun: {error.message}{hint}") from error
        self._families = _families(pb)  # A family that is dropped takes its metrics along.
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._counters = {name: family.Metric(labels=labels) for name, family in self._families.items()}
        pb.Logger.log_info(f"podrun: {args['model_instance_name']} is on its IPUs")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request, in order."""
        pb = self._pb
        begin = time.monotonic()
        taken: list[QueuedRequest | Exception] = [self._taken(request) for request in requests]
        together = [request for request in taken if isinstance(request, QueuedRequest)]
        if together:
            self._instance.runner.run_now(together)
        responses = []
        for request in taken:
            try:
                if isinstance(request, Exception):
                    raise request
                outputs = self._instance.results(request)
                tensors = [pb.Tensor.from_dlpack(name, value) for name, value in outputs.items()]
                responses.append(pb.InferenceResponse(tensors))
            except Exception as error:
                responses.append(pb.InferenceResponse([], pb.TritonError(_reason(error), _code(pb, error))))
        self._count(together, time.monotonic() - begin)
        return responses

    def finalize(self) -> None:
        """Give the IPUs back."""
        self._instance.runner.close()

    def _taken(self, request: Any) -> QueuedRequest | Exception:
        """A request of Triton's as the runner takes it, or why it cannot be served."""
        pb = self._pb
        if request.is_cancelled():
            return CancelledError("the request was cancelled")
        try:
            inputs = {
                b.name: np.from_dlpack(pb.get_input_tensor_by_name(request, b.name))
                for b in self._instance.inputs
            }
            return self._instance.prepared(inputs)
        except Exception as error:
            return error

    def _count(self, answered: Sequence[QueuedRequest], seconds: float) -> None:
        costs = [request.future.modelled for request in answered[:1]]
        for cost in costs:
            if cost is not None:
                self._counters["compute"].increment(cost.compute_s)
                self._counters["transfer"].increment(cost.transfer_s)
        self._counters["emulation"].increment(seconds)


class CancelledError(UsageError):
    """The client has given a request up."""


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, PodrunError) else f"{type(error).__name__}: {error}"


def _code(pb: Any, error: Exception) -> Any:
    if isinstance(error, CancelledError):
        return pb.TritonError.CANCELLED
    return pb.TritonError.INVALID_ARG if isinstance(error, UsageError) else pb.TritonError.INTERNAL


def _families(pb: Any) -> dict[str, Any]:
    """The metrics of the modelled device, by what they count."""
    texts = {
        "compute": "Modelled seconds that IPUs computed",
        "transfer": "Modelled seconds of transfers between host and IPUs",
        "emulation": "Seconds that the emulation took",
    }
    kind = pb.MetricFamily.COUNTER
    return {
        name: pb.MetricFamily(name=f"podrun_{name}_seconds_total", description=text, kind=kind)
        for name, text in texts.items()
    }
