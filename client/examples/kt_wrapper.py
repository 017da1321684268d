"""KTransformers' wrapper with its experts at a server: some experts here, the others there, as SGLang's kt path does.

    python client/examples/kt_wrapper.py CHECKPOINT 127.0.0.1:50051

Experts 0 and 1 stand for those that an engine keeps on its GPU.
"""

import sys

import torch

from expertd_client.engines.kt import RemoteKTMoEWrapper
from expertd_kernels import reference
from expertd_kernels.checkpoint import open_checkpoint

TOKENS, TOP_K, HERE = 6, 2, 2


def main(checkpoint: str, address: str) -> int:
    weights = open_checkpoint(checkpoint).load(0)
    wrapper = RemoteKTMoEWrapper(
        layer_idx=0,
        num_experts=weights.num_experts,
        num_experts_per_tok=TOP_K,
        hidden_size=weights.hidden_size,
        moe_intermediate_size=weights.intermediate_size,
        gpu_experts_mask=torch.arange(weights.num_experts) < HERE,
        weight_path=f"expertd://{address}",
        max_deferred_experts_per_token=0,
    )
    wrapper.load_weights(torch.arange(weights.num_experts))
    x = torch.randn(TOKENS, weights.hidden_size)
    scores, ids = torch.rand(TOKENS, weights.num_experts).softmax(-1).topk(TOP_K)
    wrapper.submit_forward(x, ids, scores, None)  # under way
    here = reference(weights, x, ids.masked_fill(ids >= HERE, -1), scores)  # meanwhile, the GPU's
    y = here + wrapper.sync_forward(x, None)
    wanted = reference(weights, x, ids, scores)
    error = float((y - wanted).norm() / wanted.norm())
    print(
        f"{wrapper.num_gpu_experts} experts here, {weights.num_experts - HERE} at {address}: relative error {error:.1e}"
    )
    return 0 if error < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
