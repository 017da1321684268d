"""What being watched costs: one server for each way of watching, all in one run, taking turns.

    python tests/load/observability.py [--turns 20] [--requests 60] [--out FILE.json]

plain      nobody scrapes, traces and channelz are off
channelz   gRPC counts its calls and connections (--channelz on), and nobody asks
scraped    its metrics are scraped once a second, with a series for each expert
ready      traces are on (--traces yes), and no request is traced
traced     every request is traced, into an SDK that samples all and exports nowhere

A turn is `requests` calls of 8 tokens, one after another, to each server; ratios are of medians over all turns, so what
else the machine does hits all alike.  Servers are this script's own processes on this host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np

WAYS = ("plain", "channelz", "scraped", "ready", "traced")
TRANSPORTS = {"unary": {"unary": True}, "inline": {}, "shm": {}, "tcp": {}}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MODEL, H, K, TOKENS = "tiny:int4_g128", 256, 2, 8


def serve(way: str) -> None:
    """A server until standard input is closed; its addresses go to standard output."""
    from expertd_server.commands.serve import as_server
    from expertd_server.config.serve import ServeConfig
    from expertd_server.config.values import Address
    from expertd_server.host.host import Host

    if way in ("ready", "traced"):
        from opentelemetry import trace
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

        provider = TracerProvider()
        provider.add_span_processor(SpanProcessor())
        trace.set_tracer_provider(provider)
    as_server()
    here = Address("127.0.0.1", 0)
    more = {"traces": way in ("ready", "traced"), "expert_metrics": way == "scraped"}
    more["channelz"] = "on" if way == "channelz" else "off"
    hosts = []
    for shm, tcp in (("off", None), ("on", None), ("off", here)):
        config = ServeConfig(
            synthetic=MODEL, device="cpu", threads=1, listen=here, metrics_listen=here, shm=shm, tcp_listen=tcp, **more
        )
        hosts.append(Host(config))
        hosts[-1].start()
        hosts[-1].ready(120)
    print(json.dumps([(h.address, h._http.port) for h in hosts]), flush=True)
    sys.stdin.read()
    for h in hosts:
        h.close()


def scrape_for_ever(ports: list[int], over: threading.Event) -> None:
    while not over.wait(1.0):
        for port in ports:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()


def measure(turns: int, requests: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each request, by transport and way."""
    from expertd_client import ExpertClient

    command = [sys.executable, __file__, "--serve"]
    servers = {
        w: subprocess.Popen([*command, w], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for w in WAYS
    }
    over = threading.Event()
    try:
        at = {w: json.loads(p.stdout.readline()) for w, p in servers.items()}
        threading.Thread(target=scrape_for_ever, args=([port for _, port in at["scraped"]], over), daemon=True).start()
        place = {"unary": 0, "inline": 0, "shm": 1, "tcp": 2}
        clients = {
            (t, w): ExpertClient(at[w][place[t]][0], timeout_s=30, **options)
            for t, options in TRANSPORTS.items()
            for w in WAYS
        }
        for (t, _), client in clients.items():
            found = "" if t in ("unary", "inline") else client.session(timeout_s=30)
            assert not found or found.transport == t, found
        rng = np.random.default_rng(0)
        x = rng.standard_normal((TOKENS, H)).astype(np.float32)
        ids = rng.random((TOKENS, 8)).argsort()[:, :K].astype(np.int32)
        weights = np.full((TOKENS, K), 0.5, np.float32)
        took: dict[str, dict[str, list[float]]] = {t: {w: [] for w in WAYS} for t in TRANSPORTS}
        for turn in range(-1, turns):  # the first warms up
            for (t, w), client in sorted(clients.items(), key=lambda _: rng.random()):
                for _ in range(requests):
                    begin = time.perf_counter()
                    client.forward(0, x, ids, weights, traceparent=PARENT if w == "traced" else "")
                    if turn >= 0:
                        took[t][w].append(time.perf_counter() - begin)
        for client in clients.values():
            client.close()
        return took
    finally:
        over.set()
        for p in servers.values():
            p.stdin.close()
            p.wait(60)


def table(took: dict[str, dict[str, list[float]]]) -> list[str]:
    """p50 in microseconds of the plain server; of the others p50 and rate as ratios to it."""
    lines = [
        "| transport | plain p50, us |" + "".join(f" {w} p50 | rate |" for w in WAYS[1:]),
        "|---|---|" + "---|---|" * len(WAYS[1:]),
    ]
    for t, ways in took.items():
        plain = ways["plain"]
        row = f"| {t} | {statistics.median(plain) * 1e6:.0f} |"
        for w in WAYS[1:]:
            p50 = statistics.median(ways[w]) / statistics.median(plain)
            rate = trimmed(plain) / trimmed(ways[w])
            row += f" {p50:.3f} | {rate:.3f} |"
        lines.append(row)
    return lines


def trimmed(seconds: list[float]) -> float:
    """The mean without the slowest 2 %: what others on the machine did in between."""
    kept = sorted(seconds)[: max(1, len(seconds) * 98 // 100)]
    return sum(kept) / len(kept)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    took = measure(args.turns, args.requests)
    print("\n".join(table(took)))
    if args.out:
        with open(args.out, "w") as f:
            json.dump(took, f)


if __name__ == "__main__":
    main()
