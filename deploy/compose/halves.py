"""A client of several servers of one model, each with a part of the experts: their partial sums must be complete.

python deploy/compose/halves.py HOST:PORT HOST:PORT ...
"""

from __future__ import annotations

import sys

import numpy as np

from expertd.errors import ExpertdError
from expertd_client import ExpertClient
from expertd_client.cluster import ExpertCluster

TOKENS = 64


def main(addresses: list[str]) -> int:
    with ExpertClient(addresses[0]) as first:
        told = first.describe(timeout_s=60.0)
    hidden_size, layer = told.model.hidden_size, told.layers[0]

    rng = np.random.default_rng(0)
    hidden_states = rng.standard_normal((TOKENS, hidden_size), np.float32)
    topk_ids = rng.random((TOKENS, layer.num_experts)).argsort()[:, : layer.top_k].astype(np.int32)
    topk_weights = np.full(topk_ids.shape, 1 / layer.top_k, np.float32)

    with ExpertCluster(addresses, timeout_s=60.0) as experts:
        try:
            answer = experts.forward(layer.layer, hidden_states, topk_ids, topk_weights)
        except ExpertdError as error:
            print(f"NOT complete: {error.reason}: {error.message}")
            return 1
    for part in answer.parts:
        print(f"{part.server}: {part.routes} of {topk_ids.size} routes, backend {part.backend}")
    print("complete" if answer.routes_computed == topk_ids.size else "NOT complete")
    return 0 if answer.routes_computed == topk_ids.size else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
