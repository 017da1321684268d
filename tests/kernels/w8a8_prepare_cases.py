"""Cases of the kernels in front of gluon_w8a8's GEMMs: inputs rounded beside the grouping of the routes, or to the
places of their routes.  On a CPU backends/gluon/w8a8/test_prepare.py runs this file as a program of its own, in
Triton's interpreter: case names from stdin, one a line; each is answered with one line of JSON."""

from __future__ import annotations

import torch
from interpreted import answer_cases
from routing_cases import routes, same_lists, unwritten

from expertd_kernels.backends.gluon.shared.grouping import Chunks
from expertd_kernels.backends.gluon.shared.routing import count_routes
from expertd_kernels.backends.gluon.w8a8.prepare import copy_to_places, prepare, round_to_places
from expertd_kernels.backends.rounding import round_groups

H, R, B = 384, 4, 512
ROUNDING = (H, True, False, R, B)


def right(q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
    """Raises unless q e4m3 and scale are x rounded by groups."""
    want, want_scale = round_groups(x)
    torch.testing.assert_close(scale, want_scale)
    differ = float((q.float() != want.float()).float().mean())
    assert differ < 0.05, f"{differ} of the rounded inputs: more than the carries that the interpreter loses"


def unrounded(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, H, dtype=torch.float8_e4m3fn), torch.full((rows, H // 128), torch.nan)


def prepared(few: bool) -> None:
    E, tokens, top_k = 9, 150, 2
    n = tokens * top_k
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids, counts, lists, c = routes(E, n, "spread"), unwritten(E), unwritten(n), Chunks.of(n, E)
    q, scale = unrounded(tokens)
    table = torch.full((c.number, c.padded), -9, dtype=torch.int16)
    if not few:
        count_routes[(c.number,)](ids, table, n, E, c.padded, c.size, False)
    groups, sizes = (E, (0, 64, 4)) if few else (c.number, (c.padded, c.size, c.rows))
    prepare[(groups + -(-tokens // R),)](
        ids, table, counts, lists, n, c.number, x, q, scale, tokens, E, *sizes, *ROUNDING, False, False
    )
    same_lists(ids, E, counts, lists)
    right(q, scale, x)


def spread() -> None:
    tokens, top_k = 37, 3
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    there = torch.randperm(tokens * top_k, generator=generator).int().view(tokens, top_k)
    there[1, 1], there[5] = -1, -1
    q, scale = unrounded(tokens * top_k)
    round_to_places[(-(-tokens // R),)](x, there, q, scale, tokens, top_k, *ROUNDING, False)
    to, token = there[there >= 0].long(), (there >= 0).nonzero()[:, 0]
    right(q[to], scale[to], x[token])
    assert int(scale.isnan().any(1).sum()) == top_k + 1, "places of routes to nowhere are written"


def copied() -> None:
    """Codes and scales of any kind, as they are."""
    tokens, top_k = 37, 3
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 256, (tokens, H), generator=generator, dtype=torch.int32).to(torch.uint8)
    scales = torch.randn(tokens, H // 128, generator=generator)
    there = torch.randperm(tokens * top_k, generator=generator).int().view(tokens, top_k)
    there[1, 1], there[5] = -1, -1
    q, scale = unrounded(tokens * top_k)
    x = codes.view(torch.float8_e4m3fn)
    copy_to_places[(-(-tokens // R),)](x, scales, there, q, scale, tokens, top_k, H, R, B, False)
    to, token = there[there >= 0].long(), (there >= 0).nonzero()[:, 0]
    assert torch.equal(q.view(torch.uint8)[to], codes[token])
    assert torch.equal(scale[to], scales[token])
    assert int(scale.isnan().any(1).sum()) == top_k + 1, "places of routes to nowhere are written"


CASES = {
    "few routes": lambda: prepared(True),
    "many routes": lambda: prepared(False),
    "to their places": spread,
    "copied to their places": copied,
}


if __name__ == "__main__":
    answer_cases(CASES)
