"""The engine with a backend that one can compute by hand: out[t] = sum over j of weight[t, j] * (slot + 1) * x[t]."""

from __future__ import annotations

import select
import threading
import time
import weakref
import zlib

import numpy as np
import pytest
import torch

from expertd.errors import (
    BackendFailedError,
    DeadlineExceededError,
    DrainingError,
    ExpertdError,
    ExpertIdOutOfRangeError,
    InternalError,
    LayerNotHeldError,
    NonFiniteHiddenStatesError,
    NonFiniteWeightsError,
    NotReadyError,
    OverloadedError,
    QueueFullError,
    RequestCancelledError,
)
from expertd.wire import ForwardHead
from expertd_kernels.protocol import ExpertsLostError
from expertd_server.engine import pipeline
from expertd_server.engine.admission import QueueLimits
from expertd_server.engine.convert import bits_of
from expertd_server.engine.core import CoreMissingError, library
from expertd_server.engine.engine import Engine
from expertd_server.engine.executor import CpuExecutor
from expertd_server.engine.lane import CpuLane, DeviceLane
from expertd_server.engine.native import NativeEngine
from expertd_server.engine.report import BatchReport
from expertd_server.engine.request import STORAGE, Answer, Operand, Request
from expertd_server.engine.scheduler import Policy
from expertd_server.engine.served import ServedLayer

H = 16
NUM_EXPERTS = 8
HELD = (2, 3, 5)
ALONE = Policy(max_tokens=64)


class FakeExperts:
    """Poisons its output, records its calls, and waits for `gate` before each."""

    backend = "fake"

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: Exception | None = None
        self.most_rows = 1 << 30  # for more there is no memory
        self.cancel = None

    def __call__(self, hidden_states, topk_ids, topk_weights, *, router_weight_on_input=False, out=None):
        self.entered.set()
        assert self.gate.wait(20)
        self.calls.append((*topk_ids.shape, router_weight_on_input))
        if self.cancel is not None and len(self.calls) > 1:
            self.cancel()
        if self.error is not None:
            raise self.error
        if len(hidden_states) > self.most_rows:
            out.fill_(float("inf"))  # what a kernel wrote before memory ran out
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        assert topk_ids.dtype == torch.int32
        assert topk_weights.dtype == torch.float32
        assert torch.isfinite(topk_weights).all()
        out.fill_(float("nan"))
        factor = torch.where(topk_ids >= 0, (topk_ids + 1) * topk_weights, 0.0).sum(dim=1, keepdim=True)
        return out.copy_(hidden_states.float() * factor)


class Caller:
    """Makes requests and collects their outcomes; outputs are copied, because they live only during reply."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Answer | ExpertdError] = {}
        self.outputs: dict[int, np.ndarray] = {}
        self._done = threading.Condition()

    def reply(self, r: Request, outcome) -> None:
        with self._done:
            assert r.tag not in self.outcomes, "answered once"
            self.outcomes[r.tag] = outcome
            if isinstance(outcome, Answer):
                self.outputs[r.tag] = outcome.output.copy()
            self._done.notify_all()

    def wait(self, *tags: int) -> None:
        with self._done:
            assert self._done.wait_for(lambda: set(tags) <= set(self.outcomes), 20), f"{tags} of {self.outcomes}"

    def request(self, tag, x, ids, weights, *, layer=0, hidden_dtype="f32", **more) -> Request:
        """x [M, H] f32 tensor; ids [M, k] and weights [M, k] lists."""
        ids = np.array(ids, more.pop("id_dtype", np.int32))
        if weights is not None:
            weights = Operand("f32", np.array(weights, np.float32).reshape(-1))
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[hidden_dtype]
        hidden = Operand(hidden_dtype, bits_of(x.to(dtype).reshape(-1)))
        ids_operand = Operand("i64" if ids.dtype == np.int64 else "i32", ids.reshape(-1))
        more = {"arrival_ns": time.monotonic_ns(), "output_dtype": "f32"} | more
        if not isinstance(layer, ServedLayer):
            layer = served(layer, None)  # what submit() goes by is its number
        return Request(layer, len(x), ids.shape[1], hidden, ids_operand, weights, self.reply, tag=tag, **more)


def served(layer: int, experts, measured=()) -> ServedLayer:
    return ServedLayer(layer, NUM_EXPERTS, HELD, 2, H, 32, experts, "fake", measured=measured)


ENGINES = {"python": Engine, "native": NativeEngine}


class Setup:
    def __init__(self, kind: str, device: str, **engine) -> None:
        self.native = kind == "native"
        self.fake = FakeExperts()
        self.reports: list[BatchReport] = []
        measured = engine.pop("measured", ())
        layers = [served(n, self.fake, measured) for n in engine.pop("layers", (0, 1))]
        engine = {"policy": ALONE, "compute_dtype": "f32", "observe": self.reports.append} | engine
        limits = {
            name: engine.pop(f"max_queue_{name}") for name in QueueLimits._fields if f"max_queue_{name}" in engine
        }
        limits["refuse_late"] = engine.pop("refuse_late", True)
        self.engine = ENGINES[kind](torch.device(device), limits=QueueLimits(**limits), **engine)
        self.engine.hold(layers)
        self.engine.start()
        self.engine.open()
        self.caller = Caller()

    def block(self) -> None:
        """Make the engine busy with a request (tag 0), so that everything after it waits."""
        self.fake.gate.clear()
        self.fake.entered.clear()
        self.engine.submit(self.caller.request(0, inputs(1), [[2]], [[1.0]]))
        assert self.fake.entered.wait(20)

    def run(self, *requests: Request) -> None:
        for r in requests:
            self.engine.submit(r)
        self.caller.wait(*(r.tag for r in requests))


DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


try:
    library()
    BUILT = ""
except CoreMissingError as e:
    BUILT = str(e)


@pytest.fixture(
    params=["python", pytest.param("native", marks=pytest.mark.skipif(bool(BUILT), reason=BUILT or "built"))]
)
def kind(request):
    """Of the engine: in Python, or around the core in C++."""
    return request.param


in_python = pytest.mark.parametrize("kind", ["python"])
"""Looks into the engine in Python."""

in_cpp = pytest.mark.parametrize(
    "kind", [pytest.param("native", marks=pytest.mark.skipif(bool(BUILT), reason=BUILT or "built"))]
)
"""Looks into the one around the core."""


@pytest.fixture(params=DEVICES)
def make(request, kind):
    made: list[Setup] = []

    def make(**engine) -> Setup:
        made.append(Setup(kind, request.param, **engine))
        return made[-1]

    yield make
    for s in made:
        s.fake.gate.set()
        s.engine.stop(10)
        assert not s.engine._thread.is_alive()


def inputs(tokens: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed))
    return torch.where(x == 0, 1.0, x)


def test_a_number_of_routes_whose_kernels_are_not_there_yet_is_said_once(make, caplog):
    s = make(warm_routes=(3,))
    one = [[2]], [[1.0]]
    s.run(
        s.caller.request(1, inputs(1), [[2, 3]], [[1.0, 1.0]]), s.caller.request(2, inputs(1), [[2, 3, 5]], [[1.0] * 3])
    )
    assert "routes a token" not in caplog.text, "the layer's own top-k, and one that was warmed up"
    s.run(s.caller.request(3, inputs(1), *one))
    s.run(s.caller.request(4, inputs(1), *one))
    assert caplog.text.count("--warm-up-routes 1 does it at boot") == 1
    caplog.clear()
    s = make()
    s.run(s.caller.request(1, inputs(1), *one))
    assert "routes" not in caplog.text, "nothing compiles on a CPU"


def test_e4m3_of_several_callers_is_widened_by_its_scales(make):
    """H is no whole block of 128; every code; scales of any sign, and at an odd address as they may lie in messages."""
    s = make()
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, H)
    scales = torch.tensor([0.5, -2.0, 3e-3, 448.0] * 4)
    raw = np.frombuffer(b"x" + scales.numpy().tobytes(), np.uint8)[1:].view(np.float32)
    requests = []
    for tag in (1, 2):
        r = s.caller.request(tag, torch.zeros(16, H), [[2]] * 16, [[1.0]] * 16)
        r.hidden = Operand("e4m3", codes.view(-1).numpy(), raw)
        assert r.nbytes == 256 + 64 + 2 * 64 + 4 * 256
        requests.append(r)
    s.run(*requests)
    want = codes.view(torch.float8_e4m3fn).float() * scales[:, None]
    for tag in (1, 2):
        np.testing.assert_array_equal(s.caller.outputs[tag].reshape(16, H), want.numpy())


def test_global_ids_become_slots_and_absent_experts_count_nothing(make):
    s = make()
    x = inputs(3)
    s.run(s.caller.request(1, x, [[2, 5], [0, 3], [-1, 7]], [[0.5, 2.0], [1.0, 1.0], [1.0, 1.0]]))
    factor = torch.tensor([[0.5 * 1 + 2.0 * 3], [2.0], [0.0]])
    assert torch.equal(torch.from_numpy(s.caller.outputs[1]).view(3, H), x * factor)
    answer = s.caller.outcomes[1]
    assert (answer.routes_computed, answer.batch_tokens, answer.batch_requests, answer.backend) == (3, 3, 1, "fake")
    s.engine.stop(10)
    assert s.reports[0].expert_tokens.tolist() == [1, 1, 1]


def test_what_waits_for_one_layer_is_computed_as_one_batch_and_split_again(make):
    s = make()
    s.block()
    xs = {tag: inputs(tag, seed=tag) for tag in (1, 2, 3)}
    for tag, x in xs.items():
        s.engine.submit(s.caller.request(tag, x, [[3]] * tag, [[float(tag)]] * tag))
    assert s.engine.load().queued_tokens == 1 + 6
    s.fake.gate.set()
    s.caller.wait(1, 2, 3)
    assert [c[0] for c in s.fake.calls] == [1, 6]
    for tag, x in xs.items():
        assert torch.equal(torch.from_numpy(s.caller.outputs[tag]).view(tag, H), x * 2 * tag)
        assert s.caller.outcomes[tag].batch_tokens == 6
        assert s.caller.outcomes[tag].batch_requests == 3
        assert s.caller.outcomes[tag].queue_ns > 0
    assert s.engine.idle()


def test_a_batch_joins_different_dtypes_and_different_top_k(make):
    s = make()
    s.block()
    x = inputs(2)
    s.engine.submit(s.caller.request(1, x, [[2, 3, 5], [5, 3, 2]], [[1.0, 1.0, 1.0]] * 2))
    s.engine.submit(s.caller.request(2, x, [[3], [5]], [[1.0], [1.0]], hidden_dtype="bf16", id_dtype=np.int64))
    s.engine.submit(s.caller.request(3, x, [[3], [-1]], None, hidden_dtype="f16"))
    s.fake.gate.set()
    s.caller.wait(1, 2, 3)
    assert s.fake.calls[1] == (6, 3, False), "narrower rows are padded"
    out = {tag: torch.from_numpy(o).view(2, H) for tag, o in s.caller.outputs.items() if tag}
    assert torch.equal(out[1], x * 6)
    assert torch.equal(out[2], x.bfloat16().float() * torch.tensor([[2.0], [3.0]]))
    assert torch.equal(out[3], x.half().float() * torch.tensor([[2.0], [0.0]]))
    assert s.caller.outcomes[3].routes_computed == 1


@pytest.mark.parametrize("output_dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("compute_dtype", ["f32", "bf16"])
def test_output_dtypes_and_their_digests(make, compute_dtype, output_dtype):
    s = make(compute_dtype=compute_dtype)
    x = inputs(5).bfloat16().float()
    plain = s.caller.request(1, x, [[2]] * 5, [[1.0]] * 5, output_dtype=output_dtype)
    digest = s.caller.request(2, x, [[2]] * 5, [[1.0]] * 5, output_dtype=output_dtype, digest=True)
    s.run(plain, digest)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[output_dtype]
    want = x.to(dtype)
    assert s.caller.outputs[1].tobytes() == bits_of(want).tobytes()
    total, squares, crc = s.caller.outcomes[2].digest
    assert total == pytest.approx(want.double().sum().item(), rel=1e-12)
    assert squares == pytest.approx(want.double().square().sum().item(), rel=1e-12)
    assert crc == zlib.crc32(bits_of(want).tobytes())
    assert s.caller.outcomes[1].digest is None


@pytest.mark.parametrize(
    ("ids", "weights", "error", "says"),
    [
        ([[2, 8]], [[1.0, 1.0]], ExpertIdOutOfRangeError, r"topk_ids\[0, 1\] of layer 0: got 8, want 0 to 7"),
        ([[-2, 2]], [[1.0, 1.0]], ExpertIdOutOfRangeError, r"topk_ids\[0, 0\] of layer 0: got -2"),
        ([[2, 3]], [[1.0, float("nan")]], NonFiniteWeightsError, r"topk_weights\[0, 1\]: got nan"),
        ([[2, 3]], [[float("-inf"), 1.0]], NonFiniteWeightsError, r"topk_weights\[0, 0\]: got -inf"),
    ],
)
def test_a_bad_request_fails_alone_in_its_batch(make, ids, weights, error, says):
    s = make()
    s.block()
    x = inputs(1)
    s.engine.submit(s.caller.request(1, x, [[2, 3]], [[1.0, 1.0]]))
    s.engine.submit(s.caller.request(2, x, ids, weights))
    s.engine.submit(s.caller.request(3, x, [[5, 3]], [[1.0, 1.0]]))
    s.fake.gate.set()
    s.caller.wait(1, 2, 3)
    with pytest.raises(error, match=says):
        raise s.caller.outcomes[2]
    assert torch.equal(torch.from_numpy(s.caller.outputs[1]).view(1, H), x * 3)
    assert torch.equal(torch.from_numpy(s.caller.outputs[3]).view(1, H), x * 5)


ODD = (float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("compute_dtype", ["f32", "bf16"])
@pytest.mark.parametrize("hidden_dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("nonfinite", ["pass", "refuse", "zero"])
def test_hidden_states_that_are_no_numbers_go_by_the_servers_policy(make, nonfinite, odd, hidden_dtype, compute_dtype):
    s = make(nonfinite=nonfinite, compute_dtype=compute_dtype)
    s.block()
    fine, other = ((4 * inputs(m)).round() for m in (2, 3))  # bf16 and f16 hold them
    other[1, 5] = other[2, 0] = odd
    s.engine.submit(s.caller.request(1, fine, [[2]] * 2, [[1.0]] * 2))
    s.engine.submit(s.caller.request(2, other, [[3]] * 3, [[1.0]] * 3, hidden_dtype=hidden_dtype))
    s.fake.gate.set()
    s.caller.wait(1, 2)
    assert torch.equal(torch.from_numpy(s.caller.outputs[1]).view(2, H), fine)
    if nonfinite == "refuse":
        with pytest.raises(NonFiniteHiddenStatesError, match=rf"hidden_states\[1, 5\]: got {odd}, want finite numbers"):
            raise s.caller.outcomes[2]
        return
    got = torch.from_numpy(s.caller.outputs[2]).view(3, H)
    want = (other if nonfinite == "pass" else torch.where(other.isfinite(), other, 0.0)) * 2
    assert torch.equal(got[0], want[0]), "other rows do not notice"
    assert torch.equal(got.nan_to_num(7, 8, 9), want.nan_to_num(7, 8, 9))


@pytest.mark.parametrize("odd", ODD)
def test_weights_that_are_no_numbers_count_as_zero_where_that_is_asked(make, odd):
    s = make(nonfinite="zero")
    x = inputs(1)
    s.run(s.caller.request(1, x, [[2, 3]], [[odd, 1.0]]))
    assert torch.equal(torch.from_numpy(s.caller.outputs[1]).view(1, H), x * 2)
    assert s.caller.outcomes[1].routes_computed == 2
    s = make(nonfinite="refuse")
    s.run(s.caller.request(1, x, [[2, 3]], [[odd, 1.0]]))
    assert isinstance(s.caller.outcomes[1], NonFiniteWeightsError)


def test_ids_beyond_32_bits_do_not_wrap_round(make):
    s = make()
    s.run(s.caller.request(1, inputs(1), [[(1 << 32) + 2]], [[1.0]], id_dtype=np.int64))
    with pytest.raises(ExpertIdOutOfRangeError, match="got 4294967298"):
        raise s.caller.outcomes[1]


def test_a_backend_that_raises_fails_its_batch_and_the_next_works(make):
    s = make()
    s.fake.error = RuntimeError("out of registers")
    s.run(s.caller.request(1, inputs(2), [[2]] * 2, [[1.0]] * 2))
    with pytest.raises(BackendFailedError, match="backend fake, layer 0, 2 tokens: RuntimeError: out of registers"):
        raise s.caller.outcomes[1]
    s.fake.error = None
    s.run(s.caller.request(2, inputs(2), [[2]] * 2, [[1.0]] * 2))
    assert isinstance(s.caller.outcomes[2], Answer)


SOON_S = 0.4
"""Of a deadline that is to pass: far enough for a busy machine to have the request taken before."""


def one(s: Setup, tag: int, within_s: float, tokens: int = 1, **more) -> Request:
    deadline_ns = time.monotonic_ns() + int(within_s * 1e9)
    return s.caller.request(tag, inputs(tokens), [[2]] * tokens, [[1.0]] * tokens, deadline_ns=deadline_ns, **more)


def pass_deadline(request: Request) -> None:
    time.sleep(max(0.0, (request.deadline_ns - time.monotonic_ns()) / 1e9 + 1e-3))


def test_expired_and_cancelled_requests_never_reach_the_kernel(make):
    s = make()
    s.block()
    late, good = one(s, 1, SOON_S), one(s, 3, 60.0)
    gone = s.caller.request(2, inputs(1), [[2]], [[1.0]])
    for r in (late, gone, good):
        s.engine.submit(r)
    gone.cancelled = True
    pass_deadline(late)
    s.fake.gate.set()
    s.caller.wait(1, 2, 3)
    assert [c[0] for c in s.fake.calls] == [1, 1], "tag 0 and tag 3, one token each"
    with pytest.raises(DeadlineExceededError, match="was not computed"):
        raise s.caller.outcomes[1]
    assert isinstance(s.caller.outcomes[3], Answer)
    assert isinstance(s.caller.outcomes[2], RequestCancelledError), "from now on its memory is free"


def test_a_deadline_that_has_passed_is_refused_at_the_door(make):
    s = make()
    with pytest.raises(DeadlineExceededError, match="had passed when it came"):
        s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]], deadline_ns=time.monotonic_ns() - 1))
    assert s.fake.calls == []


@pytest.mark.parametrize(
    "kind", [pytest.param("native", marks=pytest.mark.skipif(bool(BUILT), reason=BUILT or "built"))]
)
def test_what_is_hopeless_is_what_submit_would_refuse_for_the_time(make, kind):
    s = make(measured=[(1, 1, 5_000_000_000)])
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))

    def hopeless(timeout_ms, layer=0):
        head = ForwardHead(9, layer, 1, 1, 1, 0)
        return s.engine.hopeless(head, "test", time.monotonic_ns() + int(timeout_ms * 1e6))

    assert hopeless(1_000_000) is None
    assert hopeless(2000, layer=7) is None, "a layer that is not held: for submit() to say"
    assert hopeless(2000).reason == "OVERLOADED"
    assert hopeless(2000).retry_after_us > 100_000
    assert hopeless(-1).reason == "DEADLINE_EXCEEDED"
    with pytest.raises(OverloadedError):
        s.engine.submit(one(s, 2, 2.0))
    s.fake.gate.set()


def test_a_full_queue_refuses_clearly_and_says_when_to_come_again(make):
    s = make(max_queue_tokens=8, max_queue_requests=3)
    s.run(s.caller.request(9, inputs(4), [[2]] * 4, [[1.0]] * 4))  # so that the time of a token is known
    s.block()
    s.engine.submit(s.caller.request(1, inputs(6), [[2]] * 6, [[1.0]] * 6))
    with pytest.raises(
        QueueFullError, match="got 6 tokens waiting, 6 of them this caller's, and 3 more, want at most 8"
    ) as e:
        s.engine.submit(s.caller.request(2, inputs(3), [[2]] * 3, [[1.0]] * 3))
    assert e.value.retry_after_us >= 1
    assert e.value.retryable
    s.engine.submit(s.caller.request(3, inputs(1), [[2]], [[1.0]]))
    s.engine.submit(s.caller.request(4, inputs(1), [[2]], [[1.0]]))
    with pytest.raises(QueueFullError, match="got 3 requests waiting"):
        s.engine.submit(s.caller.request(5, inputs(1), [[2]], [[1.0]]))
    s.fake.gate.set()
    s.caller.wait(1, 3, 4)


@in_python
def test_requests_that_are_dead_make_room_in_a_full_queue(make):
    s = make(max_queue_requests=2)
    s.block()
    late = one(s, 1, SOON_S)
    gone = s.caller.request(2, inputs(1), [[2]], [[1.0]])
    s.engine.submit(late)
    s.engine.submit(gone)
    gone.cancelled = True
    pass_deadline(late)
    s.engine.submit(s.caller.request(3, inputs(1), [[2]], [[1.0]]))
    s.caller.wait(1, 2)
    assert isinstance(s.caller.outcomes[1], DeadlineExceededError)
    assert isinstance(s.caller.outcomes[2], RequestCancelledError)
    s.fake.gate.set()
    s.caller.wait(3)


@in_python
def test_the_dead_are_answered_also_where_their_room_is_not_enough(make):
    s = make(max_queue_tokens=8)
    s.block()
    late = one(s, 1, SOON_S, tokens=2)
    s.engine.submit(late)
    s.engine.submit(s.caller.request(2, inputs(6), [[2]] * 6, [[1.0]] * 6))
    pass_deadline(late)
    with pytest.raises(QueueFullError, match="got 6 tokens waiting, 6 of them this caller's, and 4 more"):
        s.engine.submit(s.caller.request(3, inputs(4), [[2]] * 4, [[1.0]] * 4))
    s.caller.wait(1)
    assert isinstance(s.caller.outcomes[1], DeadlineExceededError)
    s.fake.gate.set()
    s.caller.wait(2)


def admitted_and_computed(kind: str, seed: int):
    """What becomes of random requests of three callers that come while the engine is busy: refused or not, and the
    order in which those that are not are answered, with their batches."""
    rng = np.random.default_rng(seed)
    limits = {"max_queue_tokens": 150, "max_queue_requests": 24, "max_queue_routes": 300, "max_queue_nbytes": 30_000}
    s = Setup(kind, "cpu", policy=Policy(64), **limits)
    try:
        s.block()
        verdicts = {}
        for tag in range(1, 60):
            M, k, caller = int(rng.integers(1, 24)), int(rng.integers(1, 5)), "abc"[int(rng.integers(0, 3))]
            r = s.caller.request(tag, inputs(M), [[2] * k] * M, [[1.0] * k] * M, caller=caller)
            try:
                s.engine.submit(r)
                verdicts[tag] = ""
            except QueueFullError as e:
                verdicts[tag] = e.message
        s.fake.gate.set()
        s.caller.wait(*(tag for tag, refusal in verdicts.items() if not refusal))
    finally:
        s.fake.gate.set()
        s.engine.stop(20)
    assert {why.split(" waiting")[0].split()[-1] for why in verdicts.values() if why}
    return verdicts, list(s.caller.outcomes), [(b.requests, b.tokens) for b in s.reports]


@pytest.mark.skipif(bool(BUILT), reason=BUILT or "built")
@pytest.mark.parametrize("seed", range(6))
def test_both_engines_let_in_and_choose_alike(seed):
    python, native = admitted_and_computed("python", seed), admitted_and_computed("native", seed)
    assert python == native
    assert any(python[0].values())
    assert len(python[2]) > 3


SLOW = ((1, 1, 200_000_000), (64, 1, 12_800_000_000))
"""As if a row took 200 ms: no busy machine comes near."""


def test_what_cannot_be_in_time_is_refused_at_once_with_advice(make):
    s = make(measured=SLOW)
    s.block()
    s.engine.submit(one(s, 1, 50.0, tokens=20))  # 4 s
    with pytest.raises(OverloadedError, match="left of its time, want") as e:
        s.engine.submit(one(s, 2, 3.0))  # at once: the gate is closed
    assert e.value.retryable
    assert 1_000_000 < e.value.retry_after_us < 10_000_000
    with pytest.raises(OverloadedError):
        s.engine.ask(one(s, 3, 3.0))
    assert s.engine.load().wait_ns > 3_000_000_000
    s.engine.ask(one(s, 4, 50.0))
    assert s.engine.load().queued_requests == 2, "who only asks does not wait"
    s.engine.submit(one(s, 5, 50.0))
    s.engine.submit(s.caller.request(6, inputs(1), [[2]], [[1.0]]))  # no deadline: never too late
    s.fake.gate.set()
    s.caller.wait(1, 5, 6)
    assert all(isinstance(s.caller.outcomes[tag], Answer) for tag in (1, 5, 6))


def test_it_can_be_switched_off(make):
    s = make(measured=SLOW, refuse_late=False)
    s.block()
    s.engine.submit(one(s, 1, 50.0, tokens=60))
    s.engine.submit(one(s, 2, 3.0))
    s.fake.gate.set()
    s.caller.wait(1, 2)
    assert isinstance(s.caller.outcomes[2], Answer)


def test_a_batch_grows_no_further_than_to_where_one_of_it_would_be_late(make):
    s = make(measured=SLOW)
    s.block()
    s.engine.submit(one(s, 1, 10.0, tokens=4))
    for tag in range(2, 7):
        s.engine.submit(one(s, tag, 200.0, tokens=12))
    s.fake.gate.set()
    s.caller.wait(*range(1, 7))
    assert all(isinstance(s.caller.outcomes[tag], Answer) for tag in range(1, 7))
    rows = [call[0] for call in s.fake.calls]
    assert rows[1] in (4, 16, 28), "its own 4 rows and what fits into the ten seconds that it has, by 250 ms a row"
    assert sum(rows[1:]) == 64


def test_what_can_no_longer_be_in_time_is_dropped_before_its_deadline_has_passed(make):
    s = make(measured=((1, 1, 10_000_000), (2, 1, 3_000_000_000)))
    s.block()
    s.engine.submit(one(s, 1, 3.5, tokens=2))  # it takes 3 s
    time.sleep(0.7)
    s.engine.submit(one(s, 2, 30.0))
    s.fake.gate.set()
    s.caller.wait(1, 2)
    assert isinstance(s.caller.outcomes[1], OverloadedError), s.caller.outcomes[1]
    assert "us left of its time" in s.caller.outcomes[1].message
    assert isinstance(s.caller.outcomes[2], Answer)
    assert [call[0] for call in s.fake.calls] == [1, 1]


def test_an_empty_queue_takes_a_request_of_any_size(make):
    s = make(max_queue_tokens=2)
    s.run(s.caller.request(1, inputs(50), [[2]] * 50, [[1.0]] * 50))
    assert isinstance(s.caller.outcomes[1], Answer)


def test_drain_refuses_new_requests_and_finishes_those_taken(make):
    s = make()
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    s.engine.drain()
    assert s.engine.load().draining
    with pytest.raises(DrainingError):
        s.engine.submit(s.caller.request(2, inputs(1), [[2]], [[1.0]]))
    assert not s.engine.idle()
    s.fake.gate.set()
    s.caller.wait(0, 1)
    assert isinstance(s.caller.outcomes[1], Answer)
    s.engine.stop(10)
    assert s.engine.idle()


def test_stop_answers_what_it_could_not_compute(make):
    s = make()
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    s.engine.stop(0.05)
    s.caller.wait(1)
    assert isinstance(s.caller.outcomes[1], DrainingError)


def test_a_layer_that_is_not_held_is_refused(make):
    s = make()
    with pytest.raises(LayerNotHeldError, match="layer: got 5, want one of those held here: 0, 1"):
        s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]], layer=5))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("compute_dtype", ["f32", "bf16"])
def test_an_output_is_written_where_the_request_wants_it(make, compute_dtype, dtype):
    s = make(compute_dtype=compute_dtype)
    x = inputs(3).bfloat16().float()
    room = np.full(5 * H, 7, STORAGE[dtype])
    mine = room[H:-H]
    s.run(s.caller.request(1, x, [[3]] * 3, [[1.0]] * 3, output_dtype=dtype, into=mine))
    assert s.caller.outcomes[1].output is mine
    want = bits_of((x * 2).to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]))
    np.testing.assert_array_equal(mine.view(want.dtype), want.reshape(-1))
    assert (room[:H] == 7).all(), "and nowhere else"
    assert (room[-H:] == 7).all(), "and nowhere else"


def test_a_digest_leaves_the_place_of_an_output_alone(make):
    s = make()
    room = np.full(H, 7, np.float32)
    s.run(s.caller.request(1, inputs(1), [[3]], [[1.0]], into=room, digest=True))
    assert (room == 7).all()
    assert s.caller.outcomes[1].digest[2] == zlib.crc32(bits_of(inputs(1) * 2).tobytes())


def test_a_request_cancelled_in_its_batch_is_told_when_its_memory_is_free(make):
    s = make()
    s.block()
    room = np.full(H, 7, np.float32)
    gone = s.caller.request(1, inputs(1), [[3]], [[1.0]], into=room)
    s.engine.submit(gone)
    s.engine.submit(s.caller.request(2, inputs(1), [[3]], [[1.0]]))
    s.fake.entered.clear()
    s.fake.cancel = lambda: setattr(gone, "cancelled", True)  # while its batch is in the kernel
    s.fake.gate.set()
    s.caller.wait(1, 2)
    assert s.fake.calls[1][0] == 2, "it was computed"
    assert isinstance(s.caller.outcomes[1], RequestCancelledError)
    assert s.native or (room == 7).all(), "nobody wants the output; the core may have computed it there"
    assert isinstance(s.caller.outcomes[2], Answer)


def test_an_engine_takes_nothing_before_it_is_opened():
    engine = Engine(torch.device("cpu"), policy=ALONE)
    fake = FakeExperts()
    engine.hold([served(0, fake)])
    engine.start()
    caller = Caller()
    with pytest.raises(NotReadyError, match="until its health is SERVING"):
        engine.submit(caller.request(1, inputs(1), [[2]], [[1.0]]))
    engine.open()
    engine.submit(caller.request(1, inputs(1), [[2]], [[1.0]]))
    caller.wait(1)
    engine.stop(10)
    engine.open()
    with pytest.raises(DrainingError):
        engine.submit(caller.request(2, inputs(1), [[2]], [[1.0]]))


def test_an_engine_without_layers_works_and_takes_them_later(make):
    s = make(layers=())
    with pytest.raises(LayerNotHeldError, match="want one of those held here: none"):
        s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    s.engine.hold([served(4, s.fake)])
    s.run(s.caller.request(1, inputs(1), [[2]], [[1.0]], layer=4))
    assert isinstance(s.caller.outcomes[1], Answer)
    s.engine.hold([])
    with pytest.raises(LayerNotHeldError):
        s.engine.submit(s.caller.request(2, inputs(1), [[2]], [[1.0]], layer=4))


def test_what_waits_is_computed_by_what_was_held_when_it_came(make):
    s = make()
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    other = FakeExperts()
    swapped = threading.Thread(target=s.engine.hold, args=([served(0, other)],))
    swapped.start()
    time.sleep(0.05)
    assert swapped.is_alive(), "layers change between batches"
    s.fake.gate.set()
    swapped.join(20)
    s.caller.wait(1)
    s.run(s.caller.request(2, inputs(1), [[2]], [[1.0]]))
    assert (len(s.fake.calls), len(other.calls)) == (2, 1)


def test_a_request_checked_before_a_change_is_computed_by_what_is_held_when_it_is_taken(make):
    s = make()
    r = s.caller.request(1, inputs(1), [[2]], [[1.0]], layer=s.engine.holding.layer(0))
    other = FakeExperts()
    s.engine.hold([served(0, other)])
    s.run(r)
    assert (len(s.fake.calls), len(other.calls)) == (0, 1)


def test_a_layer_is_forgotten_when_nothing_in_flight_uses_it(make):
    s = make()
    old = s.engine.holding.layer(0)
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    fake, s.fake = s.fake, FakeExperts()
    threading.Timer(0.1, fake.gate.set).start()
    s.engine.hold([served(0, s.fake)])
    assert s.engine.forget([old], 20)
    assert len(fake.calls) == 2
    watch = weakref.ref(fake)
    until = time.monotonic() + 10
    while len(s.reports) < 2 and time.monotonic() < until:
        time.sleep(0.001)
    s.reports.clear()
    del fake, old
    until = time.monotonic() + 10
    while watch() is not None and time.monotonic() < until:
        time.sleep(0.001)  # the engine's thread has just told the second, and may not have gone on
    assert watch() is None, "nobody holds on to it: not the engine's thread, not its requests"


def test_lanes_drop_what_they_keep_for_a_forgotten_layer(make, monkeypatch):
    dropped = []
    for lane in (CpuLane, DeviceLane, CpuExecutor):
        monkeypatch.setattr(lane, "forget", lambda lane, generations: dropped.append(generations))
    s = make()
    a, b = s.engine.holding.values()
    s.engine.hold([])
    assert s.engine.forget([a, b], 20)
    assert dropped
    assert all(gone == {a.generation, b.generation} for gone in dropped)


def test_a_layer_still_in_use_is_not_forgotten(make):
    s = make()
    old = s.engine.holding.layer(0)
    s.block()
    assert not s.engine.forget([old], 0.05)
    s.fake.gate.set()
    assert s.engine.forget([old], 20)


def test_work_between_batches_has_the_device_for_itself(make):
    s = make()
    s.block()
    done = []
    threads = [threading.Thread(target=lambda: done.append(s.engine.between(threading.get_ident))) for _ in range(2)]
    for t in threads:
        t.start()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    time.sleep(0.05)
    assert not done
    s.fake.gate.set()
    for t in threads:
        t.join(20)
    assert done == [s.engine._thread.ident] * 2
    with pytest.raises(ZeroDivisionError):
        s.engine.between(lambda: 1 // 0)
    s.caller.wait(1)
    s.engine.stop(10)
    assert s.engine.between(threading.get_ident) == threading.get_ident(), "nobody computes any more"


def test_work_between_batches_waits_for_all_that_is_under_way(monkeypatch):
    two = (CpuLane(torch.float32), CpuLane(torch.float32))  # one batch is collected after the next was launched
    monkeypatch.setattr(pipeline, "lanes", lambda *_: two)
    s = Setup("python", "cpu")
    s.block()
    for tag in (1, 2, 3):
        s.engine.submit(s.caller.request(tag, inputs(1), [[2]], [[1.0]], layer=tag % 2))
    busy = []
    work = threading.Thread(target=lambda: busy.append(s.engine.between(lambda: s.engine._pipeline.busy)))
    work.start()
    time.sleep(0.05)
    s.fake.gate.set()
    work.join(20)
    assert busy == [False]
    s.caller.wait(1, 2, 3)
    s.engine.stop(10)


@in_python
def test_whoever_waits_for_work_between_batches_is_not_forgotten_when_the_engine_ends(make, monkeypatch):
    s = make()
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    monkeypatch.setattr(s.engine, "_step", lambda: 1 // 0)
    done = []
    work = threading.Thread(target=lambda: done.append(s.engine.between(lambda: "done")), daemon=True)
    work.start()
    time.sleep(0.05)
    s.fake.gate.set()
    work.join(20)
    assert done == ["done"]
    s.caller.wait(0, 1)


def test_a_transport_that_fails_gets_the_error_and_the_engine_goes_on(make):
    s = make()
    seen = []

    def broken(r, outcome):
        seen.append(outcome)
        if isinstance(outcome, Answer):
            raise ValueError("the pipe is gone")

    r = s.caller.request(1, inputs(1), [[2]], [[1.0]])
    r.reply = broken
    s.engine.submit(r)
    s.run(s.caller.request(2, inputs(1), [[2]], [[1.0]]))
    assert isinstance(seen[0], Answer)
    assert isinstance(seen[1], InternalError)
    assert "the pipe is gone" in seen[1].message


def test_layers_take_turns_by_their_oldest_request(make):
    s = make()
    s.block()
    for tag, layer in ((1, 1), (2, 0), (3, 1)):
        s.engine.submit(s.caller.request(tag, inputs(1), [[2]], [[1.0]], layer=layer))
    s.fake.gate.set()
    s.caller.wait(1, 2, 3)
    s.engine.stop(10)
    assert [(b.layer.layer, b.requests) for b in s.reports] == [(0, 1), (1, 2), (0, 1)]


@in_python
def test_an_engine_that_ends_on_its_own_fault_answers_everybody_and_says_so(make, monkeypatch):
    from expertd_server.engine import engine as module

    ended, said = threading.Event(), []
    s = make(on_fault=lambda why: (said.append(why), ended.set()))
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))

    def broken(*args):
        raise ZeroDivisionError("a fault in the scheduler")

    monkeypatch.setattr(module, "cut", broken)
    s.fake.gate.set()
    s.caller.wait(0, 1)
    assert isinstance(s.caller.outcomes[1], InternalError)
    assert ended.wait(20)
    assert said == ["the engine ended on a fault of its own"]
    with pytest.raises(DrainingError):
        s.engine.submit(s.caller.request(2, inputs(1), [[2]], [[1.0]]))
    assert s.engine.idle()


def test_a_lost_device_ends_the_engine_and_what_waits_may_go_elsewhere(make, monkeypatch):
    ended, said = threading.Event(), []
    s = make(on_fault=lambda why: (said.append(why), ended.set()))
    s.block()
    for tag in (1, 2):
        s.engine.submit(s.caller.request(tag, inputs(1), [[2]], [[1.0]]))
    s.fake.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    for lane in (CpuLane, DeviceLane, CpuExecutor):
        monkeypatch.setattr(lane, "fault", lambda lane: "CUDA error: an illegal memory access was encountered")
    s.fake.gate.set()
    s.caller.wait(0, 1, 2)
    assert isinstance(s.caller.outcomes[0], BackendFailedError), "its batch was under way"
    for tag in (1, 2):
        assert isinstance(s.caller.outcomes[tag], DrainingError)
        assert "illegal memory access" in str(s.caller.outcomes[tag])
        assert s.caller.outcomes[tag].retryable
    assert ended.wait(20)
    assert said[0].startswith("the device is lost to this process: CUDA error: an illegal memory access")
    assert "backend fake" in said[0]
    with pytest.raises(DrainingError):
        s.engine.submit(s.caller.request(3, inputs(1), [[2]], [[1.0]]))
    assert s.engine.idle()


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_a_batch_that_memory_runs_out_for_is_computed_in_halves(make, caplog, rows):
    troubles = []
    s = make(trouble=troubles.append)
    s.fake.most_rows = (rows + 1) // 2
    x = inputs(rows)
    s.run(s.caller.request(1, x, [[2, 3]] * rows, [[1.0, 0.5]] * rows))
    want = x * (1.0 * 1 + 0.5 * 2)
    assert torch.equal(torch.from_numpy(s.caller.outputs[1]).view(rows, H), want)
    assert s.caller.outcomes[1].routes_computed == 2 * rows
    assert [tokens for tokens, *_ in s.fake.calls] == [rows, (rows + 1) // 2, rows // 2]
    assert troubles == ["split"]
    assert "CUDA out of memory" in caplog.text
    s.run(s.caller.request(2, inputs(1), [[2]], [[1.0]]))
    assert isinstance(s.caller.outcomes[2], Answer)


def test_halves_are_not_halved(make):
    """Memory that is not enough for half of a batch fails it, and nothing else."""
    troubles = []
    s = make(trouble=troubles.append)
    s.fake.most_rows = 2
    s.run(s.caller.request(1, inputs(8), [[2]] * 8, [[1.0]] * 8))
    assert isinstance(s.caller.outcomes[1], BackendFailedError)
    assert "out of memory" in str(s.caller.outcomes[1])
    assert [tokens for tokens, *_ in s.fake.calls] == [8, 4]
    s.run(s.caller.request(2, inputs(2), [[2]] * 2, [[1.0]] * 2))
    assert isinstance(s.caller.outcomes[2], Answer)
    assert troubles == ["failed"]


@in_cpp
def test_what_was_overwritten_is_not_computed_again(make):
    """A caller who wants the output where the input lies: half a try may have spoiled it."""
    s = make()
    s.fake.most_rows = 2
    x = inputs(4)
    r = s.caller.request(1, x, [[2]] * 4, [[1.0]] * 4)
    memory = np.array(r.hidden.values).view(np.float32)
    r.hidden, r.into = Operand("f32", memory), memory
    s.run(r)
    assert isinstance(s.caller.outcomes[1], BackendFailedError)
    assert [tokens for tokens, *_ in s.fake.calls] == [4]


def test_other_errors_are_not_tried_again(make):
    s = make()
    s.fake.error = RuntimeError("out of registers")
    s.run(s.caller.request(1, inputs(4), [[2]] * 4, [[1.0]] * 4))
    assert isinstance(s.caller.outcomes[1], BackendFailedError)
    assert len(s.fake.calls) == 1


def test_lost_weights_end_the_engine_and_every_caller_may_go_elsewhere(make):
    """Also the one whose batch was computed from them: it did nothing wrong, and got no wrong answer."""
    ended, said = threading.Event(), []
    s = make(on_fault=lambda why: (said.append(why), ended.set()))
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    s.fake.error = ExpertsLostError("/cache/layer0: was overwritten while it was mapped")
    s.fake.gate.set()
    s.caller.wait(0, 1)
    for tag in (0, 1):
        assert isinstance(s.caller.outcomes[tag], DrainingError)
        assert s.caller.outcomes[tag].retryable
        assert "/cache/layer0: was overwritten while it was mapped" in str(s.caller.outcomes[tag])
    assert ended.wait(20)
    assert len(said) == 1
    assert said[0].startswith("cache: /cache/layer0: was overwritten while it was mapped (after a batch of 1 tokens on")
    assert s.engine.idle()


def test_counting_that_fails_does_not_end_the_computing(make):
    def broken(report):
        raise KeyError("no such series")

    s = make(observe=broken)
    for tag in (1, 2):
        s.run(s.caller.request(tag, inputs(1), [[2]], [[1.0]]))
        assert isinstance(s.caller.outcomes[tag], Answer)


def test_callers_answered_together_are_joined_again_when_they_come_back_one_by_one(make):
    s = make(policy=Policy(64, patience=30_000.0))  # of a batch of some microseconds
    s.block()
    for tag in (1, 2, 3):
        s.engine.submit(s.caller.request(tag, inputs(1), [[2]], [[1.0]]))
    s.fake.gate.set()
    s.caller.wait(1, 2, 3)
    for tag in (4, 5, 6):
        time.sleep(0.01)
        s.engine.submit(s.caller.request(tag, inputs(1), [[2]], [[1.0]]))
    s.caller.wait(4, 5, 6)
    assert [c[0] for c in s.fake.calls] == [1, 3, 3]


@in_cpp
def test_whoever_borrowed_the_outcomes_hands_them_out(make):
    s = make()
    one = inputs(1), [[2]], [[1.0]]
    bell = s.engine.lend_outcomes()
    s.engine.submit(s.caller.request(2, *one))
    assert select.select([bell], [], [], 20)[0]
    time.sleep(0.05)
    assert 2 not in s.caller.outcomes
    s.engine.deliver()
    assert 2 in s.caller.outcomes
    s.engine.report()
    assert len(s.reports) == 1
    s.engine.take_outcomes_back()
    s.run(s.caller.request(3, *one))


@in_cpp
def test_a_view_is_kept_for_its_memory_and_size_alone(make):
    s = make()
    for tag, tokens in enumerate((1, 3, 3, 2, 1), 1):
        x = inputs(tokens, tag)
        weights = [[float(tag * row)] for row in range(1, tokens + 1)]
        s.run(s.caller.request(tag, x, [[3]] * tokens, weights))
        np.testing.assert_array_equal(s.caller.outputs[tag].reshape(tokens, H), x * 2.0 * torch.tensor(weights))
