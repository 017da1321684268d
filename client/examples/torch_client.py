"""torch in, torch out: one MoE layer split over two workers whose partial sums add up.

    python client/examples/torch_client.py 127.0.0.1:50051

Both "workers" are the one server at ADDRESS; what makes them two is that each is sent only its own routes.
"""

import sys

import torch

from expertd_client import ExpertClient

TOKENS = 8


def main(address: str) -> int:
    with ExpertClient(address, timeout_s=30.0) as experts:
        model = experts.describe()
        layer = model.layers[0]
        print(f"layer {layer.layer}: {layer.num_experts} experts, {layer.weight_scheme} on {layer.backend}")

        torch.manual_seed(0)
        hidden_states = torch.randn(TOKENS, model.model.hidden_size).bfloat16()
        scores = torch.randn(TOKENS, layer.num_experts).softmax(-1)
        topk_weights, topk_ids = scores.topk(layer.top_k)

        # output_dtype: partial sums are added up in float32, whatever the experts compute in.
        whole = experts.forward(layer.layer, hidden_states, topk_ids, topk_weights, output_dtype=torch.float32)

        low = topk_ids < layer.num_experts // 2
        parts = [
            experts.submit(
                layer.layer, hidden_states, topk_ids.where(mine, -1), topk_weights, output_dtype=torch.float32
            )
            for mine in (low, ~low)
        ]  # both are under way at once
        first, second = (part.result() for part in parts)

    total = first.output + second.output
    error = float((total - whole.output).norm() / whole.output.norm())
    print(f"routes: {first.routes_computed} + {second.routes_computed} of {topk_ids.numel()}")
    print(f"partial sums against the whole: relative error {error:.1e}")
    print(f"kernel time of the whole: {whole.timing.kernel_ns / 1e3:.0f} us")
    complete = first.routes_computed + second.routes_computed == whole.routes_computed == topk_ids.numel()
    return 0 if complete and error < 1e-2 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
