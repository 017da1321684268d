"""Rows that come grouped by expert (GroupedRows of the contract): which expert each row is for.

contiguous   rows_per_expert 0: the first row_counts[0] rows are for expert_ids[0], and so on; their sum is M
batched      rows_per_expert T: the first T rows are for expert_ids[0], and so on; of each T rows the first
             row_counts[i] are valid.  That is [E, T, H] in memory, as DeepEP's low-latency dispatch writes it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from expertd.errors import BadShapeError

__all__ = ["NOBODY", "GroupedRowsLike", "experts_of_rows"]

NOBODY = -1
"""Expert of a row that is not valid: a route that nobody computes."""


class GroupedRowsLike(Protocol):
    """A GroupedRows message, or what the client has of one."""

    @property
    def expert_ids(self) -> Sequence[int] | Any: ...
    @property
    def row_counts(self) -> Sequence[int] | Any: ...
    @property
    def rows_per_expert(self) -> int: ...


def experts_of_rows(g: GroupedRowsLike, rows: int) -> NDArray[np.int64]:
    """[rows] int64 global expert ids, NOBODY for rows that are not valid.  BadShapeError where `g` does not fit `rows`
    rows, which is found before anything of that size is made."""
    ids, counts, each = g.expert_ids, g.row_counts, g.rows_per_expert
    if len(ids) != len(counts):
        raise BadShapeError.about(
            "grouped", got=f"{len(ids)} expert_ids and {len(counts)} row_counts", want="as many of each"
        )
    if each:
        return _batched(ids, counts, each, rows)
    total = sum(counts)
    if total != rows:
        raise BadShapeError.about("grouped.row_counts", got=f"{total} rows", want=f"the {rows} of hidden_states")
    return np.repeat(np.array(ids, np.int64), np.array(counts, np.int64))


def _batched(ids: Sequence[int], counts: Sequence[int], each: int, rows: int) -> NDArray[np.int64]:
    if len(ids) * each != rows:
        raise BadShapeError.about(
            "grouped.rows_per_expert",
            got=f"{each} rows for each of {len(ids)} experts",
            want=f"the {rows} rows of hidden_states",
        )
    most = max(counts, default=0)
    if most > each:
        raise BadShapeError.about(
            "grouped.row_counts", got=f"{most} rows of an expert", want=f"at most rows_per_expert, {each}"
        )
    valid = np.arange(each) < np.array(counts, np.int64)[:, None]
    return np.where(valid, np.array(ids, np.int64)[:, None], NOBODY).reshape(-1)
