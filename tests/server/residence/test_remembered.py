"""`--held FILE` whose file is not what a server wrote: refused with a sentence, in bounded time and memory."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import pytest

from expertd.placement import MOST_HELD
from expertd_server.boot.assignment import WrongOptionError
from expertd_server.residence.remembered import recall, remember

pytestmark = pytest.mark.timeout(120)

GOOD = {
    "version": 1,
    "epoch": "3",
    "fingerprint": "f00d",
    "num_experts": {"0-1": 8},
    "servers": [{"address": "here", "layers": {"0": "0-3", "1": "4-7"}}],
}


def _with(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def _refusal(path: Path) -> str:
    with pytest.raises(WrongOptionError) as e:
        recall(path, "f00d")
    return str(e.value)


def test_what_was_written_is_read(tmp_path):
    file = tmp_path / "held"
    assert recall(file, "f00d") is None
    remember(file, "f00d", 3, {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}, {0: 8, 1: 8})
    assert json.loads(file.read_text()) == GOOD
    assert recall(file, "f00d") == (3, {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "cannot be read"),
        (bytes(1000), "cannot be read"),
        (b"[" * 200_000, "cannot be read"),
        (b'{"a":' * 100_000, "cannot be read"),
        (b'{"version": 1, "epoch": ' + b"9" * 5000 + b"}", "cannot be read"),
        (b'{"version": NaN}', "cannot be read"),
        (b"null", "cannot be read"),
        (_with(num_experts={"0-1048575": 1 << 20}), "got 1048576, want 1 to 65536"),
        (_with(servers=[{"address": "here", "layers": {"0": "0-3," * 3_000_000}}]), "has more than 8388608 bytes"),
        (_with(servers=[{}] * 300_000), "got 300000, want at most"),
        (_with(servers=[{"address": "here", "layers": {"0": "0-99999999999999999999"}}]), "want numbers and ranges"),
        (_with(servers=[{"address": "here", "layers": {"7": "0"}}]), "layer 7"),
        (_with(servers=[{"address": a, "layers": {}} for a in "ab"]), "and 2 servers"),
        (_with(servers=[]), "and 0 servers"),
        (_with(fingerprint="another"), "got the fingerprint another"),
    ],
)
def test_what_is_not_is_refused_by_name(tmp_path, data, says):
    file = tmp_path / "held"
    file.write_bytes(data)
    text = _refusal(file)
    assert text.startswith(f"--held {file}: ")
    assert says in text
    assert text.endswith("delete it, and the other options say what is held")


@pytest.mark.parametrize("key", ["fingerprint", "\x1b[2J"])
def test_what_it_says_forges_no_line_and_fills_no_log(tmp_path, key):
    file = tmp_path / "held"
    file.write_bytes(_with(**{key: "x\n\x1b[2J" * 1000}))
    text = _refusal(file).replace(str(file), "")
    assert text.isprintable()
    assert len(text) < 1500


@pytest.mark.parametrize("what", ["pipe", "device", "sparse", "folder", "loop"])
def test_what_is_no_file_stops_no_start(tmp_path, what):
    path = tmp_path / what
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "sparse":
        with path.open("wb") as f:
            f.truncate(1 << 40)
    else:
        path.symlink_to("/dev/zero" if what == "device" else path)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(_refusal(path)), daemon=True)
    thread.start()
    thread.join(60)
    assert len(said) == 1
    assert "cannot be read" in said[0]


def test_any_damage_is_refused_or_read_within_the_bounds(tmp_path):
    """2,000 files, each with one to four bytes changed, left out or doubled."""
    file, sound = tmp_path / "held", json.dumps(GOOD).encode()
    rng = random.Random(1)
    read = 0
    for _ in range(2000):
        data = bytearray(sound)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + 1] = rng.choice((b"", bytes([rng.randrange(256)]), data[at : at + 1] * 2, b"9" * 12, b"-"))
        file.write_bytes(data)
        try:
            found = recall(file, "f00d")
        except WrongOptionError:
            continue
        read += 1
        assert found is not None
        assert sum(len(ids) for ids in found[1].values()) <= MOST_HELD
    assert 0 < read < 1000
