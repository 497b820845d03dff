"""Clients and servers of the services that .proto files describe, made from the descriptors in the generated messages.

user = stub_of(vipu_pb2, "UserService", channel)
user.GetPartition(request, timeout=5)

add_to_server(vipu_pb2, "UserService", servicer, server)
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass


def stub_of(messages: ModuleType, name: str, channel: grpc.Channel) -> Any:
    """An object with a call for each method of the service, by the method's name."""
    service = _service(messages, name)
    calls = {
        method.name: getattr(channel, _shape(method))(
            f"/{service.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        for method in service.methods
    }
    return SimpleNamespace(**calls)


def add_to_server(messages: ModuleType, name: str, servicer: object, server: grpc.Server) -> None:
    """Let a server answer the service's calls with the methods of ``servicer``, which have the names of the service's.
    A call whose method it lacks fails with UNIMPLEMENTED.
    """
    service = _service(messages, name)
    handlers = {
        method.name: getattr(grpc, f"{_shape(method)}_rpc_method_handler")(
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in service.methods
        if hasattr(servicer, method.name)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _service(messages: ModuleType, name: str) -> ServiceDescriptor:
    descriptor: ServiceDescriptor = messages.DESCRIPTOR.services_by_name[name]
    return descriptor


def _shape(method: MethodDescriptor) -> str:
    """gRPC's word for what a call takes and gives: one message (unary) or a stream of them."""
    return "_".join(
        "stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming)
    )
