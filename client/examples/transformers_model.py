"""A model of transformers whose experts a server computes, beside the same model with its own.

    python client/examples/transformers_model.py CHECKPOINT 127.0.0.1:50051

No expert is read or allocated in the first one.  In float32 both give the same greedy tokens.
"""

import sys

import torch
import transformers

from expertd_client.transformers import load_without_experts


def main(checkpoint: str, address: str) -> int:
    remote = load_without_experts(checkpoint, address, dtype=torch.float32).eval()
    whole = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompt = torch.arange(2, 14)[None]
    said = [m.generate(prompt, max_new_tokens=24, do_sample=False)[0, 12:].tolist() for m in (remote, whole)]
    sizes = [sum(p.numel() for p in m.parameters()) for m in (remote, whole)]
    print(f"experts at {address}: {sizes[0]} parameters here; the whole model: {sizes[1]}")
    print(f"24 greedy tokens: {'equal' if said[0] == said[1] else 'DIFFERENT'}")
    return 0 if said[0] == said[1] else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
