"""What a load generator sends: requests for one layer after the other, drawn or left to the server to draw.

Both kinds have the same distributions (expert_service.proto, SyntheticValues): hidden states normal(0, 1), top_k
different experts a token where expert e has the weight 1 / (e + 1) ** zipf, weights softmax of normal(0, 1).  The
values differ: the server's generator is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from expertd.placement import MOST_EXPERTS
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.request import Request, RequestOptions
from expertd_client.requests.tensors import Synthetic

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "POOL",
    "LayerShape",
    "Popularity",
    "drawn",
    "layer_shapes",
    "requests",
    "routes",
    "synthetic",
    "with_routes",
]

POOL = 16
"""Different requests that are sent in turn: enough that those in one batch differ, few enough that whoever draws them,
this process or the server, draws each only once."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What must be known of a layer to call it."""

    layer: int
    hidden_size: int
    num_experts: int
    top_k: int


def layer_shapes(
    described: pb.DescribeResponse | Sequence[pb.DescribeResponse], layers: Sequence[int] | None, top_k: int | None
) -> list[LayerShape]:
    """The shapes of `layers` (None = all that are held), with the model's top_k unless another one is given.
    described: by a server, or by all of a cluster's.  Raises ValueError for a layer that no server holds."""
    servers = [described] if isinstance(described, pb.DescribeResponse) else described
    held = {layer.layer: (layer, server.model.hidden_size) for server in servers for layer in server.layers}
    wanted = sorted(held) if layers is None else list(layers)
    missing = [n for n in wanted if n not in held]
    if missing or not wanted:
        who = "the servers hold" if len(servers) > 1 else "the server holds"
        raise ValueError(f"layers: got {missing or 'none'}, want some of those that {who}: {sorted(held)}")
    found = [(n, *held[n]) for n in wanted]
    shapes = [LayerShape(n, hidden, layer.num_experts, top_k or layer.top_k) for n, layer, hidden in found]
    for s in shapes:
        if not 1 <= s.top_k <= s.num_experts:
            raise ValueError(f"top_k: got {s.top_k}, want 1 to {s.num_experts}, the experts of layer {s.layer}")
        if s.num_experts > MOST_EXPERTS:
            raise ValueError(f"layer {s.layer}: got {s.num_experts} experts, want at most {MOST_EXPERTS}")
    return shapes


Popularity = Callable[[LayerShape], NDArray[np.float64]]
"""The logarithm of each expert's weight, [num_experts]; -inf: never, unless nobody else is left."""


def routes(
    rng: np.random.Generator, tokens: int, shape: LayerShape, popularity: float | Popularity
) -> NDArray[np.int32]:
    """[tokens, top_k] i32: different experts for each token.  popularity: a number is Zipf's exponent: expert e with
    the weight 1 / (e + 1) ** popularity.

    Sampling without replacement by the Gumbel trick: the top_k largest of log weight + Gumbel noise."""
    if isinstance(popularity, float | int):
        log_weight = -popularity * np.log(np.arange(1, shape.num_experts + 1))
    else:
        log_weight = popularity(shape)
    keys = log_weight + rng.gumbel(size=(tokens, shape.num_experts))
    return np.argsort(-keys, axis=1)[:, : shape.top_k].astype(np.int32)


def drawn(
    rng: np.random.Generator,
    tokens: int,
    shape: LayerShape,
    popularity: float | Popularity,
    **options: Unpack[RequestOptions],
) -> Request:
    """A request with its tensors: bf16 hidden states, i32 ids, f32 weights."""
    return with_routes(rng, shape, routes(rng, tokens, shape, popularity), **options)


def with_routes(
    rng: np.random.Generator, shape: LayerShape, ids: NDArray[np.int32], **options: Unpack[RequestOptions]
) -> Request:
    """The same with given ids, [M, top_k]."""
    tokens = len(ids)
    logits = np.exp(rng.standard_normal(ids.shape, dtype=np.float32))
    return Request(
        shape.layer,
        rng.standard_normal((tokens, shape.hidden_size), dtype=np.float32).astype(ml_dtypes.bfloat16),
        ids,
        logits / logits.sum(axis=1, keepdims=True, dtype=np.float32),
        **options,
    )


def synthetic(seed: int, tokens: int, shape: LayerShape, zipf: float, **options: Unpack[RequestOptions]) -> Request:
    """The same request for the server to draw: about 60 bytes on the wire."""
    return Request(
        shape.layer,
        Synthetic((tokens, shape.hidden_size), seed, "bf16"),
        Synthetic((tokens, shape.top_k), seed, "i32", zipf),
        Synthetic((tokens, shape.top_k), seed, "f32"),
        **options,
    )


def requests(
    shapes: Sequence[LayerShape],
    tokens: int,
    popularity: float | Popularity,
    on_the_wire: bool,
    seed: int,
    **options: Unpack[RequestOptions],
) -> Iterator[Request]:
    """Endless: the layers in turn, POOL different ones over and over.  on_the_wire: with their tensors, otherwise
    synthetic, which only a number of popularity can say."""
    if on_the_wire:
        rng = np.random.default_rng(seed)
        pool = [
            drawn(rng, tokens, shapes[n % len(shapes)], popularity, **options) for n in range(max(POOL, len(shapes)))
        ]
        pool = pool[: len(pool) // len(shapes) * len(shapes)]  # whole turns, so that the layers stay in order
        return (pool[n % len(pool)] for n in count())
    assert isinstance(popularity, float | int)
    return (synthetic(seed + n % POOL, tokens, shapes[n % len(shapes)], popularity, **options) for n in count())
