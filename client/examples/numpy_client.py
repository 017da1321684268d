"""numpy and asyncio: many requests in flight on one stream, each with its own timeout.

    python client/examples/numpy_client.py 127.0.0.1:50051

Half of the answers are digests: sums over an output that stays at the server, to compare without moving it.
"""

import asyncio
import math
import sys

import ml_dtypes
import numpy as np

from expertd.errors import LayerNotHeldError
from expertd_client import AsyncExpertClient

TOKENS = 4
BATCHES = 16


async def call(address: str) -> int:
    async with AsyncExpertClient(address, timeout_s=30.0) as experts:
        model = await experts.describe()
        layer = model.layers[0]
        rng = np.random.default_rng(0)
        ids = np.stack([rng.permutation(layer.num_experts)[: layer.top_k] for _ in range(TOKENS)]).astype(np.int32)
        weights = np.full((TOKENS, layer.top_k), 1.0 / layer.top_k, np.float32)
        batches = [
            rng.standard_normal((TOKENS, model.model.hidden_size), np.float32).astype(ml_dtypes.bfloat16)
            for _ in range(BATCHES)
        ]

        async def both(x: np.ndarray) -> bool:
            output, digest = await asyncio.gather(
                experts.forward(layer.layer, x, ids, weights),
                experts.forward(layer.layer, x, ids, weights, digest=True),
            )
            # The two may have been computed in batches of different sizes, so they agree to rounding.  Of one output
            # digest.digest.crc32 is the zlib.crc32 of its bytes.
            squares = float((output.output.astype(np.float64) ** 2).sum())
            same = math.isclose(squares, digest.digest.sum_of_squares, rel_tol=1e-2)
            return same and output.output.dtype == x.dtype and output.routes_computed == ids.size

        right = sum(await asyncio.gather(*(both(x) for x in batches)))
        print(f"{right} of {BATCHES} outputs have the digest that the server computed")

        try:
            await experts.forward(9999, batches[0], ids, weights)
        except LayerNotHeldError as error:
            print(f"as it should: {error.reason}: {error.message}")
        else:
            return 1
    return 0 if right == BATCHES else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(call(sys.argv[1])))
