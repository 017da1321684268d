"""New weights come to a server while it serves: what is served then, and what goes on when something is wrong."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import random
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import trained
from trained import E, H
from updating import IDS, W, X

from expertd.errors import (
    ChangePendingError,
    ChangeRefusedError,
    ChangeUnknownError,
    MalformedMessageError,
)
from expertd.v1 import weights_service_pb2 as pb
from expertd_kernels.backends.cpu import CpuExperts
from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.checkpoint.writer import quantize_checkpoint
from expertd_kernels.weights.quantize import scheme_named
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Ranges
from expertd_server.residence import residence
from expertd_server.transports.grpc import weights

pytestmark = pytest.mark.timeout(120)


def booted(serve, folder: Path, **more) -> list[bytes]:
    """What a server answers that was started with the folder."""
    return serve(trained.config(folder, **more)).answers()


def test_a_new_version_is_served_from_its_commit_on_and_not_before(serve, folder, tmp_path):
    server = serve(trained.config(folder, quantize="int4_g128"))
    first = server.answers()
    began = server.call("BeginUpdate", update="u", version=7, label="step 7", base=1)
    assert (began.version, began.base, began.layers) == (7, 1, 2)
    assert began.memory.weights_bytes == 2 * server.client.describe().memory.weights_bytes
    pieces = trained.parts(trained.step(2), cut=10_000)
    random.Random(5).shuffle(pieces)
    kept = ignored = 0
    for at in range(0, len(pieces), 17):
        answer = server.call("PutWeights", update="u", parts=pieces[at : at + 17])
        kept, ignored = kept + answer.kept_bytes, ignored + answer.ignored_bytes
    assert (kept, ignored) == (2 * E * 3 * H * trained.I * 2, 8 * H * 2)
    ready = server.call("PrepareUpdate", update="u")
    assert (ready.version.number, ready.version.label, ready.layers) == (7, "step 7", 2)
    assert ready.packing_s > 0
    status = server.call("GetUpdate")
    assert (status.update, status.state, status.layers_done) == ("u", pb.UPDATE_STATE_READY, 2)
    assert status.waiting_bytes == 0
    assert server.answers() == first
    assert server.client.describe().versions[0].number == 1
    done = server.call("CommitUpdate", update="u")
    assert done.version.digest == ready.version.digest
    server.call("CommitUpdate", update="u")  # the answer to the first one was lost
    second = server.answers()
    assert second == booted(serve, trained.saved(tmp_path / "2", trained.step(2)), quantize="int4_g128")
    assert all(a != b for a, b in zip(first, second, strict=True))
    told = server.client.describe().versions
    assert [(v.number, v.serving, v.source) for v in told] == [(7, True, "tensors"), (1, False, "start")]
    assert told[0].digest == ready.version.digest != told[1].digest
    assert abs(told[0].ready_unix_ns - time.time_ns()) < 60e9


SCHEMES = ("int4_g128", "int4_g32", "int8", "e4m3_block128", "e4m3_channel", "mxfp4", "mxfp8", "nvfp4")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_bits_are_those_of_expertd_quantize_and_a_start(scheme, serve, folder, tmp_path):
    """Canonical tensors, digests of them and answers: of an update with bf16 tensors, and of the offline path."""
    trained.saved(tmp_path / "step-2", trained.step(2))
    for n in (1, 2):
        quantize_checkpoint(open_checkpoint(tmp_path / f"step-{n}"), tmp_path / f"q{n}", scheme_named(scheme))
    server = serve(trained.config(tmp_path / "q1"))
    before = server.answers()
    server.update(trained.step(2))
    offline = serve(trained.config(tmp_path / "q2"))
    assert server.answers() == offline.answers() != before
    for n, mine in server.host.residence.booted.items():
        theirs = offline.host.residence.booted[n]
        assert mine.served.backend == theirs.served.backend
        assert mine.assignment.decision.problem == theirs.assignment.decision.problem


@pytest.mark.parametrize("backend", ["cpu", "cpu_torch", "reference"])
@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4", None])
def test_every_cpu_backend_takes_new_weights(backend, scheme, serve, folder, tmp_path):
    server = serve(trained.config(folder, quantize=scheme, backend=backend))
    server.update(trained.step(2))
    new = trained.saved(tmp_path / "2", trained.step(2))
    assert server.answers() == booted(serve, new, quantize=scheme, backend=backend)


def test_layers_are_checked_apart_from_the_kernel_that_serves_and_not_warmed_up_again(serve, folder, monkeypatch):
    """Or calls would wait for a thread of low priority that holds the kernel's context."""
    server = serve(trained.config(folder, quantize="int4_g128", backend="cpu"))
    measured = {n: b.served.measured for n, b in server.host.residence.booted.items()}
    calls = []
    real = CpuExperts.__call__

    def call(self, x, *rest, **more):
        calls.append((len(x), self.context.here is self.context))
        return real(self, x, *rest, **more)

    monkeypatch.setattr(CpuExperts, "__call__", call)
    server.update(trained.step(2))
    assert calls == 2 * [(E + 1, False), (1, False), (4, False)]
    assert {n: b.served.measured for n, b in server.host.residence.booted.items()} == measured
    assert all(measured.values())


def test_the_first_update_says_what_a_restart_would_serve(serve, folder, tmp_path, caplog):
    def said() -> list[str]:
        return [r.getMessage() for r in caplog.records if "a restart serves" in r.getMessage()]

    kept = serve(trained.config(folder, held=tmp_path / "held.json"))
    kept.update(trained.step(2))
    assert not said()
    server = serve(trained.config(folder))
    server.update(trained.step(2), "a", version=5)
    server.update(trained.step(3), "b")
    assert said() == [
        f"version 5 of the weights is served; without --held a restart serves --checkpoint {folder} again, as version 1"
    ]


def test_tensors_may_come_quantized_as_the_served_checkpoint_has_them(serve, folder, tmp_path):
    trained.saved(tmp_path / "step-2", trained.step(2))
    for n in (1, 2):
        quantize_checkpoint(open_checkpoint(tmp_path / f"step-{n}"), tmp_path / f"q{n}", scheme_named("int4_g128"))
    from safetensors.torch import load_file

    server = serve(trained.config(tmp_path / "q1"))
    server.update({n: t for f in (tmp_path / "q2").glob("*.safetensors") for n, t in load_file(f).items()})
    assert server.answers() == booted(serve, tmp_path / "q2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_unquantized_tensors_of_another_type_are_quantized_alike(dtype, serve, folder, tmp_path):
    server = serve(trained.config(folder, quantize="int4_g128"))
    server.update(trained.step(2, dtype))
    assert server.answers() == booted(
        serve, trained.saved(tmp_path / "2", trained.step(2, dtype)), quantize="int4_g128"
    )


def test_a_server_keeps_the_tensors_of_its_own_experts_alone(serve, folder, tmp_path):
    held = {"layers": Ranges.parse("1"), "experts": Ranges.parse("1,3")}
    server = serve(trained.config(folder, **held))
    server.call("BeginUpdate", update="u")
    answer = server.call("PutWeights", update="u", parts=trained.parts(trained.step(2)))
    assert answer.kept_bytes == 2 * 3 * H * trained.I * 2
    server.call("PrepareUpdate", update="u")
    server.call("CommitUpdate", update="u")
    assert server.answers() == booted(serve, trained.saved(tmp_path / "2", trained.step(2)), **held)


def test_a_folder_is_read_by_the_server_and_experts_can_be_added_afterwards(serve, folder, tmp_path):
    server = serve(trained.config(folder, quantize="int8", experts=Ranges.parse("0-1")))
    new = trained.saved(tmp_path / "2", trained.step(2))
    server.call("BeginUpdate", update="u", checkpoint=str(new))
    with pytest.raises(ChangeRefusedError, match="want no tensors put"):
        server.call("PutWeights", update="u", parts=trained.parts(trained.step(2)))
    server.call("PrepareUpdate", update="u")
    server.call("CommitUpdate", update="u")
    assert server.client.describe().versions[0].source == "checkpoint"
    assert server.answers() == booted(serve, new, quantize="int8", experts=Ranges.parse("0-1"))
    server.host.residence.add(0, 1, experts=[2, 3])
    assert server.answers() == booted(serve, new, quantize="int8")


def test_after_tensors_experts_cannot_be_added_and_the_version_goes_on(serve, folder):
    server = serve(trained.config(folder, experts=Ranges.parse("0-1")))
    server.update(trained.step(2))
    answers = server.answers()
    with pytest.raises(Exception, match="version 2 came as tensors, which are not kept"):
        server.host.residence.add(0, experts=[2])
    assert server.answers() == answers
    server.update(trained.step(3))
    assert server.answers() != answers


def test_rollback_serves_the_version_before_while_it_is_held(serve, folder):
    server = serve(trained.config(folder, quantize="int4_g128"))
    with pytest.raises(ChangeUnknownError, match="version before: got none"):
        server.call("RollbackVersion")
    first = server.answers()
    server.update(trained.step(2))
    second = server.answers()
    assert server.call("RollbackVersion").version.number == 1
    assert server.answers() == first
    assert server.call("RollbackVersion", version=2).version.number == 2  # and forth again
    assert server.answers() == second
    with pytest.raises(ChangeUnknownError, match=r"version 5: got version 1"):
        server.call("RollbackVersion", version=5)
    server.update(trained.step(3))
    assert [v.number for v in server.client.describe().versions] == [3, 2]


def test_a_failed_update_costs_no_version_to_roll_back_to(serve, folder):
    server = serve(trained.config(folder, quantize="int4_g128"))
    first = server.answers()
    server.update(trained.step(2))
    began = server.call("BeginUpdate", update="next")
    planned = server.client.describe().memory.weights_bytes
    assert (began.gives_up, began.memory.weights_bytes) == (0, 3 * planned)
    server.call("PutWeights", update="next", parts=trained.parts(trained.step(3)))
    with pytest.raises(ChangePendingError):
        server.call("RollbackVersion")
    ask = server.client.forward(0, X, IDS, W, weights_version=1)
    assert ask.output.view(torch.uint8).numpy().tobytes() == first[0], "it is computed still, too"
    server.call("AbortUpdate", update="next")
    assert server.call("RollbackVersion").version.number == 1
    assert server.answers() == first


def test_memory_for_two_versions_alone_is_told_before_the_older_one_goes(serve, folder, tmp_path):
    whole = trained.config(folder, quantize="int4_g128")
    memory = serve(whole).client.describe().memory
    rest = memory.scratch_bytes + memory.context_bytes + max(memory.buffers_bytes, memory.loading_bytes)
    limit = 2 * memory.weights_bytes + rest + memory.weights_bytes // 2
    server = serve(dataclasses.replace(whole, memory_limit=limit))
    assert server.call("BeginUpdate", update="", dry_run=True).gives_up == 0, "there is none before it"
    new = trained.saved(tmp_path / "2", trained.step(2))
    server.call("BeginUpdate", update="u", checkpoint=str(new))
    server.call("PrepareUpdate", update="u")
    server.call("CommitUpdate", update="u")
    planned = server.call("BeginUpdate", update="", dry_run=True)
    assert (planned.gives_up, planned.memory.weights_bytes) == (1, 2 * memory.weights_bytes)
    assert [v.number for v in server.client.describe().versions] == [2, 1], "that was a plan"
    assert server.call("BeginUpdate", update="next").gives_up == 1
    server.call("AbortUpdate", update="next")
    with pytest.raises(ChangeUnknownError):
        server.call("RollbackVersion")


def test_without_memory_for_two_versions_it_says_what_is_missing_and_no_layers_that_are_served(serve, folder):
    whole = trained.config(folder, quantize="int4_g128")
    memory = serve(whole).client.describe().memory
    rest = memory.scratch_bytes + memory.context_bytes + max(memory.buffers_bytes, memory.loading_bytes)
    server = serve(dataclasses.replace(whole, memory_limit=memory.weights_bytes * 3 // 2 + rest))
    for update, dry_run in (("", True), ("u", False)):
        with pytest.raises(ChangeRefusedError, match=r"second version beside .* --memory-limit allows") as said:
            server.call("BeginUpdate", update=update, dry_run=dry_run)
        assert "would fit" not in str(said.value)
    assert server.call("GetUpdate").update == ""


def test_the_layers_before_the_last_version_are_given_back_at_its_commit(serve, folder):
    server = serve(trained.config(folder))
    server.update(trained.step(2))
    older = [weakref.ref(b.served.experts) for b in server.host.residence.before.booted.values()]
    server.update(trained.step(3), name="v")
    server.call("BeginUpdate", update="w")  # waits for it
    gc.collect()
    assert not any(ref() for ref in older)


def test_prepare_ends_while_layers_are_packed_still(serve, folder, tmp_path, monkeypatch):
    server, may_end = serve(trained.config(folder)), threading.Event()
    made = server.host.residence.make
    monkeypatch.setattr(server.host.residence, "make", lambda *args: may_end.wait(60) and made(*args))
    monkeypatch.setattr(weights, "_PREPARE_S", 0.05)
    server.call("BeginUpdate", update="u", checkpoint=str(trained.saved(tmp_path / "2", trained.step(2))))
    with pytest.raises(ChangePendingError, match=r"got 0 of 2 layers ready, and 0.05 s are over.*ask again"):
        server.call("PrepareUpdate", update="u")
    monkeypatch.setattr(weights, "_MOST_PREPARING", 0)
    with pytest.raises(ChangePendingError, match="0 other calls wait for it"):
        server.call("PrepareUpdate", update="u")
    may_end.set()
    monkeypatch.undo()
    assert server.call("PrepareUpdate", update="u").layers == 2


def wrong(kind: str) -> list[pb.WeightPart]:
    """A step's tensors with something wrong."""
    tensors = trained.step(2)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    if kind == "NaN":
        tensors[name][3, 5] = float("nan")
    if kind == "missing":
        del tensors[name]
    if kind == "shape":
        tensors[name] = tensors[name].t()
    if kind == "dtype":
        tensors[name] = tensors[name].to(torch.int32)
    if kind == "unknown":
        tensors[name.replace("weight", "wait")] = tensors.pop(name)
    if kind == "fused":
        tensors["model.layers.1.mlp.experts.gate_up_proj"] = tensors.pop(name)
    out = trained.parts(tensors)
    part = next((p for p in out if p.name == name), None)
    if kind == "hash":
        part.sha256 = hashlib.sha256(b"something else").digest()
    if kind == "half":
        part.data = part.data[: len(part.data) // 2]
    if kind == "beyond":
        part.offset = 2
    if kind == "twice":
        out.append(pb.WeightPart(name=name, dtype="BF16", shape=part.shape, data=b"\1" + part.data[1:]))
    return out


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("NaN", r"layer 1: .*experts\.2\.up_proj.*NaN"),
        ("missing", r"layer 1: up weight of expert 2 is missing"),
        ("shape", r"experts\.2\.up_proj\.weight: shape \[256, 128\], want \[128, 256\]"),
        ("dtype", r"experts\.2\.up_proj\.weight: I32 .*want BF16"),
        ("unknown", r"up_proj\.wait: unknown name; the served checkpoint has \S*experts\.2\.up_proj\.weight$"),
        ("fused", r"experts\.gate_up_proj: unknown name; the served checkpoint has \S*experts\.0\.down_proj\.weight$"),
        ("hash", r"experts\.2\.up_proj\.weight: SHA-256"),
        ("half", r"experts\.2\.up_proj\.weight: some of its bytes are missing"),
        ("beyond", r"bytes 2 to 65538, but BF16 \[128, 256\] has 65536"),
        ("twice", r"was put before with other bytes"),
    ],
)
def test_wrong_tensors_leave_the_old_version(kind, says, serve, folder):
    server = serve(trained.config(folder, quantize="int4_g128"))
    first = server.answers()
    server.call("BeginUpdate", update="bad")
    with pytest.raises((ChangeRefusedError, ChangeUnknownError), match=says):
        server.put_and_prepare("bad", wrong(kind))
    server.call("AbortUpdate", update="bad")
    assert server.answers() == first
    assert server.call("GetUpdate").update == ""
    server.update(trained.step(2), name="good")
    assert server.answers() != first
    assert server.call("GetUpdate").last_error == ""


def test_unquantized_weights_of_another_dtype_are_refused_when_they_are_put(serve, folder, tmp_path):
    """And not when everything was sent; a server that quantizes takes them."""
    server = serve(trained.config(folder))
    server.call("BeginUpdate", update="f32")
    first = trained.parts(trained.step(2, torch.float32))[:1]
    with pytest.raises(
        ChangeRefusedError, match=r"experts\.0\.gate_proj\.weight: F32, want BF16, in which it is served"
    ):
        server.call("PutWeights", update="f32", parts=first)
    server.call("AbortUpdate", update="f32")
    server.update(trained.step(2), name="bf16")
    quantizes = serve(trained.config(folder, quantize="int4_g128"))
    quantizes.update(trained.step(2, torch.float32), name="f32")


def test_an_update_that_answers_otherwise_than_the_reference_is_refused(serve, folder, monkeypatch):
    from expertd_server.boot import prepare

    server = serve(trained.config(folder, quantize="int4_g128", backend="cpu"))
    first, real = server.answers(), prepare.check

    def fails(*args):
        return real(*args).__class__(**{**vars(real(*args)), "fault": "relative error 0.5, want at most 0.01"})

    monkeypatch.setattr(prepare, "check", fails)
    server.call("BeginUpdate", update="u")
    server.call("PutWeights", update="u", parts=trained.parts(trained.step(2)))
    with pytest.raises((ChangeRefusedError, ChangeUnknownError), match="self-check of backend cpu"):
        server.call("PrepareUpdate", update="u")
    assert server.answers() == first


def test_a_trainer_that_dies_leaves_nothing(serve, folder):
    server = serve(trained.config(folder, quantize="int4_g128"))
    first = server.answers()
    server.call("BeginUpdate", update="dies", lease_s=1)
    server.call("PutWeights", update="dies", parts=trained.parts(trained.step(2))[:20])
    end = time.monotonic() + 20
    while server.call("GetUpdate").update and time.monotonic() < end:
        time.sleep(0.05)
    status = server.call("GetUpdate")
    assert status.update == ""
    assert "update 'dies': no call about it for 1 s" in status.last_error
    with pytest.raises(ChangeUnknownError, match="no call about it for 1 s"):
        server.call("PutWeights", update="dies")
    assert server.answers() == first
    server.host.residence.add(0)  # changes are possible again


def test_one_update_at_a_time_and_no_change_of_experts_beside_it(serve, folder):
    server = serve(trained.config(folder, experts=Ranges.parse("0-1")))
    server.call("BeginUpdate", update="a", label="x")
    assert server.call("BeginUpdate", update="a", label="x").version == 2  # the answer was lost
    for other in ({"update": "b"}, {"update": "a", "label": "y"}):
        with pytest.raises(ChangePendingError, match="update 'a', receiving"):
            server.call("BeginUpdate", **other)
    with pytest.raises(Exception, match="update 'a' of the weights is under way"):
        server.host.residence.add(0, experts=[2])
    with pytest.raises(ChangePendingError, match="is receiving; want it ready"):
        server.call("CommitUpdate", update="a")
    server.call("AbortUpdate", update="a")
    server.call("AbortUpdate", update="never")
    server.host.residence.add(0, experts=[2])


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"update": ""}, MalformedMessageError, "got 0 characters"),
        ({"update": "u", "label": "x" * 257}, MalformedMessageError, "at most 256"),
        ({"update": "u", "lease_s": 3601}, MalformedMessageError, "at most 3600"),
        ({"update": "u", "base": 3}, ChangeRefusedError, "base: got 3, want 1"),
        ({"update": "u", "version": 1}, ChangeRefusedError, "version: got 1, want more than 1"),
        ({"update": "u", "fingerprint": "x"}, ChangeRefusedError, "fingerprint: got x"),
        ({"update": "u", "checkpoint": "/nowhere"}, ChangeRefusedError, "is no folder"),
    ],
)
def test_what_cannot_be_begun_is_refused(fields, error, says, serve, folder):
    server = serve(trained.config(folder))
    with pytest.raises(error, match=says):
        server.call("BeginUpdate", **fields)
    server.host.residence.add(0)
    assert server.call("GetUpdate").update == ""


def test_no_room_for_two_versions_is_a_refusal_with_the_plan(serve, folder):
    from dataclasses import replace

    server = serve(trained.config(folder))
    plan = server.host.residence.memory
    server.host.residence._config = replace(server.host.config, memory_limit=plan.peak + plan.weights // 2)
    with pytest.raises(ChangeRefusedError, match=r"a second version beside the one that is served: .*--memory-limit"):
        server.call("BeginUpdate", update="u", dry_run=True)
    with pytest.raises(ChangeRefusedError, match="--memory-limit allows"):
        server.call("BeginUpdate", update="u")


def test_a_synthetic_model_takes_no_tensors(serve):
    config = {"synthetic": "tiny:int4_g128", "device": "cpu", "listen": trained.HERE, "admin_listen": trained.HERE}
    server = serve(ServeConfig(**config, threads=1, layers=Ranges.parse("0")))
    with pytest.raises(ChangeRefusedError, match="synthetic model, which has no names of tensors"):
        server.call("BeginUpdate", update="u")


def test_memory_is_given_back(serve, folder):
    """Layers of a version that is neither served nor the one before are gone."""
    server = serve(trained.config(folder, quantize="int4_g128"))
    seen = []
    for n in range(2, 6):
        seen.append([weakref.ref(b.served.experts) for b in server.host.residence.booted.values()])
        server.update(trained.step(n), name=f"u{n}")
    server.host._updates._released.wait()
    gc.collect()
    assert [all(ref() is not None for ref in refs) for refs in seen] == [False, False, False, True]
    assert not any(ref() is not None for refs in seen[:-1] for ref in refs)


def test_old_versions_go_without_a_search_for_garbage(serve, folder, monkeypatch):
    """Which holds up everything in a large process for a third of a second."""
    searched = []
    monkeypatch.setattr(residence, "_collect_garbage", lambda: searched.append(1))
    server = serve(trained.config(folder))
    for number in range(2, 6):
        server.update(trained.step(number), name=f"u{number}")
        server.host._updates._released.wait()
    assert not searched
