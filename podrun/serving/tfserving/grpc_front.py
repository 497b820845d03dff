"""TensorFlow Serving's gRPC: PredictionService.Predict and GetModelMetadata, ModelService.GetModelStatus.

Services and methods have TensorFlow Serving's names; messages are podrun's own (`podrun/protos/tfserving.proto`),
equal on the wire. Classify, Regress, MultiInference and HandleReloadConfigRequest are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import Int64Value

from podrun.core.errors import DeadlineError, NotFoundError, PodrunError, ServiceError, UsageError
from podrun.protos import tfserving_pb2 as pb
from podrun.serving.tfserving.answers import METHOD, SIGNATURE, ModelChoice, predict, shape_for_clients
from podrun.serving.tfserving.tensors import MOST_BYTES, array_from_wire, array_to_wire, type_number
from podrun.serving.tfserving.versions import ModelVersion, ServedVersions

PREDICTION, MODELS = "tensorflow.serving.PredictionService", "tensorflow.serving.ModelService"
REFUSED = {
    PREDICTION: ("Classify", "Regress", "MultiInference"),
    MODELS: ("HandleReloadConfigRequest",),
}
_SIGNATURE_URL = "type.googleapis.com/tensorflow.serving.SignatureDefMap"
_WORKERS = 32
"""Requests that wait for IPUs at a time; others wait in gRPC's queue."""


def status_code(error: Exception) -> grpc.StatusCode:
    """The code that tells a client whose fault an error is."""
    for kind, code in (
        (NotFoundError, grpc.StatusCode.NOT_FOUND),
        (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
        (ServiceError, grpc.StatusCode.UNAVAILABLE),
        (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    ):
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def told_error(error: Exception) -> str:
    """An error in one line, with what to do."""
    if not isinstance(error, PodrunError):
        return f"{type(error).__name__}: {error}"
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _choice(spec: pb.ModelSpec) -> ModelChoice:
    number = spec.version.value if spec.HasField("version") else None
    return ModelChoice(spec.name, number, spec.version_label, spec.signature_name)


def _spec(version: ModelVersion, signature: str = "") -> pb.ModelSpec:
    return pb.ModelSpec(
        name=version.model, version=Int64Value(value=version.number), signature_name=signature
    )


class TensorFlowFront:
    """The handlers of the calls. Each takes a message and returns one, or raises a PodrunError."""

    def __init__(self, versions: ServedVersions) -> None:
        self._versions = versions

    def predict(self, request: pb.PredictRequest, seconds: float | None) -> pb.PredictResponse:
        """Answer the call PredictionService.Predict."""
        inputs = {name: array_from_wire(name, value) for name, value in request.inputs.items()}
        version, outputs = predict(
            self._versions, _choice(request.model_spec), inputs, request.output_filter, seconds
        )
        response = pb.PredictResponse(model_spec=_spec(version, SIGNATURE))
        for name, value in outputs.items():
            response.outputs[name].CopyFrom(array_to_wire(value))
        return response

    def metadata(
        self, request: pb.GetModelMetadataRequest, seconds: float | None
    ) -> pb.GetModelMetadataResponse:
        """PredictionService.GetModelMetadata, of the field ``signature_def``."""
        fields = list(request.metadata_field)
        if fields != ["signature_def"]:
            raise UsageError(f"metadata_field is ['signature_def'], not {fields}")
        choice = _choice(request.model_spec)
        choice.check()
        version = self._versions.version(choice.name, choice.number)
        packed = AnyMessage(type_url=_SIGNATURE_URL, value=signatures_of(version).SerializeToString())
        return pb.GetModelMetadataResponse(model_spec=_spec(version), metadata={"signature_def": packed})

    def status(self, request: pb.GetModelStatusRequest, seconds: float | None) -> pb.GetModelStatusResponse:
        """Answer the call ModelService.GetModelStatus."""
        choice = _choice(request.model_spec)
        choice.check()
        return status_message(self._versions, choice)


def signatures_of(version: ModelVersion) -> pb.SignatureDefMap:
    """The signatures of a version: one, with its inputs and outputs."""
    signature = pb.SignatureDef(method_name=METHOD)
    if version.runner is not None:
        for target, tensors in (
            (signature.inputs, version.runner.inputs),
            (signature.outputs, version.runner.outputs),
        ):
            for name, held in tensors.items():
                sizes = [pb.Dimension(size=size) for size in shape_for_clients(held)]
                info = pb.TensorInfo(name=f"{held.name}:0", dtype=type_number(held.dtype))
                info.tensor_shape.dim.extend(sizes)
                target[name].CopyFrom(info)
    return pb.SignatureDefMap(signature_def={SIGNATURE: signature})


def status_message(versions: ServedVersions, choice: ModelChoice) -> pb.GetModelStatusResponse:
    """The states of a model's versions."""
    response = pb.GetModelStatusResponse()
    for version in versions.statuses(choice.name, choice.number):
        told = response.model_version_status.add(version=version.number, state=int(version.state))
        told.status.SetInParent()
        if version.error is not None:
            told.status.error_code = status_code(version.error).value[0]
            told.status.error_message = told_error(version.error)
    return response


RpcAnswer = Callable[[Any, float | None], Message]
RpcMethod: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def _unary(kind: type[Message], handler: RpcAnswer) -> RpcMethod:
    def answer(request: Message, context: grpc.ServicerContext) -> Message:
        try:
            return handler(request, context.time_remaining())
        except Exception as error:
            context.abort(status_code(error), told_error(error))

    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=kind.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )


def _refused(method: str) -> RpcMethod:
    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            f"{method} is not supported: podrun serves Predict, GetModelMetadata and GetModelStatus",
        )

    return grpc.unary_unary_rpc_method_handler(answer)


def grpc_server(versions: ServedVersions, address: str) -> tuple[grpc.Server, int]:
    """A server that is not started, and its port (``address`` may have port 0). UsageError for an address in use."""
    front = TensorFlowFront(versions)
    methods: Mapping[str, Mapping[str, RpcMethod]] = {
        PREDICTION: {
            "Predict": _unary(pb.PredictRequest, front.predict),
            "GetModelMetadata": _unary(pb.GetModelMetadataRequest, front.metadata),
        },
        MODELS: {"GetModelStatus": _unary(pb.GetModelStatusRequest, front.status)},
    }
    server = grpc.server(
        ThreadPoolExecutor(_WORKERS, "podrun-tensorflow-serving"),
        options=[
            ("grpc.max_receive_message_length", MOST_BYTES),
            ("grpc.max_send_message_length", MOST_BYTES),
            ("grpc.so_reuseport", 0),
        ],
    )
    for service, handlers in methods.items():
        refused = {method: _refused(method) for method in REFUSED[service]}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {**handlers, **refused}),)
        )
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise UsageError(
            f"{address} cannot be listened on: it is in use, or not this host's", hint="Name another port."
        ) from error
    return server, port
