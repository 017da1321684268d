"""Recordings: what the proxy notes and hands on, what is sent again, and files that are none."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import zipfile

import grpc
import in_process
import numpy as np
import pytest
from as_command import expertctl
from grpc_health.v1 import health_pb2, health_pb2_grpc

from expertctl.common.workload import LayerShape
from expertctl.load import proxy, recording
from expertctl.load.proxy import Proxy, Recorder
from expertctl.load.recording import DRAWN, Recording, replayed, routes_of
from expertd.codec import decode_forward_request
from expertd.errors import MessageTooLargeError, UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import expert_service_pb2_grpc as stubs
from expertd_client import AsyncExpertClient, ExpertClient, Synthetic
from expertd_client.transports.credentials import Credentials

H, E = 256, 8


def batch(seed, tokens, top_k=2, dtype=np.int32):
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, E)), axis=1)[:, :top_k].astype(dtype)
    return rng.standard_normal((tokens, H)).astype(np.float32), ids, rng.random((tokens, top_k)).astype(np.float32)


async def test_calls_go_through_and_are_noted(tiny_server):
    recorder = Recorder(100)
    x, ids, weights = batch(0, 5)
    wide = batch(1, 3, top_k=3, dtype=np.int64)
    async with Proxy(tiny_server, "127.0.0.1:0", Credentials(), recorder) as proxy:
        async with AsyncExpertClient(tiny_server) as straight:
            want = (await straight.forward(1, x, ids, weights)).output.copy()
            described = await straight.describe()
        for unary in (False, True):
            async with AsyncExpertClient(proxy.address, unary=unary) as client:
                if not unary:
                    session = await client.session()
                    assert session.transport == "inline"
                    assert "recorded" in str(session.refused)
                np.testing.assert_array_equal((await client.forward(1, x, ids, weights)).output, want)
                await client.forward(0, *wide)
                await client.forward(0, Synthetic((4, H), 7, "bf16"), Synthetic((4, 2), 7, "i32"),
                                     Synthetic((4, 2), 7, "f32"))  # fmt: skip
                with pytest.raises(MessageTooLargeError):
                    await client.forward(0, *batch(2, 5000))
        async with grpc.aio.insecure_channel(proxy.address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            f32 = {"dtype": pb.DATA_TYPE_F32}
            await stubs.ExpertServiceStub(channel).Forward(
                pb.ForwardRequest(
                    hidden_states=pb.Tensor(shape=[1, H], floats=pb.FloatValues(values=[1.0] * H), **f32),
                    topk_ids=pb.Tensor(dtype=pb.DATA_TYPE_I32, shape=[1, 2], ints=pb.IntValues(values=[3, -1])),
                    topk_weights=pb.Tensor(shape=[1, 2], floats=pb.FloatValues(values=[1.0, 0.0]), **f32),
                )
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/expertd.v1.ExpertService/Nothing")(b"")
            assert refused.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE)
    found = recorder.recording(described)
    assert found.layer.tolist() == [1, 0, 0, 0] * 2 + [0]
    assert found.tokens.tolist() == [5, 3, 4, 5000] * 2 + [1]
    assert found.top_k.tolist() == [2, 3, 2, 2] * 2 + [2]
    np.testing.assert_array_equal(found.ids(0), ids)
    np.testing.assert_array_equal(found.ids(5), wide[1])
    assert (found.ids(2) == DRAWN).all()
    assert found.ids(8).tolist() == [[3, -1]]
    assert found.at_us[0] == 0
    assert (np.diff(found.at_us) > 0).all()
    assert (found.hidden_size, found.num_experts) == (H, {0: E, 1: E})
    found.check()


async def test_what_a_broken_caller_gets_is_the_servers_word(tiny_server):
    recorder = Recorder(9)
    async with (
        Proxy(tiny_server, "127.0.0.1:0", Credentials(), recorder) as proxy,
        grpc.aio.insecure_channel(proxy.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/expertd.v1.ExpertService/Forward")(b"\xff\xff\xff")
    assert dict(refused.value.trailing_metadata())["expertd-reason"] == "MALFORMED_MESSAGE"
    assert len(recorder) == 0


async def test_a_token_is_shown_for_callers_and_deadlines_travel(tmp_path):
    """Behind a proxy whose server is a function: what it is asked with."""
    (tmp_path / "token").write_text("abcdefghijklmnopqrst\n")
    seen = {}

    async def describe(request, context):
        seen.update(dict(context.invocation_metadata()), left=context.time_remaining())
        return pb.DescribeResponse(version="9")

    server = grpc.aio.server()
    rows = {"Describe": grpc.unary_unary_rpc_method_handler(describe, pb.DescribeRequest.FromString,
                                                            pb.DescribeResponse.SerializeToString)}  # fmt: skip
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("expertd.v1.ExpertService", rows),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    shown = Credentials(token_file=tmp_path / "token")
    proxy = Proxy(f"127.0.0.1:{port}", f"unix:{tmp_path}/s", shown, Recorder(1))
    async with proxy, AsyncExpertClient(f"unix:{tmp_path}/s") as client:
        assert (await client.describe(timeout_s=70)).version == "9"
    await server.stop(0)
    assert seen["authorization"] == "Bearer abcdefghijklmnopqrst"
    assert 35 < seen["left"] <= 70


def message(layer=0, tokens=2, top_k=2, ids=None, **drawn):
    """As it comes over the wire; drawn: sizes of a request whose tensors the server is to draw."""
    f32, i32 = {"dtype": pb.DATA_TYPE_F32}, {"dtype": pb.DATA_TYPE_I64}
    if drawn:
        some = pb.SyntheticValues(seed=1)
        hidden = pb.Tensor(shape=[drawn["tokens_drawn"], H], synthetic=some, **f32)
        made = pb.Tensor(shape=[drawn["tokens_drawn"], drawn["top_k_drawn"]], synthetic=some, **i32)
    else:
        data = np.arange(tokens * top_k, dtype="<i8") % E if ids is None else np.asarray(ids, "<i8")
        hidden = pb.Tensor(shape=[tokens, H], raw=b"", **f32)
        made = pb.Tensor(shape=[tokens, top_k], raw=data.tobytes(), **i32)
    return pb.ForwardRequest(layer=layer, hidden_states=hidden, topk_ids=made).SerializeToString()


HOSTILE = {
    "a layer that is not there": message(layer=7),
    "the last layer that there can be": message(layer=2**32 - 1),
    "an expert that is not there": message(ids=[0, 1, 2, E]),
    "an expert that 32 bits do not hold": message(ids=[0, 1, 2, 2**32]),
    "2^32 - 1 tokens without routes": message(tokens=2**32 - 1, top_k=0),
    "more tokens than a file may have": message(tokens=1 << 16, top_k=1),
    "more routes a token than a file may have": message(tokens=1, top_k=1 << 12),
    "40 bytes for 1 TiB of routes": message(tokens_drawn=1 << 30, top_k_drawn=256),
    "40 bytes for 2^64 routes": message(tokens_drawn=2**32 - 1, top_k_drawn=2**32 - 1),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_no_caller_spoils_a_recording(tmp_path, what):
    """The server refuses it; the file can be read all the same, and has the others' requests."""
    described = pb.DescribeResponse(
        model=pb.Model(hidden_size=H, fingerprint="f"),
        layers=[pb.Layer(layer=n, num_experts=E, top_k=2) for n in (0, 1)],
    )
    recorder = Recorder(100)
    for n, data in enumerate((message(layer=1), HOSTILE[what], message())):
        recorder.note(decode_forward_request(data), n)
    recorder.recording(described).save(tmp_path / "r.npz")
    found = Recording.load(tmp_path / "r.npz")
    assert found.layer.tolist() == [1, 0]
    assert len(list(replayed(found, described, 0))) == 2
    assert next(routes_of(found, LayerShape(0, H, E, 2), 2)).tolist() == [[0, 1], [2, 3]]


def test_a_recording_ends_before_it_is_too_large_to_be_read(tmp_path, monkeypatch):
    for module in (proxy, recording):
        monkeypatch.setattr(module, "MOST_BYTES", 8192)
    monkeypatch.setattr(proxy, "_HEADER_BYTES", 4096)
    recorder = Recorder(1 << 20)
    while not recorder.full.is_set():
        assert len(recorder) < 1000
        recorder.note(decode_forward_request(message()), 0)
    assert len(recorder) == 4096 // (20 + 16)
    made = recorder.recording(pb.DescribeResponse(model=pb.Model(hidden_size=H), layers=[pb.Layer(num_experts=E)]))
    made.save(tmp_path / "r.npz")
    assert len(Recording.load(tmp_path / "r.npz")) == len(recorder)


def made(**changes):
    arrays = {
        "at_us": np.array([0, 10, 20]),
        "layer": np.array([0, 1, 0], np.int32),
        "tokens": np.array([2, 1, 1], np.int32),
        "top_k": np.array([2, 2, 2], np.int32),
        "topk_ids": np.array([0, 1, 2, 3, 4, 5, 6, 7], np.int32),
        "fingerprint": "f",
        "hidden_size": H,
        "num_experts": {0: E, 1: E},
    }
    return Recording(**{**arrays, **changes})


def test_a_file_is_read_as_it_was_written_and_holds_no_payload(tmp_path):
    made().save(tmp_path / "r.npz")
    again = Recording.load(tmp_path / "r.npz")
    for name in ("at_us", "layer", "tokens", "top_k", "topk_ids"):
        np.testing.assert_array_equal(getattr(again, name), getattr(made(), name))
    assert (again.fingerprint, again.hidden_size, again.num_experts) == ("f", H, {0: E, 1: E})
    with np.load(tmp_path / "r.npz", allow_pickle=False) as raw:
        assert sorted(raw) == ["at_us", "header", "layer", "tokens", "top_k", "topk_ids"]
        assert all(raw[name].dtype.kind in "iU" for name in raw)


NONE = np.zeros(0, np.int32)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"at_us": np.array([0, 20, 10])}, "at_us: want ascending"),
        ({"topk_ids": np.zeros(7, np.int32)}, "topk_ids"),
        ({"topk_ids": np.full(8, -3, np.int32)}, "topk_ids"),
        ({"layer": np.array([0, 1], np.int32)}, "layer: got .* want 3 numbers"),
        ({"tokens": np.array([2, 1, 1.0])}, "tokens: got float64"),
        ({"num_experts": {0: E}}, "got none of layer 1"),
        (
            {"tokens": np.full(3, 2**31 - 1, np.int32), "top_k": np.zeros(3, np.int32), "topk_ids": NONE},
            "tokens: .* from 0 to",
        ),
        ({"top_k": np.full(3, 2**31 - 1, np.int32), "tokens": np.zeros(3, np.int32), "topk_ids": NONE}, "top_k: "),
        ({"tokens": np.array([2, 1, 1], np.int8)}, "tokens: got int8"),
        ({"topk_ids": np.zeros(8, np.int8)}, "topk_ids: got int8"),
        ({"topk_ids": np.zeros((4, 2), np.int32)}, "topk_ids: got int32"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"hidden_size": "many"}, "header"),
        ({"fingerprint": ["f"]}, "header"),
        ({"num_experts": {0: float("inf"), 1: 8}}, "infinity"),
        ({"at_us": np.array([0, 10, 2**63 - 1])}, "at_us: got 0 to 9223372036854775807, want 0 to"),
        ({"at_us": np.array([-(2**63), 0, 1])}, "at_us: "),
    ],
)
def test_a_file_that_is_no_recording(tmp_path, changes, why):
    made(**changes).save(tmp_path / "r.npz")
    with pytest.raises(ValueError, match=why) as told:
        Recording.load(tmp_path / "r.npz")
    assert "want what expertctl record wrote" in str(told.value)
    (tmp_path / "text").write_text("no")
    os.mkfifo(tmp_path / "pipe")
    for name in ("text", "pipe", "away", "."):
        with pytest.raises(ValueError, match="cannot be read as a recording"):
            Recording.load(tmp_path / name)


@pytest.mark.parametrize("experts", [[8, 8], "0-1", None, {"0": None}, {"x": 8}])
def test_a_header_of_another_form(tmp_path, experts):
    header = {"format": 1, "fingerprint": "f", "hidden_size": H, "num_experts": experts}
    arrays = {name: getattr(made(), name) for name in ("at_us", "layer", "tokens", "top_k", "topk_ids")}
    with (tmp_path / "r.npz").open("wb") as file:
        np.savez(file, header=json.dumps(header), **arrays)
    with pytest.raises(ValueError, match="want what expertctl record wrote"):
        Recording.load(tmp_path / "r.npz")


def test_what_a_small_file_says_of_its_size_is_not_believed(tmp_path, monkeypatch):
    path = tmp_path / "r.npz"
    made().save(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    head = members["topk_ids.npy"]
    claim = head[:10] + head[10 : 10 + 118].replace(b"(8,)", b"(8000000000000,)")[:117] + b"\n" + head[128:]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (members | {"topk_ids.npy": claim}).items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match="want fewer"):
        Recording.load(path)
    monkeypatch.setattr(recording, "MOST_BYTES", 1 << 20)
    made(topk_ids=np.zeros(1 << 18, np.int32)).save(path)
    assert path.stat().st_size < 10_000
    with pytest.raises(ValueError, match="want fewer"):
        Recording.load(path)


def test_any_damage_is_refused_or_read(tmp_path):
    """1,000 recordings with bytes changed, left out or doubled: their lengths, their kinds, what is compressed."""
    path = tmp_path / "r.npz"
    made().save(path)
    sound, rng = path.read_bytes(), random.Random(3)
    read = 0
    for _ in range(1000):
        data = bytearray(sound)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            data[at : at + 1] = rng.choice((b"", bytes([rng.randrange(256)]), data[at : at + 1] * 2))
        path.write_bytes(data)
        with contextlib.suppress(ValueError):
            Recording.load(path)
            read += 1
    assert 0 < read < 500


def test_recorded_routes_come_in_their_order_and_again():
    rows = routes_of(made(), LayerShape(0, H, E, 2), tokens=2)
    assert [next(rows).tolist() for _ in range(3)] == [[[0, 1], [2, 3]], [[6, 7], [0, 1]], [[2, 3], [6, 7]]]
    with pytest.raises(ValueError, match="no routes of layer 0 with top-3"):
        routes_of(made(), LayerShape(0, H, E, 3), tokens=2)
    with pytest.raises(ValueError, match="got expert 7, want fewer than 4"):
        routes_of(made(), LayerShape(0, H, 4, 2), tokens=2)


def test_what_is_sent_again():
    layers = [pb.Layer(layer=n, num_experts=E, top_k=2) for n in (0, 1)]
    described = pb.DescribeResponse(model=pb.Model(hidden_size=H), layers=layers)
    found = list(replayed(made(), described, 0))
    assert [r.layer for r in found] == [0, 1, 0]
    assert [np.asarray(r.topk_ids).tolist() for r in found] == [[[0, 1], [2, 3]], [[4, 5]], [[6, 7]]]
    for r in found:
        np.testing.assert_allclose(np.asarray(r.topk_weights).sum(axis=1), 1, rtol=1e-6)
        assert np.asarray(r.hidden_states).astype(np.float32).any()
    drawn = made(topk_ids=np.array([0, 1, 2, 3, DRAWN, DRAWN, 6, 7], np.int32))
    assert (np.asarray(list(replayed(drawn, described, 0))[1].topk_ids) >= 0).all()
    with pytest.raises(ValueError, match="got hidden size 256, want 8"):
        replayed(made(), pb.DescribeResponse(model=pb.Model(hidden_size=8), layers=layers), 0)
    with pytest.raises(ValueError, match=r"got experts by layer \{1: 8\}, want \{1: 'none'\}"):
        replayed(made(), pb.DescribeResponse(model=pb.Model(hidden_size=H), layers=layers[:1]), 0)


@pytest.mark.parametrize("how", ["ctrl-c", "requests"])
def test_record_and_replay_as_commands(tiny_server, tmp_path, how):
    file = tmp_path / "r.npz"
    command = [sys.executable, "-u", "-m", "expertctl.cli", "record", tiny_server, "-o", str(file)]
    command += ["--requests", "16"] if how == "requests" else []
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = child.stdout.readline().split()[2]
        words = ["--requests", 40, "--warmup", 0, "--rate", 200, "--m", 3, "--json"]
        (sent,) = json.loads(expertctl("load", address, *words))["runs"]
        assert sent["answered"] == 40
        if how == "ctrl-c":
            os.kill(child.pid, signal.SIGINT)
        out, _ = child.communicate(timeout=100)
    finally:
        child.kill()
    assert child.returncode == 0
    count = 40 if how == "ctrl-c" else 16
    assert f"{count} requests of {3 * count} tokens" in out
    recorded_s = float(Recording.load(file).at_us[-1]) * 1e-6
    (found,) = json.loads(expertctl("replay", file, tiny_server, "--speed", recorded_s / 2, "--json"))["runs"]
    assert (found["answered"], found["routes_computed"]) == (count, count * 3 * 2)
    assert (found["plan"]["loop"], found["plan"]["requests"], found["plan"]["tokens"]) == ("open", count, 3)
    assert (found["plan"]["arrivals"], found["plan"]["concurrency"]) == ("recorded", None)
    assert found["wall_s"] >= 2, "as slowly as was asked for"
    words = ["--routing", f"recorded:{file}", "--requests", 20, "--json"]
    (routed,) = json.loads(expertctl("load", tiny_server, *words))["runs"]
    assert (routed["answered"], routed["failed"]) == (20, 0)


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT] * 3], ids=["SIGTERM", "ctrl-c three times"])
def test_a_recording_is_whole_however_it_ends(tiny_server, tmp_path, signals):
    """A client's stream is open, so the proxy is closing when the second signal comes."""
    file = tmp_path / "r.npz"
    command = [sys.executable, "-u", "-m", "expertctl.cli", "record", tiny_server, "-o", str(file)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with ExpertClient(child.stdout.readline().split()[2]) as client:
            for seed in range(5):
                client.forward(0, *batch(seed, 3), timeout_s=60)
            said = []
            for number in signals:
                child.send_signal(number)
                said += [child.stderr.readline(), child.stderr.readline()] if not said else []
            out, rest = child.communicate(timeout=100)
    finally:
        child.kill()
    assert (child.returncode, rest) == (0, "")
    assert said == ["\n", "stopping; again to leave at once\n"]
    assert "5 requests of 15 tokens" in out
    assert Recording.load(file).tokens.tolist() == [3] * 5


def test_a_recording_outlives_its_server(tiny_server, tmp_path):
    """Calls fail as without the proxy, and what was recorded before is kept."""
    file = tmp_path / "r.npz"
    with in_process.hosts(synthetic="tiny:int4_g128") as serve:
        host = serve()
        command = [sys.executable, "-u", "-m", "expertctl.cli", "record", host.address, "-o", str(file)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            with ExpertClient(child.stdout.readline().split()[2]) as client:
                client.forward(0, *batch(0, 3), timeout_s=60)
                host.close()
                with pytest.raises(UnavailableError):
                    client.forward(0, *batch(1, 3), timeout_s=60)
                child.send_signal(signal.SIGINT)
                _, said = child.communicate(timeout=100)
        finally:
            child.kill()
    assert child.returncode == 0
    assert said.endswith("\nstopping; again to leave at once\n"), "before it gRPC may log that the server went"
    assert "Traceback" not in said
    assert Recording.load(file).tokens[0] == 3


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["record", "A", "-o", "x", "--listen", "0.0.0.0:7"], "travels in plain text"),
        (["record", "A", "-o", "x", "--listen", "nonsense"], "127.0.0.1:PORT"),
        (["record", "A", "-o", "/no/such/folder/x"], "a folder that is not there"),
        (["replay", "README.md", "A"], "README.md: cannot be read as a recording"),
        (["forward", "A", "--routing", "recorded:x"], "want it in expertctl load"),
    ],
)
def test_wrong_command_lines(tiny_server, words, want):
    assert want in expertctl(*(tiny_server if w == "A" else w for w in words), code=2)


def test_the_proxy_ends_with_calls_open(tiny_server):
    async def go():
        async with Proxy(tiny_server, "127.0.0.1:0", Credentials(), Recorder(5)) as proxy:
            client = AsyncExpertClient(proxy.address)
            await client.forward(0, *batch(0, 1))
        await client.close()

    asyncio.run(asyncio.wait_for(go(), 20))
