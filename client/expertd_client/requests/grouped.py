"""Rows of a request that come sorted by expert, instead of with routes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertd.errors import BadShapeError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.tensors import take

__all__ = ["Grouped", "grouped_message", "grouped_rows"]


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows that come sorted by expert: the first row_counts[0] rows are for expert_ids[0], and so on; sum = M.

    rows_per_expert: where it is T > 0, hidden_states are an array [experts, T, H], flattened to [experts * T, H] (what
    DeepEP's low-latency dispatch gives): the first row_counts[i] of an expert's T rows are valid, the others are not
    computed and answered with zeros.

    They are answered row by row, not weighted and not summed."""

    expert_ids: Sequence[int]
    row_counts: Sequence[int]
    rows_per_expert: int = 0


def grouped_message(grouped: Grouped) -> pb.GroupedRows:
    """As the contract has it."""
    return pb.GroupedRows(
        expert_ids=grouped.expert_ids, row_counts=grouped.row_counts, rows_per_expert=grouped.rows_per_expert
    )


def grouped_rows(grouped: Grouped, index: Any) -> Grouped:
    """Which experts the rows at `index` are for.  Raises BadShapeError where rows of one expert would be apart."""
    group = take(np.repeat(np.arange(len(grouped.row_counts)), grouped.row_counts), index)
    if (np.diff(group) < 0).any():
        raise BadShapeError.about(
            "rows", got="an order in which an expert's rows are apart", want="ascending numbers for grouped rows"
        )
    counts = np.bincount(group, minlength=len(grouped.row_counts))
    left = np.flatnonzero(counts).tolist()
    return Grouped([grouped.expert_ids[n] for n in left], counts[left].tolist())
