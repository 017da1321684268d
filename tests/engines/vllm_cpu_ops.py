"""The compiled CPU ops that the tests' models call and vLLM's wheel for CUDA lacks, in torch: a plugin of
vllm.general_plugins, so that each process of an engine has them."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

_LIBRARY: list[torch.library.Library] = []


def install() -> None:
    """Defines them, once in a process."""
    if _LIBRARY:
        return
    _LIBRARY.append(torch.library.Library("_C", "FRAGMENT"))
    for schema, function in _OPS.items():
        _LIBRARY[0].define(schema)
        _LIBRARY[0].impl(schema.split("(")[0], function, "CompositeExplicitAutograd")


def _slots(starts, positions, table, slots, size):
    for row in range(len(starts) - 1):
        begin, end = int(starts[row]), int(starts[row + 1])
        at = positions[begin:end].long()
        slots[begin:end] = table[row, at // size].long() * size + at % size


def _store(key, value, key_cache, value_cache, slots, *_):
    slots = slots[: len(key)]
    used, size = slots >= 0, key_cache.shape[2]
    block, offset = slots[used] // size, slots[used] % size
    key_cache[block, :, offset] = key[used]
    value_cache[block, :, offset] = value[used]


def _attention(q, key_cache, value_cache, out, starts, lengths, scale, *more):
    causal, alibi, window, table, cap, _, sinks, *_ = more
    assert (causal, alibi, cap) == (True, None, 0)
    size = key_cache.shape[2]
    for row, length in enumerate(lengths.tolist()):
        begin, end = int(starts[row]), int(starts[row + 1])
        if begin == end:
            continue
        at, now = torch.arange(length), torch.arange(length - (end - begin), length)[:, None]
        blocks = table[row, at // size].long()
        key, value = (cache[blocks, :, at % size].transpose(0, 1) for cache in (key_cache, value_cache))
        mask = torch.zeros(1, q.shape[1], end - begin, length, dtype=q.dtype)
        mask.masked_fill_((at > now) | ((at <= now - window) if window > 0 else False), float("-inf"))
        if sinks is not None:  # one more key, of zeros, whose logit is the sink
            key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
            mask = torch.cat([mask, sinks.to(q.dtype)[None, :, None, None].expand(1, -1, end - begin, 1)], -1)
        query = q[begin:end].transpose(0, 1)[None]
        found = scaled_dot_product_attention(query, key[None], value[None], mask, scale=scale, enable_gqa=True)
        out[begin:end] = found[0].transpose(0, 1)


_OPS = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
    "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, int size)"
    " -> ()": _slots,
    "get_scheduler_metadata(int requests, int heads, int kv_heads, int head_dim, Tensor lengths, ScalarType dtype, "
    "Tensor starts, bool causal, int window, str isa, bool split, Tensor? dynamic, str kv_dtype) -> Tensor": (
        lambda *_: torch.zeros(1)
    ),
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, "
    "str isa, float k_scale, float v_scale, str kv_dtype) -> ()": _store,
    "cpu_attention_with_kv_cache(Tensor q, Tensor key_cache, Tensor value_cache, Tensor(a!) out, Tensor starts, "
    "Tensor lengths, float scale, bool causal, Tensor? alibi, int window, Tensor table, float cap, Tensor? meta, "
    "Tensor? sinks, Tensor? dynamic, float k_scale, float v_scale, str kv_dtype) -> ()": _attention,
}
