"""What a caller with CUDA tensors pays for shared memory: copied by the GPU into the session's memory, or by way of the
host, in turns.

    python tests/load/gpu_tensors.py [--model qwen3-30b-a3b:int4_g128] [--tokens 1,8,64,128,512,2048] [--seconds 0.4]

Server and callers are one process, so that the GPU is not shared out between two: what is compared is the way of the
tensors.  Until the output is on the GPU, by the host's clock.  Every way's last answer is compared with the float32
reference; the exit code is 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from expertd_client import ExpertClient
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import SyntheticModel, random_inputs
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address, Ranges
from expertd_server.host.host import Host

ROWS = 4


def timed(client: ExpertClient, tensors: Any, seconds: float) -> tuple[list[float], torch.Tensor]:
    """Seconds of each call, and the last output."""
    times, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        output = client.forward(0, *tensors).output
        torch.cuda.current_stream().synchronize()
        times.append(time.perf_counter() - begin)
    return times, output


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="qwen3-30b-a3b:int4_g128")
    parser.add_argument("--tokens", type=lambda t: [int(n) for n in t.split(",")], default=[1, 8, 64, 128, 512, 2048])
    parser.add_argument("--seconds", type=float, default=0.4)
    args = parser.parse_args()
    host = Host(ServeConfig(synthetic=args.model, layers=Ranges.parse("0"), listen=Address("127.0.0.1", 0)))
    host.start()
    host.ready(200)
    ok = True
    with ExpertClient(host.address) as straight, ExpertClient(host.address) as bounced:
        for client in (straight, bounced):
            assert client.session().transport == "shm", client.session()
        bounced._exchange._link.session_connection._pinnable = False
        described = straight.describe()
        layer, H = described.layers[0], described.model.hidden_size
        weights = SyntheticModel.parse(args.model, torch.device("cuda")).load(0, range(layer.num_experts))
        for tokens in args.tokens:
            tensors = [t.to("cuda") for t in random_inputs(tokens, H, layer.num_experts, layer.top_k, seed=tokens)]
            tensors[0] = tensors[0].bfloat16()
            want = reference(weights.to(torch.device("cuda")), *(t[:ROWS] for t in tensors))
            found: dict[str, list[float]] = {"straight": [], "bounced": []}
            for turn in range(6):
                for name, client in (("straight", straight), ("bounced", bounced)):
                    times, output = timed(client, tensors, args.seconds / 5)
                    found[name] += times if turn else []
                    ok &= relative_error(output[:ROWS].float(), want) <= tolerance("bf16")
            p50 = {name: sorted(times)[len(times) // 2] * 1e6 for name, times in found.items()}
            kernel = straight.forward(0, *tensors).timing.kernel_ns / 1e3
            print(
                f"{tokens:5d} tokens, us: straight {p50['straight']:8.1f}  by way of the host {p50['bounced']:8.1f}"
                f"  batch {kernel:8.1f}  {'right' if ok else 'WRONG'}",
                flush=True,
            )
    host.close()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
