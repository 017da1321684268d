"""Shared memory, for clients on this host ("shm") and for tensors on its GPUs ("cuda_ipc")."""

from expertd_server.transports.shm.listener import GpuListener, ShmEngine, ShmListener

__all__ = ["GpuListener", "ShmListener", "ShmEngine"]
