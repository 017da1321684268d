"""Layers without values, whose calls launch what real ones launch: their tensors' memory is never touched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from expertd_kernels.backends.gather import kernels as rows
from expertd_kernels.backends.gather.table import SCALED_COLUMNS, WORDS
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import E4m3Experts, Experts, Packed, takes_e4m3
from expertd_kernels.compiling.job import LayerCalls
from expertd_kernels.oracle.decision import Backend, backend_module
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import experts_of
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.numerics import COMPUTE_DTYPE

__all__ = ["calls_of", "empty_experts", "grown"]

_ROWS = 16
"""Of a batch, in the calls of the engine's own kernels: none of them depends on it."""


def empty_experts(layer: LayerCalls) -> Experts:
    """The layer on its backend, for the GPU that backends.device.compile_for() was told."""
    backend = next(b for b in BACKENDS if b.name == layer.backend)
    return experts_of(backend, grown(_one_packed(backend, layer.problem), layer.problem.num_experts), layer.problem)


def _one_packed(backend: Backend, p: Problem) -> Packed:
    """One expert, packed."""
    weights = random_weights(
        p.w13,
        1,
        p.hidden_size,
        p.intermediate_size,
        activation=p.activation,
        bias=p.bias,
        act_order=p.act_order,
        w2_scheme=p.w2,
    )
    if p.static_scales:
        weights = replace(weights, input_scales=torch.ones(1, 2))
    packed: Packed = backend_module(backend).pack(weights, replace(p, num_experts=1))
    return packed


def grown(packed: Packed, experts: int) -> Packed:
    """The packed layer of one expert as one of many, without values."""
    meta = json.loads(json.dumps(packed.meta))
    for name in ("w13", "w2"):
        meta[name]["shape"][0] = experts
    tensors = {name: torch.empty((experts, *t.shape[1:]), dtype=t.dtype) for name, t in packed.tensors.items()}
    return replace(packed, tensors=tensors, meta=meta)


def calls_of(layer: LayerCalls, experts: Experts) -> Iterator[Callable[[], object]]:
    """The calls of a server with this layer: the experts', largest first, and those that bring a batch to the device
    and its answers from there."""
    p = layer.problem
    dtype, coded, on_input = COMPUTE_DTYPE[p.compute_dtype], takes_e4m3(experts), p.router_weight_on_input
    for tokens, top_k in sorted(layer.sizes, reverse=True):
        x = torch.empty(tokens, p.hidden_size, dtype=dtype)
        routes = torch.empty(tokens, top_k, dtype=torch.int32), torch.empty(tokens, top_k)
        out = torch.empty_like(x)
        yield partial(experts, x, *routes, router_weight_on_input=on_input, out=out)
        if coded:
            taking = cast(E4m3Experts, experts)
            yield partial(taking.of_e4m3, *_codes(tokens, p.hidden_size), *routes, out=out)
    for top_k in dict.fromkeys(k for _, k in layer.sizes):
        yield from _ends(p.hidden_size, top_k, dtype, coded)


def _codes(tokens: int, H: int) -> tuple[Tensor, Tensor]:
    return torch.empty(tokens, H, dtype=torch.float8_e4m3fn), torch.empty(tokens, H // SCALED_COLUMNS)


def _ends(H: int, top_k: int, dtype: torch.dtype, coded: bool) -> Iterator[Callable[[], object]]:
    """The engine's own kernels (rows/) for batches of this width."""
    table, hidden = torch.empty(_ROWS, WORDS, dtype=torch.int64), torch.empty(_ROWS, H, dtype=dtype)
    routes = torch.empty(_ROWS, top_k, dtype=torch.int32), torch.empty(_ROWS, top_k)
    verdicts = torch.empty(_ROWS, 2, dtype=torch.int32)
    for brought in (None, hidden):
        if coded:
            yield partial(rows.collect_e4m3, table, _ROWS, *_codes(_ROWS, H), *routes, verdicts, brought)
        else:
            yield partial(rows.collect, table, _ROWS, brought, *routes, verdicts)
    yield partial(rows.deliver, table, _ROWS, hidden)
    yield partial(rows.signal, torch.empty(_ROWS, dtype=torch.int32)[:1])
