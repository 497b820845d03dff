"""Triton's backend ``poplar``: the genuine server loads it for models whose configuration says ``backend: "poplar"``.

Runs in a process that Triton starts for each instance of a model. `TritonPythonModel` is the class that Triton's
Python backend looks for; it answers the requests of a batch through an `podrun.serving.instance.PoplarInstance`.
Arrays cross by DLPack: Triton's own way expects NumPy 1. Requests that are cancelled are given back, requests that do
not fit are answered with an error of their own; the others of the batch are served.
"""

from __future__ import annotations

import ctypes
import gc
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.errors import CallError, PodrunError, ServiceError, UsageError
from podrun.serving.instance import PoplarInstance
from podrun.serving.leftovers import end_with_tritonserver
from podrun.serving.runtime.requests import QueuedRequest

if TYPE_CHECKING:
    from types import ModuleType

_USED = b"used_dltensor"
"""The name of a capsule whose tensor was taken, by the DLPack standard. Lives as long as the process, as
capsules ask.
"""


class TritonPythonModel:
    """The class that Triton's Python backend calls. Its methods have that backend's names."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """The configuration as it is: `podrun serve` writes one where there is none."""
        return auto_complete_model_config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model onto IPUs. Whatever is wrong is Triton's reason for the model not to be ready."""
        import triton_python_backend_utils as pb  # type: ignore[import-not-found]

        end_with_tritonserver()
        self._pb = pb
        folder = Path(args["model_repository"], args["model_version"])
        try:
            name = f"{args['model_name']}/{args['model_version']} ({args['model_instance_name']})"
            self._instance = PoplarInstance(folder, json.loads(args["model_config"]), name)
        except PodrunError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise pb.TritonModelException(f"podrun: {error.message}{hint}") from error
        self._counters = _counters(pb, {"model": args["model_name"], "version": args["model_version"]})
        pb.Logger.log_info(f"podrun: {args['model_instance_name']} is on its IPUs")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request, in order."""
        pb = self._pb
        begin = time.monotonic()
        taken = self._all_taken(requests)
        together = [request for request in taken if isinstance(request, QueuedRequest)]
        if together:
            try:
                self._instance.answer(together)
            except PodrunError as error:  # There are no IPUs any more. Requests that ran have their results.
                for request in together:
                    request.future.finish(error)
        responses = []
        for held in taken:
            try:
                if isinstance(held, Exception):
                    raise held
                outputs = self._instance.results(held)
                tensors = [_tensor(pb, name, value) for name, value in outputs.items()]
                responses.append(pb.InferenceResponse(tensors))
            except Exception as error:
                responses.append(pb.InferenceResponse([], pb.TritonError(_reason(error), _code(pb, error))))
        self._count(together, time.monotonic() - begin)
        for request in together:
            _let_go(request)
        return responses

    def finalize(self) -> None:
        """Give the IPUs and Triton's tensors back. Tensors that live until the interpreter ends are freed in memory
        that Triton has given back: the process would crash, and now and then the server with it.
        """
        self._instance.runner.close()
        del self._instance
        gc.collect()

    def _all_taken(self, requests: Sequence[Any]) -> list[QueuedRequest | Exception]:
        """Requests as the runner takes them. Once there are no IPUs, the rest is told so without another attempt."""
        taken: list[QueuedRequest | Exception] = []
        for request in requests:
            last = taken[-1] if taken else None
            taken.append(last if isinstance(last, ServiceError) else self._taken(request))
        return taken

    def _taken(self, request: Any) -> QueuedRequest | Exception:
        """A request of Triton's as the runner takes it, or why it cannot be served."""
        pb = self._pb
        if request.is_cancelled():
            return CancelledError("the request was cancelled")
        try:
            tensors = {b.name: pb.get_input_tensor_by_name(request, b.name) for b in self._instance.inputs}
            inputs = {name: np.from_dlpack(held) for name, held in tensors.items() if held is not None}
            return self._instance.prepared(inputs, request.request_id())
        except Exception as error:
            return error

    def _count(self, answered: Sequence[QueuedRequest], seconds: float) -> None:
        costs = {id(cost): cost for request in answered if (cost := request.future.modelled) is not None}
        for cost in costs.values():  # Requests of one run share its cost.
            self._counters["compute"].increment(cost.compute_s)
            self._counters["transfer"].increment(cost.transfer_s)
        self._counters["emulation"].increment(seconds)


def _let_go(request: QueuedRequest) -> None:
    """Drop Triton's tensors. An error holds the frames that it went through, and these the request."""
    request.inputs = {}
    if request.future.error is not None:
        request.future.error.__traceback__ = None


class CancelledError(UsageError):
    """The client has given a request up."""


def _tensor(pb: ModuleType, name: str, value: np.ndarray) -> Any:
    """Triton's tensor of an array.

    Its library marks a capsule that it has used with another name than the one that NumPy looks for, and NumPy would
    print a traceback for each: so the capsule gets the name of the standard.
    """
    capsule = value.__dlpack__()
    tensor = pb.Tensor.from_dlpack(name, capsule)
    ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(capsule), _USED)
    return tensor


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, PodrunError) else f"{type(error).__name__}: {error}"


def _code(pb: ModuleType, error: Exception) -> Any:
    if isinstance(error, CancelledError):
        return pb.TritonError.CANCELLED
    if isinstance(error, (ServiceError, CallError)):
        return pb.TritonError.UNAVAILABLE
    return pb.TritonError.INVALID_ARG if isinstance(error, UsageError) else pb.TritonError.INTERNAL


def _counters(pb: ModuleType, labels: Mapping[str, str]) -> dict[str, Any]:
    """The metrics of the modelled device, by what they count. Instances of a version, also those of a reload, count on
    in the same ones.

    They are never freed: Triton has one metric for equal labels, deletes it with the first instance that drops it, and
    then writes into freed memory for the others (its issue 8663), until the server crashes.
    """
    texts = {
        "compute": "Modelled seconds that IPUs computed",
        "transfer": "Modelled seconds of transfers between host and IPUs",
        "emulation": "Seconds that the emulation took",
    }
    kind = pb.MetricFamily.COUNTER
    counters = {}
    for name, text in texts.items():
        family = pb.MetricFamily(name=f"podrun_{name}_seconds_total", description=text, kind=kind)
        counters[name] = family.Metric(labels=labels)
        for held in (family, counters[name]):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    return counters
