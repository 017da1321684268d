"""One table (`OPTIONS`) makes the flags, the variables, the file's keys and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertd_server.config.logs import FORMATS, LEVELS
from expertd_server.config.parsers import backend, choice, copies, part, seconds, size, whole, yes_no
from expertd_server.config.values import Address, Ranges, Shard

__all__ = ["OPTIONS", "Option"]

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


OPTIONS: tuple[Option, ...] = (
    Option("checkpoint", Path, "DIR", "folder with config.json and safetensors files"),
    Option("synthetic", str, "MODEL:SCHEME", "random weights of a public model's shape, as qwen3-30b-a3b:int4_g128"),
    Option("layer_template", str, "TEMPLATE", "names of the expert tensors of a family that is not known"),
    Option("quantize", str, "SCHEME", "quantize unquantized weights while loading, as int4_g128 or mxfp4"),
    Option("layers", Ranges.parse_or_none, "0-3,7", "layers to hold, or none; default: all that have experts"),
    Option("experts", Ranges.parse, "0-63", "global ids of the experts to hold in each layer; default: all"),
    Option("shard", Shard.parse, "RANK/COUNT", "hold part RANK (from 0) of COUNT equal parts of the experts"),
    Option("device", str, "NAME", "auto, cpu, cuda[:N], rocm[:N] or xpu[:N]"),
    Option("backend", backend, "NAME", 'pin the kernel backend: NAME, or by layer "layers.0-2=triton,*=auto"'),
    Option(
        "oracle",
        choice("order", "measure"),
        "HOW",
        "order: the first backend of the platform's order that no rule refuses; measure: the fastest here, on the real"
        " weights, after a check of its answers",
    ),
    Option(
        "copies",
        copies,
        "N",
        "with --oracle measure, packed copies of a layer: 2 = one backend for few tokens and another for many, where"
        " that is worth it and memory allows",
    ),
    Option(
        "cache",
        Path,
        "DIR",
        "keep packed weights there: later starts map them instead of packing, and servers share them; default: nowhere",
    ),
    Option("compute_dtype", choice("bf16", "float32"), "DTYPE", "bf16 or float32: element type inside the kernels"),
    Option(
        "activations",
        choice("weight-only", "checkpoint"),
        "HOW",
        "weight-only: activations stay in the compute dtype; checkpoint: rounded as the checkpoint asks",
    ),
    Option(
        "deterministic",
        choice("no", "runs", "batches"),
        "HOW",
        "runs: only backends that give the same bits from run to run; batches: and a token's bits do not depend on the"
        " batch that it is computed in",
    ),
    Option(
        "memory_limit",
        size,
        "SIZE",
        "most memory of the device (on a CPU: of the host) that this server takes, as 20GiB, where others share it; 0 ="
        " what is free",
    ),
    Option(
        "threads",
        whole(0),
        "N",
        "CPU threads of the kernels; 0 = measured at boot (torch's operators: torch's default)",
    ),
    Option("listen", Address.parse_or_unix, "HOST:PORT", "where to serve gRPC; port 0 = a free one; or unix:/path"),
    Option(
        "metrics_listen", Address.parse, "HOST:PORT", "where to serve Prometheus metrics over HTTP; default: nowhere"
    ),
    Option(
        "expert_metrics",
        yes_no,
        "yes|no",
        "yes: the metrics have a series for each expert of each layer, thousands of a large model: what expertctl plan"
        " --metrics reads",
    ),
    Option(
        "admin_listen",
        Address.parse_or_unix,
        "HOST:PORT",
        "where to serve AdminService, which changes what is held (expertctl apply); this host alone, or TLS and callers"
        " with the right admin; or unix:/path; default: nowhere",
    ),
    Option(
        "held",
        Path,
        "FILE",
        "what is held is written there whenever it is changed, and a restart holds that instead of --layers, --experts"
        " and --shard; default: nowhere, a restart holds what the options say",
    ),
    Option(
        "shm",
        choice("auto", "on", "off"),
        "HOW",
        "shared memory for clients of the same user on this host: auto = where --listen is loopback",
    ),
    Option("shm_memory", size, "SIZE", "most shared memory of all sessions together"),
    Option(
        "tcp",
        choice("auto", "on", "off"),
        "HOW",
        "sessions over TCP beside gRPC, for clients of other hosts, with TLS where gRPC has it: auto = where"
        " --tcp-listen is given; on = also without, on a free port of --listen's host",
    ),
    Option("tcp_listen", Address.parse, "HOST:PORT", "where to serve them; port 0 = a free one"),
    Option("insecure", yes_no, "yes|no", "yes: listen beyond this host without TLS"),
    Option("tls_cert", Path, "FILE", "certificate chain in PEM; read again when it changes, as are the three below"),
    Option("tls_key", Path, "FILE", "its key in PEM"),
    Option("tls_client_ca", Path, "FILE", "callers need a certificate signed by one of these (mTLS)"),
    Option("callers", Path, "FILE", "TOML with the tokens, certificates and rights of callers; default: everybody"),
    Option("reflection", yes_no, "yes|no", "no: reflection is closed"),
    Option("health", yes_no, "yes|no", "no: the health service is closed"),
    Option("kserve", yes_no, "yes|no", "yes: layers as models of the Open Inference Protocol (KServe v2), too"),
    Option(
        "channelz",
        choice("auto", "on", "off"),
        "HOW",
        "gRPC's view of its own connections and streams (grpc.channelz.v1.Channelz), for callers who may describe: auto"
        " = where --listen is loopback and grpcio-channelz is installed",
    ),
    Option("max_tokens", whole(1, _MOST_TOKENS), "N", "most tokens of a request and of a joined batch"),
    Option(
        "warm_up_routes",
        Ranges.parse,
        "1,4",
        "on an accelerator, numbers of routes a token whose kernels are compiled at boot, besides each layer's top-k: 1"
        " for rows that come grouped by expert; default: none, they compile at their first use",
    ),
    Option("max_message_bytes", whole(0), "N", "largest message taken; 0 = what max-tokens tokens in f32 need"),
    Option("max_in_flight", whole(1), "N", "most requests in flight on one stream"),
    Option(
        "max_queue_tokens",
        whole(1),
        "N",
        "most tokens of one caller that wait, and 4/3 of it of all together; beyond it, and beyond those below,"
        " requests are refused",
    ),
    Option("max_queue_requests", whole(1), "N", "the same of requests"),
    Option("max_queue_routes", whole(1), "N", "the same of routes (tokens x top_k): what computing costs"),
    Option("max_queue_bytes", size, "SIZE", "the same of memory that waiting requests and their answers hold"),
    Option(
        "max_half_sent_bytes",
        size,
        "SIZE",
        "limit on incomplete messages of one TCP connection of gRPC; all together may hold 4/3 of it. Beyond it"
        " connections end, first those without a complete message for longest. At least twice max-message-bytes",
    ),
    Option(
        "refuse_late",
        yes_no,
        "yes|no",
        "yes: a request whose answer would come after its deadline, by what batches took, is refused at once; no: it"
        " waits, and is dropped when its deadline has passed",
    ),
    Option(
        "nonfinite",
        choice("pass", "refuse", "zero"),
        "WHAT",
        "what becomes of NaN and infinity. pass: hidden states are computed as they are, a router weight refuses its"
        " request; refuse: both do, and the error names the row; zero: both count as 0. Other than pass, every hidden"
        " state is looked at, and tensors on a device are not taken there",
    ),
    Option("max_wait_us", whole(0), "US", "maximum batching delay, in microseconds, while the engine is idle"),
    Option(
        "patience",
        part,
        "PART",
        "largest part of a joined batch's time to wait for the callers just answered; 0 = none",
    ),
    Option("grace_s", seconds, "S", "after SIGTERM, the time to finish what was taken"),
    Option("log_level", choice(*LEVELS), "LEVEL", "debug, info, warning or error: the least that is logged"),
    Option(
        "log_format",
        choice(*FORMATS),
        "HOW",
        "text: lines on standard error, and what people want to see on standard output; json: one object a line on"
        " standard error, what is said at boot as well, and nothing on standard output",
    ),
    Option(
        "traces",
        yes_no,
        "yes|no",
        "yes: requests whose callers record a trace (traceparent) become spans of OpenTelemetry, with the SDK that this"
        " process has, and exemplars of the histograms",
    ),
    Option(
        "test_route_us",
        whole(0),
        "US",
        "for tests: so much longer for each token of an expert, as if this machine were slower; not on a GPU",
    ),
)
"""In the order of --help."""
