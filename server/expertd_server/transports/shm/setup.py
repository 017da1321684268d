"""Listeners for shared memory, made of the server's options.  See Listen in transports/table.py."""

from __future__ import annotations

from collections.abc import Sequence

from expertd_kernels.sources.source import LayerInfo
from expertd_server.config.serve import ServeConfig
from expertd_server.service.service import Service
from expertd_server.transports.shm.listener import GpuListener, ShmListener

__all__ = ["arena_bytes", "gpu_listener", "shm_listener"]


def arena_bytes(max_tokens: int, infos: Sequence[LayerInfo]) -> int:
    """Of one connection's shared memory: two of its largest requests, bf16 in and out, within bounds."""
    widest = max(4 * i.hidden_size + 12 * i.top_k for i in infos)
    return min(max(2 * max_tokens * widest, 16 << 20), 256 << 20)


def shm_listener(config: ServeConfig, service: Service, infos: Sequence[LayerInfo]) -> ShmListener | str:
    """For clients on this host."""
    if not config.offers_shm:
        return f"the server has it off (--shm {config.shm}, listening on {config.listen.host}); --shm on switches it on"
    arena = arena_bytes(config.max_tokens, infos)
    listener = ShmListener(service.engine, arena_bytes=arena, most_bytes=config.shm_memory)
    try:
        listener.start()
    except OSError as e:
        return str(e)
    return listener


def gpu_listener(config: ServeConfig, service: Service, infos: Sequence[LayerInfo]) -> GpuListener | str:
    """For tensors on GPUs of this host, beside shared memory."""
    if config.nonfinite != "pass":
        return f"--nonfinite {config.nonfinite}: numbers on a device are not looked at"
    shm = service.offered["shm"]
    if isinstance(shm, str):
        return shm
    assert isinstance(shm, ShmListener), "the entry before this one"
    return shm.gpu
