"""Activation order: from a group index for each input column to canonical `columns`."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

__all__ = ["columns_of", "is_natural"]


def is_natural(g_idx: Tensor, group_size: int) -> bool:
    """Whether [K] g_idx is 0, 0, ..., 1, 1, ...: column k in group k // group_size."""
    return torch.equal(g_idx.to(torch.int32), _natural(g_idx.numel(), group_size))


@cache
def _natural(k: int, group_size: int) -> Tensor:
    return torch.arange(k, dtype=torch.int32) // group_size


def columns_of(g_idx: Tensor, groups: int, group_size: int) -> Tensor | None:
    """[K] group of each input column -> [K] int32 code columns in group order; None = natural order.

    Code column j then multiplies input column columns[j], and its group is j // group_size.  That needs groups of
    group_size columns each (the last may be shorter): otherwise ValueError.  A group outside 0 .. groups - 1 is one,
    too.

    >>> columns_of(torch.tensor([1, 0, 1, 0]), groups=2, group_size=2).tolist()
    [1, 3, 0, 2]
    """
    group = g_idx.numpy()
    if group.size and (group.min() < 0 or group.max() >= groups):
        raise ValueError(f"group {group.min()} to {group.max()}, but there are {groups} groups of scales")
    if is_natural(g_idx, group_size):
        return None
    sizes = np.bincount(group, minlength=groups)
    if (sizes[:-1] != group_size).any() or sizes[-1] != group.size - group_size * (groups - 1):
        raise ValueError("groups of unequal size")
    narrow = group.astype(np.uint16) if groups <= 1 << 16 else group  # numpy sorts 16-bit integers by radix
    return torch.from_numpy(np.argsort(narrow, kind="stable").astype(np.int32))
