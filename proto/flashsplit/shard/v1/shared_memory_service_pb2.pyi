from flashsplit.shard.v1 import shared_memory_pb2 as _shared_memory_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
