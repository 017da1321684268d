"""What a model costs whose experts live elsewhere: to load it, and a layer of it, by transport.

    python tests/load/model_frontend.py [--only load|layer|account] [--layers 2] [--experts 32] [--wide 1024]
        [--calls 300]

load     in a process of its own each: the whole model by transformers; without experts from the whole checkpoint and
         from the stripped one: seconds, and how much more memory (peak of resident pages; those of the mapped
         checkpoint that were read are among them)
layer    the experts of one layer for 1 and 32 tokens: in the model (transformers' own), and at a server in another
         process through shared memory, TCP and gRPC, the ways in turn: median microseconds; then the mean of calls
         that were traced, and its stages

account  where a layer's time in shared memory goes at 1 and 32 tokens: RemoteExperts; the client's forward; a slot,
         whose tensors lie in shared memory; what the server says of its own stages; calls in turn, medians

A random qwen3_moe in float32, on the CPU.  Medians of what takes turns can be compared; absolute times are this
machine's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from served import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from tiny_models import save, tiny_model
from transformers import AutoModelForCausalLM

from expertctl.pictures.trace import by_layer, write
from expertd_client import ExpertClient, trace
from expertd_client.engines.strip import strip
from expertd_client.engines.torch_experts import RemoteExperts
from expertd_client.tracing.stages import STAGES
from expertd_client.transformers import load_without_experts
from expertd_client.transports.grpc.sync import GrpcTransport
from expertd_client.transports.shm.connection import ShmTransport
from expertd_client.transports.tcp.connection import TcpTransport

HIDDEN, ROUTES = 256, 8
TOKENS = (1, 32)
MIB = 1 << 20


def loaded(way: str, folder: str, address: str) -> None:
    """Of one process: prints what loading cost.  A first model of the same kind was loaded and let go before."""
    if way == "whole":
        load = lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # noqa: E731
    else:
        load = lambda: load_without_experts(folder, address, dtype=torch.float32)  # noqa: E731
    load()  # imports, and the file is in the page cache
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    resident, begin_s = status("VmRSS"), time.perf_counter()
    load()
    seconds = time.perf_counter() - begin_s
    print(json.dumps({"seconds": seconds, "memory": (status("VmHWM") - resident) / 1024}))


def status(name: str) -> int:
    """KiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0])


def show_load(folder: Path, address: str) -> None:
    size = {
        name: sum(p.stat().st_size for p in (folder / name).glob("*.safetensors")) / MIB for name in ("all", "front")
    }
    print("\n| load | checkpoint | seconds | memory |\n|---|---|---|---|")
    for name, way, which in (
        ("whole model", "whole", "all"),
        ("without experts", "front", "all"),
        ("without experts, stripped", "front", "front"),
    ):
        command = [sys.executable, __file__, "--loaded", way, str(folder / which), address]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
        found = json.loads(said.splitlines()[-1])
        cost = f"{found['seconds']:.2f} | {found['memory']:.0f} MiB"
        print(f"| {name} | {size[which]:.0f} MiB | {cost} |", flush=True)


def show_layer(model: Any, address: str, calls: int, out: Path, stack: ExitStack) -> None:
    offers: dict[str, list[Any]] = {
        "shared memory": [ShmTransport()],
        "TCP": [TcpTransport(address, None)],
        "gRPC": [],
    }
    remote = {}
    for name, offered in offers.items():
        client = stack.enter_context(ExpertClient(GrpcTransport(address, offers=offered)))
        assert client.session(timeout_s=30) is not None
        remote[name] = RemoteExperts(client, 0).eval()
    ways = {"in the model": model.model.layers[0].mlp.experts, **remote}
    print(f"\n| tokens | way | us a layer | traced | {' | '.join(STAGES[1:-1])} |\n|{'---|' * (len(STAGES) + 2)}")
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN)
        ids = torch.rand(tokens, model.config.num_experts).topk(ROUTES).indices
        weights = torch.full((tokens, ROUTES), 1 / ROUTES)
        us: dict[str, list[float]] = {name: [] for name in ways}
        with torch.inference_mode():
            wanted = ways["in the model"](x, ids, weights)
            for n in range(calls + 20):
                for name, experts in ways.items():
                    begin_s = time.perf_counter()
                    got = experts(x, ids, weights)
                    if n >= 20:
                        us[name].append(1e6 * (time.perf_counter() - begin_s))
                    assert float((got - wanted).norm() / wanted.norm()) < 1e-5, name
            for name, experts in ways.items():
                stages = traced(experts, (x, ids, weights), out / f"{name.replace(' ', '-')}-{tokens}.json", calls)
                mean = [sum(stages.values()), *(stages[s] for s in STAGES[1:-1])] if stages else []
                cells = [f"{t:.0f}" for t in mean] or [""] * (len(STAGES) - 1)
                print(f"| {tokens} | {name} | {statistics.median(us[name]):.0f} | {' | '.join(cells)} |", flush=True)


def show_account(model: Any, address: str, calls: int, stack: ExitStack) -> None:
    """Each column after "served" is a part of it: what one way takes longer than the next one, which does less."""
    client = stack.enter_context(ExpertClient(GrpcTransport(address, offers=[ShmTransport()])))
    assert client.session(timeout_s=30).transport == "shm"
    print(
        "\n| tokens | in the model | served | RemoteExperts | request, copies | rings, waking | server | of it kernel |"
    )
    print("|" + "---|" * 8)
    for tokens in TOKENS:
        at = account(model, client, tokens, calls)
        parts = (at["module"] - at["client"], at["client"] - at["slot"], at["slot"] - at["server"], at["server"])
        cells = " | ".join(f"{value:.0f}" for value in (at["own"], at["module"], *parts, at["kernel"]))
        print(f"| {tokens} | {cells} |", flush=True)


def account(model: Any, client: ExpertClient, tokens: int, calls: int) -> dict[str, float]:
    """Median microseconds of each way, in turn, and of the server's stages."""
    own, remote = model.model.layers[0].mlp.experts, RemoteExperts(client, 0).eval()
    x = torch.randn(tokens, HIDDEN)
    ids = torch.rand(tokens, model.config.num_experts).topk(ROUTES).indices
    weights = torch.full((tokens, ROUTES), 1 / ROUTES)
    slot = client.slot(tokens, HIDDEN, ROUTES, "f32")
    slot.hidden_states[:], slot.topk_ids[:], slot.topk_weights[:] = x.numpy(), ids.numpy(), weights.numpy()
    ways: dict[str, Any] = {
        "own": lambda: own(x, ids, weights),
        "module": lambda: remote(x, ids, weights),
        "client": lambda: client.forward(0, x, ids, weights).release(),
        "slot": lambda: slot.forward(0),
    }
    us: dict[str, list[float]] = {name: [] for name in (*ways, "server", "kernel")}
    with torch.inference_mode():
        for n in range(calls + 20):
            for name, call in ways.items():
                begin_s = time.perf_counter()
                call()
                if n >= 20:
                    us[name].append(1e6 * (time.perf_counter() - begin_s))
            if n >= 20:
                t = slot.timing
                us["kernel"].append(t.kernel_ns / 1e3)
                us["server"].append((t.queue_ns + t.copy_in_ns + t.kernel_ns + t.copy_out_ns) / 1e3)
        wanted = own(x, ids, weights)
        assert float((torch.from_numpy(slot.output) - wanted).norm() / wanted.norm()) < 1e-5
    return {name: statistics.median(values) for name, values in us.items()}


def traced(experts: Any, tensors: Any, path: Path, calls: int) -> dict[str, float]:
    """Stage -> mean microseconds; {} = nobody was called."""
    with trace() as found:
        for _ in range(calls):
            experts(*tensors)
    write(found, path)
    return by_layer(found).get(0, {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for name, value in (("--layers", 2), ("--experts", 32), ("--wide", 1024), ("--calls", 300)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--out", type=Path, default=Path("build/model_frontend"))
    parser.add_argument("--only", choices=("load", "layer", "account"), help="one of them; default: all")
    parser.add_argument("--loaded", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.loaded:
        loaded(*args.loaded)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="expertd-model-")))
        sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": args.wide, "num_hidden_layers": args.layers}
        model = tiny_model("qwen3_moe", experts=args.experts, num_experts_per_tok=ROUTES, **sizes)
        save(model, folder / "all")
        strip(folder / "all", folder / "front")
        options = ["--compute-dtype", "float32", "--device", "cpu", "--threads", "1", "--tcp-listen", "127.0.0.1:0"]
        server = Server("server", ["--checkpoint", str(folder / "all"), *options], args.out / "server.log")
        stack.callback(server.process.kill)
        server.wait(180)
        if args.only in (None, "load"):
            show_load(folder, server.address)
        if args.only in (None, "layer"):
            show_layer(model, server.address, args.calls, args.out, stack)
        if args.only in (None, "account"):
            show_account(model, server.address, args.calls, stack)
    return 0


if __name__ == "__main__":
    sys.exit(main())
