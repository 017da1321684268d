"""A file is there whole or not at all."""

from __future__ import annotations

import pytest

from expertd_kernels.common.atomic_file import replacing


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=lambda error: error.__name__)
@pytest.mark.parametrize("keep", [False, True], ids=["replace", "keep"])
@pytest.mark.parametrize("before", [None, b"before"], ids=["none", "one"])
def test_of_a_body_that_fails_nothing_is_left(tmp_path, error, keep, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)

    def half() -> None:
        with replacing(path, keep=keep) as f:
            f.write(b"half of it")
            f.flush()
            raise error

    with pytest.raises(error):
        half()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == ({} if before is None else {"file": before})


def test_a_file_that_cannot_take_its_place_is_gone(tmp_path):
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"), replacing(tmp_path / "folder") as f:
        f.write(b"whole")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_its_folder_is_made(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    with replacing(path) as f:
        f.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert list(path.parent.iterdir()) == [path]
