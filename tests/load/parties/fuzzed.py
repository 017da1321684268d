"""What the fuzzed sessions have in common (session_fuzz.py): a party that is honest, one that is not, and what the
latter does to memory, sockets and lengths."""

from __future__ import annotations

import contextlib
import ctypes as C
import fcntl
import os
import random
from collections import Counter

from expertd.shm import layout
from expertd.shm.layout import Submission
from expertd.shm.region import Region

DEADLINE_S = 20.0
"""Of an honest request; it takes 0.1 ms where nobody else needs the machine."""
ARENA = 1 << 16
"""Bytes of tensors of a session in shared memory."""
H, TOKENS = 32, 16
"""Columns of hidden states, and most tokens of a batch, of the server that hostile clients have."""
_PUNCH = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_LIBC = C.CDLL(None)


class Fuzzed:
    """A session with a hostile party.  Rules are the methods rule_*: what one step may be.

    steps    taken, by rule; took_s: by honest requests
    rng      of the step at hand: each step is a function of its seed and of what was before
    """

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.steps: Counter[str] = Counter()
        self.took_s: list[float] = []

    @classmethod
    def rules(cls) -> list[str]:
        return [name for name in dir(cls) if name.startswith("rule_")]

    def step(self, rule: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.steps[rule.removeprefix("rule_")] += 1
        with contextlib.suppress(OSError):  # of the hostile party's own calls
            getattr(self, rule)()

    def check(self) -> None:
        """What always holds.  Raises AssertionError."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends all sessions, and checks what holds then."""
        raise NotImplementedError


def garbage(rng: random.Random, size: int) -> bytes:
    return rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))


def fill(fd: int) -> None:
    """Makes its open file blocking after nothing more fits into it."""
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
    with contextlib.suppress(OSError):
        for _ in range(10_000):
            os.write(fd, b"\1")
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)


def disturb(region: Region, rng: random.Random) -> None:
    """Words of the control page, of the rings, or bytes of the arena; or holes in the memory."""
    page = region.address
    what = rng.randrange(5)
    if what == 0:
        C.c_uint32.from_address(page + 4 * rng.randrange(layout.PAGE // 4)).value = rng.choice((0, 1, 2**32 - 1))
    elif what == 1:
        at = rng.randrange(layout.PAGE, layout.arena_offset(region.entries) - 64)
        C.memmove(page + at, garbage(rng, 64), 64)
    elif what == 2:
        C.memmove(region.arena + rng.randrange(region.arena_bytes - 64), garbage(rng, 64), 64)
    elif what == 3:
        _LIBC.fallocate(region._fds[0], _PUNCH, C.c_long(rng.randrange(16) << 12), C.c_long(1 << 14))
    else:
        with contextlib.suppress(PermissionError):
            os.ftruncate(region._fds[0], rng.choice((0, 4096, 1 << 30)))
            raise AssertionError("its size is not sealed")


def random_submission(rng: random.Random) -> Submission:
    """Fields close to what is right, and lies about lengths."""
    s = Submission()
    s.kind, s.layer = rng.choice((0, 1, 1, 1, 2, 3, 4, 9)), rng.choice((0, 0, 0, 1, 2**32 - 1))
    s.tokens, s.top_k = rng.choice((0, 1, 3, TOKENS, TOKENS + 1, 2**32 - 1)), rng.choice((0, 1, 2, 2, 4, 2**31))
    s.hidden_dtype, s.ids_dtype = rng.choice((1, 1, 2, 3, 4, 255)), rng.choice((5, 5, 6, 0))
    s.weights_dtype, s.out_dtype = rng.choice((1, 1, 2, 0)), rng.choice((1, 1, 4, 77))
    s.flags, s.hidden_size, s.id = rng.choice((0, 0, 1, 2, 65535)), rng.choice((0, H, 7)), rng.randrange(1 << 10)
    s.deadline_ns, s.number = rng.choice((0, 1, 2**64 - 1)), rng.choice((0, 1, 1 << 16, 2**32 - 1))
    for name in ("hidden", "ids", "weights", "out", "scales"):
        setattr(s, name, rng.choice((0, 4096, 8192, ARENA - 16, ARENA, 8, 2**64 - 16, rng.randrange(1 << 16))))
    return s
