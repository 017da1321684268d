"""A server of a tiny trained model, and its WeightsService."""

from __future__ import annotations

from contextlib import ExitStack

import grpc
import torch
import trained
from trained import E, H, K

from expertd.errors import from_rpc_error
from expertd.v1 import weights_service_pb2 as pb
from expertd.v1 import weights_service_pb2_grpc as stubs
from expertd_client import ExpertClient
from expertd_kernels.sources.synthetic import random_inputs
from expertd_server.config.serve import ServeConfig
from expertd_server.host.host import Host

X, IDS, W = random_inputs(16, H, E, K, seed=3)


class Server:
    """A server and its WeightsService."""

    def __init__(self, stack: ExitStack, config: ServeConfig) -> None:
        self.host = Host(config)
        stack.callback(self.host.close)
        self.client = stack.enter_context(ExpertClient(self.host.start()))
        self.host.ready(60)
        channel = stack.enter_context(grpc.insecure_channel(self.client.describe().admin_address))
        self.stub = stubs.WeightsServiceStub(channel)

    def call(self, method: str, **fields):
        """Raises rows of the error table."""
        try:
            return getattr(self.stub, method)(getattr(pb, f"{method}Request")(**fields), timeout=60)
        except grpc.RpcError as e:
            raise from_rpc_error(e) from None

    def answers(self) -> list[bytes]:
        """What each layer answers to one batch."""
        return [
            self.client.forward(n, X, IDS, W).output.view(torch.uint8).numpy().tobytes()
            for n in sorted(self.host.residence.booted)
        ]

    def put_and_prepare(self, name: str, parts) -> None:
        self.call("PutWeights", update=name, parts=parts)
        self.call("PrepareUpdate", update=name)

    def update(self, tensors, name="u", **begin) -> None:
        self.call("BeginUpdate", update=name, **begin)
        self.put_and_prepare(name, trained.parts(tensors))
        self.call("CommitUpdate", update=name)
