"""An engine with a backend that one can compute by hand: out[t] = sum over j of weight[t, j] * (slot + 1) * x[t]."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from expertd.errors import ExpertdError
from expertd_server.engine import engine as module
from expertd_server.engine.admission import QueueLimits
from expertd_server.engine.convert import bits_of
from expertd_server.engine.device import DeviceExecutor
from expertd_server.engine.engine import Engine
from expertd_server.engine.executor import CpuExecutor
from expertd_server.engine.plain import PlainExecutor
from expertd_server.engine.policy import Policy
from expertd_server.engine.report import BatchReport
from expertd_server.engine.request import Answer, EngineRequest, Operand
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

    def reply(self, r: EngineRequest, outcome) -> None:
        with self._done:
            assert r.request_id not in self.outcomes, "answered once"
            self.outcomes[r.request_id] = outcome
            if isinstance(outcome, Answer):
                self.outputs[r.request_id] = outcome.output.copy()
            self._done.notify_all()

    def wait(self, *numbers: int) -> None:
        with self._done:
            assert self._done.wait_for(lambda: set(numbers) <= set(self.outcomes), 20), f"{numbers} of {self.outcomes}"

    def request(self, number, x, ids, weights, *, layer=0, hidden_dtype="f32", **more) -> EngineRequest:
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
        return EngineRequest(
            layer, len(x), ids.shape[1], hidden, ids_operand, weights, self.reply, request_id=number, **more
        )


def served(layer: int, experts, measured=()) -> ServedLayer:
    return ServedLayer(layer, NUM_EXPERTS, HELD, 2, H, 32, experts, "fake", measured=measured)


class Setup:
    """device: of torch, or "plain": the plain executor, on memory of the host."""

    def __init__(self, device: str, **engine) -> None:
        self.fake = FakeExperts()
        self.reports: list[BatchReport] = []
        measured = engine.pop("measured", ())
        layers = [served(n, self.fake, measured) for n in engine.pop("layers", (0, 1))]
        engine = {"policy": ALONE, "compute_dtype": "f32", "observe": self.reports.append} | engine
        limits = {
            name: engine.pop(f"max_queue_{name}") for name in QueueLimits._fields if f"max_queue_{name}" in engine
        }
        limits["refuse_late"] = engine.pop("refuse_late", True)
        with pytest.MonkeyPatch.context() as patch:
            if device == "plain":
                patch.setattr(module, "executor_of", plain_executor)
            where = torch.device("cpu" if device == "plain" else device)
            self.engine = Engine(where, limits=QueueLimits(**limits), **engine)
        self.engine.hold(layers)
        self.engine.start()
        self.engine.open()
        self.caller = Caller()

    def block(self) -> None:
        """Make the engine busy with a request (number 0), so that everything after it waits."""
        self.fake.gate.clear()
        self.fake.entered.clear()
        self.engine.submit(self.caller.request(0, inputs(1), [[2]], [[1.0]]))
        assert self.fake.entered.wait(20)

    def run(self, *requests: EngineRequest) -> None:
        for r in requests:
            self.engine.submit(r)
        self.caller.wait(*(r.request_id for r in requests))


def plain_executor(device: torch.device, compute_dtype: str, warm: object) -> tuple[PlainExecutor, str]:
    return PlainExecutor(device, compute_dtype, "a test wants it"), "a test wants it"


DEVICES = ["cpu", "plain", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


on_cpu = pytest.mark.parametrize("make", ["cpu"], indirect=True)
"""Of what an engine does on no other device."""

EXECUTORS = (CpuExecutor, PlainExecutor, DeviceExecutor)
"""Whatever runs a batch."""


def inputs(tokens: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed))
    return torch.where(x == 0, 1.0, x)


SOON_S = 0.4
"""Of a deadline that is to pass: far enough for a busy machine to have the request taken before."""


def one(s: Setup, tag: int, within_s: float, tokens: int = 1, **more) -> EngineRequest:
    deadline_ns = time.monotonic_ns() + int(within_s * 1e9)
    return s.caller.request(tag, inputs(tokens), [[2]] * tokens, [[1.0]] * tokens, deadline_ns=deadline_ns, **more)


def pass_deadline(request: EngineRequest) -> None:
    pass_moment(request.deadline_ns)


def pass_moment(monotonic_ns: int) -> None:
    time.sleep(max(0.0, (monotonic_ns - time.monotonic_ns()) / 1e9 + 1e-3))
