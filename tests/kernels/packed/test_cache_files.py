"""The file of a packed layer before it is read, while it is read, and as it is written."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from pathlib import Path

import pytest
from cache_kit import CPU, scribble, turn

from expertd_kernels import decide, problem_of
from expertd_kernels.backends import reference as backend
from expertd_kernels.common.atomic_file import replacing
from expertd_kernels.native.library import kernel_error
from expertd_kernels.packed import file as file_module
from expertd_kernels.packed.cache import CacheError, PackedCache
from expertd_kernels.packed.file import ALIGN, read_entry, read_header
from expertd_kernels.packed.integrity import prove
from expertd_kernels.sources.synthetic import random_weights

# ---------------------------------------------------------------------------------------------- while it is read


@pytest.mark.parametrize("how", ["written to", "cut"])
def test_an_entry_that_changes_while_it_is_read_is_not_taken(layer, monkeypatch, how):
    check = file_module.checksum
    done = []

    def meanwhile(t):
        found = check(t)
        if not done:
            done.append(turn(layer.path, 2 * ALIGN + 5) if how == "written to" else os.truncate(layer.path, ALIGN))
        return found

    if how == "cut" and kernel_error():
        pytest.skip(kernel_error())
    monkeypatch.setattr(file_module, "checksum", meanwhile)
    with pytest.raises(CacheError, match=r"changed while it was read|its checksum differs"):
        read_entry(layer.path)


# --------------------------------------------------------------------------------------------- before it is read


def with_header(path: Path, header: bytes) -> None:
    """The entry with another header, whose own checksum is right."""
    data = path.read_bytes()
    size = struct.unpack("<I", data[8:12])[0]
    body = data[-(-(16 + size) // ALIGN) * ALIGN :]
    start = -(-(16 + len(header)) // ALIGN) * ALIGN
    new = data[:8] + struct.pack("<II", len(header), zlib.crc32(header)) + header
    path.chmod(0o644)
    path.write_bytes(new.ljust(start, b"\0") + body)


def changed(path: Path, change) -> None:
    data = path.read_bytes()
    size = struct.unpack("<I", data[8:12])[0]
    header = json.loads(data[16 : 16 + size])
    with_header(path, json.dumps(change(header)).encode())


def tensor(**more):
    def change(header):
        header["tensors"][1] |= more
        return header

    return change


def without(*keys):
    return lambda header: {k: v for k, v in header.items() if k not in keys}


ODD = {
    "a list": (lambda h: [h], "its header is a list, want an object"),
    "a number": (lambda h: 7, "its header is a int, want an object"),
    "null": (lambda h: None, "its header is a NoneType"),
    "no tensors": (without("tensors"), "tensors is None, want list"),
    "no facts": (without("facts"), "facts is None, want dict"),
    "facts that are a list": (lambda h: h | {"facts": []}, r"facts is \[\], want dict"),
    "no backend": (lambda h: h | {"backend": 3}, "backend is 3, want str"),
    "meta that is none": (lambda h: h | {"meta": "x"}, "meta is 'x', want dict"),
    "size as text": (lambda h: h | {"data_bytes": "9"}, "data_bytes is '9', want int"),
    "negative size": (lambda h: h | {"data_bytes": -4096}, "inside -4096 bytes|its header says"),
    "huge size": (lambda h: h | {"data_bytes": 1 << 62}, "its header says"),
    "tensors that are none": (lambda h: h | {"tensors": [1, 2]}, "a tensor of its header is a int"),
    "offset beyond": (tensor(offset=1 << 40), "tensor w13.scales: .* bytes at 1099511627776, want"),
    "offset of the end": (lambda h: tensor(offset=h["data_bytes"])(h), "tensor w13.scales: .* want a multiple of 4096"),
    "negative offset": (tensor(offset=-4096), "offset -4096, want 0 or more"),
    "odd offset": (tensor(offset=4097), "want a multiple of 4096"),
    "an offset that is none": (tensor(offset=None), "offset is None, want int"),
    "an offset that is true": (tensor(offset=True), "offset is True, want int"),
    "one over another": (tensor(offset=0), "tensor w13.* bytes at 0, want a multiple of 4096 from"),
    "unknown dtype": (tensor(dtype="float3"), "dtype 'float3', which torch does not have"),
    "a dtype that is a module": (tensor(dtype="nn"), "dtype 'nn', which torch does not have"),
    "huge shape": (tensor(shape=[1 << 39, 1 << 39, 1 << 39]), "bytes at"),
    "extents beyond all": (tensor(shape=[0, 1 << 70]), "want numbers from 0 to"),
    "a million extents": (tensor(shape=[1 << 39] * 1_000_000), "a shape of 1000000 extents, want at most 16"),
    "negative extent": (tensor(shape=[-1, 4]), r"shape \[-1, 4\], want numbers from 0"),
    "half an extent": (tensor(shape=[1.5]), r"shape \[1.5\]"),
    "a nested shape": (tensor(shape=[[1]]), r"shape \[\[1\]\]"),
    "another checksum": (tensor(checksum="0" * 64), "tensor w13.scales is damaged"),
    "unknown part": (tensor(part="more"), "belongs to 'more', want one of packed, proof"),
    "a part of a proof": (tensor(part="proof"), "its proof has w13.scales, want dominant, expected, ids, weights, x"),
    "a name twice": (lambda h: h | {"tensors": [h["tensors"][0]] * 2}, "codes: .* from|stands there twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_strange_headers_are_sentences(layer, case):
    change, sentence = ODD[case]
    changed(layer.path, change)
    with pytest.raises(CacheError, match=sentence) as e:
        read_entry(layer.path)
    assert str(layer.path) in str(e.value)
    assert e.value.__cause__ is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "its header is no JSON"),
        (b"{", "its header is no JSON"),
        (b"\xff\xfe\x00", "its header is no JSON"),
        (b"[" * 100_000, "its header is no JSON"),
        (b"1" * 10_000, "its header is no JSON|its header is a int"),
        (b"{}", "backend is None, want str"),
    ],
    ids=["empty", "half", "no text", "deep", "long number", "empty object"],
)
def test_headers_that_are_no_json_are_sentences(layer, text, sentence):
    with_header(layer.path, text)
    for read in (read_entry, read_header):
        with pytest.raises(CacheError, match=sentence):
            read(layer.path)


@pytest.mark.parametrize("size", [1 << 16, (1 << 32) - 1])
def test_a_header_longer_than_its_file_is_a_sentence(layer, size):
    scribble(layer.path, 8, struct.pack("<I", size))
    with pytest.raises(CacheError, match=f"a header of {size} bytes in a file of|damaged header"):
        read_entry(layer.path)


@pytest.mark.parametrize("what", ["folder", "pipe", "empty", "missing", "link to itself", "unreadable"])
def test_what_is_no_file_is_a_sentence_and_keeps_nobody_waiting(tmp_path, layer, what):
    path = tmp_path / "other"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "empty":
        path.touch()
    elif what == "link to itself":
        path.symlink_to(path)
    elif what == "unreadable":
        shutil.copy(layer.path, path)
        if os.geteuid() == 0:
            return as_nobody(path)
        path.chmod(0)
    sentence = {"folder": "is no file", "pipe": "is no file", "empty": "is empty"}.get(what, "cannot be opened")
    with pytest.raises(CacheError, match=sentence):
        read_entry(path)
    return None


NOBODY = """
import os, sys
from pathlib import Path
from expertd_kernels.packed.file import CacheError, read_entry
import torch
os.setgid(65534), os.setuid(65534)
path = Path(sys.argv[1])
try:
    read_entry(path)
    print("read")
except CacheError as e:
    print(e)
try:
    path.open("r+b")
    print("open for writing")
except OSError as e:
    print(e.strerror)
"""


def as_nobody(path: Path) -> None:
    """Another user meets the modes: root does not.  In a folder of its own: pytest shuts its own ones for others."""
    with tempfile.TemporaryDirectory() as room:
        os.chmod(room, 0o711)
        _as_nobody(Path(shutil.copy(path, room)))


def _as_nobody(path: Path) -> None:
    for mode, said in ((0o600, "cannot be opened: Permission denied"), (0o444, "read")):
        path.chmod(mode)
        done = subprocess.run(
            [sys.executable, "-c", NOBODY, str(path)], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert said in first
        assert second == "Permission denied"


# --------------------------------------------------------------------------------------------------- writing it


def test_an_entry_is_read_only_for_everybody(layer):
    assert layer.path.stat().st_mode & 0o222 == 0
    assert layer.path.stat().st_mode & 0o400


def test_who_starts_together_ends_with_one_file(tmp_path):
    """Eight threads store the same layer at the same time: all find one inode there, and nothing is left over."""
    w = random_weights("int4_g32_zp", 3, 64, 32)
    p = problem_of(w, CPU, top_k=2)
    cache = PackedCache(tmp_path)
    facts = cache.facts("f" * 64, 0, range(3), decide(p, pin="reference").require(), p)
    packed, proof = backend.pack(w, p), prove(w, p, reference_experts=2)
    together, inodes = threading.Barrier(8), set()

    def store() -> None:
        together.wait()
        inodes.add(cache.store(facts, packed, proof, replace=False).stat().st_ino)

    threads = [threading.Thread(target=store) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(inodes) == 1
    assert list(tmp_path.iterdir()) == [cache.path(facts)]
    assert cache.find(facts).outcome == "hit"


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_file_that_is_there_stays_where_that_is_asked(tmp_path, monkeypatch, links, there):
    def none(*args):
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", none)
    path = tmp_path / "file"
    with replacing(path, keep=True) as f:
        f.write(b"mine")
        if there:
            path.write_bytes(b"theirs")
    assert path.read_bytes() == (b"theirs" if there and links else b"mine")
    assert list(tmp_path.iterdir()) == [path]
