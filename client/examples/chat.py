"""A transformers model speaks while its experts are computed by two servers.

    python client/examples/chat.py                          tiny random models of four families, made here
    python client/examples/chat.py --family gpt_oss --scheme mxfp4 --tokens 128
    python client/examples/chat.py --checkpoint DIR         a real model: two servers are started, and you are asked
    python client/examples/chat.py --checkpoint DIR --servers 10.0.0.1:50051 10.0.0.2:50051 --prompt "Why?"

Tiny models are made in float32 and saved, `expertd quantize` quantizes their experts, two `expertd serve` hold one half
each, and the frontend is loaded without experts.  Beside it the same model speaks with the dequantized weights in its
own modules: greedy tokens must be equal.  Exit code 0 = they were.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from expertd_client.transformers import load_without_experts
from expertd_kernels.checkpoint import open_checkpoint

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16, "head_dim": 32},
    "mixtral": {"num_local_experts": 16, "head_dim": 32},
    "gpt_oss": {"num_local_experts": 16, "head_dim": 32},
    "deepseek_v3": {"n_routed_experts": 16, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, **LATENT},
}
BOOT_TIMEOUT_S = 900.0
console = Console(width=None if sys.stdout.isatty() else 120)


def make(family: str, folder: Path) -> None:
    """A random model's checkpoint."""
    config = transformers.CONFIG_MAPPING[family](**SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:  # large enough to have a say in the next token
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)


def dequantize_into(model: torch.nn.Module, folder: Path) -> None:
    """Writes the experts of a checkpoint, dequantized, into the model's own modules."""
    source = open_checkpoint(folder)
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        weights = source.load(int(re.findall(r"\.(\d+)\.", name)[-1]))
        for parameter, matrix in (("gate_up_proj", weights.w13), ("down_proj", weights.w2)):
            values, bias = matrix.dequantize(), matrix.bias
            if matrix.segments == 2 and not module.is_concatenated:  # gate and up rows alternate here
                order = torch.arange(values.shape[1]).view(2, -1).T.flatten()
                values, bias = values[:, order], None if bias is None else bias[:, order]
            with torch.no_grad():
                module.get_parameter(parameter).copy_(values.mT if module.is_transposed else values)
                if bias is not None:
                    module.get_parameter(f"{parameter}_bias").copy_(bias)


def expertd(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "expertd_server.commands.cli", *arguments]


@contextlib.contextmanager
def two_servers(folder: Path, *options: str) -> Iterator[list[str]]:
    """The addresses of two `expertd serve`, each with one half of the experts."""
    with contextlib.ExitStack() as stack:
        started = []
        for half in ("0/2", "1/2"):
            command = expertd("serve", "--checkpoint", str(folder), "--shard", half, "--listen", "127.0.0.1:0")
            command += options
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.terminate)
            started.append(process)
        yield [address_of(process) for process in started]


def address_of(process: subprocess.Popen[str]) -> str:
    """Once it serves."""
    assert process.stdout is not None
    log, until_s = [], time.monotonic() + BOOT_TIMEOUT_S
    for line in process.stdout:
        log.append(line)
        if found := re.search(r"serving on (\S+)", line):
            threading.Thread(target=process.stdout.read, daemon=True).start()  # else its log fills the pipe
            return found[1]
        if time.monotonic() > until_s:
            break
    raise SystemExit(f"chat: a server did not come up:\n{''.join(log)}")


def speak(model: Any, prompt: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Greedy tokens [1, 1], one step of the model each."""
    cache, step = None, prompt
    for _ in range(most):
        with torch.inference_mode():
            said = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache, step = said.past_key_values, said.logits[:, -1:].argmax(-1)
        yield step


def timed(model: Any, prompt: torch.Tensor, tokens: int, what: str) -> tuple[list[int], float]:
    """Tokens, and how many a second after the first, with a progress bar on a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    said, begin_s = [], 0.0
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        for token in bar.track(speak(model, prompt, tokens), total=tokens, description=what):
            said.append(int(token))
            begin_s = begin_s or time.perf_counter()
    return said, (tokens - 1) / (time.perf_counter() - begin_s)


def compare(family: str, scheme: str, tokens: int, folder: Path) -> tuple[bool, list[str]]:
    """Whether the model says the same with its experts served, and a row of the table."""
    whole, quantized = folder / family, folder / f"{family}-{scheme}"
    make(family, whole)
    subprocess.run(expertd("quantize", str(whole), str(quantized), "--scheme", scheme), check=True, capture_output=True)
    local = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    dequantize_into(local, quantized)
    prompt = torch.randint(2, SIZES["vocab_size"], (1, 16), generator=torch.Generator().manual_seed(1))
    options = ("--compute-dtype", "float32", "--device", "cpu", "--threads", "1")
    with two_servers(quantized, *options) as addresses:
        remote = load_without_experts(quantized, addresses, dtype=torch.float32)
        with torch.inference_mode():
            ours, theirs = remote(prompt).logits, local(prompt).logits
        error = float((ours - theirs).norm() / theirs.norm())
        expected, local_speed = timed(local, prompt, tokens, f"{family} local")
        said, remote_speed = timed(remote, prompt, tokens, f"{family} remote")
    same = said == expected
    speeds = [f"{local_speed:.0f}", f"{remote_speed:.0f}", f"{remote_speed / local_speed:.2f}"]
    return same, [family, scheme, f"{tokens} equal" if same else "DIFFERENT", f"{error:.1e}", *speeds]


def tiny(args: argparse.Namespace) -> int:
    table = Table(title="greedy tokens with the experts on two servers, beside the same weights in the model itself")
    for column in ("family", "experts", "tokens", "logits differ by", "tokens/s local", "remote", "ratio"):
        table.add_column(column, justify="left" if column in ("family", "experts") else "right")
    right = True
    with tempfile.TemporaryDirectory() as folder:
        for family in args.family or FAMILIES:
            scheme = args.scheme or ("mxfp4" if family == "gpt_oss" else "int4_g32")
            same, row = compare(family, scheme, args.tokens, Path(folder))
            right = right and same
            table.add_row(*row)
    console.print(table)
    return 0 if right else 1


def chat(args: argparse.Namespace) -> int:
    """One prompt, or as many as are typed."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.checkpoint)
    with contextlib.ExitStack() as stack:
        servers: Sequence[str] = args.servers or stack.enter_context(two_servers(args.checkpoint))
        begin_s = time.perf_counter()
        model = load_without_experts(args.checkpoint, servers[0] if len(servers) == 1 else list(servers))
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        console.print(f"loaded {size / 2**30:.2f} GiB, no experts, in {time.perf_counter() - begin_s:.1f} s")
        prompts = [args.prompt] if args.prompt else iter(lambda: console.input("[bold]> [/]"), "")
        for prompt in prompts:
            answer(model, tokenizer, prompt, args.tokens)
    return 0


def answer(model: Any, tokenizer: Any, prompt: str, most: int) -> None:
    """Prints the answer as it comes."""
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    else:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    said, shown, begin_s = [], "", time.perf_counter()
    for token in speak(model, ids.to(model.device), most):
        said.append(int(token))
        if said[-1] == tokenizer.eos_token_id:
            break
        text = tokenizer.decode(said)
        print(text[len(shown) :], end="", flush=True)
        shown = text
    console.print(f"\n{len(said)} tokens, {len(said) / (time.perf_counter() - begin_s):.1f} tokens/s", style="dim")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--family", nargs="+", choices=FAMILIES, help="tiny models of these (default: all)")
    parser.add_argument("--scheme", help="how experts are quantized (default: int4_g32, mxfp4 for gpt_oss)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--checkpoint", type=Path, help="a real model instead")
    parser.add_argument("--servers", nargs="+", metavar="HOST:PORT", help="its servers; default: two are started here")
    parser.add_argument("--prompt", help="default: ask until an empty line")
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return chat(args) if args.checkpoint else tiny(args)


if __name__ == "__main__":
    sys.exit(main())
