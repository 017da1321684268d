"""New weights for a GPU server under load: whether bits are those of a CPU, then seconds, failed calls and latencies.

    python tests/load/update_gpu.py [--layers 6] [--budget 140]

The model has the sizes of Qwen3-30B-A3B: 48 layers of 128 experts, 57 GB of bf16 in, int4_g128 out; `--layers` of them
are held, and seconds are scaled to 48, which each line says.  One process serves, two call it through shared memory at
half of the calls that they get in a closed loop ("control": the same calls while nothing is updated), another one is
the trainer.  Tensors come from pinned host memory and from the same GPU's memory (both as the service has them once
they are there: without transport), from a trainer's GPU memory through CUDA IPC, and over gRPC from another process.
What does not come to its end in --budget seconds is left out, and said.  Exit code 1 = bits that differ, a failed call.

`--stalls` prints what the server's engine did between batches, which callers wait for.  `--small` runs the same on a
CPU with a tiny model: a test of this script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import stalls
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "kernels"))

from adversarial import adversarial  # noqa: E402

from expertd.errors import ExpertdError  # noqa: E402
from expertd_client import ExpertClient  # noqa: E402
from expertd_client.weights import Updater  # noqa: E402
from expertd_kernels import QuantTensor, Scheme, decide, detect_device  # noqa: E402
from expertd_kernels.checkpoint import open_checkpoint  # noqa: E402
from expertd_kernels.checkpoint.received import Received  # noqa: E402
from expertd_kernels.oracle.rules import judge  # noqa: E402
from expertd_kernels.oracle.table import BACKENDS  # noqa: E402
from expertd_kernels.packed.builder import pack, problem_of  # noqa: E402
from expertd_kernels.sources.quantized import QuantizedSource  # noqa: E402
from expertd_kernels.sources.synthetic import random_inputs, random_weights  # noqa: E402
from expertd_kernels.weights import quantize as quantize_module  # noqa: E402
from expertd_kernels.weights.quantize import quantize, quantize_matrix, scheme_named  # noqa: E402
from expertd_kernels.weights.scheme import ActivationQuant  # noqa: E402
from expertd_server.config.serve import ServeConfig  # noqa: E402
from expertd_server.config.values import Address  # noqa: E402
from expertd_server.host.host import Host  # noqa: E402
from expertd_server.updates.updates import UpdateRequest, Updates  # noqa: E402

SCHEMES = ("int4_g128", "mxfp4", "int8_channel", "e4m3_block128", "int4_g32", "mxfp8", "nvfp4")
NONE, GROUPS = ActivationQuant.NONE, ActivationQuant.E4M3_GROUP128
PACKED = [
    (backend, scheme, NONE)
    for backend in ("gluon_sm90", "triton")
    for scheme in ("int4_g128", "mxfp4", "int8_channel", "e4m3_block128")
] + [("gluon_w8a8", "e4m3_block128", GROUPS)]
MODEL_LAYERS = 48
AFTER_S = 0.1
"""After a switch: calls that fall into it may wait for it, or for what it left to be done."""


@dataclass(frozen=True)
class Sizes:
    experts: int
    hidden: int
    inner: int
    top_k: int
    tokens: int

    @property
    def bytes(self) -> int:
        """Of a layer in bf16."""
        return self.experts * 3 * self.hidden * self.inner * 2

    def shapes(self) -> dict[str, tuple[int, int]]:
        return {
            "gate_proj": (self.inner, self.hidden),
            "up_proj": (self.inner, self.hidden),
            "down_proj": (self.hidden, self.inner),
        }

    def places(self) -> Iterator[tuple[str, tuple[int, int], int, int]]:
        """(end of the name, shape, first byte, last byte) of each tensor of a layer that lies in one piece."""
        at = 0
        for e in range(self.experts):
            for projection, shape in self.shapes().items():
                nbytes = 2 * shape[0] * shape[1]
                yield f"mlp.experts.{e}.{projection}.weight", shape, at, at + nbytes
                at += nbytes


QWEN, SMALL = Sizes(128, 2048, 768, 8, 16), Sizes(4, 256, 128, 2, 4)


class Clock:
    """Of the whole run."""

    def __init__(self, budget_s: float) -> None:
        self._begin, self._budget_s = time.monotonic(), budget_s

    @property
    def left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._begin)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begin:6.1f} s] {text}", flush=True)


def layer_of(sizes: Sizes, seed: int) -> torch.Tensor:
    """[bytes] u8: a layer's weights, a random stretch again and again."""
    g = torch.Generator().manual_seed(seed)
    some = (torch.randn(min(1 << 24, sizes.bytes // 2), generator=g) * 0.02).bfloat16()
    return some.repeat(-(-sizes.bytes // 2 // some.numel()))[: sizes.bytes // 2].view(torch.uint8)


def saved(folder: Path, sizes: Sizes, layers: int, content: torch.Tensor) -> None:
    """A checkpoint whose layers have all the same weights."""
    facts = {"model_type": "qwen3_moe", "hidden_size": sizes.hidden, "moe_intermediate_size": sizes.inner}
    facts |= {"num_experts": sizes.experts, "num_experts_per_tok": sizes.top_k, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(facts))
    for n in range(layers):
        header = {
            f"model.layers.{n}.{end}": {"dtype": "BF16", "shape": shape, "data_offsets": [begin, stop]}
            for end, shape, begin, stop in sizes.places()
        }
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with open(folder / f"model-{n:05d}.safetensors", "wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.write(content.numpy().data)


# ---- bits ------------------------------------------------------------------------------------------------------------


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def compared(here: QuantTensor, there: QuantTensor) -> str:
    """ "" where the bits are equal, else how many differ."""
    out = []
    for (name, a), (_, b) in zip(here.tensors(), there.tensors(), strict=True):
        if not equal(a, b):
            x, y = (t.cpu().contiguous().view(torch.uint8) for t in (a, b))
            where = (x != y).nonzero()
            out.append(f"{len(where)} of {x.numel()} bytes of {name}, the first at {where[0].tolist()}")
    return "; ".join(out)


def quantized_bits(device: torch.device) -> list[str]:
    faults = []
    for name in SCHEMES:
        for dtype in ("bf16", "f32"):
            w = adversarial(3, 256, 512).to({"bf16": torch.bfloat16, "f32": torch.float32}[dtype])
            w = torch.nan_to_num(w, posinf=3e38, neginf=-3e38)
            q = QuantTensor(Scheme.parse(dtype), (3, 256, 512), w, segments=2)
            scheme = scheme_named(name)
            here = quantize_matrix(q, scheme)
            ways = {"": quantize_matrix(q.to(device), scheme)}
            fused, quantize_module._fused = quantize_module._fused, lambda w, scheme, out: False
            try:
                ways[", step by step"] = quantize_matrix(q.to(device), scheme)
            finally:
                quantize_module._fused = fused
            for way, there in ways.items():
                if wrong := compared(here, there):
                    faults.append(f"bits: {name} of {dtype}{way}: {wrong}")
    return faults


def packed_bits(device: torch.device) -> list[str]:
    faults = []
    plain = random_weights("bf16", 6, 512, 256, seed=3)
    for backend, scheme, rounding in PACKED:
        row = next(b for b in BACKENDS if b.name == backend)
        packed = []
        for weights in (plain, plain.to(device)):
            made = quantize(weights, scheme)
            problem = problem_of(made, detect_device(device.type), activation_quant=rounding)
            if refusals := judge(row, problem):
                print(f"  packed bits: {backend} {scheme}: not here: {refusals[0]}")
                break
            packed.append(pack(row, made, problem))
        if len(packed) == 2:
            here, there = packed
            wrong = [n for n in here.tensors if not equal(here.tensors[n], there.tensors[n])]
            if wrong or here.meta != there.meta:
                faults.append(f"bits: {backend} packs {scheme} to other {', '.join(wrong) or 'facts'}")
    return faults


def received_bits(device: torch.device, folder: Path, sizes: Sizes, content: torch.Tensor) -> list[str]:
    """Tensors that are put and quantized on the device, against a boot's and `expertd quantize`'s way."""
    some = list(range(min(8, sizes.experts)))
    checkpoint = open_checkpoint(folder)
    want = QuantizedSource(checkpoint, scheme_named("int4_g128")).load(0, some)
    faults = []
    for where, memory in (("host", pinned(content, device)), ("GPU", content.to(device))):
        received = Received(checkpoint, {0: some})
        put_layer(received, 0, sizes, memory)
        taken = received.take()
        assert taken is not None
        got = QuantizedSource(taken[1], scheme_named("int4_g128"), device).load(0, some)
        for matrix in ("w13", "w2"):
            if wrong := compared(getattr(want, matrix), getattr(got, matrix)):
                faults.append(f"bits: {matrix} from the {where}'s memory: {wrong}")
        if not torch.equal(want.origin, got.origin):
            faults.append(f"digests from the {where}'s memory differ")
    return faults


def put_layer(received: Received, number: int, sizes: Sizes, memory: torch.Tensor) -> None:
    """Tensors of a layer that lie in `memory` [bytes] u8."""
    for end, shape, begin, _ in sizes.places():
        name = f"model.layers.{number}.{end}"
        received.put_memory(name, "BF16", shape, lambda nbytes, begin=begin: memory[begin : begin + nbytes])


def pinned(content: torch.Tensor, device: torch.device) -> torch.Tensor:
    return content.pin_memory() if device.type == "cuda" else content


def pieces_alone(device: torch.device, folder: Path, sizes: Sizes, content: torch.Tensor) -> list[str]:
    """Prints milliseconds of a layer's parts while nothing else runs: bringing and quantizing it, packing it."""
    checkpoint, experts = open_checkpoint(folder), list(range(sizes.experts))
    settled = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for where, memory in (("pinned host memory", pinned(content, device)), ("the GPU's memory", content.to(device))):
        took: dict[str, list[float]] = {"quantized": [], "packed": []}
        for _ in range(4):
            received = Received(checkpoint, {0: experts})
            put_layer(received, 0, sizes, memory)
            taken = received.take()
            assert taken is not None
            settled()
            start = time.perf_counter()
            weights = QuantizedSource(taken[1], scheme_named("int4_g128"), device).load(0, experts)
            settled()
            took["quantized"].append(time.perf_counter() - start)
            problem = problem_of(weights, detect_device(device.type), top_k=sizes.top_k)
            row = decide(problem).require()
            start = time.perf_counter()
            pack(row, weights, problem)
            settled()
            took["packed"].append(time.perf_counter() - start)
        best = {what: 1e3 * min(seconds) for what, seconds in took.items()}
        each = ", ".join(f"{what} in {b:.1f} ms" for what, b in best.items())
        scaled = 1e-3 * sum(best.values()) * MODEL_LAYERS
        print(f"    a layer alone from {where}: {each} ({row.name}); {MODEL_LAYERS} of them {scaled:.2f} s")
    return []


# ---- load ------------------------------------------------------------------------------------------------------------


def _call(
    address: str, layers: int, sizes: Sizes, threads: int, rate: Any, counts: Any, mine: int, stop: Any, out: Any
) -> None:
    """A process that calls: rate.value calls a second of all of its threads, 0 = one after another; counts[mine]: those
    that were answered."""
    torch.set_num_threads(1)
    done: list[tuple[float, float]] = []
    failed: list[str] = []
    with ExpertClient(address) as client:
        x, ids, w = random_inputs(sizes.tokens, sizes.hidden, sizes.experts, sizes.top_k, dtype=torch.bfloat16, seed=3)

        def run(seed: int) -> None:
            due, n = time.monotonic() + seed * 1e-3, seed
            while not stop.is_set():
                if rate.value:
                    due = max(due + threads / rate.value, time.monotonic() - 1.0)
                    if (pause := due - time.monotonic()) > 0:
                        time.sleep(pause)
                else:
                    due = time.monotonic()
                n += 1
                try:
                    client.forward(n % layers, x, ids, w, timeout_s=20)
                except ExpertdError as error:
                    failed.append(f"{error.reason}: {error.message}")
                    continue
                now = time.monotonic()
                done.append((now, now - due))
                counts[mine] = len(done)

        running = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    out.put((np.array(done).reshape(-1, 2), failed))


class Load:
    """Processes that call."""

    def __init__(self, address: str, layers: int, sizes: Sizes, processes: int, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._processes, self._stop, self._out = processes, spawn.Event(), spawn.Queue()
        self._rate, self._counts = spawn.Value("d", 0.0), spawn.Array("L", processes, lock=False)
        shared = (address, layers, sizes, threads, self._rate, self._counts)
        self._running = [
            spawn.Process(target=_call, args=(*shared, i, self._stop, self._out), daemon=True) for i in range(processes)
        ]
        for process in self._running:
            process.start()

    def at(self, calls_per_s: float) -> None:
        self._rate.value = calls_per_s / self._processes

    @property
    def answered(self) -> int:
        return sum(self._counts)

    def end(self) -> tuple[np.ndarray, list[str]]:
        """[calls, 2] monotonic second of the end, seconds; what failed."""
        self._stop.set()
        found = [self._out.get(timeout=60) for _ in self._running]
        for process in self._running:
            process.join(10)
        return np.concatenate([d for d, _ in found]), [f for _, failed in found for f in failed]


# ---- updates ---------------------------------------------------------------------------------------------------------


@dataclass
class Update:
    """begin to ready, and the switch, on the monotonic clock; stages: seconds of making layers by stage; beginning: of
    the update alone."""

    begin: float
    ready: float
    switch: float
    end: float
    stages: dict[str, float]
    beginning: float = 0.0


def put_here(updates: Updates, layers: int, sizes: Sizes, memory: torch.Tensor) -> Update:
    """An update whose tensors lie in `memory`, as they do after a transport."""
    name = f"update-{updates.highest + 1}"
    begin = time.monotonic()
    job = updates.begin(UpdateRequest(name))
    begun = time.monotonic() - begin
    assert job.received is not None
    for n in range(layers):
        put_layer(job.received, n, sizes, memory)
        job.packing.wake()
    updates.seal(name)
    job.ended.wait(120)
    if job.error is not None:
        raise job.error
    ready = time.monotonic()
    stages = dict(job.packing._workshop.seconds)
    updates.commit(name)
    return Update(begin, ready, ready, time.monotonic(), stages, begun)


def _trainer(address: str, layers: int, sizes: Sizes, on: str, hashes: bool, out: Any) -> None:
    """Another process that publishes.  on: device of its tensors."""
    try:
        torch.set_num_threads(8)
        memory = layer_of(sizes, 5).to(on)
        with Updater([address], hashes=hashes, timeout_s=60, cuda_ipc=on == "cuda") as updater:
            tensors = {
                f"model.layers.{n}.{end}": memory[at:stop].view(torch.bfloat16).view(shape)
                for n in range(layers)
                for end, shape, at, stop in sizes.places()
            }
            begin = time.monotonic()
            update = updater.begin()
            update.put_all(tensors)
            update.prepare()
            ready = time.monotonic()
            update.commit()
            out.put(Update(begin, ready, ready, time.monotonic(), {}))
    except BaseException:
        out.put(traceback.format_exc())


def put_from_afar(address: str, layers: int, sizes: Sizes, on: str, hashes: bool, wait_s: float) -> Update:
    spawn = multiprocessing.get_context("spawn")
    out = spawn.Queue()
    process = spawn.Process(target=_trainer, args=(address, layers, sizes, on, hashes, out), daemon=True)
    process.start()
    try:
        found = out.get(timeout=max(1.0, wait_s))
    finally:
        process.terminate()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


# ---- the table -------------------------------------------------------------------------------------------------------


def within(calls: np.ndarray, windows: list[tuple[float, float]]) -> tuple[np.ndarray, float]:
    """(seconds of calls that ended in one of them, seconds of the windows)."""
    inside = np.zeros(len(calls), bool)
    for begin, end in windows:
        inside |= (calls[:, 0] >= begin) & (calls[:, 0] < end)
    return calls[inside, 1], sum(end - begin for begin, end in windows)


def worst_around(calls: np.ndarray, begin: float, end: float) -> float:
    """Seconds of the longest call that was under way between them."""
    inside = (calls[:, 0] >= begin) & (calls[:, 0] - calls[:, 1] < end)
    return float(calls[inside, 1].max()) if inside.any() else float("nan")


def ms(seconds: np.ndarray, q: float) -> float:
    return 1e3 * float(np.quantile(seconds, q)) if len(seconds) else float("nan")


def report(name: str, found: list[Update], calls: np.ndarray, control: list[tuple[float, float]], args: Any) -> None:
    """A line for a source of tensors, and one for its switches."""
    sizes, layers = args.sizes, args.layers
    took = [u.ready - u.begin for u in found]
    seconds = statistics.median(took)
    scaled, nbytes = seconds * MODEL_LAYERS / layers, layers * sizes.bytes
    alone, alone_s = within(calls, control)
    during, during_s = within(calls, [(u.begin, u.end + AFTER_S) for u in found])
    rate, base = len(during) / during_s, len(alone) / alone_s
    args.clock.say(
        f"{name}: {len(found)} updates, {seconds:.3f} s for {layers} layers (median; {min(took):.3f} to"
        f" {max(took):.3f}), {nbytes / seconds / 1e9:.2f} GB/s; scaled to {MODEL_LAYERS} layers: {scaled:.2f} s"
    )
    tail = ms(during, 0.99) / ms(alone, 0.99)
    print(
        f"    calls: {rate:.0f}/s against {base:.0f}/s ({rate / base:.2f}); p50 {ms(during, 0.5):.2f} ms against"
        f" {ms(alone, 0.5):.2f}; p99 {ms(during, 0.99):.2f} ms against {ms(alone, 0.99):.2f} ({tail:.2f} times)"
    )
    starts = [b + i * AFTER_S for b, e in control for i in range(int((e - b) / AFTER_S))]
    usual = statistics.median(worst_around(calls, s, s + AFTER_S) for s in starts)
    worst = [worst_around(calls, u.switch, u.end + AFTER_S) for u in found]
    commit = statistics.median(u.end - u.switch for u in found)
    print(
        f"    switch: {1e3 * commit:.2f} ms; the longest call in {AFTER_S * 1e3:.0f} ms after it: median"
        f" {1e3 * statistics.median(worst):.2f} ms, most {1e3 * max(worst):.2f}; without one: median {1e3 * usual:.2f}"
        f" ms: it adds {1e3 * (statistics.median(worst) - usual):.2f} ms"
    )
    stages = {k: statistics.median(u.stages.get(k, 0.0) for u in found) for k in found[0].stages}
    if stages:
        parts = ", ".join(f"{k} {1e3 * v / layers:.1f}" for k, v in sorted(stages.items()) if v)
        begun = 1e3 * statistics.median(u.beginning for u in found)
        print(f"    ms of a layer by stage: {parts}; beginning an update {begun:.1f}", flush=True)


def measured(host: Host, content: torch.Tensor, args: Any) -> list[str]:
    sizes, layers, clock, device = args.sizes, args.layers, args.clock, args.where
    load = Load(host.address, layers, sizes, args.processes, args.threads)
    sources: dict[str, list[Update]] = {}
    faults: list[str] = []
    try:
        while not load.answered:
            time.sleep(0.1)
        time.sleep(1.0)
        begin, before = time.monotonic(), load.answered
        time.sleep(args.span_s / 2)
        capacity = (load.answered - before) / (time.monotonic() - begin)
        load.at(capacity / 2)
        clock.say(f"closed loop: {capacity:.0f} calls/s of {sizes.tokens} tokens; from here on half of that")
        time.sleep(1.0)
        control = [(time.monotonic(), 0.0)]
        time.sleep(args.span_s)
        control[0] = (control[0][0], time.monotonic())
        memories = {"pinned host memory": pinned(content, device)}
        if device.type == "cuda":
            memories["the same GPU's memory"] = content.to(device)
        for name, memory in memories.items():
            put_here(host._updates, layers, sizes, memory)  # the first takes memory from the system
            until = time.monotonic() + args.span_s
            while not sources.get(name) or (time.monotonic() < until and clock.left_s > 20):
                time.sleep(2 * AFTER_S)  # what a switch leaves to be done is not the next update's
                sources.setdefault(name, []).append(put_here(host._updates, layers, sizes, memory))
        memories.clear()
        afar = [("another process over gRPC, hashed", "cpu", True), ("another process over gRPC", "cpu", False)]
        if device.type == "cuda":
            afar.insert(0, ("a trainer's GPU memory (CUDA IPC)", "cuda", False))
        for name, on, hashes in afar:
            if clock.left_s < 25:
                clock.say(f"{name}: left out, {clock.left_s:.0f} s are left")
                continue
            try:
                found = put_from_afar(host.address, layers, sizes, on, hashes, clock.left_s - 10)
                sources.setdefault(name, []).append(found)
            except Exception as error:
                faults.append(f"{name}: {error}")
        now = time.monotonic()
        time.sleep(min(args.span_s, max(0.5, clock.left_s - 10)))
        control.append((now, time.monotonic()))
    finally:
        calls, failed = load.end()
    for name, found in sources.items():
        report(name, found, calls, control, args)
    clock.say(f"{len(calls)} calls answered, {len(failed)} failed")
    return faults + [f"call failed: {text}" for text in failed[:5]]


def booted(folder: Path, args: Any) -> Host:
    here = Address("127.0.0.1", 0)
    if args.where.type == "cuda":  # the boot is not what is measured: on the GPU it takes seconds
        QuantizedSource.__init__.__defaults__ = (args.where,)
    config = ServeConfig(
        checkpoint=folder,
        quantize="int4_g128",
        device=args.where.type,
        listen=here,
        admin_listen=here,
        max_tokens=256,
        threads=0 if args.where.type == "cuda" else 1,
    )
    host = Host(config)
    host.start()
    host.ready(max(30.0, args.clock.left_s))
    QuantizedSource.__init__.__defaults__ = (None,)
    return host


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layers", type=int, default=6, help=f"held, of {MODEL_LAYERS} (6)")
    parser.add_argument("--budget", type=float, default=140.0, help="seconds of the whole run (140)")
    parser.add_argument("--span-s", type=float, default=5.0, help="of each measurement (5)")
    parser.add_argument("--processes", type=int, default=2, help="that call (2)")
    parser.add_argument("--threads", type=int, default=4, help="of each of them (4)")
    parser.add_argument(
        "--stalls", action="store_true", help="print what held up the server's engine for 0.5 ms or more"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU: a test of this script")
    args = parser.parse_args()
    args.clock = Clock(args.budget)
    args.sizes, args.where = (SMALL, torch.device("cpu")) if args.small else (QWEN, torch.device("cuda"))
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, content = Path(name), layer_of(args.sizes, 1)
        saved(folder, args.sizes, args.layers, content)
        args.clock.say(f"checkpoint of {args.layers} layers, {args.layers * args.sizes.bytes / 1e9:.2f} GB, written")
        steps: list[tuple[str, Callable[[], list[str]]]] = [
            (f"quantized bits of {', '.join(SCHEMES)}", lambda: quantized_bits(args.where)),
            (f"packed bits of {len(PACKED)} schemes and backends", lambda: packed_bits(args.where)),
            ("a layer's parts alone", lambda: pieces_alone(args.where, folder, args.sizes, content)),
            ("bits of received tensors", lambda: received_bits(args.where, folder, args.sizes, content)),
        ]
        for what, step in steps:
            try:
                wrong = step()
            except Exception:
                wrong = [f"{what}: {traceback.format_exc()}"]
            faults += wrong
            args.clock.say(f"{what}: {'FAULT' if wrong else 'as they should be'}")
        try:
            host = booted(folder, args)
            stack.callback(host.close)
            backends = {b.served.backend for b in host.residence.booted.values()}
            args.clock.say(f"serving {args.layers} layers on {', '.join(backends)}, {os.cpu_count()} cores")
            with stalls.recorded(0.5e-3) as found:
                faults += measured(host, layer_of(args.sizes, 2), args)
            if args.stalls:
                print(stalls.table(found), flush=True)
        except Exception:
            faults.append(traceback.format_exc())
    for fault in faults:
        print(f"FAULT: {fault}")
    args.clock.say("FAULTS" if faults else "no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
