"""One table (`GROUPS`) makes the flags, the variables, the file's keys and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertd_server.config.logs import FORMATS, LEVELS
from expertd_server.config.parsers import backend, choice, copies, part, seconds, size, size_text, whole, yes_no
from expertd_server.config.values import Address, Ranges, Shard, Split

__all__ = ["GROUPS", "MOST_USED", "OPTIONS", "TESTS", "Option"]

_MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class Option:
    """One option: its name as a field of ServeConfig, how its text is read, and what --help says."""

    name: str
    parse: Callable[[str], Any]
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "EXPERTD_" + self.name.upper()

    def text(self, value: Any) -> str:
        """A value as people write it: "yes", "4GiB"."""
        if self.parse is size:
            return size_text(value)
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


MOST_USED, TESTS = "Most used", "For tests"
GROUPS: tuple[tuple[str, tuple[Option, ...]], ...] = (
    (
        MOST_USED,
        (
            Option("checkpoint", Path, "DIR", "folder of the model: config.json and safetensors files"),
            Option(
                "synthetic",
                str,
                "MODEL:SCHEME",
                "instead of a checkpoint, random weights of a public model's shape, for example"
                " qwen3-30b-a3b:int4_g128",
            ),
            Option(
                "device",
                str,
                "NAME[,NAME]",
                "auto, cpu, cuda[:N], rocm[:N] or xpu[:N]; several share the experts of each layer, such as cuda:0,cpu:"
                " those that are used most are on the first, as far as its memory allows. cpu:N is memory node N",
            ),
            Option(
                "shard", Shard.parse, "RANK/COUNT", "serve shard RANK (from 0) of COUNT equal shards of the experts"
            ),
            Option(
                "listen",
                Address.parse_or_unix,
                "HOST:PORT",
                "address of the gRPC server; port 0 selects a free port; unix:/path is a socket in the file system",
            ),
            Option(
                "cache",
                Path,
                "DIR",
                "folder that keeps packed weights: later starts map them instead of packing again, and all servers of a"
                " host share one copy; default: none",
            ),
        ),
    ),
    (
        "Model and experts",
        (
            Option(
                "layers", Ranges.parse_or_none, "0-3,7", "layers to serve, or none; default: all layers with experts"
            ),
            Option("experts", Ranges.parse, "0-63", "global ids of the experts to serve in each layer; default: all"),
            Option("quantize", str, "SCHEME", "quantize unquantized weights while loading, for example to int4_g128"),
            Option("layer_template", str, "TEMPLATE", "names of the expert tensors of an unknown model family"),
            Option(
                "held",
                Path,
                "FILE",
                "file that records which experts this server has after each change by AdminService, and beside it the"
                " folder FILE.weights, which records its version of the weights. A restart serves what they record:"
                " other experts than --layers, --experts and --shard say, newer weights than --checkpoint, which has to"
                " stay the same folder; default: none",
            ),
        ),
    ),
    (
        "Backend and arithmetic",
        (
            Option(
                "backend",
                backend,
                "NAME",
                'use this kernel backend, or refuse to start: NAME, or by layer "layers.0-2=triton,*=auto"',
            ),
            Option(
                "oracle",
                choice("order", "measure"),
                "HOW",
                "order: the first eligible backend in the platform's order of preference; measure: the fastest eligible"
                " backend, benchmarked at startup on the real weights after a check of its answers",
            ),
            Option(
                "copies",
                copies,
                "N",
                "with --oracle measure, packed copies of each layer. 2 allows one backend for few tokens and another"
                " one"
                " for many, where that is faster and memory suffices",
            ),
            Option(
                "compute_dtype", choice("bf16", "float32"), "DTYPE", "element type inside the kernels: bf16 or float32"
            ),
            Option(
                "activations",
                choice("weight-only", "checkpoint"),
                "HOW",
                "weight-only: activations stay in the compute dtype; checkpoint: they are quantized as the"
                " checkpoint asks",
            ),
            Option(
                "deterministic",
                choice("no", "runs", "batches"),
                "HOW",
                "no: any backend; runs: use only backends that give the same bits in every run; batches: in addition,"
                " the bits of a token do not depend on its batch",
            ),
            Option(
                "nonfinite",
                choice("pass", "refuse", "zero"),
                "WHAT",
                "NaN and infinity in requests. pass: hidden states are computed as they are, and a router weight"
                " that is"
                " not finite refuses the request; refuse: both refuse the request, and the error names the token; zero:"
                " both count as 0. refuse and zero read every hidden state on the CPU, so tensors on a device are not"
                " accepted there",
            ),
            Option("threads", whole(0), "N", "CPU threads of the kernels; 0 = measured at startup"),
            Option(
                "warm_up_routes",
                Ranges.parse,
                "1,4",
                "on an accelerator, numbers of routes per token whose kernels are compiled at startup, in addition"
                " to each"
                " layer's top-k: 1 for tokens grouped by expert; default: none, kernels are compiled at first use",
            ),
        ),
    ),
    (
        "Memory",
        (
            Option(
                "memory_limit",
                size,
                "SIZE",
                "most memory of the device (on a CPU: of the host) that this server uses, for example 20GiB; of several"
                " devices: of each accelerator; 0 = what is free",
            ),
            Option(
                "split",
                Split.parse,
                "N,N",
                "with several devices, how many experts of each layer each of them holds; default: devices of one kind"
                " the same number, those named first as many as fit",
            ),
            Option(
                "routing_stats",
                Path,
                "FILE",
                "with several devices, how often each expert is used, as expertctl plan --record writes it: the most"
                " used experts of each layer go to the first device; default: the lowest ids",
            ),
            Option(
                "move_rate",
                size,
                "SIZE",
                "with several devices, bytes of packed weights a second for moving experts as routing changes, for"
                " example 200MiB; needs room for one layer more; 0 = experts stay where they are",
            ),
            Option("shm_memory", size, "SIZE", "most shared memory of all connections together"),
        ),
    ),
    (
        "Listeners and transports",
        (
            Option(
                "metrics_listen",
                Address.parse,
                "HOST:PORT",
                "address of the HTTP server with Prometheus metrics at /metrics and a probe at /healthz, usually port"
                " 9464; default: none",
            ),
            Option(
                "admin_listen",
                Address.parse_or_unix,
                "HOST:PORT",
                "address of AdminService, by which experts and weights can be changed (expertctl apply, update). It"
                " has to be an address of this host alone, or to have TLS and --callers with the right admin;"
                " default: none",
            ),
            Option(
                "shm",
                choice("auto", "on", "off"),
                "HOW",
                "auto, on or off: shared memory for clients of the same user on this host. auto: where --listen is"
                " loopback",
            ),
            Option(
                "tcp",
                choice("auto", "on", "off"),
                "HOW",
                "auto, on or off: TCP transport beside gRPC for clients of other hosts, with TLS if gRPC has it. auto:"
                " with --tcp-listen;"
                " on: without it, too, at a free port of --listen's host",
            ),
            Option(
                "tcp_listen", Address.parse, "HOST:PORT", "address of the TCP transport; port 0 selects a free port"
            ),
            Option(
                "kserve",
                yes_no,
                "yes|no",
                "yes: also serve layers as models of the Open Inference Protocol (KServe v2)",
            ),
            Option("reflection", yes_no, "yes|no", "gRPC server reflection, which grpcurl and buf need"),
            Option("health", yes_no, "yes|no", "gRPC health service"),
            Option(
                "channelz",
                choice("auto", "on", "off"),
                "HOW",
                "auto, on or off: gRPC's statistics of its own connections (grpc.channelz.v1.Channelz), for clients"
                " with the right describe. auto: where --listen is loopback and grpcio-channelz is installed",
            ),
        ),
    ),
    (
        "Security",
        (
            Option("insecure", yes_no, "yes|no", "yes: listen beyond this host without TLS"),
            Option(
                "tls_cert",
                Path,
                "FILE",
                "certificate chain in PEM. It and the three files below are read again when they change",
            ),
            Option("tls_key", Path, "FILE", "private key of the certificate in PEM"),
            Option(
                "tls_client_ca", Path, "FILE", "mTLS: clients need a certificate signed by one of these authorities"
            ),
            Option(
                "callers",
                Path,
                "FILE",
                "TOML file with the tokens, certificates and rights of clients; default: no client needs one",
            ),
        ),
    ),
    (
        "Batches, queues and limits",
        (
            Option("max_tokens", whole(1, _MOST_TOKENS), "N", "most tokens of a request and of a batch"),
            Option("max_wait_us", whole(0), "US", "maximum batching delay while the engine is idle, in microseconds"),
            Option(
                "patience",
                part,
                "PART",
                "longest wait, as a part of the duration of a batch, for the next requests of clients that were just"
                " answered; 0 = none",
            ),
            Option(
                "refuse_late",
                yes_no,
                "yes|no",
                "yes: refuse at once a request that would be answered after its deadline, judged by recent batches; no:"
                " queue it, and drop it when its deadline has passed",
            ),
            Option("max_in_flight", whole(1), "N", "most requests in flight on one stream"),
            Option(
                "max_queue_tokens",
                whole(1),
                "N",
                "most queued tokens of one client; all clients together may queue 4/3 of it. Requests beyond this limit"
                " and the three below are refused",
            ),
            Option("max_queue_requests", whole(1), "N", "most queued requests, counted in the same way"),
            Option("max_queue_routes", whole(1), "N", "most queued routes (tokens x top_k), counted in the same way"),
            Option(
                "max_queue_bytes",
                size,
                "SIZE",
                "most memory of queued requests and their answers, counted in the same way",
            ),
            Option(
                "max_message_bytes",
                whole(0),
                "N",
                "largest message in bytes; 0 = what --max-tokens tokens in float32 need",
            ),
            Option(
                "max_half_sent_bytes",
                size,
                "SIZE",
                "most memory of incomplete messages of one gRPC connection; all connections together may have 4/3 of"
                " it."
                " Beyond it connections are closed, first those without a complete message for the longest time. At"
                " least twice --max-message-bytes",
            ),
            Option("grace_s", seconds, "S", "seconds after SIGTERM to answer the requests that were accepted"),
        ),
    ),
    (
        "Logs, metrics and traces",
        (
            Option("log_level", choice(*LEVELS), "LEVEL", "lowest level that is logged: debug, info, warning or error"),
            Option(
                "log_format",
                choice(*FORMATS),
                "HOW",
                "text: log lines on standard error, startup messages on standard output; json: everything on standard"
                " error, one object per line",
            ),
            Option(
                "expert_metrics",
                yes_no,
                "yes|no",
                "yes: one metrics series for each expert of each layer (thousands for a large model), which expertctl"
                " plan --metrics reads",
            ),
            Option(
                "traces",
                yes_no,
                "yes|no",
                "yes: requests with a trace context (traceparent) become OpenTelemetry spans, through the SDK that this"
                " process was started with, and exemplars of the histograms",
            ),
        ),
    ),
    (
        TESTS,
        (
            Option(
                "test_route_us",
                whole(0),
                "US",
                "additional microseconds for each route, to imitate a slower machine; not on a GPU",
            ),
            Option(
                "test_part_us",
                Split.parse,
                "US,US",
                "the same for each device of --device, to imitate unequal ones",
            ),
        ),
    ),
)
"""In the order of --help and of docs/options.md."""

OPTIONS: tuple[Option, ...] = tuple(o for _, options in GROUPS for o in options)
