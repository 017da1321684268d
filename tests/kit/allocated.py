"""What malloc has given out in this process, exactly; resident memory also has what the allocator keeps for later."""

import ctypes as C

import pytest

_NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Info(C.Structure):
    _fields_ = [(name, C.c_size_t) for name in _NAMES]


_mallinfo2 = getattr(C.CDLL(None), "mallinfo2", None)
needs_mallinfo = pytest.mark.skipif(_mallinfo2 is None, reason="asks glibc 2.33 or newer what it has given out")


def allocated() -> int:
    """Bytes, over all threads."""
    assert _mallinfo2 is not None
    _mallinfo2.restype = _Info
    found = _mallinfo2()
    return int(found.uordblks + found.hblkhd)
