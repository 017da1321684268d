"""A restart serves what was committed last, and what cannot be written is not committed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import zlib
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import trained
from updating import IDS, Server, W, X

from expertd.errors import ChangeRefusedError, ChangeUnknownError
from expertd.v1 import weights_service_pb2 as pb
from expertd_server.boot.assignment import WrongOptionError
from expertd_server.config.values import Ranges
from expertd_server.updates.store import Served, Store
from expertd_server.updates.versions import Version

pytestmark = pytest.mark.timeout(180)
REFUSED = (ChangeRefusedError, ChangeUnknownError)


def config(folder: Path, **more):
    return trained.config(folder, held=folder.parent / "held.json", **more)


def versions(server: Server) -> list[tuple[int, str]]:
    return [(v.number, v.source) for v in server.client.describe().versions]


def test_after_an_update_the_checkpoint_of_the_start_has_to_stay(serve, folder, tmp_path):
    """It is the model's identity in Describe; the new folder is refused, with what to do."""
    server, new = serve(config(folder)), trained.saved(tmp_path / "new", trained.step(2))
    server.update(trained.step(2), version=7)
    server.host.close()
    moved = dataclasses.replace(config(folder), checkpoint=new)
    with pytest.raises(WrongOptionError, match="give --checkpoint the folder from before the update") as said:
        serve(moved)
    assert "held.json.weights to serve another model than the other servers" in str(said.value)
    assert versions(serve(config(folder)))[0][0] == 7


@pytest.mark.parametrize("quantize", [None, "int4_g128"])
def test_a_restart_serves_tensors_that_were_committed_last(serve, folder, tmp_path, quantize):
    options = {"quantize": quantize, "experts": Ranges.parse("1-2")}
    server = serve(config(folder, **options))
    fingerprint = server.client.describe().model.fingerprint
    server.update(trained.step(2), version=7, label="seven")
    answers, digest = server.answers(), server.client.describe().versions[0].digest
    server.host.close()
    again = serve(config(folder, **options))
    assert again.answers() == answers
    told = again.client.describe()
    assert (told.versions[0].number, told.versions[0].label, told.versions[0].digest) == (7, "seven", digest)
    assert told.model.fingerprint == fingerprint, "its sums are added to those of servers that were not restarted"
    assert answers == serve(trained.config(trained.saved(tmp_path / "2", trained.step(2)), **options)).answers()
    with pytest.raises(ChangeRefusedError, match="want more than 7"):
        again.call("BeginUpdate", update="u", version=7)
    again.update(trained.step(3), name="v")
    assert versions(again) == [(8, "tensors"), (7, "tensors")]
    assert sorted(p.name for p in (tmp_path / "held.json.weights").iterdir() if p.is_dir()) == ["7", "8"]
    again.update(trained.step(4), name="w")
    assert sorted(p.name for p in (tmp_path / "held.json.weights").iterdir() if p.is_dir()) == ["8", "9"]


def test_a_restart_serves_a_folder_that_was_committed_last(serve, folder, tmp_path):
    server = serve(config(folder, quantize="int8"))
    new = trained.saved(tmp_path / "step-2", trained.step(2))
    server.call("BeginUpdate", update="u", checkpoint=str(new))
    server.call("PrepareUpdate", update="u")
    server.call("CommitUpdate", update="u")
    answers = server.answers()
    server.host.close()
    again = serve(config(folder, quantize="int8"))
    assert (again.answers(), versions(again)) == (answers, [(2, "checkpoint")])


def test_a_restart_after_a_rollback_serves_the_version_before(serve, folder):
    server = serve(config(folder))
    first = server.answers()
    server.update(trained.step(2))
    server.call("RollbackVersion")
    server.host.close()
    again = serve(config(folder))
    assert (again.answers(), versions(again)) == (first, [(1, "start")])
    with pytest.raises(ChangeRefusedError, match="want more than 2"):
        again.call("BeginUpdate", update="u", version=2)


def test_after_tensors_that_are_kept_experts_can_be_added(serve, folder, tmp_path):
    """Those that the update brought; of others there are no tensors."""
    server = serve(config(folder))
    server.update(trained.step(2))
    server.host.residence.remove(0, experts=[3])
    server.host.residence.add(0, experts=[3])
    assert server.answers() == serve(trained.config(trained.saved(tmp_path / "2", trained.step(2)))).answers()


def test_an_update_that_was_not_committed_leaves_nothing(serve, folder, tmp_path):
    server = serve(config(folder))
    first = server.answers()
    server.call("BeginUpdate", update="u")
    server.put_and_prepare("u", trained.parts(trained.step(2)))
    assert (tmp_path / "held.json.weights" / "2").is_dir()
    server.call("AbortUpdate", update="u")
    assert not (tmp_path / "held.json.weights" / "2").exists()
    server.host.close()
    assert serve(config(folder)).answers() == first


def full(*_args, **_more):
    raise OSError(28, "No space left on device")


def test_a_full_disk_refuses_the_update_and_the_old_version_goes_on(serve, folder, monkeypatch):
    from expertd_server.updates import store

    server = serve(config(folder))
    first = server.answers()
    monkeypatch.setattr(store, "write_layer", full)
    server.call("BeginUpdate", update="u")
    with pytest.raises(REFUSED, match=r"cannot be kept for a restart: .*No space left"):
        server.put_and_prepare("u", trained.parts(trained.step(2)))
    monkeypatch.undo()
    assert server.answers() == first
    server.call("BeginUpdate", update="v")
    server.put_and_prepare("v", trained.parts(trained.step(2)))
    monkeypatch.setattr(store, "replacing", full)  # full at the commit
    with pytest.raises(ChangeRefusedError, match="a restart would serve the old version"):
        server.call("CommitUpdate", update="v")
    assert server.answers() == first
    assert versions(server) == [(1, "start")]
    monkeypatch.undo()
    server.call("CommitUpdate", update="v")  # there is room again
    assert server.answers() != first


def test_full_memory_refuses_the_update_and_the_old_version_goes_on(serve, folder, monkeypatch):
    from expertd_kernels.checkpoint import in_memory

    server = serve(trained.config(folder))
    first = server.answers()
    server.call("BeginUpdate", update="u")
    with monkeypatch.context() as patch:
        patch.setattr(in_memory.os, "pwrite", full)
        with pytest.raises(ChangeRefusedError, match="No space left"):
            server.call("PutWeights", update="u", parts=trained.parts(trained.step(2)))
    server.call("AbortUpdate", update="u")
    assert server.answers() == first
    server.update(trained.step(2), name="v")
    assert server.answers() != first


@pytest.mark.parametrize("broken", ["{", '{"version": {}}', "text"])
def test_a_broken_memory_of_what_was_served_is_said(serve, folder, broken):
    server = serve(config(folder))
    server.update(trained.step(2))
    server.host.close()
    (folder.parent / "held.json.weights" / "served.json").write_text(broken)
    with pytest.raises(WrongOptionError, match=r"served\.json: cannot be read: .*; delete"):
        serve(config(folder))


GOOD = {
    "version": {"number": 7, "label": "seven", "source": "tensors", "folder": "", "ready_unix_ns": 1, "identity": ""},
    "highest": 9,
    "fingerprint": "f00d",
}
EVIL = [None, True, -1, 1.5, float("nan"), float("inf"), 2**63, 2**64, "", "x\n\x1b[2J", "../../etc", [], {}, [[]], b""]


def _changed(field: str, value: object) -> dict[str, object]:
    return {**GOOD, field: value} if field in GOOD else {**GOOD, "version": {**GOOD["version"], field: value}}


@pytest.mark.parametrize("field", ["version", *GOOD["version"], "highest", "fingerprint", "more"])
def test_what_was_served_is_read_with_fields_of_their_kind_alone(tmp_path, field):
    """Whoever wrote the file: no traceback, no line of his own, no path that is made of its number."""
    store, file = Store(tmp_path / "held"), tmp_path / "held.weights" / "served.json"
    file.parent.mkdir()
    file.write_text(json.dumps(GOOD))
    assert store.recall("f00d") == Served(Version(**GOOD["version"]), 9, "f00d")
    for value in EVIL:
        if isinstance(value, bytes):
            file.write_text(json.dumps({k: v for k, v in _changed(field, 0).items() if k != field}))
            if field not in GOOD:
                continue
        else:
            file.write_text(json.dumps(_changed(field, value)))
        fits = field in ("label", "identity", "folder") and isinstance(value, str)
        if fits and (field != "folder" or value.isprintable()):
            assert store.recall("f00d") is not None
        else:
            with pytest.raises(WrongOptionError) as said:
                store.recall("f00d")
            text = str(said.value).replace(str(tmp_path), "")
            assert text.isprintable()
            assert len(text) < 1000


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"highest": ' + b"9" * 5000 + b"}", b" " * (2 << 20), b"\xff", b""])
def test_what_is_no_memory_of_what_was_served(tmp_path, data):
    (tmp_path / "held.weights").mkdir()
    (tmp_path / "held.weights" / "served.json").write_bytes(data)
    with pytest.raises(WrongOptionError, match=r"served\.json: cannot be read: .*; delete"):
        Store(tmp_path / "held").recall("f00d")


@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_what_is_no_file_does_not_hold_up_the_start(tmp_path, what):
    path = tmp_path / "held.weights" / "served.json"
    path.parent.mkdir()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    said: list[str] = []

    def recalled() -> None:
        with pytest.raises(WrongOptionError) as e:
            Store(tmp_path / "held").recall("f00d")
        said.append(str(e.value))

    thread = threading.Thread(target=recalled, daemon=True)
    thread.start()
    thread.join(30)
    assert len(said) == 1
    assert "is no regular file" in said[0]


def test_weights_that_are_gone_are_said(serve, folder):
    server = serve(config(folder))
    server.update(trained.step(2))
    server.host.close()
    (folder.parent / "held.json.weights" / "2" / "layer-00001.safetensors").unlink()
    with pytest.raises(WrongOptionError, match="version 2 was committed last, and its weights cannot be read"):
        serve(config(folder))


class Process:
    """`expertd serve` in a process of its own, at one address."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        log = stack.enter_context((folder.parent / "serve.log").open("ab"))
        command = [
            sys.executable,
            "-m",
            "expertd_server.commands.cli",
            "serve",
            "--checkpoint",
            str(folder),
            "--device",
            "cpu",
        ]
        command += ["--threads", "1", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        command += ["--held", str(folder.parent / "held.json")]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        stack.callback(self.kill)
        for line in self.process.stdout:
            if "serving on " in line:
                self.address = line.split("serving on ")[1].split()[0]
                return
        raise AssertionError((folder.parent / "serve.log").read_text())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def test_a_server_killed_after_any_step_serves_what_was_committed_last(folder):
    """A version is committed first; then the server is killed after each step of an update to the next one."""
    from expertd_client import ExpertClient
    from expertd_client.weights import WeightsServer

    said: dict[int, bytes] = {}

    def serves(version: int) -> None:
        with ExpertClient(server.address, timeout_s=30) as client:
            found = client.forward(0, X, IDS, W)
        assert found.weights_version == version
        assert (
            said.setdefault(version, found.output.float().numpy().tobytes()) == found.output.float().numpy().tobytes()
        )

    def update(version: int, until: str) -> None:
        weights = WeightsServer(server.address)
        weights.begin("u", version)
        if until != "begin":
            weights.put("u", trained.parts(trained.step(version))[: 8 if until == "put" else None])
        if until not in ("begin", "put"):
            weights.prepare("u")
        if until in ("commit", "rollback"):
            weights.commit("u")
        if until == "rollback":
            serves(version)
            weights.rollback()
        weights.close()

    with ExitStack() as stack:
        server = Process(stack, folder)
        update(2, "commit")
        number = served = 2
        serves(served)
        for step in ("begin", "put", "prepare", "commit", "rollback"):
            number += 1
            update(number, step)
            server.kill()
            server = Process(stack, folder)
            served = number if step == "commit" else served
            serves(served)
        assert len(set(said.values())) == len(said) > 2


def test_a_server_killed_before_and_in_the_middle_of_a_rolling_update_serves_one_version(folder):
    """The old one until the first layer is switched, and then the new one, also where it was killed in the middle."""
    from expertd_client import ExpertClient
    from expertd_client.weights import WeightsServer

    def answers() -> tuple[list[int], list[bytes]]:
        with ExpertClient(server.address, timeout_s=30) as client:
            found = [client.forward(n, X, IDS, W) for n in trained.LAYERS]
        return [f.weights_version for f in found], [f.output.float().numpy().tobytes() for f in found]

    def update(version: int, until: str) -> None:
        weights = WeightsServer(server.address)
        weights.begin("u", version, rolling=pb.ROLLING_UPDATE_REQUIRED)
        weights.put("u", trained.parts(trained.step(version)))
        weights.prepare("u")
        if until == "half":
            weights.roll("u", 0)
        weights.close()

    with ExitStack() as stack:
        server = Process(stack, folder)
        first = answers()
        update(2, "prepare")
        assert answers() == first
        server.kill()
        server = Process(stack, folder)
        assert answers() == first
        update(3, "half")
        numbers, half = answers()
        assert (numbers, half[1]) == ([3, 1], first[1][1])
        server.kill()
        server = Process(stack, folder)
        numbers, after = answers()
        assert (numbers, after[0]) == ([3, 3], half[0])
        assert after[1] != half[1]


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def differences(before, after, encoding):
    """Of the experts' tensors that changed."""
    from expertd_kernels.checkpoint.delta import delta_of

    kind = {"xor": pb.WEIGHT_DELTA_XOR, "overwrite": pb.WEIGHT_DELTA_OVERWRITE}[encoding]
    return [
        pb.WeightPart(
            name=name,
            dtype="BF16",
            shape=list(tensor.shape),
            data=delta_of(raw(before[name]), raw(tensor), encoding),
            delta=kind,
            checksum=f"adler32:{zlib.adler32(raw(tensor)):08x}",
        )
        for name, tensor in after.items()
        if ".experts." in name and not torch.equal(tensor, before[name])
    ]


def test_differences_against_the_start_and_against_differences(serve, folder, tmp_path):
    """One expert stays as it is all the time, a layer at first."""
    pytest.importorskip("zstandard")
    server = serve(config(folder, quantize="int4_g128"))
    now = trained.step(1)
    for number, encoding, stays in ((2, "xor", ("layers.0.", ".experts.3.")), (3, "overwrite", (".experts.3.",))):
        after = {n: now[n] if any(s in n for s in stays) else t for n, t in trained.step(number).items()}
        parts = differences(now, after, encoding)
        assert len(parts) == (9 if number == 2 else 18)
        with pytest.raises(ChangeRefusedError, match=f"base: got 9, want {number - 1}"):
            server.call("BeginUpdate", update="wrong", base=9, delta=True)
        server.call("BeginUpdate", update=f"u{number}", base=number - 1, delta=True)
        server.put_and_prepare(f"u{number}", parts)
        server.call("CommitUpdate", update=f"u{number}")
        want = serve(trained.config(trained.saved(tmp_path / f"w{number}", after), quantize="int4_g128"))
        assert server.answers() == want.answers()
        now = after
    first = server.answers()
    server.call("BeginUpdate", update="bad", base=3, delta=True)
    parts[0].checksum = "adler32:00000000"
    with pytest.raises(ChangeRefusedError, match="adler32"):
        server.call("PutWeights", update="bad", parts=parts)
    server.call("AbortUpdate", update="bad")
    assert server.answers() == first


def test_deltas_need_their_base(serve, folder):
    server = serve(trained.config(folder))
    with pytest.raises(ChangeRefusedError, match="delta: want `base`"):
        server.call("BeginUpdate", update="u", delta=True)
    server.update(trained.step(2), name="u")
    with pytest.raises(ChangeRefusedError, match="came as tensors, which are not kept; want --held"):
        server.call("BeginUpdate", update="v", base=2, delta=True)
    server.call("BeginUpdate", update="w")
    part = trained.parts(trained.step(3))[0]
    part.delta = pb.WEIGHT_DELTA_XOR
    with pytest.raises(ChangeRefusedError, match="has no base to apply it to"):
        server.call("PutWeights", update="w", parts=[part])
    server.call("AbortUpdate", update="w")
