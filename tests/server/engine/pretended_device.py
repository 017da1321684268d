"""A core for a device whose driver is pretended: copies copy, and a graph is a function that is called.  Run by
test_device_pieces.py with that driver before all others; prints what each batch launched as JSON."""

import ctypes as C
import json
import sys
import threading

import numpy as np
from core_kit import BF16, E4M3, F32, I32, slot_table
from core_kit import E as EXPERTS
from waiting import until

from expertd_server.engine import core as module

H, K, ROWS = 256, 2, 256
NAMES = {n: getattr(module, n) for n in ("COLLECT", "COLLECT_ROUTES", "COLLECT_E4M3", "COLLECT_STAGED")}
ended = []


def words(*shape, dtype=np.uint16):
    return np.zeros(shape, dtype)


def rows_of(t):
    """[first, last] of those that something was copied to, each of them whole."""
    found = t.any(1).nonzero()[0]
    assert (t[found] != 0).all()
    if not len(found):
        return []
    assert len(found) == found[-1] - found[0] + 1
    return [int(found[0]), int(found[-1])]


def take(core, requests):
    """Wait until so many are answered."""
    seen = []
    until(lambda: seen.extend(core.outcomes()) or len(seen) >= requests)


def main(takes_e4m3, nonfinite):
    launched, keep, may_end = [], [], threading.Event()
    may_end.set()
    core = module.Core(
        module.Config(
            batch_slots=1, max_tokens=ROWS, max_queue_requests=100, max_queue_tokens=10**6, max_queue_routes=10**6,
            max_queue_bytes=1 << 30, spin_ns=20_000, compute_dtype=BF16, device=1, streamed_rows=128,
            nonfinite=nonfinite,
        )
    )  # fmt: skip
    assert core.device(1, 2, 3)
    table, verdicts, done = words(ROWS, 8, dtype=np.int64), words(ROWS, 2, dtype=np.uint32), words(16, dtype=np.uint32)
    buffers = [words(ROWS, H), words(ROWS, K, dtype=np.int32), words(ROWS, K, dtype=np.float32), words(ROWS, H)]
    device, codes, coded = words(ROWS, H), words(ROWS, H, dtype=np.uint8), words(ROWS, H // 128, dtype=np.float32)
    names = ("table", "verdicts", "done", "hidden", "slots", "weights", "out", "device_hidden", "device_out")
    memory = (table, verdicts, done, *buffers, device, device, codes, coded)
    names = (*names, "device_codes", "device_scales")
    core.batch_slot(0, module.BatchSlotMemory(**{n: a.ctypes.data for n, a in zip(names, memory, strict=True)}))
    slots, counts = slot_table(), words(8, dtype=np.uint64)
    core.add_layer(
        module.LayerFacts(
            layer=3, generation=1, hidden_size=H, num_experts=EXPERTS, held=6, top_k=K,
            takes_e4m3=takes_e4m3, slots=slots.ctypes.data, expert_tokens=counts.ctypes.data,
        ),
        [(0, 7, "b")],
    )  # fmt: skip

    def graph(name, part, rows, last):
        def run():
            if name in ("COLLECT_STAGED", "COLLECT_ROUTES"):
                launched.append({n: rows_of(a) for n, a in (("wide", device), ("codes", codes), ("scales", coded))})
            launched.append(name)
            if name == "DELIVER":
                assert may_end.wait(20)
                done[0] = 1

        keep.append(C.CFUNCTYPE(None)(run))
        core.add_graph(3, 1, part, 0, rows, K, last, C.cast(keep[-1], C.c_void_p).value)

    for rows in (8, ROWS):
        graph("EXPERTS", module.EXPERTS, rows, 0)
        graph("DELIVER", module.DELIVER, rows, H)
        for name, part in NAMES.items():
            graph(name, part, rows, H)

    def loop():
        run = module.Run()
        while (code := core.run(run)) != module.STOPPED:
            assert code == module.RUN
            ended.append(f"no graph: {run.tokens} tokens")
            core.done(run.batch_slot, 1, "no graph")

    thread = threading.Thread(target=loop)
    thread.start()

    def submit(kind, M):
        hidden = np.ones((M, H), np.uint16 if kind == "bf16" else np.uint8)
        scales, out = np.ones((M, H // 128), np.float32), words(M, H)
        ids, w = words(M, K, dtype=np.int32), np.ones((M, K), np.float32)
        keep.append((hidden, scales, out, ids, w))
        core.submit(
            module.Forward(
                hidden=hidden.ctypes.data, scales=scales.ctypes.data if kind == "e4m3" else 0, ids=ids.ctypes.data,
                weights=w.ctypes.data, out=out.ctypes.data, layer=3, tokens=M, top_k=K, caller=1, ids_dtype=I32,
                hidden_dtype=BF16 if kind == "bf16" else E4M3, weights_dtype=F32, out_dtype=BF16,
            )
        )  # fmt: skip

    found = {}
    for kind, M in (("bf16", 5), ("e4m3", 5), ("bf16", 200), ("e4m3", 200)):
        submit(kind, M)
        take(core, 1)
        found[f"{kind} {M}"] = launched[:]
        for t in (launched, device, codes, coded):
            t.clear() if t is launched else t.fill(0)
    may_end.clear()
    submit("bf16", 5)
    until(lambda: "EXPERTS" in launched)
    submit("bf16", 100)
    submit("e4m3", 60)
    until(lambda: core.load().queued_requests == 3)
    launched.clear()
    may_end.set()
    take(core, 3)
    found["both"] = launched[launched.index("DELIVER") + 1 :] if launched[0] == "DELIVER" else launched[:]
    core.stop()
    thread.join(20)
    assert not ended, ended
    return found


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
