"""The library that an inference engine imports: ExpertClient, ExpertCluster, and their asyncio twins.

Names are imported when they are first used, so that `import expertd_client` costs nothing.  Needs grpcio, protobuf,
numpy, ml_dtypes and safetensors; torch only where the caller passes torch tensors.  The command `expertctl` is the
package `expertctl`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expertd_client.clients.async_client import AsyncExpertClient
    from expertd_client.clients.client import ExpertClient, ForwardFuture
    from expertd_client.clients.forwarder import AsyncForwarder, Forwarder
    from expertd_client.cluster.async_cluster import AsyncExpertCluster
    from expertd_client.cluster.cluster import ClusterFuture, ExpertCluster
    from expertd_client.cluster.kubernetes import EndpointSlices
    from expertd_client.cluster.policy import OnMissing, Policy
    from expertd_client.cluster.ray import RayServers as RayServers
    from expertd_client.cluster.result import Answered, ClusterResult
    from expertd_client.cluster.sources import Dns, Fixed, PlacementFile, Source
    from expertd_client.engines.layer import RankExperts as RankExperts
    from expertd_client.engines.torch_experts import RemoteExperts as RemoteExperts
    from expertd_client.exchange.session import Session
    from expertd_client.requests.e4m3 import E4m3
    from expertd_client.requests.grouped import Grouped
    from expertd_client.requests.request import Request
    from expertd_client.requests.result import ForwardResult
    from expertd_client.requests.retry import Retry
    from expertd_client.requests.step_version import StepVersion
    from expertd_client.requests.tensors import Synthetic
    from expertd_client.tracing.recorder import Trace, trace
    from expertd_client.transports.credentials import Credentials
    from expertd_client.transports.grpc.aio import AioGrpcTransport
    from expertd_client.transports.grpc.sync import GrpcTransport
    from expertd_client.transports.protocol import Connection, FunctionTransport, SessionTransport, Transport

__all__ = [
    "AioGrpcTransport",
    "Answered",
    "AsyncExpertClient",
    "AsyncExpertCluster",
    "AsyncForwarder",
    "SessionTransport",
    "ClusterFuture",
    "ClusterResult",
    "Connection",
    "Credentials",
    "Dns",
    "E4m3",
    "EndpointSlices",
    "ExpertClient",
    "ExpertCluster",
    "Fixed",
    "ForwardFuture",
    "ForwardResult",
    "Forwarder",
    "FunctionTransport",
    "Grouped",
    "GrpcTransport",
    "OnMissing",
    "PlacementFile",
    "Policy",
    "Request",
    "Retry",
    "Session",
    "Source",
    "StepVersion",
    "Synthetic",
    "Trace",
    "Transport",
    "trace",
]

_MODULES = {
    "AioGrpcTransport": "transports.grpc.aio",
    "Answered": "cluster.result",
    "AsyncExpertClient": "clients.async_client",
    "AsyncExpertCluster": "cluster.async_cluster",
    "AsyncForwarder": "clients.forwarder",
    "SessionTransport": "transports.protocol",
    "ClusterFuture": "cluster.cluster",
    "ClusterResult": "cluster.result",
    "Connection": "transports.protocol",
    "Credentials": "transports.credentials",
    "Dns": "cluster.sources",
    "E4m3": "requests.e4m3",
    "EndpointSlices": "cluster.kubernetes",
    "ExpertClient": "clients.client",
    "ExpertCluster": "cluster.cluster",
    "Fixed": "cluster.sources",
    "ForwardFuture": "clients.client",
    "ForwardResult": "requests.result",
    "Forwarder": "clients.forwarder",
    "FunctionTransport": "transports.protocol",
    "Grouped": "requests.grouped",
    "GrpcTransport": "transports.grpc.sync",
    "OnMissing": "cluster.policy",
    "PlacementFile": "cluster.sources",
    "Policy": "cluster.policy",
    "RankExperts": "engines.layer",
    "RayServers": "cluster.ray",
    "RemoteExperts": "engines.torch_experts",
    "Request": "requests.request",
    "Retry": "requests.retry",
    "Session": "exchange.session",
    "Source": "cluster.sources",
    "StepVersion": "requests.step_version",
    "Synthetic": "requests.tensors",
    "Trace": "tracing.recorder",
    "Transport": "transports.protocol",
    "trace": "tracing.recorder",
}
"""Public name -> the module of this package that defines it; the imports above are the same for type checkers.

Those that need another package, torch or ray, are not in __all__: `import *` works without it, and they are imported by
name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
