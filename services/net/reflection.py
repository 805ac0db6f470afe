"""gRPC reflection under both of its names, v1 and v1alpha: newer clients ask for the first, older ones for the second.

The library has v1alpha alone; the messages of both are the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA = reflection.SERVICE_NAME
V1 = V1ALPHA.replace("v1alpha", "v1")
_METHOD = "ServerReflectionInfo"


def enable_reflection(services: Iterable[str], server: grpc.aio.Server) -> None:
    """Have a server describe these services, and reflection itself, to clients that ask."""
    _describe_v1()
    listed = [*services, V1, V1ALPHA]
    reflection.enable_server_reflection(listed, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(listed).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {_METHOD: handler}),))


def _describe_v1() -> None:
    """Add the description of v1, made of that of v1alpha, to those that reflection knows, unless it is there."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        text = text_format.MessageToString(file).replace("v1alpha", "v1")
        pool.AddSerializedFile(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()).SerializeToString())
