"""The client of expertd: ExpertClient and ExpertCluster with their twins in an event loop, and the `expertctl` command.

Needs grpcio, protobuf, numpy and safetensors; torch only where the caller passes torch tensors.
"""

from expertd_client.async_client import AsyncExpertClient
from expertd_client.client import ExpertClient, ForwardFuture
from expertd_client.cluster import AsyncExpertCluster, ExpertCluster
from expertd_client.credentials import Credentials
from expertd_client.e4m3 import E4m3
from expertd_client.forwarder import AsyncForwarder, Forwarder
from expertd_client.grpc_aio import AioGrpcTransport
from expertd_client.grpc_sync import GrpcTransport
from expertd_client.request import Grouped, Request
from expertd_client.result import ForwardResult
from expertd_client.retry import Retry
from expertd_client.session import Session
from expertd_client.tensors import Synthetic
from expertd_client.tracing import Trace, trace
from expertd_client.transport import Channel, Connection, FunctionTransport, Transport

__all__ = [
    "AioGrpcTransport",
    "AsyncExpertClient",
    "AsyncExpertCluster",
    "AsyncForwarder",
    "Channel",
    "Connection",
    "Credentials",
    "E4m3",
    "ExpertClient",
    "ExpertCluster",
    "ForwardFuture",
    "ForwardResult",
    "Forwarder",
    "FunctionTransport",
    "Grouped",
    "GrpcTransport",
    "Request",
    "Retry",
    "Session",
    "Synthetic",
    "Trace",
    "Transport",
    "trace",
]
