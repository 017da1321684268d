"""Callers on GPUs of the server's host (expertd_client.device): correctness, and time from input ready to output.

    python tests/load/gpu_callers.py [--server 0] [--caller 1] [--shapes qwen3,dsv3] [--tokens 1,8,128,512]
                                     [--callers 8x32] [--reconnects 1000] [--hide] [--kill]

The server (the engine with its listener, without gRPC) is this process; each caller is a process of its own.
Microseconds by CUDA events on the caller's stream, median and 99th percentile of 200 calls: eager (launches of a stream
that waits for them are in it), ahead (the stream was busy, as an engine's is), graph (ahead, the call captured in a
CUDA graph), slot (that, its tensors in the session's memory).
host: of the call, on the caller's; server: from the batch's launch to its end, as the server sees it.
Every answer's output was NaN before, and rows of it are compared with the float32 reference: exit code 1 where they
are not right.  --hide: each process sees its own GPU alone (CUDA_VISIBLE_DEVICES).  --kill: what becomes of each side
when the other is killed.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing as mp
import os
import statistics
import time
import traceback

SHAPES = {"qwen3": (128, 8, 2048, 768), "dsv3": (64, 8, 7168, 2048)}
CALLS = 200
IN_A_ROW = 20
CHECKED = 8


def enter(token, endpoint, device):
    """A session as the client's transport opens it."""
    from expertd.v1 import expert_service_pb2 as pb
    from expertd_client.device.cuda_ipc import open_session

    return open_session(pb.SessionAnswer(token=token, endpoint=endpoint), device, same_gpu=True)


def request(shape, M, device, seed=0):
    import torch

    E, k, H, _ = SHAPES[shape]
    g = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(M, H, device=device, generator=g).bfloat16()
    ids = torch.rand(M, E, device=device, generator=g).topk(k).indices.int()
    return x, ids, torch.rand(M, k, device=device, generator=g) / k


def child(target, results, *args):
    """A caller's process: what it fails with goes to the parent."""
    try:
        target(*args, results)
    except BaseException:
        results.put(traceback.format_exc())


def take(results, timeout_s):
    """What a child says."""
    said = results.get(timeout=timeout_s)
    if isinstance(said, str) and said.startswith("Traceback"):
        raise SystemExit(said)
    return said


def rows(t, out):
    """To the server's process: [x, ids, weights, out] of some rows."""
    at = slice(-CHECKED, None)
    return [v[at].float().cpu().numpy() if v.is_floating_point() else v[at].cpu().numpy() for v in (*t, out)]


def percentiles(us):
    us = sorted(us[20:])
    return us[len(us) // 2], us[int(len(us) * 0.99)]


def measure(device, ticket, loads, layers, results):
    """One caller: every load in three ways."""
    faulthandler.dump_traceback_later(100, exit=True)
    import torch

    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    event = lambda: torch.cuda.Event(enable_timing=True)  # noqa: E731
    with enter(*ticket, device) as lane, torch.inference_mode():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for shape, M in loads:
                t = request(shape, M, f"cuda:{device}")
                out = torch.full_like(t[0], float("nan"))
                call = lambda t=t, out=out, layer=layers[shape]: lane.forward(layer, *t, out=out)  # noqa: E731
                for _ in range(8):  # the server captures its graphs
                    call()
                stream.synchronize()
                lane.check()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    call()
                slot = lane.slot(M, t[0].shape[1], t[1].shape[1])
                for to, tensor in zip((slot.hidden_states, slot.topk_ids, slot.topk_weights), t, strict=True):
                    to.copy_(tensor)
                for _ in range(8):
                    slot.forward(layers[shape])
                stream.synchronize()
                in_place = torch.cuda.CUDAGraph()
                with torch.cuda.graph(in_place, stream=stream):
                    slot.forward(layers[shape])
                found = {}
                ways = (("eager", call, out), ("ahead", call, out), ("graph", graph.replay, out))
                for mode, run, out in (*ways, ("slot", in_place.replay, slot.output)):
                    us, host, server = [], [], []
                    out.fill_(float("nan"))
                    for _ in range(CALLS):
                        b, e = event(), event()
                        if mode != "eager":
                            torch.cuda._sleep(400_000)
                        b.record()
                        begin = time.perf_counter()
                        run()
                        host.append(time.perf_counter() - begin)
                        e.record()
                        e.synchronize()
                        us.append(b.elapsed_time(e) * 1e3)
                        server.append(lane.last.kernel_ns / 1e3)
                    found[mode] = (*percentiles(us), rows(t, out), statistics.median(host) * 1e6)
                lane.check()
                slot.close()
                results.put((shape, M, found, statistics.median(server)))
    results.put(None)


def together(device, tickets, shape, M, layer, results):
    """Several callers, each a session and a stream of this process (processes that share a GPU take turns on it), and a
    graph of calls in a row."""
    faulthandler.dump_traceback_later(100, exit=True)
    import torch

    torch.cuda.set_device(device)
    lanes, graphs, answers = [enter(*ticket, device) for ticket in tickets], [], []
    with torch.inference_mode():
        for i, lane in enumerate(lanes):
            stream, t = torch.cuda.Stream(), request(shape, M, f"cuda:{device}", i)
            out = torch.full_like(t[0], float("nan"))
            with torch.cuda.stream(stream):
                for _ in range(10):
                    lane.forward(layer, *t, out=out)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    for _ in range(IN_A_ROW):
                        lane.forward(layer, *t, out=out)
            graphs.append((stream, graph))
            answers.append((t, out))
        us, batches = [], []
        for _ in range(30):
            begin = time.perf_counter()
            for stream, graph in graphs:
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            us.append((time.perf_counter() - begin) * 1e6 / IN_A_ROW)
            batches += [lane.last.batch_requests for lane in lanes]
        for lane in lanes:
            lane.check()
        results.put((sorted(us[10:]), [rows(*a) for a in answers], statistics.mean(batches)))
    for lane in lanes:
        lane.close()


def reconnect(device, tickets, shape, layer, results):
    """Sessions one after another; addresses, descriptors and the GPU's memory before and after."""
    faulthandler.dump_traceback_later(200, exit=True)
    import torch

    torch.cuda.set_device(device)
    t = request(shape, 2, f"cuda:{device}")

    def held():
        with open("/proc/self/maps") as maps:
            spaces = len(maps.readlines())
        return spaces, len(os.listdir("/proc/self/fd")), torch.cuda.mem_get_info(device)[0] >> 20

    before = None
    n = 0
    while (ticket := tickets.get()) is not None:
        with enter(*ticket, device) as lane:
            lane.forward(layer, *t)
            torch.cuda.synchronize()
            lane.check()
        n += 1
        if n == 20:
            before = held()
        results.put("again")
    results.put((n, before, held()))


def endless(device, ticket, shape, M, layer, results):
    """Calls until somebody is killed; says what became of it."""
    faulthandler.dump_traceback_later(100, exit=True)
    import torch

    torch.cuda.set_device(device)
    lane = enter(*ticket, device)
    t = request(shape, M, f"cuda:{device}")
    n = 0
    try:
        while True:
            for _ in range(20):
                out = lane.forward(layer, *t)
                n += 1
                if n == 40:
                    results.put("running")
            torch.cuda.synchronize()
    except Exception as e:
        begin = time.perf_counter()
        torch.cuda.synchronize()
        waited = time.perf_counter() - begin
        lane.close()
        results.put(f"{type(e).__name__}: {e}; {n} calls, then {waited * 1e3:.1f} ms; NaN: {bool(out.isnan().all())}")


class Served:
    """The engine, its listener, and what answers are compared with."""

    def __init__(self, device, shapes):
        import torch

        from expertd_kernels import QuantTensor, Scheme, Weights, build, decide, detect_device, problem_of
        from expertd_server.engine.engine import Engine
        from expertd_server.engine.policy import Policy
        from expertd_server.engine.served import ServedLayer
        from expertd_server.transports.shm import ShmListener

        torch.cuda.set_device(device)
        self.device = torch.device(f"cuda:{device}")
        g, scheme = torch.Generator(device=self.device).manual_seed(1), Scheme.parse("int4_g128")
        self.weights, self.experts, layers = {}, {}, []
        for number, shape in enumerate(shapes):
            E, k, H, I = SHAPES[shape]

            def matrix(n, c, segments, E=E):
                codes = torch.randint(0, 256, (E, n, c // 2), dtype=torch.uint8, device=self.device, generator=g)
                scales = (0.5 + torch.rand(E, n, c // 128, device=self.device, generator=g)) / (4.6 * c**0.5)
                return QuantTensor(scheme, (E, n, c), codes, scales.bfloat16(), segments=segments)

            w = Weights(matrix(2 * I, H, 2), matrix(H, I, 1))
            decision = decide(problem_of(w, detect_device(f"cuda:{device}"), top_k=k))
            self.weights[shape], self.experts[shape] = w, build(decision, w)
            layers.append(
                ServedLayer(number, E, tuple(range(E)), k, H, I, self.experts[shape], decision.chosen.name, True)
            )
        self.layers = {shape: number for number, shape in enumerate(shapes)}
        self.engine = Engine(self.device, policy=Policy(max_tokens=2048))
        self.engine.hold(layers)
        self.engine.start()
        self.engine.open()
        self.listener = ShmListener(self.engine, arena_bytes=1 << 20, most_pools=64)
        self.listener.start()

    def ticket(self):
        from expertd.shm.region import host_id

        token, endpoint, why = self.listener.gpu.offer("caller", host_id())
        assert not why, why
        return token, endpoint

    def alone(self, shape, M):
        """Microseconds of the experts alone, from a graph of eight calls."""
        import torch

        x, ids, w = request(shape, M, self.device)

        def time_it():
            out, stream = torch.empty_like(x), self.engine.stream
            with torch.inference_mode(), torch.cuda.stream(stream):
                for _ in range(2):
                    self.experts[shape](x, ids, w, out=out)
                graph, us = torch.cuda.CUDAGraph(), []
                with torch.cuda.graph(graph, stream=stream):
                    for _ in range(8):
                        self.experts[shape](x, ids, w, out=out)
                for _ in range(20):
                    b, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    b.record()
                    graph.replay()
                    e.record()
                    e.synchronize()
                    us.append(b.elapsed_time(e) * 1e3 / 8)
            return statistics.median(us)

        return self.engine.between(time_it)

    def error(self, shape, checked):
        import torch

        from expertd_kernels import reference, relative_error, tolerance

        x, ids, w, out = (torch.from_numpy(v).to(self.device) for v in checked)
        error = float(relative_error(out.bfloat16(), reference(self.weights[shape], x.bfloat16(), ids, w)))
        if not error <= tolerance("bf16"):
            raise SystemExit(f"{shape}: relative error {error}, want at most {tolerance('bf16')}")
        return error


def visible(device, hide):
    """(the environment's, the number in the process) of a caller's GPU."""
    return (str(device), 0) if hide else (None, device)


def start_process(ctx, target, results, args, see):
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if see is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = see
    p = ctx.Process(target=child, args=(target, results, *args), daemon=True)
    p.start()
    if see is not None:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    return p


def kill_server(a, ctx):
    """A server in a process of its own is killed under load."""
    import signal

    tickets, results = ctx.Queue(), ctx.Queue()
    server = start_process(ctx, serve_forever, results, (a.server, tickets), None)
    see, number = visible(a.caller, a.hide)
    caller = start_process(ctx, endless, results, (number, tickets.get(timeout=60), "qwen3", 8, 0), see)
    assert take(results, 60) == "running"
    time.sleep(0.3)
    os.kill(server.pid, signal.SIGKILL)
    print("the server is killed:", take(results, 20), flush=True)
    caller.join(20)
    print("  the caller's exit code:", caller.exitcode, flush=True)


def serve_forever(device, tickets, results):
    served = Served(device, ["qwen3"])
    tickets.put(served.ticket())
    time.sleep(100)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--server", type=int, default=0)
    parser.add_argument("--caller", type=int, default=1)
    parser.add_argument("--shapes", default="qwen3,dsv3")
    parser.add_argument("--tokens", default="1,8,128,512")
    parser.add_argument("--callers", default="")
    parser.add_argument("--reconnects", type=int, default=0)
    parser.add_argument("--hide", action="store_true")
    parser.add_argument("--kill", action="store_true")
    a = parser.parse_args()
    ctx = mp.get_context("spawn")
    see, number = visible(a.caller, a.hide)
    if a.hide:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(a.server)
        a.server = 0
    shapes = a.shapes.split(",")
    served, results = Served(a.server, shapes), ctx.Queue()
    loads = [(shape, int(M)) for shape in shapes for M in a.tokens.split(",") if M]
    if loads:
        alone = {load: served.alone(*load) for load in loads}
        p = start_process(ctx, measure, results, (number, served.ticket(), loads, served.layers), see)
        print("layer, tokens | kernels | eager p50 p99 | ahead | graph | slot | over | host | server | errors")
        while (found := take(results, 110)) is not None:
            shape, M, modes, server = found
            k, errors = alone[shape, M], [served.error(shape, m[2]) for m in modes.values()]
            cells = " | ".join(f"{m[0]:7.1f} {m[1]:7.1f}" for m in modes.values())
            over = " ".join(f"{m[0] - k:+.1f}" for m in modes.values())
            hosts = " ".join(f"{m[3]:.1f}" for m in modes.values())
            print(
                f"{shape} {M:4d} | {k:7.1f} | {cells} | {over} | {hosts} | {server:.1f} | {max(errors):.1e}", flush=True
            )
        p.join(20)
    for load in filter(None, a.callers.split(",")):
        callers, M = map(int, load.split("x"))
        for shape in shapes:
            tickets = [served.ticket() for _ in range(callers)]
            p = start_process(ctx, together, results, (number, tickets, shape, M, served.layers[shape]), see)
            us, answers, batch = take(results, 90)
            errors = max(served.error(shape, checked) for checked in answers)
            each = us[len(us) // 2]
            print(
                f"{shape} {load}: {each:.1f} us a call of each ({us[0]:.1f} to {us[-1]:.1f}), kernels of all in one"
                f" batch {served.alone(shape, callers * M):.1f} us, {callers * 1e6 / each:.0f} requests/s,"
                f" {batch:.1f} requests a batch, error {errors:.1e}",
                flush=True,
            )
            p.join(20)
    if a.reconnects:
        tickets = ctx.Queue()
        p = start_process(ctx, reconnect, results, (number, tickets, shapes[0], 0), see)
        begin = None
        for n in range(a.reconnects):
            tickets.put(served.ticket())
            assert take(results, 60) == "again"
            if n == 0:
                begin = time.perf_counter()
        tickets.put(None)
        took = time.perf_counter() - begin
        print(f"sessions, mappings+descriptors+MiB free at 20 and at the end: {take(results, 20)}; {took:.1f} s")
        p.join(20)
        print("left at the server:", served.listener.sessions, served.engine.shm_connections.pools, flush=True)
    if a.kill:
        p = start_process(ctx, endless, results, (number, served.ticket(), shapes[0], 8, 0), see)
        assert take(results, 60) == "running"
        time.sleep(0.2)
        p.kill()
        p.join()
        time.sleep(0.5)
        q = start_process(ctx, measure, results, (number, served.ticket(), [(shapes[0], 8)], served.layers), see)
        shape, M, modes, _ = take(results, 110)
        error = max(served.error(shape, m[2]) for m in modes.values())
        print(
            f"a caller is killed: the next one's error {error:.1e}, pools left {served.engine.shm_connections.pools}",
            flush=True,
        )
        q.join(20)
    served.listener.close()
    served.engine.stop(10)
    if a.kill:
        kill_server(a, ctx)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(550, exit=True)
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # children and the engine's threads end with it
