"""Files of others: what is no file is not waited for, and what is too large is not read."""

import errno
import os
import threading
from pathlib import Path

import pytest

from expertd.common.files import named, read_file

pytestmark = pytest.mark.timeout(60)


def test_a_file_is_read_whole_up_to_its_limit(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 1000)
    assert read_file(file, 1000) == b"x" * 1000
    with pytest.raises(OSError, match="has more than 999 bytes"):
        read_file(file, 999)
    (tmp_path / "link").symlink_to(file)
    assert len(read_file(str(tmp_path / "link"), 1 << 20)) == 1000


def test_a_file_that_says_it_is_huge_takes_no_memory(tmp_path):
    file = tmp_path / "sparse"
    with file.open("wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(OSError, match="more than 4096 bytes"):
        read_file(file, 4096)


@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_waited_for(tmp_path, what):
    path = tmp_path / what
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    raised: list[OSError] = []

    def reads() -> None:
        try:
            read_file(path, 1 << 30)
        except OSError as e:
            raised.append(e)

    thread = threading.Thread(target=reads, daemon=True)
    thread.start()
    thread.join(30)
    assert [(e.errno, e.strerror) for e in raised] == [(errno.EINVAL, "is no regular file")]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "nowhere", 1)


@pytest.mark.parametrize("memory", [True, False])
def test_bytes_have_a_path_as_long_as_it_is_wanted(monkeypatch, memory):
    if not memory:  # as where Linux is not
        monkeypatch.delattr(os, "memfd_create")
    with named(b"one") as one, named(b"two") as two:
        assert [Path(path).read_bytes() for path in (one, two, one)] == [b"one", b"two", b"one"]
        assert os.stat(one).st_mode & 0o077 == 0 or memory
    assert not os.path.exists(one)
