"""Differences of tensors: what comes out is the new tensor, and what is no difference of this base is refused."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np
import pytest

from expertd_kernels.checkpoint.delta import ENCODINGS, applied, delta_of, require_checksum
from expertd_kernels.checkpoint.errors import CheckpointError

zstandard = pytest.importorskip("zstandard")
RNG = np.random.default_rng(7)
BASE = RNG.integers(0, 256, 5000, dtype=np.uint8)


def changed(count):
    new = BASE.copy()
    places = RNG.choice(BASE.size, count, replace=False)
    new[places] ^= RNG.integers(1, 256, count, dtype=np.uint8)
    return new


def frame(data):
    return zstandard.ZstdCompressor(level=1).compress(bytes(data))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("count", [0, 1, 37, 5000])
def test_a_difference_gives_the_new_tensor(encoding, count):
    new = changed(count)
    data = delta_of(BASE, new, encoding)
    assert np.array_equal(applied("x", BASE, data, encoding), new)
    assert count > 37 or len(data) < BASE.size // 4


@pytest.mark.parametrize(
    ("encoding", "data", "says"),
    [
        ("xor", b"no frame", "no zstd frame"),
        ("xor", frame(bytes(4999)), "of 4999 bytes, want 5000"),
        ("xor", frame(bytes(5001)), "of 5001 bytes, want at most 5000"),
        ("overwrite", frame(b""), "0 bytes for 0 places"),
        ("overwrite", frame(np.array([2, 1], "<u4").tobytes() + b"ab"), "for 2 places"),
        ("overwrite", frame(np.array([1, 5000], "<u4").tobytes() + b"a"), "place 5000 of a tensor of 5000"),
        ("other", frame(bytes(10)), "encoding 'other'"),
    ],
)
def test_what_is_no_difference_is_refused(encoding, data, says):
    with pytest.raises(CheckpointError, match=says):
        applied("x", BASE, data, encoding)


def test_a_bomb_is_refused_unread():
    """A frame of some kilobytes that would be gigabytes, with its size in its header and without."""
    compressor = zstandard.ZstdCompressor(level=1)
    with pytest.raises(CheckpointError, match="want at most"):
        applied("x", BASE, compressor.compress(bytes(64 << 20)), "xor")
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(64 << 20))
    with pytest.raises(CheckpointError, match="of more than 5000 bytes"):
        applied("x", BASE, unsized, "xor")


def test_checksums():
    xxhash = pytest.importorskip("xxhash")
    good = {
        "sha256": hashlib.sha256(BASE).hexdigest(),
        "adler32": f"{zlib.adler32(BASE):08x}",
        "xxh3-128": xxhash.xxh3_128_hexdigest(BASE),
    }
    require_checksum("x", BASE, "")
    for algorithm, digits in good.items():
        require_checksum("x", BASE, f"{algorithm}:{digits}")
        with pytest.raises(CheckpointError, match=f"x: {algorithm} "):
            require_checksum("x", changed(1), f"{algorithm}:{digits}")
    with pytest.raises(CheckpointError, match="blake3"):
        require_checksum("x", BASE, "blake3:00")
