"""One batch -> one part for each server: the tokens that have a route there, with the routes to other servers left out.

    topk_ids            experts 0-3 at a, 4-7 at b        part of a: tokens 0, 1    part of b: tokens 0, 2
    [[0, 5],                                              [[0, -1],                 [[-1, 5],
     [1, 2],                                               [1,  2]]                  [ 4, 7]]
     [4, 7]]

In C++ where that is built (csrc/split.cpp), in numpy otherwise: the same parts.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertd.errors import ExpertIdOutOfRangeError
from expertd_client.cluster.native import BATCH, OWNERS, Library, Room, at, batch_of, library
from expertd_client.cluster.table import LayerTable
from expertd_client.requests.e4m3 import E4m3
from expertd_client.requests.request import Request

# Why it is so: decision 104 in DECISIONS.md.
__all__ = [
    "Destinations",
    "SubBatch",
    "Shares",
    "cut",
    "meant",
    "meant_numpy",
    "part_of",
    "scanned",
    "shares",
    "split",
    "split_numpy",
]

_Owners = Sequence[int] | NDArray[np.int32]
_IDS = (np.dtype(np.int32), np.dtype(np.int64))
_BITS, _MOST = 63, 512
"""Groups that fit into a number, and numbers that are remembered of a table."""


@dataclass(frozen=True, slots=True, eq=False)
class SubBatch:
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


class Destinations(NamedTuple):
    """What the ids of a batch are of.

    routes    those that are not -1
    groups    of the table, ascending; orphans: whether experts that nobody holds are among them
    """

    routes: int
    groups: tuple[int, ...]
    orphans: bool


class Shares(NamedTuple):
    """How many tokens and routes each server gets, and which: rows[begins[n] : begins[n] + tokens[n]]."""

    tokens: list[int]
    routes: list[int]
    begins: list[int]
    rows: NDArray[np.int64]


# ---- which experts are meant -----------------------------------------------------------------------------------------


def meant(ids: NDArray[np.integer], table: LayerTable, layer: int) -> Destinations:
    """Of a batch.  Raises ExpertIdOutOfRangeError for ids that the model does not have."""
    native = library()
    if native is None or not ids.flags.c_contiguous or ids.dtype not in _IDS:
        return meant_numpy(ids, table, layer)
    batch = BATCH.pack(0, 0, at(ids), 0, 0, 0, 0, *ids.shape, ids.itemsize == 8)
    return scanned(native, batch, table, layer)


def scanned(native: Library, batch: Any, table: LayerTable, layer: int) -> Destinations:
    """The same by the C++ twin.  batch: a BATCH, or its address."""
    groups, found = len(table.replicas), C.c_int64()
    flags = (C.c_uint8 * (groups + 1))() if groups >= _BITS else None
    routes = native.scan(batch, table.group_of_at, table.num_experts, groups, flags, C.byref(found))
    if routes < 0:
        raise _unknown(found.value, table, layer)
    bits = found.value if flags is None else -1
    if (known := table.groups_of_bits.get(bits)) is None:
        if flags is None:
            there = [n for n in range(groups + 1) if bits >> n & 1]
        else:
            there = np.frombuffer(bytes(flags), np.uint8).nonzero()[0].tolist()
        orphans = bool(there) and there[-1] == groups
        known = tuple(there[:-1] if orphans else there), orphans
        if flags is None and len(table.groups_of_bits) < _MOST:
            table.groups_of_bits[bits] = known
    return Destinations(routes, *known)


def meant_numpy(ids: NDArray[np.integer], table: LayerTable, layer: int) -> Destinations:
    """meant() without its C++ twin."""
    if not ids.size:
        return Destinations(0, (), False)
    low, high = int(ids.min()), int(ids.max())
    if low < -1 or high >= table.num_experts:
        raise _unknown(low if low < -1 else high, table, layer)
    there = ids[ids >= 0]
    groups = np.unique(table.group_of.take(there)).tolist()
    return Destinations(there.size, tuple(g for g in groups if g >= 0), -1 in groups)


def _unknown(expert: int, table: LayerTable, layer: int) -> ExpertIdOutOfRangeError:
    return ExpertIdOutOfRangeError.about(
        f"topk_ids of layer {layer}",
        got=expert,
        want=f"0 to {table.num_experts - 1}, or -1 for a route that nobody computes",
    )


# ---- who gets what ---------------------------------------------------------------------------------------------------


def split(request: Request, table: LayerTable, owner_of_group: _Owners, owners: int) -> list[SubBatch]:
    """The parts of a request whose tensors are numpy arrays, in the order of their owners; that of nobody, if there is
    one, comes last.  A route with the id -1 is in no part, and a token without routes neither.

    owner_of_group   by group of the table: the number of the server that is to compute it, < owners, or -1
    """
    native = library()
    if native is None or not request.tokens:
        return split_numpy(request, table, owner_of_group, owners)
    of_group = np.full(len(owner_of_group) + 1, owners, np.int32)  # the last one: that of experts without a group
    of_group[:-1] = owner_of_group
    of_group[of_group < 0] = owners
    group_of = np.where(table.group_of < 0, len(of_group) - 1, table.group_of)
    values, kept = batch_of(request)
    batch = BATCH.pack(*values)
    who = OWNERS.pack(at(group_of), at(of_group), table.num_experts, owners + 1)
    found = shares(native, batch, who, request, owners + 1)
    present = [n for n in range(owners + 1) if found.tokens[n]]
    if len(present) == 1 and found.tokens[present[0]] == request.tokens:
        return [SubBatch(_owner(present[0], owners), None, request, found.routes[present[0]])]
    gathered = _gathered(native, batch, who, found, present, _like(request, sum(found.tokens)))
    parts = [
        SubBatch(
            _owner(n, owners),
            found.rows[found.begins[n] : found.begins[n] + found.tokens[n]],
            part,
            found.routes[n],
        )
        for n, part in zip(present, gathered, strict=True)
    ]
    del kept  # they were read until here
    return parts


def shares(native: Library, batch: Any, owners: Any, request: Request, count: int) -> Shares:
    """What each of `count` servers gets.  batch, owners: BATCH and OWNERS, or their addresses."""
    tokens, top_k = request.topk_ids.shape
    rows, found = np.empty(tokens * min(top_k, count), np.int64), (C.c_int64 * (3 * count))()
    where, step = C.addressof(found), 8 * count
    native.count(batch, owners, where, where + step, where + 2 * step, at(rows))
    counts = found[:]
    return Shares(counts[:count], counts[count : 2 * count], counts[2 * count :], rows)


def _owner(number: int, owners: int) -> int:
    return number if number < owners else -1


def _like(request: Request, tokens: int) -> Request:
    """Room for that many tokens."""
    x, ids, weights = request.hidden_states, request.topk_ids, request.topk_weights

    def room(array: NDArray[Any]) -> NDArray[Any]:
        return np.empty((tokens, array.shape[1]), array.dtype.newbyteorder("="))

    hidden = E4m3(room(x.codes), room(x.scales)) if isinstance(x, E4m3) else room(x)
    return request.with_tensors(hidden, room(ids), room(weights))


def _gathered(
    native: Library, batch: Any, owners: Any, found: Shares, present: Sequence[int], room: Request
) -> list[Request]:
    """The parts of those servers, each in its place of the room for all.  An array's address costs more than a row."""
    hidden, ids, weights = room.hidden_states, room.topk_ids, room.topk_weights
    arrays = (hidden.codes, hidden.scales) if isinstance(hidden, E4m3) else (hidden, None)
    wide = [(at(a), a.strides[0]) if a is not None else (0, 0) for a in (*arrays, ids, weights, found.rows)]
    parts = []
    for owner in present:
        begin, tokens = found.begins[owner], found.tokens[owner]
        *places, rows = [address + begin * bytes_ for address, bytes_ in wide]
        native.gather(batch, owners, owner, rows, tokens, C.byref(Room(*places)))
        mine = slice(begin, begin + tokens)
        parts.append(room.with_tensors(hidden[mine], ids[mine], weights[mine]))
    return parts


def split_numpy(request: Request, table: LayerTable, owner_of_group: _Owners, owners: int) -> list[SubBatch]:
    """split() without its C++ twin: all parts are gathered at once."""
    ids = request.topk_ids
    of_expert = np.array([*owner_of_group, -2], np.int64)[table.group_of]  # no group, -1: the last one
    of_expert[:-1][of_expert[:-1] == -2] = -1
    owner = of_expert.take(ids)  # [M, top_k]; -2 = the id -1, by numpy's way of counting from the end
    routes = np.bincount((owner + 2).ravel(), minlength=owners + 2)[1:].tolist()  # nobody's first
    present = [n for n in range(-1, owners) if routes[n + 1]]
    if len(present) == 1 and bool((owner >= -1).any(axis=1).all()):
        return [SubBatch(present[0], None, request, routes[present[0] + 1])]
    hits = [(n, np.flatnonzero((owner == n).any(axis=1))) for n in [*range(owners), -1]]
    return [SubBatch(n, rows, part_of(request, rows, owner[rows] == n), routes[n + 1]) for n, rows in hits if rows.size]


def part_of(request: Request, rows: NDArray[np.int64], mine: NDArray[np.bool_]) -> Request:
    """Those tokens; routes that are not mine [m, top_k] become -1."""
    part = request.rows(rows)
    return part.with_tensors(
        part.hidden_states, np.where(mine, part.topk_ids, -1).astype(part.topk_ids.dtype), part.topk_weights
    )


def cut(part: SubBatch, max_tokens: int) -> list[SubBatch]:
    """Parts of at most max_tokens tokens, in order; max_tokens 0 = no bound."""
    if not max_tokens or part.request.tokens <= max_tokens:
        return [part]
    rows = np.arange(part.request.tokens) if part.rows is None else part.rows
    pieces = []
    for n, request in enumerate(part.request.cut(max_tokens)):
        of_piece = rows[n * max_tokens : (n + 1) * max_tokens]
        pieces.append(SubBatch(part.owner, of_piece, request, int(np.count_nonzero(request.topk_ids >= 0))))
    return [piece for piece in pieces if piece.routes]
