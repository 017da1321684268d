"""Routes for rows that come grouped by expert, as all-to-all libraries hand them over.  Nothing is read back from the
device, so a CUDA graph may hold it.

    contiguous  [R, H], the rows of expert 0, then those of expert 1, ...:    experts(x, *grouped_routes(counts, R))
    batched     [E, T, H], of expert e the first counts[e] rows are valid:    experts(x.flatten(0, 1),
                                                                                      *batched_routes(counts, T))

Each row has one route with weight 1, so a backend computes it as any other batch and the answer stands row by row.
Weighting and adding up a token's rows is left to whoever spread them.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["batched_routes", "grouped_routes"]


def grouped_routes(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(topk_ids [rows, 1] int32, topk_weights [rows, 1] f32) of rows sorted by expert.

    counts: [E] integers, rows of each local expert, 0 allowed.  Rows behind their sum have no route (-1): their answers
    are zero.
    """
    ends = counts.long().cumsum(0)
    ids = torch.searchsorted(ends, torch.arange(rows, device=counts.device), right=True)
    return _routes(ids, ids < counts.shape[0])


def batched_routes(counts: Tensor, rows_per_expert: int) -> tuple[Tensor, Tensor]:
    """(topk_ids [E * T, 1] int32, topk_weights [E * T, 1] f32) of [E, T, H] rows, T = rows_per_expert.

    counts: [E] integers, valid rows of each local expert, at most T; the others have no route (-1)."""
    E = counts.shape[0]
    place = torch.arange(rows_per_expert, device=counts.device)
    here = (place < counts[:, None]).flatten()
    ids = torch.arange(E, device=counts.device).repeat_interleave(rows_per_expert, output_size=E * rows_per_expert)
    return _routes(ids, here)


def _routes(ids: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.where(here, ids, -1).int()
    return ids[:, None], torch.ones(ids.shape[0], 1, device=ids.device)
