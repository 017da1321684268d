"""A value that is made from files, while these change."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from expertd_server.service.reloading import FileError, Reloading


def load(data):
    if b"broken" in data[0]:
        raise FileError(f"no good: {len(data[0])} bytes")
    return data[0].decode()


class Watched:
    """A file, and what its Reloading told."""

    def __init__(self, path, loads=load) -> None:
        self.path, self.told = path, []
        path.write_text("first")
        self.reloading = Reloading("it", [path], loads, lambda what, good: self.told.append(good), every_s=0.0)


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path / "file")


def test_a_file_that_changes_is_read_again_and_one_that_does_not_is_not(watched):
    assert watched.reloading.current() == "first"
    assert watched.told == []
    watched.path.write_text("second one")
    assert watched.reloading.current() == "second one"
    assert watched.reloading.current() == "second one"
    assert (watched.told, watched.reloading.generation) == ([True], 2)


def test_a_broken_file_leaves_what_was_good_and_is_told_once(watched, caplog):
    watched.path.write_text("broken")
    assert [watched.reloading.current() for _ in range(3)] == ["first"] * 3
    assert watched.told == [False]
    assert caplog.text.count("keeping the last valid version") == 1
    watched.path.write_text("broken otherwise")  # another sentence
    assert watched.reloading.current() == "first"
    assert watched.told == [False, False]
    watched.path.write_text("good again")
    assert watched.reloading.current() == "good again"
    watched.path.write_text("broken")
    watched.reloading.current()
    assert watched.told == [False, False, True, False], "what broke once may break again"


def test_a_file_that_is_not_there_leaves_what_was_good(watched):
    away = watched.path.rename(watched.path.with_suffix(".away"))
    assert watched.reloading.current() == "first"
    assert watched.told == [False]
    away.rename(watched.path)
    assert [watched.reloading.current() for _ in range(2)] == ["first"] * 2
    assert watched.told == [False, True], "the same file is back"


def test_a_file_that_changes_while_it_is_read_is_read_at_the_next_look(tmp_path):
    changes = []

    def loads(data):
        if changes:
            path.write_text(changes.pop())
        return load(data)

    watched = Watched(path := tmp_path / "file", loads)
    path.write_text("half of")
    changes.append("half of it and the rest")
    assert watched.reloading.current() == "first"
    assert watched.told == []
    assert watched.reloading.current() == "half of it and the rest"
    assert watched.told == [True]


def test_a_link_that_is_swapped_is_another_file(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text("first" if name == "one" else "other")
        os.utime(tmp_path / name, (1, 1))
    link = tmp_path / "link"
    link.symlink_to("one")
    reloading = Reloading("it", [link], load, every_s=0.0)
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", link)
    assert reloading.current() == "other"


def test_it_is_looked_at_no_more_often_than_asked(tmp_path):
    path = tmp_path / "file"
    path.write_text("first")
    reloading = Reloading("it", [path], load, every_s=3600.0)
    path.write_text("second")
    assert reloading.current() == "first"
    assert reloading.refresh()
    assert reloading.current() == "second"


def _folder(path):
    path.mkdir()


def _large(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


NO_FILES = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": _folder,
    "socket": lambda path: os.mknod(path, 0o600 | stat.S_IFSOCK),
    "1 TiB": _large,
    "nothing": lambda path: path.symlink_to("/nowhere"),
    "loop": lambda path: path.symlink_to(path),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_is_not_waited_for_and_leaves_what_was_good(watched, what):
    """gRPC holds a lock while it asks for certificates: whoever waits there lets no client in."""
    away = watched.path.rename(watched.path.with_suffix(".away"))
    NO_FILES[what](watched.path)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(watched.reloading.current() for _ in range(2)), daemon=True)
    thread.start()
    thread.join(30)
    assert found == ["first"] * 2
    assert watched.told == [False]
    os.rename(watched.path, watched.path.with_suffix(".bad"))
    away.rename(watched.path)
    assert watched.reloading.current() == "first"
    assert watched.told == [False, True]


@pytest.mark.parametrize("error", [RecursionError, MemoryError, UnicodeError, KeyError], ids=lambda e: e.__name__)
def test_a_parser_that_fails_otherwise_leaves_what_was_good(tmp_path, caplog, error):
    """No caller gets it."""

    def loads(data):
        if data[0] != b"first":
            raise error("a secret of the file")
        return load(data)

    watched = Watched(tmp_path / "file", loads)
    watched.path.write_text("other")
    assert [watched.reloading.current() for _ in range(2)] == ["first"] * 2
    assert watched.told == [False]
    assert f"{watched.path}: cannot be used: {error.__name__}" in caplog.text
    assert "secret" not in caplog.text
