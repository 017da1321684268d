"""Connections in shared memory, which the core serves without Python: their regions, and their pools on a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from expertd.shm.pool import Pool
from expertd.shm.region import Region
from expertd_server.engine import core as c
from expertd_server.engine.executor import Executor

__all__ = ["ShmConnections"]

_FIRST = 1 << 62
"""Handles of sessions lie above those of requests."""


class ShmConnections:
    """For any thread.  number_of: a caller's number in the core."""

    def __init__(self, core: c.Core, executor: Executor, number_of: Callable[[str], int]) -> None:
        self._core, self._executor, self._number_of = core, executor, number_of
        self._handles = itertools.count(_FIRST)
        self._regions: dict[int, Region] = {}
        self._pools: dict[int, Pool] = {}

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def pools(self) -> int:
        """How many have memory on the device."""
        return len(self._pools)

    def pool(self, nbytes: int) -> Pool:
        """Memory of the device for a session.  Raises PoolError."""
        return self._executor.pool(nbytes)

    def pool_refusal(self) -> str:
        """Why there is none, "" where there is."""
        return self._executor.pool_refusal()

    def add(self, region: Region, caller: str, pool: Pool | None = None) -> int:
        """Serve what comes through `region`, and from a device through `pool`; both belong to this from now on.  Its
        handle.  Raises OSError where the device cannot be given the memory."""
        self._executor.register(region.address, region.bytes)
        handle = next(self._handles)
        self._regions[handle] = region
        if pool is not None:
            self._pools[handle] = pool
        self._core.add_session(
            handle,
            region.address,
            region.bytes,
            region.entries,
            region.bell,
            self._number_of(caller),
            (0, 0) if pool is None else (pool.address, pool.bytes),
        )
        return handle

    def remove(self, handle: int) -> None:
        """Serve it no more.  The region is closed when nothing uses it."""
        self._core.remove_session(handle)

    def gone(self, handle: int) -> None:
        """The core uses it no more."""
        pool = self._pools.pop(handle, None)
        if pool is not None:
            pool.close()
        region = self._regions.pop(handle, None)
        if region is not None:
            self._executor.unregister(region.address)
            region.close()
