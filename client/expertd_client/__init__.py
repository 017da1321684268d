"""The client of expertd: ExpertClient, AsyncExpertClient, and the `expertctl` command.

Needs grpcio, protobuf and numpy; torch only where the caller passes torch tensors.
"""

from expertd_client.async_client import AsyncExpertClient
from expertd_client.call import ForwardResult, Grouped
from expertd_client.client import ExpertClient, ForwardFuture
from expertd_client.grpc_aio import AioGrpcTransport
from expertd_client.grpc_sync import GrpcTransport
from expertd_client.retry import Retry
from expertd_client.tensors import Synthetic
from expertd_client.transport import FunctionTransport, Transport

__all__ = [
    "AioGrpcTransport",
    "AsyncExpertClient",
    "ExpertClient",
    "ForwardFuture",
    "ForwardResult",
    "FunctionTransport",
    "Grouped",
    "GrpcTransport",
    "Retry",
    "Synthetic",
    "Transport",
]
