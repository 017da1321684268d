"""What it is worth that a layer of w8a8 takes e4m3 hidden states as they are: batches on a GPU, brought both ways.

    python tests/load/e4m3_inputs.py [--compile] [--shapes qwen3-30b-a3b,deepseek-v3/64] [--tokens 1,8,64,128,512]
                                     [--rounds 40]

--compile: only what the kernels of each size need, side by side; what follows then finds them in Triton's cache.

    widened   collect widens e4m3 to bf16, and the layer rounds its inputs itself
    codes     collect brings codes and scales (those of bf16 requests by the layer's own rule), and the layer takes them

Microseconds, medians in turns, of CUDA graphs over callers' pinned memory: the whole batch (collect, experts, deliver),
the experts alone and collect alone.  staged: ids, weights and, for `codes`, rounding of rows that copy engines have
brought.  under load: a batch of many, inputs, experts and outputs of two lanes on streams of their own as the core
launches them; bf16 comes by copy engines, e4m3 widened by collect and as codes by copy engines.
Then the engine serves both layers: requests of bf16, of e4m3 and of both at once, inline, cold and from its graphs.
Every answer's memory was NaN before; answers of bf16 requests have to have the same bits both ways, rows of all are
compared with the float32 reference of what was sent, and the exit code is 1 where one is not right.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertd_kernels import ActivationQuant, build, decide, detect_device, problem_of, relative_error, tolerance
from expertd_kernels.backends.gather import table as t
from expertd_kernels.backends.gather.kernels import collect, collect_e4m3, deliver, signal
from expertd_kernels.bench.cuda import shape_of
from expertd_kernels.packed.integrity import reference_rows
from expertd_kernels.sources.synthetic import random_inputs, random_weights

HOW = ActivationQuant.E4M3_GROUP128
MOST = tolerance("bf16", HOW)
CHECKED = 8
SETS = 4
"""Input sets of each size, so that few tokens do not find their experts' weights in the cache."""


def layer(name: str) -> Any:
    s = shape_of(name)
    weights = random_weights("e4m3_block128", s.num_experts, s.hidden_size, s.intermediate_size, device="cuda")
    problem = problem_of(weights, detect_device("cuda"), top_k=s.top_k, activation_quant=HOW)
    return s, weights, build(decide(problem, pin="gluon_w8a8"), weights)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """As a client's quantizer: codes u8 [M, H], scales f32 [M, H / 128]."""
    groups = x.float().view(len(x), -1, 128)
    scales = (groups.abs().amax(2) / 448).clamp_min(1e-12)
    codes = (groups / scales[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(x.shape).view(torch.uint8), scales


def widened(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)


class Batch:
    """Requests' memory, the table that names it, and the buffers of one lane."""

    def __init__(self, s: Any, tokens: int, wire: str, seed: int) -> None:
        E, k, H = s.num_experts, s.top_k, s.hidden_size
        x, self.ids, self.w = random_inputs(tokens, H, E, k, seed=seed, device="cuda")
        self.sent, self.wire, scales = x.float(), wire, None
        raw, kind = x.view(torch.uint8), t.BF16
        if wire == "e4m3":
            raw, scales = quantized(x)
            self.sent, kind = widened(raw, scales), t.E4M3
        self.memory, step = raw.cpu().pin_memory(), raw.shape[1]
        self.scales = None if scales is None else scales.cpu().pin_memory()
        self.given = self.ids.cpu().pin_memory(), self.w.cpu().pin_memory()
        self.answer = torch.full((tokens, H), float("nan"), dtype=torch.bfloat16).pin_memory()
        self.places = torch.cat([torch.arange(E), torch.tensor([-1])]).int().cuda()
        self.counts = torch.zeros(E, dtype=torch.int64, device="cuda")
        info, ids, w = t.info(k, E, kind), *self.given
        lines = [
            [
                self.memory.data_ptr() + i * step,
                ids.data_ptr() + 4 * k * i,
                w.data_ptr() + 4 * k * i,
                self.answer.data_ptr() + 2 * H * i,
                info,
                0 if self.scales is None else self.scales.data_ptr() + i * H // 32,
                self.places.data_ptr(),
                self.counts.data_ptr(),
            ]
            for i in range(tokens)
        ]
        self.table = torch.tensor(lines, dtype=torch.int64).pin_memory()
        self.rows, self.hidden = tokens, torch.empty(tokens, H, dtype=torch.bfloat16, device="cuda")
        self.codes = torch.empty(tokens, H, dtype=torch.float8_e4m3fn, device="cuda")
        self.coded = torch.empty(tokens, H // 128, device="cuda")
        self.slots, self.weights = torch.empty_like(self.ids), torch.empty_like(self.w)
        self.right: tuple[Tensor, Tensor] | None = None
        self.verdicts, self.done = (torch.zeros(n, dtype=torch.int32).pin_memory() for n in ((tokens, 2), 1))

    def collect(self, codes: bool) -> None:
        if codes:
            collect_e4m3(self.table, self.rows, self.codes, self.coded, self.slots, self.weights, self.verdicts)
        else:
            collect(self.table, self.rows, self.hidden, self.slots, self.weights, self.verdicts)

    def staged(self, codes: bool) -> None:
        if codes:
            routes = self.slots, self.weights, self.verdicts
            collect_e4m3(self.table, self.rows, self.codes, self.coded, *routes, self.hidden)
        else:
            collect(self.table, self.rows, None, self.slots, self.weights, self.verdicts)

    def compute(self, experts: Any, codes: bool) -> None:
        if codes:
            experts.of_e4m3(self.codes, self.coded, self.slots, self.weights, out=self.hidden)
        else:
            experts(self.hidden, self.slots, self.weights, out=self.hidden)

    def whole(self, experts: Any, codes: bool) -> None:
        self.collect(codes)
        self.compute(experts, codes)
        deliver(self.table, self.rows, self.hidden)
        signal(self.done)


def graph(body: Callable[[], None]) -> Any:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
        stream.synchronize()
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made, stream=stream):
            body()
    return made


def timed(graphs: list[Any]) -> float:
    """Microseconds of one of them, replayed one after another while the host is ahead."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(100_000)
    begin.record()
    for g in graphs:
        g.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / len(graphs)


def in_turns(ways: dict[Any, list[Any]], rounds: int) -> dict[Any, float]:
    found: dict[Any, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, graphs in ways.items():
            found[way].append(timed(graphs))
    return {way: statistics.median(us[rounds // 4 :]) for way, us in found.items()}


class Lanes:
    """Two batches in turns, each input, experts and output on a stream of its own, as csrc/batch_slots.cpp launches
    them."""

    def __init__(self, batches: list[Batch], ways: dict[Any, list[Any]], codes: bool) -> None:
        self.batches, self.ways, self.codes = batches, ways, codes
        self.inputs, self.compute, self.outputs = (torch.cuda.Stream() for _ in range(3))

    def bring(self, i: int) -> None:
        b = self.batches[i]
        if b.wire == "e4m3" and not self.codes:
            self.ways["collect", False][i].replay()
            return
        if b.scales is None:
            b.hidden.copy_(b.memory.view(torch.bfloat16), non_blocking=True)
        else:
            b.codes.view(torch.uint8).copy_(b.memory, non_blocking=True)
            b.coded.copy_(b.scales, non_blocking=True)
        self.ways["staged", self.codes][i].replay()

    def run(self, number: int = 24) -> float:
        """Microseconds a batch."""
        there, computed, gone = ([torch.cuda.Event() for _ in range(2)] for _ in range(3))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(self.inputs):
            torch.cuda._sleep(12_000_000)  # the host is ahead
            begin.record()
        for n in range(number):
            i = n % 2
            with torch.cuda.stream(self.inputs):
                if n > 1:
                    self.inputs.wait_event(gone[i])
                self.bring(i)
                there[i].record()
            with torch.cuda.stream(self.compute):
                self.compute.wait_event(there[i])
                self.ways["experts", self.codes][i].replay()
                computed[i].record()
            with torch.cuda.stream(self.outputs):
                self.outputs.wait_event(computed[i])
                self.batches[i].answer.copy_(self.batches[i].hidden, non_blocking=True)
                gone[i].record()
        with torch.cuda.stream(self.outputs):
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / number


class Wrong(Exception):  # noqa: N818
    """An answer that is not right."""


def error_of(weights: Any, b: Batch, answer: Tensor) -> float:
    """Of some rows, against the reference, which is computed once."""
    if b.right is None:
        rows = torch.unique(torch.linspace(0, b.rows - 1, min(b.rows, CHECKED)).long())
        here = rows.cuda()
        b.right = rows, reference_rows(weights, b.sent[here], b.ids[here], b.w[here], False)
    rows, right = b.right
    return float(relative_error(answer[rows].cuda(), right))


def kernels(name: str, of: Any, tokens: list[int], rounds: int) -> bool:
    """The table of one shape."""
    s, weights, experts = of
    print(f"\n{name}: us, widened -> codes; errors against the float32 reference of what was sent, at most {MOST}\n")
    print("| tokens | wire | whole | experts | collect | staged | under load | error widened, codes | bits |")
    print("|---|---|---|---|---|---|---|---|---|")
    fine = True
    for M in tokens:
        for wire in ("bf16", "e4m3"):
            batches = [Batch(s, M, wire, seed) for seed in range(SETS)]
            ways: dict[Any, list[Any]] = {}
            for codes in (False, True):
                ways["whole", codes] = [graph(lambda b=b, c=codes: b.whole(experts, c)) for b in batches]
                ways["experts", codes] = [graph(lambda b=b, c=codes: b.compute(experts, c)) for b in batches]
                ways["collect", codes] = [graph(lambda b=b, c=codes: b.collect(c)) for b in batches]
                ways["staged", codes] = [graph(lambda b=b, c=codes: b.staged(c)) for b in batches]
            errors, answers = [], []
            for codes in (False, True):
                b, out = batches[0], batches[0].answer
                for buffer in (b.hidden, b.codes.view(torch.uint8), b.coded.view(torch.uint8)):
                    buffer.view(torch.uint8).fill_(0xFF)
                out.fill_(float("nan"))
                torch.cuda.synchronize()
                ways["whole", codes][0].replay()
                torch.cuda.synchronize()
                answers.append(out.clone())
                errors.append(error_of(weights, b, out))
            same = torch.equal(*answers)
            fine &= (same or wire == "e4m3") and all(e <= MOST for e in errors)
            us = in_turns(ways, rounds)
            cells = [f"{us[k, False]:.1f} -> {us[k, True]:.1f}" for k in ("whole", "experts", "collect", "staged")]
            lanes = [Lanes(batches[:2], ways, codes) for codes in (False, True)] if M >= 128 else []
            loaded = [[each.run() for each in lanes] for _ in range(max(4, rounds // 4))]
            cells.append(" -> ".join(f"{statistics.median(us):.1f}" for us in zip(*loaded[1:], strict=True)))
            bits = "same" if same else f"{relative_error(answers[1].cuda(), answers[0].cuda()):.1e} apart"
            print(f"| {M} | {wire} | {' | '.join(cells)} | {errors[0]:.4f}, {errors[1]:.4f} | {bits} |", flush=True)
    return fine


def ask(engine: Any, of: Any, b: Batch, reply: Callable[[Any, Any], None]) -> Tensor:
    """A request of the batch's rows; its answer's memory, NaN until it is there."""
    from expertd_server.engine.request import EngineRequest, Operand

    ids, w = (v.numpy().reshape(-1) for v in b.given)
    raw = b.memory.numpy().reshape(-1)
    hidden = Operand("bf16", raw.view(np.uint16))
    if b.scales is not None:
        hidden = Operand("e4m3", raw, b.scales.numpy().reshape(-1))
    out = np.full((b.rows, of.hidden_size), 0x7FC0, np.uint16)
    routes = Operand("i32", ids), Operand("f32", w)

    def copied(request: Any, outcome: Any) -> None:
        if not isinstance(outcome, Exception):
            out.reshape(-1)[:] = outcome.output
        reply(request, outcome)

    engine.submit(EngineRequest(of, b.rows, of.top_k, hidden, *routes, copied))
    return torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)


def together(engine: Any, of: Any, asked: list[Batch]) -> tuple[list[Tensor], set[int]]:
    """The answers of requests that are submitted at once, and how many there were in their batches."""
    came, sizes, left = threading.Semaphore(0), set(), []

    def reply(_: Any, outcome: Any) -> None:
        left.append(outcome)
        came.release()

    outs = [ask(engine, of, b, reply) for b in asked]
    for _ in asked:
        if not came.acquire(timeout=60):
            raise Wrong("a request was not answered")
    for outcome in left:
        if isinstance(outcome, Exception):
            raise Wrong(f"{type(outcome).__name__}: {outcome}")
        sizes.add(outcome.batch_requests)
    return outs, sizes


MIXES = (("bf16",), ("e4m3",), ("bf16", "e4m3", "e4m3", "bf16"), ("e4m3", "bf16"))


def served(names: list[str], made: list[Any], device: torch.device, turns: int = 6) -> bool:
    """Through the engine: cold, captured and replayed batches; several requests at once."""
    from expertd_server.engine.engine import Engine
    from expertd_server.engine.policy import Policy
    from expertd_server.engine.served import ServedLayer

    fine = True
    sizes = {mix: (1, 5, 60, 300 if len(mix) == 1 else 200) for mix in MIXES}
    asks = [
        [[Batch(s, M, wire, 7 * M + i) for i, wire in enumerate(mix)] for mix in MIXES for M in sizes[mix]]
        for s, _, _ in made
    ]
    for codes in (False, True):
        engine = Engine(device, policy=Policy(max_tokens=512))
        layers = [
            ServedLayer(
                i, s.num_experts, range(s.num_experts), s.top_k, s.hidden_size, s.intermediate_size, experts,
                "gluon_w8a8", capturable=True, in_place=True, takes_e4m3=codes,
            )
            for i, (s, _, experts) in enumerate(made)
        ]  # fmt: skip
        engine.hold(layers)
        engine.start()
        engine.open()
        for of, name, (_, weights, _), asked in zip(layers, names, made, asks, strict=True):
            worst, answers, found = 0.0, 0, set()
            for batch, _ in itertools.product(asked, range(turns)):
                outs, met = together(engine, of, batch)
                found |= met
                for b, out in zip(batch, outs, strict=True):
                    error = error_of(weights, b, out)
                    worst, answers = max(worst, error), answers + 1
                    if not error <= MOST:
                        fine = False
                        print(f"WRONG: {[a.wire for a in batch]} x {b.rows} tokens, {b.wire}: {error}", flush=True)
            way = "codes" if codes else "widened"
            print(
                f"served {name}, {way}: {answers} answers, error at most {worst:.4f}; requests a batch {sorted(found)};"
                f" graphs {len(getattr(engine._executor, 'pieces', ()))}",
                flush=True,
            )
        engine.stop(10)
    return fine


def warm(name: str, tokens: int) -> None:
    """Compile what one size needs: a process of its own, kernels stay in Triton's cache on disk."""
    s, _, experts = layer(name)
    for wire in ("bf16", "e4m3"):
        b = Batch(s, tokens, wire, 0)
        for codes in (False, True):
            b.whole(experts, codes)
            b.staged(codes)
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shapes", default="qwen3-30b-a3b,deepseek-v3/64")
    parser.add_argument("--tokens", default="1,8,64,128,512")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--compile", action="store_true", help="compile the kernels of all sizes and end")
    parser.add_argument("--warm", help="SHAPE:TOKENS, compile the kernels of this size and end")
    a = parser.parse_args()
    if a.warm:
        name, tokens = a.warm.rsplit(":", 1)
        warm(name, int(tokens))
        return 0
    names, tokens = a.shapes.split(","), [int(n) for n in a.tokens.split(",")]
    begin = time.monotonic()
    if a.compile:
        command = [sys.executable, __file__, "--warm"]
        warmed = [subprocess.Popen([*command, f"{name}:{M}"]) for M in tokens for name in names]
        codes = [p.wait() for p in warmed]
        print(f"compiled in {time.monotonic() - begin:.0f} s, exit codes {codes}", flush=True)
        return int(any(codes))
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    made, fine = [layer(name) for name in names], True
    for name, of in zip(names, made, strict=True):
        fine &= kernels(name, of, tokens, a.rounds)
    print(f"{time.monotonic() - begin:.0f} s", flush=True)
    fine &= served(names, made, torch.device("cuda", 0))
    print(f"{time.monotonic() - begin:.0f} s; {'right' if fine else 'WRONG'}", flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
