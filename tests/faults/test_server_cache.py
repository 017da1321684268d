"""Packed weights kept on disk: the second boot maps them, servers share them, nothing stale or damaged is served."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from expertd.errors import ExpertdError
from expertd_client import ExpertClient
from expertd_kernels import Device, reference, relative_error
from expertd_kernels.native.library import kernel_error
from expertd_kernels.oracle.probe import detect_device, installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed import cache
from expertd_kernels.packed.cache import PackedCache, read_entry, write_packed
from expertd_kernels.packed.file import read_header
from expertd_kernels.sources.synthetic import SyntheticModel, random_inputs
from expertd_kernels.weights.digest import expert_digests
from expertd_server.boot import autotuning as measuring
from expertd_server.boot.assignment import assign_layers, files_state, open_source
from expertd_server.boot.layers import Booted, boot_layers
from expertd_server.boot.prepare import Workshop
from expertd_server.commands.cli import main
from expertd_server.config.serve import ServeConfig
from expertd_server.views.describe import describe_layer

pytestmark = pytest.mark.timeout(240)  # each test starts servers
FIXTURE = Path(__file__).parents[1] / "fixtures" / "gptq-w4-g128-sym-descact-false-qwen3moe1l"
CPU = torch.device("cpu")
CPU_DEVICE = Device("cpu", "x86_64")


class Guarded:
    """A source that counts what is loaded from it."""

    def __init__(self, source) -> None:
        self._source, self.loaded = source, []

    def __getattr__(self, name):
        return getattr(self._source, name)

    def load(self, layer, experts=None):
        self.loaded.append(layer)
        return self._source.load(layer, experts)


def boot(folder: Path, **options) -> tuple[list[Booted], Workshop]:
    config = ServeConfig(**({"synthetic": "tiny:int4_g128"} | options))
    source = Guarded(open_source(config))
    plans = assign_layers(config, source, detect_device("cpu"), installed_packages(BACKENDS))
    workshop = Workshop(source, CPU, PackedCache(folder), files_state(config))
    return boot_layers(plans, workshop), workshop


def digests_of(model: str) -> list[tuple[int, ...]]:
    source = SyntheticModel.parse(model)
    return [tuple(expert_digests(source.load(layer)).tolist()) for layer in source.layers]


def answers(booted: list[Booted]) -> list[torch.Tensor]:
    b = booted[0].served
    x, ids, w = random_inputs(9, b.hidden_size, len(b.held), 2)
    return [b.served.experts(x, ids, w) for b in booted]


@pytest.mark.parametrize("backend", ["auto", "cpu_torch", "reference"])
def test_the_second_boot_loads_nothing_and_answers_the_same(tmp_path, backend):
    first, workshop = boot(tmp_path, backend=backend)
    assert (workshop.source.loaded, dict(workshop.lookups)) == ([0, 1], {"miss": 2})
    second, workshop = boot(tmp_path, backend=backend)
    assert (workshop.source.loaded, dict(workshop.lookups)) == ([], {"hit": 2})
    assert set(workshop.seconds) == {"map", "check", "warm_up", "surface"}
    assert [b.digests for b in second] == [b.digests for b in first] == digests_of("tiny:int4_g128")
    for a, b, y, z in zip(first, second, answers(first), answers(second), strict=True):
        assert torch.equal(y, z)
        assert (a.from_cache, b.from_cache) == (False, True)
        assert b.error == pytest.approx(a.error, rel=0.2)
        assert describe_layer(b).from_cache


def test_a_part_of_the_experts_is_an_entry_of_its_own(tmp_path):
    boot(tmp_path, layers=None)
    from expertd_server.config.values import Shard

    _, workshop = boot(tmp_path, shard=Shard.parse("1/2"))
    assert dict(workshop.lookups) == {"miss": 2}
    for shard in (None, Shard.parse("1/2")):
        assert dict(boot(tmp_path, shard=shard)[1].lookups) == {"hit": 2}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(FIXTURE, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    return folder


def test_weights_that_change_in_place_under_an_unchanged_header_are_packed_again(tmp_path, checkpoint, caplog):
    """The fingerprint, made of headers and samples, is the same: the files' state tells the difference."""
    options = {"synthetic": None, "checkpoint": checkpoint}
    before, _ = boot(tmp_path / "cache", **options)
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    begin, end = next(header[n]["data_offsets"] for n in header if n.endswith("experts.2.up_proj.qweight"))
    for at in range(8 + size + (begin + end) // 2, 8 + size + end):
        data[at] ^= 0x11
    fingerprint = open_source(ServeConfig(checkpoint=checkpoint)).fingerprint
    path.write_bytes(data)
    assert open_source(ServeConfig(checkpoint=checkpoint)).fingerprint == fingerprint
    with caplog.at_level(logging.WARNING):
        after, workshop = boot(tmp_path / "cache", **options)
    assert dict(workshop.lookups) == {"stale": 1}
    assert "made with other files; packing it again" in caplog.text
    assert not torch.equal(answers(before)[0], answers(after)[0])
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert dict(boot(tmp_path / "cache", **options)[1].lookups) == {"hit": 1}


@pytest.mark.parametrize(
    "how", ["a bit of the data", "the header", "half of it", "another layer's weights", "no proof"]
)
def test_a_damaged_entry_is_reported_and_made_again(tmp_path, how, caplog):
    whole = answers(boot(tmp_path)[0])
    path = next(tmp_path.glob("layer1-*"))
    data = bytearray(path.read_bytes())
    if how == "a bit of the data":
        data[len(data) // 2] ^= 1
    elif how == "the header":
        data[100] ^= 1
    elif how == "half of it":
        data = data[: len(data) // 2]
    path.chmod(0o644)
    path.write_bytes(data)
    if how in ("another layer's weights", "no proof"):  # sound files with sound checksums, and yet not to be served
        boot(tmp_path)
        other, mine = (read_entry(next(tmp_path.glob(f"layer{n}-*"))) for n in (0, 1))
        facts = _facts(path)
        if how == "no proof":
            write_packed(path, mine.packed, facts)
        else:
            write_packed(path, other.packed, facts, mine.proof)
    with caplog.at_level(logging.WARNING):
        booted, workshop = boot(tmp_path)
    assert dict(workshop.lookups) == {"hit": 1, "damaged": 1}
    assert workshop.source.loaded == [1]
    assert "layer 1 on " in caplog.text
    assert "packing it again" in caplog.text
    if how == "another layer's weights":
        assert "fails the self-check: relative error" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(whole, answers(booted), strict=True))
    assert dict(boot(tmp_path)[1].lookups) == {"hit": 2}


def _facts(path: Path) -> dict:
    return dict(read_header(path).facts)


def test_servers_that_start_together_end_with_one_file_and_one_copy(tmp_path, monkeypatch):
    """While the first one loads layer 0, another boots from the same folder from beginning to end."""
    written = []
    write = cache.write_packed
    monkeypatch.setattr(
        cache, "write_packed", lambda path, *rest, **more: (written.append(path.name), write(path, *rest, **more))
    )
    load, others = Guarded.load, []

    def slowly(self, layer, experts=None):
        if not others:
            others.append(None)
            others.append(boot(tmp_path)[0])
        return load(self, layer, experts)

    monkeypatch.setattr(Guarded, "load", slowly)
    mine, workshop = boot(tmp_path)
    assert dict(workshop.lookups) == {"miss": 1, "hit": 1}
    assert len(written) == len(set(written)) == 2
    assert [b.from_cache for b in mine] == [False, True]
    assert all(torch.equal(a, b) for a, b in zip(answers(mine), answers(others[1]), strict=True))


def test_a_folder_that_cannot_be_written_is_a_warning_and_no_more(tmp_path, monkeypatch, caplog):
    def full(*args, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "write_packed", full)
    with caplog.at_level(logging.WARNING):
        booted, _ = boot(tmp_path)
    assert "No space left on device" in caplog.text
    assert [b.from_cache for b in booted] == [False, False]
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    args = ["--synthetic", "tiny:int4_g128", "--device", "cpu", "--cache", str(tmp_path / "file")]
    assert main(["serve", "--listen", "127.0.0.1:0", *args]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_the_mapped_layer_is_right_by_the_reference(tmp_path):
    boot(tmp_path)
    booted, workshop = boot(tmp_path)
    for b in booted:
        x, ids, w = random_inputs(16, 256, 8, 2, seed=3)
        weights = workshop.source.load(b.served.layer)
        assert relative_error(b.served.experts(x, ids, w), reference(weights, x, ids, w)) < 1e-2


def test_a_device_with_other_instructions_has_an_entry_of_its_own(tmp_path):
    config = ServeConfig(synthetic="tiny:int4_g128")
    source = open_source(config)
    paths = set()
    for device in (Device("cpu", "x86_64"), Device("cpu", "x86_64", features=frozenset({"avx2"}))):
        plan = assign_layers(config, source, device, {})[0]
        row = plan.decision.require()
        kept = PackedCache(tmp_path)
        paths.add(kept.path(kept.facts(source.fingerprint, 0, plan.held, row, plan.decision.problem)))
    assert len(paths) == 2


@contextlib.contextmanager
def started(folder: Path, log: Path):
    """(process, address) of a server that serves from `folder`; killed at the end if it is still there."""
    command = [
        sys.executable,
        "-m",
        "expertd_server.commands.cli",
        "serve",
        "--synthetic",
        "tiny:int4_g128",
        "--threads",
        "1",
    ]
    command += ["--listen", "127.0.0.1:0", "--device", "cpu", "--backend", "cpu", "--cache", str(folder)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
    try:
        end_s = time.monotonic() + 240
        while (found := re.search(r"serving on (\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)
        yield process, found[1]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _needs_the_kernel() -> None:
    if error := kernel_error():
        pytest.skip(error)


@pytest.mark.parametrize("how", ["overwritten", "another layer copied over it", "cut", "cut while it computes"])
def test_a_server_whose_entry_is_changed_in_place_answers_no_more_and_ends_with_a_sentence(tmp_path, how):
    _needs_the_kernel()
    folder, log = tmp_path / "cache", tmp_path / "log"
    x, ids, w = random_inputs(4, 256, 8, 2)
    with started(folder, log) as (process, address), ExpertClient(address) as client:
        right = [client.forward(layer, x, ids, w).output for layer in (0, 1)]
        entry, other = (next(folder.glob(f"layer{n}-*")) for n in (1, 0))
        entry.chmod(0o644)
        if how == "overwritten":
            with entry.open("r+b") as f:
                f.seek(entry.stat().st_size // 2)
                f.write(b"\x5a" * 5000)
        elif how == "another layer copied over it":
            shutil.copyfile(other, entry)
        elif how == "cut":
            os.truncate(entry, 5000)
        assert torch.equal(client.forward(0, x, ids, w).output, right[0]), "the other layer's file is as it was"
        answered, answers, error = threading.Event(), 0, None
        if how == "cut while it computes":
            threading.Thread(target=lambda: answered.wait(60) and os.truncate(entry, 5000)).start()
        while error is None:
            try:
                assert torch.equal(client.forward(1, x, ids, w).output, right[1]), "a wrong answer got out"
                answers += 1
                answered.set()
            except ExpertdError as e:
                error = e
        assert error.retryable
        assert (answers > 0) == (how == "cut while it computes")
        assert process.wait(timeout=60) == 3
    text = log.read_text()
    assert re.search(rf"stopped: cache: \S*{entry.name}: .* while it was mapped.*; restart the server", text), text
    with started(folder, log) as (process, address), ExpertClient(address) as client:
        assert [torch.equal(client.forward(n, x, ids, w).output, right[n]) for n in (0, 1)] == [True, True]
    assert "packing it again" in log.read_text()


def shares(pid: int, suffix: str) -> dict[str, int]:
    """KiB by kind (Rss, Pss, Private_Dirty, ...) over all of the process's mappings of files that end in `suffix`."""
    out: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(suffix)
        elif inside and (m := re.fullmatch(r"(\w+): +(\d+) kB", line)):
            out[m[1]] = out.get(m[1], 0) + int(m[2])
    return out


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system has no /proc/PID/smaps")
def test_two_servers_compute_from_one_copy_of_the_weights(tmp_path):
    _needs_the_kernel()
    folder = tmp_path / "cache"
    x, ids, w = random_inputs(64, 256, 8, 2)  # every expert
    with contextlib.ExitStack() as stack:
        pids = []
        for name, cached in (("a", "cache: 2 miss"), ("b", "cache: 2 hit")):
            process, address = stack.enter_context(started(folder, tmp_path / name))
            assert cached in (tmp_path / name).read_text()
            client = stack.enter_context(ExpertClient(address))
            for layer in (0, 1):  # whatever is to be mapped is read now
                client.forward(layer, x, ids, w)
            pids.append(process.pid)
        kept = sum(p.stat().st_size for p in folder.glob("*.packed")) >> 10
        for pid in pids:  # the first one, too: it maps what it has written
            found = shares(pid, ".packed")
            assert found["Rss"] >= 0.8 * kept, found
            assert found["Private_Dirty"] == 0, "nobody wrote to the weights"
            assert found["Pss"] <= 0.6 * found["Rss"], f"each page belongs to both servers: {found}"


def test_the_number_of_threads_is_measured_once(tmp_path, monkeypatch):
    problem = assign_layers(
        ServeConfig(synthetic="tiny:int4_g128"), open_source(ServeConfig(synthetic="tiny:int4_g128")), CPU_DEVICE, {}
    )[0].decision.problem
    measured, said = [], []

    def measure(p, note):
        measured.append(p)
        note("threads: 3 of 4")
        return 3

    monkeypatch.setattr(measuring, "measured_threads", measure)
    for _ in range(2):
        assert measuring.settled_threads(problem, tmp_path, said.append) == 3
    assert len(measured) == 1
    assert "as measured earlier" in said[1]
    (kept,) = tmp_path.glob("threads-*.json")
    for damage in ("", "[]", '{"threads": -1}', '{"threads": "many"}'):
        kept.write_text(damage)
        assert measuring.settled_threads(problem, tmp_path, said.append) == 3
    assert len(measured) == 5
    monkeypatch.setattr(measuring, "code_digest", lambda: "other code")
    assert measuring.settled_threads(problem, tmp_path, said.append) == 3
    assert measuring.settled_threads(problem, None, said.append) == 3
    assert len(measured) == 7
    (tmp_path / "file").touch()
    assert measuring.settled_threads(problem, tmp_path / "file", said.append) == 3, "a folder that takes no file"
