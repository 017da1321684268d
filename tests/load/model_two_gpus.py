"""A model of Qwen3-30B-A3B's size: attention on one GPU, experts on another behind `expertd serve`, beside all on one.

    python tests/load/model_two_gpus.py [--layers 48] [--batches 1,32,256] [--steps 16] [--out DIR]

Weights are random, the experts' those of the synthetic model, so all ways compute the same.  Ways, in this order:

transformers   its own experts, on the first GPU
remote         attached: experts on the second GPU, tensors from GPU to GPU
remote, host   the same through this host's memory
in process     expertd's kernels instead of its experts, on the first GPU

One greedy step after a prompt: milliseconds, tokens/s, and the distance of the prompt's last logits from those of
transformers' own experts (bf16: the order of sums differs).  The exit code is 1 where that is above 5 %.  Of each
remote way and batch one more step is recorded (DIR/WAY-BATCH.json for Perfetto, .svg).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from served import Server
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from expertctl.pictures.trace import write
from expertd_client import trace
from expertd_client.transformers import attach, detach
from expertd_kernels import build, decide, detect_device, problem_of
from expertd_kernels.sources.synthetic import SyntheticModel

MODEL = "qwen3-30b-a3b:bf16"
PROMPT = 32
MOST_DISTANCE = 0.05


class InProcess(torch.nn.Module):
    """Experts as a layer of expertd_kernels."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        return self.experts(x, topk_ids.int(), topk_weights.float()).view_as(hidden_states)


def random_model(args: argparse.Namespace, weights: Any) -> Any:
    """weights(layer) -> canonical weights."""
    config = Qwen3MoeConfig(
        vocab_size=args.vocab, hidden_size=2048, intermediate_size=6144, num_hidden_layers=args.layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=4096,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(args.gpus[0]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for n, layer in enumerate(model.model.layers):
            w = weights(n)
            layer.mlp.experts.gate_up_proj.copy_(w.w13.codes.view_as(layer.mlp.experts.gate_up_proj))
            layer.mlp.experts.down_proj.copy_(w.w2.codes.view_as(layer.mlp.experts.down_proj))
    return model


@torch.inference_mode()
def decode(model: Any, batch: int, steps: int, recorded: Path | None = None) -> tuple[list[float], Any]:
    """(seconds of each step, the prompt's last logits [batch, vocab]); one step more is written to `recorded`."""
    device = model.device
    generator = torch.Generator().manual_seed(batch)
    prompt = torch.randint(0, model.config.vocab_size, (batch, PROMPT), generator=generator).to(device)
    out = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    first, times = out.logits[:, -1].float(), []

    def step() -> float:
        nonlocal out
        token = out.logits[:, -1:].argmax(-1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    for n in range(steps + 3):
        seconds = step()
        if n >= 3:
            times.append(seconds)
    if recorded is not None:
        with trace() as found:
            step()
        write(found, recorded)
    return times, first


class Bench:
    def __init__(self, args: argparse.Namespace, model: Any) -> None:
        self.args, self.model, self.rows, self.right = args, model, [], {}

    def way(self, name: str) -> None:
        for batch in self.args.batches:
            recorded = self.args.out / f"{name.replace(', ', '-')}-{batch}.json" if name.startswith("remote") else None
            times, logits = decode(self.model, batch, self.args.steps, recorded)
            want = self.right.setdefault(batch, logits)
            distance = float((logits - want).norm() / want.norm())
            p50 = statistics.median(times)
            self.rows.append({"way": name, "batch": batch, "step_ms": p50 * 1e3, "tokens_per_s": batch / p50,
                              "distance": distance})  # fmt: skip
            print(f"{name:14} batch {batch:4}: {p50 * 1e3:7.2f} ms a step, {batch / p50:8.0f} tokens/s,"
                  f" logits {distance:.1e} away", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpus", type=lambda t: t.split(","), default=["cuda:0", "cuda:1"])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--batches", type=lambda t: [int(n) for n in t.split(",")], default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("build/model_two_gpus"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    layers = f"0-{args.layers - 1}"
    command = ["--synthetic", MODEL, "--layers", layers, "--device", args.gpus[1]]
    server = Server("experts", command, args.out / "experts.log")
    source = SyntheticModel.parse(MODEL, torch.device(args.gpus[0]))
    try:
        model = random_model(args, lambda n: source.load(n, range(128)).to(torch.device(args.gpus[0])))
        bench = Bench(args, model)
        bench.way("transformers")
        server.wait(400)
        print(f"experts: {server.line('layer 0.*')[:150]}", flush=True)
        client = attach(model, server.address).forwarder
        bench.way("remote")
        if args.gpus[0] != "cpu":
            print(f"               from GPU to GPU: {client.device_transport(int(args.gpus[0][-1])).reason or 'yes'}")
            client.device_transport(int(args.gpus[0][-1])).close()
            bench.way("remote, host")
        detach(model)
        where = detect_device(args.gpus[0])
        for layer in model.model.layers:
            layer.mlp.experts = None
            w = source.load(layer.self_attn.layer_idx, range(128)).to(torch.device(args.gpus[0]))
            layer.mlp.experts = InProcess(build(decide(problem_of(w, where, top_k=8)), w))
            gc.collect()
        bench.way("in process")
    finally:
        if server.process.poll() is None:
            server.stop(30)
    (args.out / "model.json").write_text(json.dumps(bench.rows, indent=1))
    return int(any(row["distance"] > MOST_DISTANCE for row in bench.rows))


if __name__ == "__main__":
    sys.exit(main())
