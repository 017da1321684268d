"""Layout of the Marlin MoE kernels, from and to canonical weights, one expert at a time.  Needs no GPU.

    codes    int32 [E, K / 16, N * 16 * bits / 32], integers as unsigned codes, in tiles of 16 columns x 64 rows (below)
    scales   bf16 [E, K / g, N] ([E, 1, N] for a channel), or e8m0 bytes; in each 64 rows (channel: 32) in the order in
             which a warp's lanes hold them.  Those of e4m3 are multiplied by 2^120: the kernel makes bf16 numbers of
             e4m3 codes by shifting their bits, which divides them by that
    zeros    int32 [E, K / g, N / 8], four bits each, in the order of the scales and then of NIBBLES

The kernel's thread blocks compute 128 rows and 64 columns at least, so N is padded to a multiple of 128 with rows of
code 0 and scale 0 (gpt-oss: 2880 -> 2944 rows of w2).  e4m3 weights with 128 x 128 blocks or one scale a matrix are
computed with a copy of the scale for each row, in groups of 128 columns or one group.

A tile is what four warps multiply by one 16 x 8 fragment of a tensor core and its neighbour: lane t of warp j holds
columns 2 (t % 4) + {0, 1, 8, 9} of rows 16 j + t // 4 and 16 j + 8 + t // 4.  These eight codes are one word (two for
bytes, a row each), words of a lane side by side; inside a word they stand in the order NIBBLES (BYTES), so that a mask
and a shift give pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.scales import as_f32
from expertd_kernels.common.refused import Refused
from expertd_kernels.weights.canonical import CODE_DTYPE, SCALE_DTYPE, QuantTensor, pack_nibbles, unpack_nibbles
from expertd_kernels.weights.scheme import WHOLE, Element, ScaleType
from expertd_kernels.weights.serial import matrix_to_json, scheme_from_json

__all__ = ["BYTES", "NIBBLES", "THREAD_K", "THREAD_N", "pack_matrix", "padded_rows", "unpack_matrix"]

TILE_K, TILE_N = 16, 64
THREAD_K, THREAD_N = 64, 128
"""Columns and rows of the smallest thread block that every type and number of tokens has
(small_batch_thread_configs and large_batch_thread_configs in sglang's moe_wna16_marlin.cuh)."""
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
BYTES = (0, 2, 1, 3)
COLUMNS = (0, 1, 8, 9)
"""Columns of a lane, before 2 (t % 4) is added."""
_GROUPED = tuple(i + 8 * j for i in range(8) for j in range(8))
_CHANNEL = tuple(2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25))
_E8M0 = (0, 2, 1, 3)
"""Bytes of four exponents, so that two of them become bf16 at once."""
GROUPS = (WHOLE, 32, 64, 128)
E4M3_BLOCKS = ((1, 128), (1, WHOLE), (128, 128), (WHOLE, WHOLE))
"""Of e4m3: the package has kernels for groups of 128 and for one group (BIGGROUP_GET_IF)."""
E4M3_FACTOR = 2.0**120
LARGEST_SCALE = 2.0**7
"""Of e4m3, so that the multiplied scale is a bf16 number: 2^127 is one, 2^128 is not."""


@cache
def _tile(bits: int) -> tuple[int, ...]:
    """For each of the tile's 1024 codes as they are stored: 16 * row + column."""
    out = []
    for t in range(32):
        for j in range(4):
            held = [(16 * j + 8 * half + t // 4, 2 * (t % 4) + c) for half in range(2) for c in COLUMNS]
            order = NIBBLES if bits == 4 else (*BYTES, *(4 + i for i in BYTES))
            out += [TILE_K * held[i][0] + held[i][1] for i in order]
    return tuple(out)


def _order(places: tuple[int, ...], device: torch.device, inverse: bool = False) -> Tensor:
    order = torch.tensor(places, device=device)
    return order.argsort() if inverse else order


def _codes(codes: Tensor, bits: int) -> Tensor:
    """[N, K] u8 codes of one expert -> int32 [K / 16, N * 16 * bits / 32]."""
    N, K = codes.shape
    tiles = codes.view(N // TILE_N, TILE_N, K // TILE_K, TILE_K).permute(2, 0, 1, 3)
    tiles = tiles.reshape(K // TILE_K, N // TILE_N, -1)[..., _order(_tile(bits), codes.device)]
    stored = pack_nibbles(tiles) if bits == 4 else tiles
    return stored.contiguous().view(torch.int32).view(K // TILE_K, -1)


def _uncodes(words: Tensor, N: int, K: int, bits: int) -> Tensor:
    """The inverse of _codes."""
    stored = words.contiguous().view(torch.uint8).view(K // TILE_K, N // TILE_N, -1)
    tiles = unpack_nibbles(stored, TILE_K * TILE_N) if bits == 4 else stored
    tiles = tiles[..., _order(_tile(bits), words.device, inverse=True)]
    return tiles.view(K // TILE_K, N // TILE_N, TILE_N, TILE_K).permute(1, 2, 0, 3).reshape(N, K)


def _lanes(t: Tensor, places: tuple[int, ...], inverse: bool = False) -> Tensor:
    """[E, G, N] with the entries of each len(places) rows in this order; inverse: back."""
    order = _order(places, t.device, inverse)
    return t.reshape(*t.shape[:2], -1, len(places))[..., order].reshape(t.shape)


def _unsigned(codes: Tensor, element: Element) -> Tensor:
    """int8 plus 128 as u8, other codes as their bytes; its own inverse on bytes."""
    return codes.view(torch.uint8) ^ 0x80 if element is Element.INT8 else codes.view(torch.uint8)


def _places(q: QuantTensor) -> tuple[int, ...]:
    return _CHANNEL if q.scheme.cols in (WHOLE, q.shape[2]) else _GROUPED


def padded_rows(n: int) -> int:
    """Rows of a matrix of n rows as it is packed."""
    return -(-n // THREAD_N) * THREAD_N


def _pad(t: Tensor, dim: int, size: int) -> Tensor:
    """`t` with zeros behind, along `dim`, up to `size`."""
    if t.shape[dim] == size:
        return t
    more = t.new_zeros(*t.shape[:dim], size - t.shape[dim], *t.shape[dim + 1 :])
    return torch.cat((t, more), dim)


def _check(q: QuantTensor) -> None:
    s, (_, N, K) = q.scheme, q.shape
    known = s.element in (Element.INT4, Element.INT8, Element.E4M3) or s.name == "mxfp4"
    assert known, f"{s.name} is not the row's"
    blocks = E4M3_BLOCKS if s.element is Element.E4M3 else tuple((1, g) for g in GROUPS)
    assert (s.rows, s.cols) in blocks, f"blocks of {s.name} are not the row's"
    assert s.element is not Element.E4M3 or s.scale is not ScaleType.E8M0, f"scales of {s.name} are not the row's"
    assert q.columns is None, "activation order is not the row's"
    assert q.global_scales is None, "second-level scales are not the row's"
    assert q.zeros is None or s.element is Element.INT4, "zero points of int8 are not the row's"
    cut = K % THREAD_K or K % (s.cols or K) or N // q.segments % (s.rows or 1)
    assert not cut, f"[{N}, {K}] is cut by tiles or groups: not the row's"
    assert q.segments == 1 or N % THREAD_N == 0, f"padding {N} rows of gate and up would part them: not the row's"


def _row_scales(q: QuantTensor) -> Tensor:
    """[E, K / g, N] bf16: e4m3's scales, one for each row, multiplied.  Refused: one whose product bf16 cannot hold."""
    s, (E, N, _) = q.scheme, q.shape
    assert q.scales is not None
    if bool((q.scales.abs().float() > LARGEST_SCALE).any()):
        raise Refused(f"a scale above {LARGEST_SCALE:g} of e4m3 weights: the kernel's scales are 2^120 times as large")
    rows = N // q.segments if s.rows == WHOLE else s.rows
    each = as_f32(q.scales, s.scale).repeat_interleave(rows, 1)
    return (each.transpose(1, 2).reshape(E, -1, N).to(torch.bfloat16) * E4M3_FACTOR).to(torch.bfloat16)


def _stored_codes(q: QuantTensor) -> Tensor:
    """[E, K / 16, N * 16 * bits / 32] int32, N padded."""
    (E, N, K), bits = q.shape, 4 if q.scheme.element.packed else 8
    codes = (unpack_nibbles(q.codes[e], K) if bits == 4 else _unsigned(q.codes[e], q.scheme.element) for e in range(E))
    return torch.stack([_codes(_pad(one, 0, padded_rows(N)), bits) for one in codes])


def pack_matrix(q: QuantTensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors codes, scales, zeros, bias (f32; those that exist), exact_scales where the kernel's are others, and the
    facts that unpack needs."""
    _check(q)
    assert q.scales is not None
    s, rows = q.scheme, padded_rows(q.shape[1])
    out = {"codes": _stored_codes(q)}
    if s.element is Element.E4M3:
        out["scales"] = _lanes(_pad(_row_scales(q), 2, rows), _places(q))
        out["exact_scales"] = q.scales.clone()
    else:
        scales = _lanes(_pad(q.scales.transpose(1, 2), 2, rows), _places(q))
        if s.scale is ScaleType.E8M0:
            out["scales"] = _lanes(scales, _E8M0)
        else:
            out["scales"] = scales.to(torch.bfloat16)
            if not torch.equal(q.scales.to(torch.bfloat16).to(q.scales.dtype), q.scales):
                out["exact_scales"] = q.scales.clone()
    if q.zeros is not None:
        zeros = _lanes(_lanes(_pad(q.zeros.transpose(1, 2), 2, rows), _GROUPED), NIBBLES)
        out["zeros"] = pack_nibbles(zeros).contiguous().view(torch.int32)
    if q.bias is not None:
        out["bias"] = q.bias.clone()
    return {name: t.contiguous() for name, t in out.items()}, matrix_to_json(q)


def unpack_matrix(t: Mapping[str, Tensor], meta: Mapping[str, Any]) -> QuantTensor:
    """The exact inverse of pack_matrix."""
    s, (E, N, K) = scheme_from_json(meta["scheme"]), meta["shape"]
    bits, rows = 4 if s.element.packed else 8, padded_rows(meta["shape"][1])
    codes = torch.stack([_uncodes(t["codes"][e], rows, K, bits)[:N] for e in range(E)])
    codes = pack_nibbles(codes) if bits == 4 else _unsigned(codes, s.element).view(CODE_DTYPE[s.element])
    places = _CHANNEL if s.cols in (WHOLE, K) else _GROUPED
    scales = t.get("exact_scales")
    if scales is None:
        stored = _lanes(t["scales"], _E8M0, inverse=True) if s.scale is ScaleType.E8M0 else t["scales"]
        natural = _lanes(stored, places, inverse=True).transpose(1, 2)[:, :N]
        scales = natural.to(SCALE_DTYPE[s.scale]).contiguous()
    zeros = None
    if "zeros" in t:
        stored = unpack_nibbles(t["zeros"].contiguous().view(torch.uint8), rows)
        natural = _lanes(_lanes(stored, NIBBLES, inverse=True), _GROUPED, inverse=True).transpose(1, 2)
        zeros = natural[:, :N].contiguous()
    return QuantTensor(s, (E, N, K), codes, scales, zeros, bias=t.get("bias"), segments=meta["segments"])
