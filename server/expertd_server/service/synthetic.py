"""Tensors that a request asks the server to draw: `synthetic {seed, zipf_exponent}`.

The same seed, shape and dtype give the same values on every server.  Hidden states, ids and weights draw from separate
streams, so that one seed can stand in all three tensors of a request.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np
from cachetools import LRUCache

from expertd_server.engine.convert import round_floats
from expertd_server.engine.request import STORAGE, Array, Operand

__all__ = ["CACHE_BYTES", "SyntheticGenerator", "generate_hidden", "generate_ids", "generate_weights"]

CACHE_BYTES = 256 << 20
"""Drawn tensors are kept up to this size: a load test sends the same few seeds again and again."""

_HIDDEN, _IDS, _WEIGHTS = range(3)


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, stream])))


def generate_hidden(seed: int, tokens: int, hidden_size: int, dtype: str) -> Operand:
    """[M, H] ~ normal(0, 1), drawn in f32, rounded to dtype."""
    values = _generator(seed, _HIDDEN).standard_normal(tokens * hidden_size, dtype=np.float32)
    return Operand(dtype, round_floats(values, dtype))


def generate_ids(seed: int, tokens: int, top_k: int, num_experts: int, zipf_exponent: float, dtype: str) -> Operand:
    """[M, top_k], different experts in a row; the first of a row is e with probability ~ 1 / (e + 1) ** zipf_exponent.

    Gumbel top-k: the top_k largest of log(weight) + Gumbel noise are a draw without replacement.
    """
    u = _generator(seed, _IDS).random((tokens, num_experts), dtype=np.float32)
    rank = np.arange(1, num_experts + 1, dtype=np.float32)
    key = -zipf_exponent * np.log(rank) - np.log(-np.log(np.maximum(u, 1e-20)))
    return Operand(dtype, np.argsort(-key, axis=1, kind="stable")[:, :top_k].astype(STORAGE[dtype]).reshape(-1))


def generate_weights(seed: int, tokens: int, top_k: int, dtype: str) -> Operand:
    """[M, top_k], rows are softmax of normals: positive, sum 1 before rounding."""
    z = np.exp(_generator(seed, _WEIGHTS).standard_normal((tokens, top_k), dtype=np.float32))
    return Operand(dtype, round_floats((z / z.sum(axis=1, keepdims=True)).reshape(-1), dtype))


class SyntheticGenerator:
    """Draws, and remembers what it drew last.  From any thread."""

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._kept: LRUCache[tuple[object, ...], Operand] = LRUCache(cache_bytes, getsizeof=_bytes)
        self._lock = threading.Lock()

    def hidden(self, seed: int, tokens: int, hidden_size: int, dtype: str) -> Operand:
        key = (_HIDDEN, seed, tokens, hidden_size, dtype)
        return self._get(key, lambda: generate_hidden(seed, tokens, hidden_size, dtype))

    def ids(self, seed: int, tokens: int, top_k: int, num_experts: int, zipf_exponent: float, dtype: str) -> Operand:
        key = (_IDS, seed, tokens, top_k, num_experts, zipf_exponent, dtype)
        return self._get(key, lambda: generate_ids(seed, tokens, top_k, num_experts, zipf_exponent, dtype))

    def weights(self, seed: int, tokens: int, top_k: int, dtype: str) -> Operand:
        key = (_WEIGHTS, seed, tokens, top_k, dtype)
        return self._get(key, lambda: generate_weights(seed, tokens, top_k, dtype))

    def _get(self, key: tuple[object, ...], make: Callable[[], Operand]) -> Operand:
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            found = make()  # outside the lock; if two threads draw the same, they draw the same values
            with self._lock, contextlib.suppress(ValueError):  # larger than the whole room
                self._kept[key] = found
        return found


def _bytes(o: Operand) -> int:
    values: Array = o.values
    return values.nbytes
