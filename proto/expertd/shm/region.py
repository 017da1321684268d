"""A region's memory: made by the server, sent to the client over a Unix socket, mapped by both.  And its bell, on each
side: that side's end of a socket to the other process, by which a side that sleeps is woken.

The memory is an anonymous memfd: it has no name in any file system and lives as long as somebody maps it.  Its size is
sealed, so neither side can cut it short and make the other die of SIGBUS; all of it is there from the start, so neither
can be killed for want of a page.  Nothing else is shared: with a descriptor of one open file each process could change
its flags, so that the other's writes block.  No text of an error holds a descriptor, a path or a token.
"""

from __future__ import annotations

import ctypes as C
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Sequence

from expertd.shm.layout import ENTRIES, PAGE, arena_offset, region_bytes

# Why it is so: decision 163 in DECISIONS.md.
__all__ = ["Region", "RegionError", "host_id", "peer_uid", "supported"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SHRINK") else 0
_HEADER = struct.Struct("<8sQI4x")
_MAGIC = b"expshm01"
MOST_ENTRIES = 1 << 16


class RegionError(Exception):
    """Shared memory cannot be had, or what came over the socket is no region."""


def host_id() -> str:
    """Equal for processes that can share memory by a socket: the boot of this kernel and its network namespace.
    "" = not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f"{f.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def supported() -> str:
    """ "" where this Python and kernel have what a region needs, else what is missing."""
    for module, name in ((os, "memfd_create"), (os, "eventfd"), (socket, "recv_fds")):
        if not hasattr(module, name):
            return f"{module.__name__}.{name} is missing: shared memory needs Linux and Python 3.10"
    return "" if _SEALS else "memory cannot be sealed here: shared memory needs Linux"


class Region:
    """address: of its mapping in this process; bytes: of it; bell: a socket to the other side, -1 before ring_by()."""

    def __init__(self, memory: mmap.mmap, fd: int, entries: int) -> None:
        self._memory: mmap.mmap | None = memory
        self._view = (C.c_char * len(memory)).from_buffer(memory)
        self._fds = [fd]
        self.address = C.addressof(self._view)
        self.bytes = len(memory)
        self.entries = entries
        self.bell = -1

    @property
    def arena(self) -> int:
        """Address of the arena."""
        return self.address + arena_offset(self.entries)

    @property
    def arena_bytes(self) -> int:
        return self.bytes - arena_offset(self.entries)

    @classmethod
    def create(cls, arena_bytes: int, entries: int = ENTRIES) -> Region:
        """Zeroed memory, sealed.  Raises RegionError where there is not as much."""
        size, fds = region_bytes(entries, arena_bytes), []
        if size > (available := _available_bytes()) // 2:
            raise RegionError(f"shared memory of {size} bytes: got {available} available, want twice as much")
        try:
            fds.append(os.memfd_create("expertd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.posix_fallocate(fds[0], 0, size)
            fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, _SEALS)
            return cls(mmap.mmap(fds[0], size), fds[0], entries)
        except OSError as e:
            _close(fds)
            raise RegionError(f"shared memory of {size} bytes: {e.strerror or e}") from e

    def ring_by(self, sock: socket.socket) -> None:
        """Bells go through `sock`, of which no other process has this end.  Its owner may close it: end it by
        shutdown(), so that the other side sees it."""
        self.bell = os.dup(sock.fileno())
        self._fds.append(self.bell)

    def ring_here(self) -> socket.socket:
        """A pair of sockets for the bells: one end is this region's, and this is the other one's."""
        ours, theirs = socket.socketpair()
        with ours:
            self.ring_by(ours)
        return theirs

    def send(self, to: socket.socket) -> None:
        """The client's half: a header and the memory's descriptor."""
        header = _HEADER.pack(_MAGIC, self.bytes, self.entries)
        socket.send_fds(to, [header], self._fds[:1])

    @classmethod
    def receive(cls, source: socket.socket, bell: socket.socket | None = None) -> Region:
        """What `send` sent; bells go through `bell`, or `source` as well.

        Trusts none of it: the size is that of the memory, and the memory must be sealed.  Raises
        RegionError, and OSError where the socket breaks."""
        data, fds, flags, _ = socket.recv_fds(source, _HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if len(data) != _HEADER.size or len(fds) != 1 or flags & socket.MSG_CTRUNC:
                raise RegionError(
                    f"session: got {len(data)} bytes with {len(fds)} descriptors, want {_HEADER.size} with 1"
                )
            magic, size, entries = _HEADER.unpack(data)
            if magic != _MAGIC or not 1 <= entries <= MOST_ENTRIES or entries & (entries - 1):
                raise RegionError("session: the server shares memory of another version")
            if size <= arena_offset(entries) or size % PAGE or os.fstat(fds[0]).st_size != size:
                raise RegionError("session: the shared memory has another size than the server says")
            if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise RegionError("session: the shared memory is not sealed")
            region = cls(mmap.mmap(fds[0], size), fds[0], entries)
        except (OSError, ValueError) as e:
            _close(fds)
            raise RegionError(f"session: the shared memory cannot be mapped: {e}") from e
        except BaseException:
            _close(fds)
            raise
        region.ring_by(source if bell is None else bell)
        return region

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the arena, writable.  While a view of it lives, close() cannot unmap."""
        assert self._memory is not None
        start = arena_offset(self.entries) + offset
        return memoryview(self._memory)[start : start + nbytes]

    def close(self) -> None:
        """Unmaps it and closes its descriptors; nobody may use its addresses afterwards.  Memory of which somebody
        still holds a view goes when the view goes."""
        _close(self._fds)
        memory, self._memory = self._memory, None
        if memory is not None:
            del self._view
            try:
                memory.close()
            except BufferError:  # an array of the caller: it keeps the mapping
                del memory


def _available_bytes() -> int:
    """Memory of this host that may be taken without swapping: asking the kernel for more would not be refused, but
    paid for by whoever is killed."""
    with open("/proc/meminfo") as facts:
        for line in facts:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def peer_uid(of: socket.socket) -> int:
    """Who is at the other end of a Unix socket, as the kernel says."""
    credentials = of.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
    if isinstance(fds, list):
        fds.clear()
