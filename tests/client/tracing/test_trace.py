"""trace(): what is recorded of a client's calls, how a server's stages are placed, and that nothing is recorded
otherwise."""

import contextlib
import itertools
import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cluster_kit import Threaded
from trace_kit import checked

from expertctl.pictures.trace import by_layer, draw, write
from expertd.codec import ForwardResponseView, TensorView
from expertd.errors import UnavailableError, UnsupportedCombinationError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import ExpertClient, trace
from expertd_client.engines.torch_experts import RemoteExperts
from expertd_client.tracing import SubRequestTrace, TracedCall, gpu_clock, recorder
from expertd_client.tracing.stages import SERVER, own_clock, placed, stages_of

pytestmark = pytest.mark.timeout(30)

X = np.ones((3, 8), np.float32)
IDS, W = np.ones((3, 2), np.int32), np.ones((3, 2), np.float32)
MS = 1_000_000
SLOW = (22, 23)
ENDED = threading.Event()


def serve(request):
    """Answers after 2 ms, of which it says that the kernel took one and the queue a half; SLOW layers when ENDED is
    set."""
    arrival_ns = time.monotonic_ns()
    if request.layer == 13:
        raise UnavailableError("unlucky")
    if request.layer in SLOW:
        ENDED.wait(20)
    time.sleep(2e-3)
    timing = pb.Timing(queue_ns=MS // 2, kernel_ns=MS, batch_tokens=3, backend="fake", arrival_ns=arrival_ns)
    output = TensorView.of_raw(pb.DATA_TYPE_F32, (len(request.hidden_states.raw) // 32, 8), request.hidden_states.raw)
    routes = len(request.topk_ids.raw) // 4
    return ForwardResponseView(request.request_id, output, routes_computed=routes, timing=timing, load=pb.Load())


@pytest.fixture
def client():
    with ExpertClient(Threaded(serve, lambda request: pb.DescribeResponse(), "here")) as made:
        yield made


def test_a_client_writes_a_file(client, tmp_path):
    with trace(tmp_path / "step.json") as t:
        for layer in (4, 5):
            client.forward(layer, X, IDS, W)
    document, tracks = checked(t)
    assert json.loads((tmp_path / "step.json").read_text()) == document
    write(t, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == document
    assert (tmp_path / "again.svg").read_text().startswith("<svg")
    assert document["otherData"] == {"calls": 2, "unfinished": 0, "clocks": {"here": "the clock of this host"}}
    caller, server = tracks
    assert [name for *_, name, _ in tracks[caller] if name.startswith("call")] == ["call 4", "call 5"]
    kernels = [e for e in tracks[server] if e[2] == "kernel"]
    assert [end - begin for begin, end, *_ in kernels] == [MS, MS]
    assert kernels[0][3] == {
        "layer": 4,
        "tokens": 3,
        "transport": "inline",
        "backend": "fake",
        "batch_tokens": 3,
        "batch_requests": 0,
    }
    assert by_layer(t)[4]["kernel"] == 1000.0
    assert by_layer(t)[4]["queue"] == 500.0


def test_calls_that_overlap_have_tracks_of_their_own(client):
    def two(n):
        for future in [client.submit(n, X, IDS, W) for _ in range(2)]:
            future.result()

    with trace() as t:
        threads = [threading.Thread(target=two, args=(n,), name=f"thread {n}") for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    document, tracks = checked(t)
    assert document["otherData"]["calls"] == 4
    assert {track for _, track in tracks} >= {"thread 0", "thread 1"}
    assert sum(name.startswith("call") for events in tracks.values() for *_, name, _ in events) == 4


def test_what_fails_or_is_not_answered_in_time_is_counted(client):
    ENDED.clear()
    with trace() as t:
        client.forward(0, X, IDS, W)
        with pytest.raises(UnavailableError):
            client.forward(13, X, IDS, W)
        assert client.submit(22, X, IDS, W).cancel()
        late = client.submit(23, X, IDS, W)
    ENDED.set()
    late.result()
    document, _ = checked(t)
    assert [c.layer for c in t.finished] == [0]
    assert document["otherData"] == {"calls": 1, "unfinished": 3, "clocks": {"here": "the clock of this host"}}


def test_a_module_names_what_the_model_does_between_its_calls(client):
    experts = [RemoteExperts(client, n, max_tokens=2).eval() for n in range(3)]
    x, ids, w = torch.ones(3, 8), torch.ones(3, 2, dtype=torch.int32), torch.ones(3, 2)
    with torch.inference_mode(), trace() as t:
        experts[0](x, ids, w)  # cut into two requests, which are under way at once
        time.sleep(0.3)
        started = experts[1].start(x, ids, w)
        time.sleep(0.3)
        experts[1].wait(started)
        experts[2](x, ids, w)
    _, tracks = checked(t)
    me = threading.current_thread().name
    spans = {name: end - begin for (_, track), es in tracks.items() if track == me for begin, end, name, _ in es}
    assert {"experts 0", "attention 1", "start 1", "meanwhile 1", "wait 1", "attention 2", "experts 2"} <= set(spans)
    assert min(spans["attention 1"], spans["meanwhile 1"]) >= 300 * MS
    assert by_layer(t)[1]["attention"] == pytest.approx(spans["attention 1"] / 1000 / 2)  # two requests


def test_nothing_is_recorded_outside_and_one_at_a_time(client):
    with trace() as t:
        with pytest.raises(UnsupportedCombinationError, match="another trace"), trace():
            pass
        assert recorder.active is t
    client.forward(0, X, IDS, W)
    assert recorder.active is None
    assert t.calls == []
    with pytest.raises(ZeroDivisionError), trace():
        raise ZeroDivisionError
    assert recorder.active is None


def part(begin, sent, answered, arrival=0, **timing):
    found = SubRequestTrace("there", 3, begin_ns=begin, sent_ns=sent)
    found.answered(pb.Timing(arrival_ns=arrival, **timing), answered)
    return found


def test_stages_stand_in_the_middle_where_the_clock_is_another_hosts():
    there = part(1000, 1100, 2100, queue_ns=100, kernel_ns=500)
    assert not own_clock(there)
    stages = placed(there, same_clock=False).stages
    assert [s.name for s in stages] == list(SERVER)
    assert [s[1:] for s in stages if s.end_ns > s.begin_ns] == [(1300, 1400), (1400, 1900)]


def test_stages_stand_where_they_were_where_the_clock_is_ours():
    there = part(1000, 1100, 2100, arrival=1150, queue_ns=100, kernel_ns=500)
    assert own_clock(there)
    assert [s[1:] for s in placed(there, same_clock=True).stages if s.end_ns > s.begin_ns] == [
        (1150, 1250),
        (1250, 1750),
    ]


@pytest.mark.parametrize("same_clock", [False, True])
def test_stages_never_leave_the_round_trip(same_clock):
    for arrival, kernel, sent in [(1990, 600, 1100), (1000, 5000, 1100), (1500, 950, 1900), (2000, 999, 2000)]:
        there = part(1000, sent, 2000, arrival=arrival, queue_ns=7, kernel_ns=kernel, copy_out_ns=3)
        stages = placed(there, same_clock).stages
        assert stages[0].begin_ns >= 1000
        assert stages[-1].end_ns <= 2000
        assert all(a.end_ns == b.begin_ns and a.begin_ns <= a.end_ns for a, b in itertools.pairwise(stages))


def test_of_several_servers_the_last_answer_counts():
    call = TracedCall(0, 3, begin_ns=0, split_ns=100, joined_ns=2150, end_ns=2200)
    call.parts = [part(100, 200, 900, kernel_ns=300), part(200, 260, 2100, queue_ns=40, kernel_ns=1000)]
    found = {name: ns for name, ns in stages_of(call).items() if ns}
    assert found == {"split": 100, "send": 160, "queue": 40, "kernel": 1000, "wire": 800, "wake": 50, "join": 50}


class StreamOfEvents:
    """torch.cuda as far as a clock needs it: each event is a millisecond after the one before."""

    def __init__(self):
        self.count = itertools.count()

    def Event(self, enable_timing):  # noqa: N802
        assert enable_timing
        recorded = []
        return SimpleNamespace(
            at=recorded,
            record=lambda: recorded.append(next(self.count)),
            synchronize=lambda: None,
            elapsed_time=lambda other: float(other.at[0] - recorded[0]),
        )

    def device(self, index):
        return contextlib.nullcontext()

    def is_current_stream_capturing(self):
        return False


def test_calls_from_gpu_to_gpu_are_timed_by_the_gpu(monkeypatch):
    monkeypatch.setattr(gpu_clock.torch, "cuda", StreamOfEvents())
    with trace() as t:
        for layer in (0, 1):
            over = gpu_clock.timed(t, layer, torch.zeros(3, 8))
            t.module("experts", layer, over)
        assert [m.name for m in t.modules] == ["experts", "experts"], "nothing waits for the GPU before the end"
        time.sleep(6e-3)
    _, tracks = checked(t)
    (gpu,) = (events for (process, track), events in tracks.items() if track == "cpu")
    assert [(name, end - begin) for begin, end, name, _ in gpu] == [
        ("from GPU to GPU 0", MS), ("from GPU to GPU 1", MS), ("attention 1", MS),
    ]  # fmt: skip
    assert gpu[0][3] == {"layer": 0, "tokens": 3}
    stages = by_layer(t)
    assert stages[0]["from GPU to GPU"] == stages[1]["from GPU to GPU"] == stages[1]["attention"] == 1000.0
    assert stages[0]["attention"] == 0, "the host's own gaps say nothing of the GPU"
    assert "layer 1: 1 call, 3 tokens, 1 server" in draw(t)
