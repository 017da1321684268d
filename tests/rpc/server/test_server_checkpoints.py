"""Checkpoints of other people's tools, served and called over localhost, against the outputs those tools expect."""

from __future__ import annotations

import time

import grpc
import numpy as np
import pytest
import torch
from safetensors import safe_open

from expertd.v1 import expert_service_pb2 as pb
from expertd.v1.expert_service_pb2_grpc import ExpertServiceStub
from expertd_kernels import relative_error, tolerance
from expertd_kernels.oracle.probe import detect_device, installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_server.boot.assignment import assign_layers, open_source
from expertd_server.boot.layers import boot_layers
from expertd_server.boot.prepare import Workshop
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address, Ranges
from expertd_server.engine.admission import Limits
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.host.from_options import message_bytes
from expertd_server.service.service import Service
from expertd_server.transports.grpc.server import ExpertServer
from expertd_server.views.metrics import Metrics

CHECKPOINTS = (
    "gptq-w4-g128-sym-descact-false-qwen3moe1l",
    "gptq-w4-g32-sym-descact-true-qwen3moe1l",
    "bf16-sharded-qwen3moe1l",
    "mxfp4-oai-modelopt-gptoss-ns",
    "hf-fp8-block128-qwen3moe1l",
    "modelopt-int4-awq-qwen3moe1l",
)


async def answers(
    folder, layer: int, compute_dtype: str, requests: list[pb.ForwardRequest]
) -> list[pb.ForwardResponse]:
    """What a server of this checkpoint's layer answers."""
    config = ServeConfig(checkpoint=folder, layers=Ranges.parse(str(layer)), compute_dtype=compute_dtype, device="cpu")
    source = open_source(config)
    plans = assign_layers(config, source, detect_device("cpu"), installed_packages(BACKENDS))
    (b,) = boot_layers(plans, Workshop(source, torch.device("cpu")))
    engine = Engine(torch.device("cpu"), compute_dtype=config.compute, policy=Policy(64))
    service = Service(engine, Metrics(), Limits(64, message_bytes(64, [p.info for p in plans]), 8))
    server = ExpertServer(service)
    address = await server.start(Address("127.0.0.1", 0))
    engine.hold([b.served])
    engine.start()
    service.open(lambda decisions: pb.DescribeResponse())
    await server.open()
    async with grpc.aio.insecure_channel(str(address)) as channel:
        stub = ExpertServiceStub(channel)
        out = [await stub.Forward(r) for r in requests]
    service.drain()
    assert await server.drain(time.monotonic() + 5)
    engine.stop(5)
    service.close()
    return out


@pytest.mark.parametrize(("compute_dtype", "limit"), [("bf16", tolerance("bf16")), ("float32", tolerance("f32"))])
@pytest.mark.parametrize("name", CHECKPOINTS)
async def test_the_served_answer_is_the_one_its_tool_expects(checkpoint_folder, name, compute_dtype, limit):
    folder = checkpoint_folder(name)
    requests, expected = [], []
    with safe_open(folder / "expected.safetensors", "pt") as f:
        layer = int(f.metadata()["layer"])
        for m in (1, 5, 33):
            x, ids, w = (f.get_tensor(f"M{m}.{t}") for t in ("hidden_states", "topk_ids", "topk_weights"))
            requests.append(
                pb.ForwardRequest(
                    layer=layer,
                    hidden_states=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=x.shape, raw=x.numpy().tobytes()),
                    topk_ids=pb.Tensor(dtype=pb.DATA_TYPE_I64, shape=ids.shape, raw=ids.long().numpy().tobytes()),
                    topk_weights=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=w.shape, raw=w.float().numpy().tobytes()),
                    output_dtype=pb.DATA_TYPE_F32,
                )
            )
            expected.append(f.get_tensor(f"M{m}.expected"))
    for r, a, want in zip(requests, await answers(folder, layer, compute_dtype, requests), expected, strict=True):
        got = torch.from_numpy(np.frombuffer(a.output.raw, np.float32).copy()).view(want.shape)
        assert a.routes_computed == r.topk_ids.shape[0] * r.topk_ids.shape[1]
        assert relative_error(got, want) <= limit
