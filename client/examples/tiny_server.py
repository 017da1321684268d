"""Something to try an engine with: makes a tiny random model and serves its experts.

    python client/examples/tiny_server.py DIR [OPTION...]         # then: serving on 127.0.0.1:PORT

DIR gets the whole checkpoint (qwen3_moe, float32, 2 layers of 8 experts); options are those of `expertd serve`.
"""

import os
import sys
from pathlib import Path

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
OTHERS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}


def make(folder: Path) -> None:
    """A random model's checkpoint."""
    print("loading torch and transformers", flush=True)
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(vocab_size=96, eos_token_id=None, **SIZES, **OTHERS)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                ".experts." in name
            ):  # larger than usual, so that they matter for the next token; bf16 holds them exactly
                parameter.normal_(std=0.15).copy_(parameter.bfloat16())
    model.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder, options = Path(sys.argv[1]), sys.argv[2:]
    if not (folder / "config.json").exists():
        make(folder)
    print("starting the server, which loads torch", flush=True)
    serve = ["serve", "--checkpoint", str(folder), "--compute-dtype", "float32", "--device", "cpu", "--threads", "1"]
    os.execv(sys.executable, [sys.executable, "-m", "expertd_server.commands.cli", *serve, *options])
