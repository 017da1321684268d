"""One batch -> one part for each server: the tokens that have a route there, with the routes to other servers left out.

    topk_ids            experts 0-3 at a, 4-7 at b        part of a: tokens 0, 1    part of b: tokens 0, 2
    [[0, 5],                                              [[0, -1],                 [[-1, 5],
     [1, 2],                                               [1,  2]]                  [ 4, 7]]
     [4, 7]]

All parts of a batch are gathered at once, so the work does not grow with the number of servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertd.errors import ExpertIdOutOfRangeError
from expertd_client.cluster.table import LayerTable
from expertd_client.request import Request

__all__ = ["Part", "check_ids", "count_routes", "cut", "split"]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one server gets of a batch.

    owner     number of the server, as `split` was told; -1: nobody holds these experts
    rows      [m] i64, ascending: its tokens in the batch; None = all
    request   [m] tokens, routes to others are -1
    routes    how many are not
    """

    owner: int
    rows: NDArray[np.int64] | None
    request: Request
    routes: int


def check_ids(ids: NDArray[np.integer], table: LayerTable, layer: int) -> int:
    """How many routes somebody is to compute.  Raises ExpertIdOutOfRangeError for ids that the model does not have."""
    if not ids.size:
        return 0
    low, high = int(np.minimum.reduce(ids, axis=None)), int(np.maximum.reduce(ids, axis=None))
    if low < -1 or high >= table.num_experts:
        raise ExpertIdOutOfRangeError.about(
            f"topk_ids of layer {layer}",
            got=low if low < -1 else high,
            want=f"0 to {table.num_experts - 1}, or -1 for a route that nobody computes",
        )
    return ids.size if low >= 0 else count_routes(ids)


def count_routes(ids: NDArray[np.integer]) -> int:
    """Routes that somebody is to compute."""
    return int(np.count_nonzero(ids >= 0))


def split(request: Request, table: LayerTable, owner_of_group: Sequence[int], owners: int) -> list[Part]:
    """The parts of a request whose tensors are numpy arrays, in the order of their owners; that of nobody, if there is
    one, comes last.  A route with the id -1 is in no part, and a token without routes neither.

    owner_of_group   by group of the table: the number of the server that is to compute it, < owners, or -1
    """
    ids = request.topk_ids
    of_expert = np.array([*owner_of_group, -2], np.int64)[table.group_of]  # no group, -1: the last one
    of_expert[:-1][of_expert[:-1] == -2] = -1
    owner = of_expert.take(ids)  # [M, top_k]; -2 = the id -1, by numpy's way of counting from the end
    routes = np.bincount((owner + 2).ravel(), minlength=owners + 2)[1:].tolist()  # nobody's first
    present = [n for n in range(-1, owners) if routes[n + 1]]
    if len(present) == 1 and bool((owner >= -1).any(axis=1).all()):
        return [Part(present[0], None, request, routes[present[0] + 1])]
    return _gather(request, owner, owners, routes)


def _gather(request: Request, owner: NDArray[np.int64], owners: int, routes: Sequence[int]) -> list[Part]:
    tokens = request.tokens
    hit = np.zeros((owners + 2, tokens), bool)
    hit[owner, np.arange(tokens)[:, None]] = True  # rows owners and owners + 1 are those of -2 and -1
    hit[owners] = hit[owners + 1]
    which, rows = (np.ascontiguousarray(n) for n in np.nonzero(hit[: owners + 1]))
    mine = np.where(which == owners, -1, which)
    x, weights = request.hidden_states.take(rows, axis=0), request.topk_weights.take(rows, axis=0)
    ids = request.topk_ids.take(rows, axis=0)
    ids[owner.take(rows, axis=0) != mine[:, None]] = -1
    parts, ends = [], np.searchsorted(which, np.arange(owners + 2)).tolist()
    for n in range(owners + 1):
        first, end = ends[n], ends[n + 1]
        if first < end:
            number = n if n < owners else -1
            part = request.with_tensors(x[first:end], ids[first:end], weights[first:end])
            parts.append(Part(number, rows[first:end], part, routes[number + 1]))
    return parts


def cut(part: Part, max_tokens: int) -> list[Part]:
    """Parts of at most max_tokens tokens, in order; max_tokens 0 = no bound."""
    if not max_tokens or part.request.tokens <= max_tokens:
        return [part]
    rows = np.arange(part.request.tokens) if part.rows is None else part.rows
    pieces = []
    for n, request in enumerate(part.request.cut(max_tokens)):
        of_piece = rows[n * max_tokens : (n + 1) * max_tokens]
        pieces.append(Part(part.owner, of_piece, request, count_routes(request.topk_ids)))
    return [piece for piece in pieces if piece.routes]
