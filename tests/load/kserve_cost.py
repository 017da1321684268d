"""What the KServe facade costs: the same batch as Forward and as ModelInfer, in turns, in one run.

    python tests/load/kserve_cost.py ADDRESS [SECONDS]      a server with --kserve yes; seconds of each size

Both are unary calls with raw bytes that were made before; what a client library does is in neither.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import grpc
import numpy as np

from expertd.kserve import inference_pb2 as kserve
from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import expert_service_pb2_grpc as stubs

ROUNDS, CALLERS = 8, 4
FORWARD, INFER = "/expertd.v1.ExpertService/Forward", "/inference.GRPCInferenceService/ModelInfer"


def messages(layer: pb.Layer, hidden_size: int, tokens: int) -> dict[str, bytes]:
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, hidden_size), np.float32)
    ids = np.argsort(rng.random((tokens, layer.num_experts)), axis=1)[:, : layer.top_k].astype(np.int32)
    weights = rng.random(ids.shape, np.float32) + np.float32(0.1)
    arrays = {"hidden_states": x, "topk_ids": ids, "topk_weights": weights}
    tensors = {
        name: pb.Tensor(
            dtype=pb.DATA_TYPE_I32 if a.dtype == np.int32 else pb.DATA_TYPE_F32, shape=a.shape, raw=a.tobytes()
        )
        for name, a in arrays.items()
    }
    kinds = {name: "INT32" if a.dtype == np.int32 else "FP32" for name, a in arrays.items()}
    inputs = [
        kserve.ModelInferRequest.InferInputTensor(name=n, datatype=kinds[n], shape=a.shape) for n, a in arrays.items()
    ]
    infer = kserve.ModelInferRequest(model_name=f"layer_{layer.layer}", inputs=inputs)
    infer.raw_input_contents.extend(a.tobytes() for a in arrays.values())
    return {
        FORWARD: pb.ForwardRequest(layer=layer.layer, **tensors).SerializeToString(),
        INFER: infer.SerializeToString(),
    }


async def turn(channel: grpc.aio.SessionTransport, method: str, data: bytes, seconds: float) -> list[float]:
    """Latencies of a closed loop."""
    call, took, end = channel.unary_unary(method), list[float](), time.perf_counter() + seconds

    async def caller() -> None:
        while (begin := time.perf_counter()) < end:
            await call(data)
            took.append(time.perf_counter() - begin)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return took


async def main(address: str, seconds: float) -> None:
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=unlimited) as channel:
        described = await stubs.ExpertServiceStub(channel).Describe(pb.DescribeRequest())
        for tokens in (1, 8, 128, 512):
            both = messages(described.layers[0], described.model.hidden_size, tokens)
            outputs = {m: await channel.unary_unary(m)(data) for m, data in both.items()}
            want = pb.ForwardResponse.FromString(outputs[FORWARD]).output.raw
            assert kserve.ModelInferResponse.FromString(outputs[INFER]).raw_output_contents[0] == want
            p50: dict[str, list[float]] = {m: [] for m in both}
            rate: dict[str, list[float]] = {m: [] for m in both}
            for _ in range(ROUNDS):
                for method, data in both.items():
                    took = await turn(channel, method, data, seconds / (2 * ROUNDS))
                    p50[method].append(statistics.median(took))
                    rate[method].append(len(took) / (seconds / (2 * ROUNDS)))
            print(f"M {tokens:4}: {compared(p50, rate)}", flush=True)


def compared(p50: dict[str, list[float]], rate: dict[str, list[float]]) -> str:
    """Medians of the rounds.  A ratio is of the two of a round, which had the same neighbours: its median is seldom
    that of the two medians before it."""
    f, k = (statistics.median(p50[m]) * 1e6 for m in (FORWARD, INFER))
    p50_ratio, rate_ratio = (
        statistics.median(b / a for a, b in zip(x[FORWARD], x[INFER], strict=True)) for x in (p50, rate)
    )
    return (
        f"p50 Forward {f:6.0f} us, ModelInfer {k:6.0f} us; median of {len(p50[FORWARD])} rounds' ModelInfer/Forward:"
        f" p50 {p50_ratio:.3f}, throughput {rate_ratio:.3f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("address", metavar="ADDRESS", help="a server with --kserve yes")
    parser.add_argument("seconds", metavar="SECONDS", nargs="?", type=float, default=8.0, help="of each size (8)")
    args = parser.parse_args()
    asyncio.run(main(args.address, args.seconds))
