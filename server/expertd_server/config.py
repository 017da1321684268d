"""The configuration of `expertd serve`: frozen, printable, from four places.  Imports no torch.

    flag  >  environment EXPERTD_*  >  file (--config, TOML)  >  default

One table (`OPTIONS`) makes the flags, the variables, the file's keys and their checks; a key that is not in it is
refused with the nearest one that is.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from expertd.ranges import parse_ranges
from expertd_server.logs import FORMATS, LEVELS

__all__ = [
    "Address",
    "ConfigError",
    "OPTIONS",
    "Option",
    "Pins",
    "Ranges",
    "ServeConfig",
    "Shard",
    "add_flags",
    "parse_backend",
    "resolve",
]


class ConfigError(Exception):
    """An option that cannot be used.  The text says which, from where, what was got and what is wanted."""


@dataclass(frozen=True)
class Ranges:
    """Numbers written as "0-3,7": both ends included."""

    text: str
    numbers: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Ranges:
        return cls(text, parse_ranges(text))

    @classmethod
    def parse_or_none(cls, text: str) -> Ranges:
        """Also "none"."""
        return cls(text, ()) if text == "none" else cls.parse(text)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `count` equal parts of the experts of each layer, "2/8".  Ranks start at 0, as in
    torch.distributed; the first E mod count parts hold one expert more."""

    rank: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        m = re.fullmatch(r"(\d+)/(\d+)", text)
        if m is None or int(m[2]) < 1 or int(m[1]) >= int(m[2]):
            raise ValueError(
                f"got {text!r}, want RANK/COUNT with RANK from 0 to COUNT - 1, as 2/8 for the third of eight"
            )
        return cls(int(m[1]), int(m[2]))

    def experts(self, num_experts: int) -> range:
        """Global ids of this part of `num_experts`."""
        each, more = divmod(num_experts, self.count)
        first = self.rank * each + min(self.rank, more)
        return range(first, first + each + (self.rank < more))

    def __str__(self) -> str:
        return f"{self.rank}/{self.count}"


@dataclass(frozen=True)
class Address:
    """HOST:PORT; an IPv6 host in brackets.  Port 0 = a free one.  Or path: of a Unix socket, "" = none."""

    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        m = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d+)", text)
        if m is None or int(m[3]) > 65535:
            raise ValueError(f"got {text!r}, want HOST:PORT as 127.0.0.1:50051 or [::1]:50051")
        return cls(m[1] or m[2], int(m[3]))

    @classmethod
    def parse_or_unix(cls, text: str) -> Address:
        """Also "unix:/path"."""
        if not text.startswith("unix:"):
            return cls.parse(text)
        path = text.removeprefix("unix:")
        if not path.startswith("/") or len(path.encode()) > 107 or "\0" in path:
            raise ValueError(f"got {text!r}, want unix:/path of at most 107 bytes")
        return cls("", 0, path)

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Pins:
    """Which backend the user demands: pins(layer) is its name, None = the oracle's choice.

    rules: (layers, name); the first match wins; None instead of layers: every one
    """

    rules: tuple[tuple[frozenset[int] | None, str | None], ...]

    def __call__(self, layer: int) -> str | None:
        return next((name for layers, name in self.rules if layers is None or layer in layers), None)

    @property
    def names(self) -> set[str]:
        """Of all backends that are demanded somewhere."""
        return {name for _, name in self.rules if name is not None}

    @property
    def layers(self) -> set[int]:
        """All layers that are named."""
        return {n for layers, _ in self.rules if layers is not None for n in layers}


def parse_backend(text: str) -> Pins:
    """ "NAME" pins every layer; "layers.0-2=triton,layers.7=cpu,*=auto" pins by layer, layers without a match are the
    oracle's.  Raises ValueError."""
    if "=" not in text:
        return Pins(((None, _pin(text)),))
    rules: list[tuple[frozenset[int] | None, str | None]] = []
    for part in re.split(r",(?=\s*(?:layers\.|\*))", text):
        where, sep, name = part.strip().partition("=")
        if not sep or not (where == "*" or where.startswith("layers.")):
            raise ValueError(f"got {part.strip()!r}, want NAME, or layers.0-2=NAME,...,*=NAME (NAME or auto)")
        layers = None if where == "*" else frozenset(Ranges.parse(where.removeprefix("layers.")).numbers)
        rules.append((layers, _pin(name)))
    return Pins(tuple(rules))


def _pin(name: str) -> str | None:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ValueError(f"got {name!r}, want a backend's name or auto; expertd explain lists them")
    return None if name == "auto" else name


def _backend(text: str) -> str:
    parse_backend(text)
    return text


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"got {text!r}, want {' or '.join(names)}")
        return text

    return parse


_MOST_TOKENS = 1 << 20
_MOST = (1 << 31) - 1
"""Of any other number: what gRPC and the contract's fields hold."""


def _int(least: int, most: int = _MOST) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or not least <= int(text) <= most:
            raise ValueError(f"got {text[:80]!r}, want a whole number from {least} to {most}")
        return int(text)

    return parse


def _yes_no(text: str) -> bool:
    return _choice("yes", "no")(text) == "yes"


def _copies(text: str) -> int:
    return int(_choice("1", "2")(text))


_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "KB": 10**3, "MB": 10**6,
          "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip


def _bytes(text: str) -> int:
    m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if m is None or m[2].upper() not in _UNITS:
        raise ValueError(f"got {text!r}, want a size as 20GiB, 20G (the same), 20GB or bytes; 0 = none")
    return int(float(m[1]) * _UNITS[m[2].upper()])


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise ValueError(f"got {text!r}, want seconds >= 0")
    return float(text)


def _part(text: str) -> float:
    if not re.fullmatch(r"0(\.\d+)?|1(\.0+)?", text):
        raise ValueError(f"got {text!r}, want a number from 0 to 1")
    return float(text)


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


@dataclass(frozen=True)
class ServeConfig:
    """What `expertd serve` does.  Every field is an option of the same name; see OPTIONS for what each means."""

    checkpoint: Path | None = None
    synthetic: str | None = None
    layer_template: str | None = None
    quantize: str | None = None
    layers: Ranges | None = None
    experts: Ranges | None = None
    shard: Shard | None = None
    device: str = "auto"
    backend: str = "auto"
    oracle: str = "order"
    copies: int = 1
    cache: Path | None = None
    compute_dtype: str = "bf16"
    activations: str = "weight-only"
    deterministic: str = "no"
    memory_limit: int = 0
    threads: int = 0
    listen: Address = Address("127.0.0.1", 50051)
    metrics_listen: Address | None = None
    expert_metrics: bool = False
    admin_listen: Address | None = None
    held: Path | None = None
    shm: str = "auto"
    shm_memory: int = 4 << 30
    tcp: str = "auto"
    tcp_listen: Address | None = None
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    callers: Path | None = None
    reflection: bool = True
    health: bool = True
    kserve: bool = False
    channelz: str = "auto"
    max_tokens: int = 4096
    warm_up_routes: Ranges | None = None
    max_message_bytes: int = 0
    max_in_flight: int = 1024
    max_queue_tokens: int = 1 << 17
    max_queue_requests: int = 4096
    max_queue_routes: int = 1 << 20
    max_queue_bytes: int = 2 << 30
    max_half_sent_bytes: int = 1 << 29
    refuse_late: bool = True
    nonfinite: str = "pass"
    max_wait_us: int = 0
    patience: float = 0.25
    grace_s: float = 30.0
    log_level: str = "info"
    log_format: str = "text"
    traces: bool = False
    test_route_us: int = 0

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.synthetic is None):
            got = "both" if self.checkpoint else "neither"
            raise ConfigError(f"--checkpoint and --synthetic: got {got}, want one of them: a folder, or MODEL:SCHEME")
        if self.experts is not None and self.shard is not None:
            raise ConfigError("--experts and --shard: got both, want at most one: each says which experts are held")
        if self.copies > 1 and self.oracle != "measure":
            raise ConfigError("--copies: got 2 with --oracle order, which chooses one backend; want --oracle measure")
        if self.warm_up_routes is not None and self.warm_up_routes.numbers[0] < 1:
            raise ConfigError(f"--warm-up-routes: got {str(self.warm_up_routes)!r}, want numbers from 1 on")
        self._check_security()
        if self.layer_template is not None and self.checkpoint is None:
            raise ConfigError("--layer-template: got it without --checkpoint, which it describes")

    def _check_security(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key: got one of them, want both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("--tls-client-ca: got it without --tls-cert and --tls-key, want all three")
        plain: list[tuple[str, Address | None]] = []
        if self.tls_cert is None:
            plain = [("--listen", self.listen), ("--tcp-listen", self.tcp_where)]
        for flag, where in [*plain, ("--metrics-listen", self.metrics_listen)]:
            if where is not None and not where.loopback and not self.insecure:
                tls = "--tls-cert and --tls-key, or " * (flag != "--metrics-listen")
                raise ConfigError(
                    f"{flag} {where}: everybody who can reach it would be served in plain text; want {tls}an address of"
                    " this host alone, or --insecure where the network keeps strangers out"
                )

        admin = self.admin_listen
        if admin is not None and not admin.loopback and (self.tls_cert is None or self.callers is None):
            raise ConfigError(
                f"--admin-listen {admin}: who reaches it could change what is served; want an address of this host"
                " alone, or --tls-cert, --tls-key and --callers, whose callers need the right admin"
            )

    @property
    def tcp_where(self) -> Address | None:
        """Where sessions over TCP are served; None: nowhere."""
        if self.tcp == "off" or (self.tcp == "auto" and self.tcp_listen is None):
            return None
        return self.tcp_listen or Address(self.listen.host or "127.0.0.1", 0)

    @property
    def compute(self) -> str:
        """The compute dtype as kernels spell it."""
        return "f32" if self.compute_dtype == "float32" else "bf16"

    @property
    def offers_shm(self) -> bool:
        """Whether clients on this host may share memory, where the host and the engine can."""
        return self.shm == "on" or (self.shm == "auto" and self.listen.loopback)

    @property
    def warm_routes(self) -> tuple[int, ...]:
        """Numbers of routes a token for which kernels are warmed up, besides each layer's top-k."""
        return tuple(self.warm_up_routes.numbers) if self.warm_up_routes else ()

    @property
    def pins(self) -> Pins:
        """The backends that the user demands."""
        return parse_backend(self.backend)

    def __str__(self) -> str:
        """Every option that is set, one a line, as the file would say it."""
        lines = []
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool):
                value = "yes" if value else "no"
            if value is not None:
                number = isinstance(value, (int, float))
                lines.append(f"{f.name.replace('_', '-')} = {value if number else chr(34) + str(value) + chr(34)}")
        return "\n".join(lines)


OPTIONS: tuple[Option, ...] = (
    Option("checkpoint", Path, "DIR", "folder with config.json and safetensors files"),
    Option("synthetic", str, "MODEL:SCHEME", "random weights of a public model's shape, as qwen3-30b-a3b:int4_g128"),
    Option("layer_template", str, "TEMPLATE", "names of the expert tensors of a family that is not known"),
    Option("quantize", str, "SCHEME", "quantize unquantized weights while loading, as int4_g128 or mxfp4"),
    Option("layers", Ranges.parse_or_none, "0-3,7", "layers to hold, or none; default: all that have experts"),
    Option("experts", Ranges.parse, "0-63", "global ids of the experts to hold in each layer; default: all"),
    Option("shard", Shard.parse, "RANK/COUNT", "hold part RANK (from 0) of COUNT equal parts of the experts"),
    Option("device", str, "NAME", "auto, cpu, cuda[:N] or xpu[:N]"),
    Option("backend", _backend, "NAME", 'pin the kernel backend: NAME, or by layer "layers.0-2=triton,*=auto"'),
    Option(
        "oracle",
        _choice("order", "measure"),
        "HOW",
        "order: the first backend of the platform's order that no rule refuses; measure: the fastest here, on the real"
        " weights, after a check of its answers",
    ),
    Option(
        "copies",
        _copies,
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
    Option("compute_dtype", _choice("bf16", "float32"), "DTYPE", "bf16 or float32: element type inside the kernels"),
    Option(
        "activations",
        _choice("weight-only", "checkpoint"),
        "HOW",
        "weight-only: activations stay in the compute dtype; checkpoint: rounded as the checkpoint asks",
    ),
    Option(
        "deterministic",
        _choice("no", "runs", "batches"),
        "HOW",
        "runs: only backends that give the same bits from run to run; batches: and a token's bits do not depend on the"
        " batch that it is computed in",
    ),
    Option(
        "memory_limit",
        _bytes,
        "SIZE",
        "most memory of the device (on a CPU: of the host) that this server takes, as 20GiB, where others share it; 0 ="
        " what is free",
    ),
    Option(
        "threads", _int(0), "N", "CPU threads of the kernels; 0 = measured at boot (torch's operators: torch's default)"
    ),
    Option("listen", Address.parse_or_unix, "HOST:PORT", "where to serve gRPC; port 0 = a free one; or unix:/path"),
    Option(
        "metrics_listen", Address.parse, "HOST:PORT", "where to serve Prometheus metrics over HTTP; default: nowhere"
    ),
    Option(
        "expert_metrics",
        _yes_no,
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
        _choice("auto", "on", "off"),
        "HOW",
        "shared memory for clients of the same user on this host: auto = where --listen is loopback",
    ),
    Option("shm_memory", _bytes, "SIZE", "most shared memory of all sessions together"),
    Option(
        "tcp",
        _choice("auto", "on", "off"),
        "HOW",
        "sessions over TCP beside gRPC, for clients of other hosts, with TLS where gRPC has it: auto = where"
        " --tcp-listen is given; on = also without, on a free port of --listen's host",
    ),
    Option("tcp_listen", Address.parse, "HOST:PORT", "where to serve them; port 0 = a free one"),
    Option("insecure", _yes_no, "yes|no", "yes: listen beyond this host without TLS"),
    Option("tls_cert", Path, "FILE", "certificate chain in PEM; read again when it changes, as are the three below"),
    Option("tls_key", Path, "FILE", "its key in PEM"),
    Option("tls_client_ca", Path, "FILE", "callers need a certificate signed by one of these (mTLS)"),
    Option("callers", Path, "FILE", "TOML with the tokens, certificates and rights of callers; default: everybody"),
    Option("reflection", _yes_no, "yes|no", "no: reflection is closed"),
    Option("health", _yes_no, "yes|no", "no: the health service is closed"),
    Option("kserve", _yes_no, "yes|no", "yes: layers as models of the Open Inference Protocol (KServe v2), too"),
    Option(
        "channelz",
        _choice("auto", "on", "off"),
        "HOW",
        "gRPC's view of its own connections and streams (grpc.channelz.v1.Channelz), for callers who may describe: auto"
        " = where --listen is loopback and grpcio-channelz is installed",
    ),
    Option("max_tokens", _int(1, _MOST_TOKENS), "N", "most tokens of a request and of a joined batch"),
    Option(
        "warm_up_routes",
        Ranges.parse,
        "1,4",
        "on an accelerator, numbers of routes a token whose kernels are compiled at boot, besides each layer's top-k: 1"
        " for rows that come grouped by expert; default: none, they compile at their first use",
    ),
    Option("max_message_bytes", _int(0), "N", "largest message taken; 0 = what max-tokens tokens in f32 need"),
    Option("max_in_flight", _int(1), "N", "most requests in flight on one stream"),
    Option(
        "max_queue_tokens",
        _int(1),
        "N",
        "most tokens of one caller that wait, and 4/3 of it of all together; beyond it, and beyond those below,"
        " requests are refused",
    ),
    Option("max_queue_requests", _int(1), "N", "the same of requests"),
    Option("max_queue_routes", _int(1), "N", "the same of routes (tokens x top_k): what computing costs"),
    Option("max_queue_bytes", _bytes, "SIZE", "the same of memory that waiting requests and their answers hold"),
    Option(
        "max_half_sent_bytes",
        _bytes,
        "SIZE",
        "most that one TCP connection of gRPC may hold of messages that are not whole yet, and 4/3 of it all together;"
        " beyond it connections end, first those on which nothing came whole for longest; at least twice"
        " max-message-bytes",
    ),
    Option(
        "refuse_late",
        _yes_no,
        "yes|no",
        "yes: a request whose answer would come after its deadline, by what batches took, is refused at once; no: it"
        " waits, and is dropped when its deadline has passed",
    ),
    Option(
        "nonfinite",
        _choice("pass", "refuse", "zero"),
        "WHAT",
        "what becomes of NaN and infinity. pass: hidden states are computed as they are, a router weight refuses its"
        " request; refuse: both do, and the error names the row; zero: both count as 0. Other than pass, every hidden"
        " state is looked at, and tensors on a device are not taken there",
    ),
    Option("max_wait_us", _int(0), "US", "how long a request may wait for company while the engine is idle"),
    Option(
        "patience",
        _part,
        "PART",
        "largest part of a joined batch's time to wait for the callers just answered; 0 = none",
    ),
    Option("grace_s", _seconds, "S", "after SIGTERM, the time to finish what was taken"),
    Option("log_level", _choice(*LEVELS), "LEVEL", "debug, info, warning or error: the least that is logged"),
    Option(
        "log_format",
        _choice(*FORMATS),
        "HOW",
        "text: lines on standard error, and what people want to see on standard output; json: one object a line on"
        " standard error, what is said at boot as well, and nothing on standard output",
    ),
    Option(
        "traces",
        _yes_no,
        "yes|no",
        "yes: requests whose callers record a trace (traceparent) become spans of OpenTelemetry, with the SDK that this"
        " process has, and exemplars of the histograms",
    ),
    Option(
        "test_route_us",
        _int(0),
        "US",
        "for tests: so much longer for each token of an expert, as if this machine were slower; not on a GPU",
    ),
)
"""In the order of --help."""


_ALTERNATIVES = (("checkpoint", "synthetic"), ("experts", "shard"))
"""Options of which one at most may be set."""


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str] | None = None) -> None:
    """The options as flags (some of them where `names` are given), and --config.  What is not given stays None."""
    defaults = {f.name: f.default for f in fields(ServeConfig)}
    for o in OPTIONS:
        if names is None or o.name in names:
            default = defaults[o.name]
            default = {True: "yes", False: "no"}[default] if isinstance(default, bool) else default
            text = o.help + (f" (default {default})" if default is not None else "")
            alone: dict[str, Any] = {"nargs": "?", "const": "yes"} if isinstance(defaults[o.name], bool) else {}
            parser.add_argument(o.flag, metavar=o.metavar, help=text.replace("%", "%%"), **alone)
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with the same names as keys; flags and EXPERTD_* go before it"
    )


def resolve(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> ServeConfig:
    """The configuration from parsed flags, the environment and --config's file.  Raises ConfigError."""
    environ = os.environ if environ is None else environ
    path = getattr(args, "config", None) or environ.get("EXPERTD_CONFIG")
    file = _read(Path(path)) if path else {}
    values: dict[str, Any] = {}
    rank: dict[str, int] = {}
    for o in OPTIONS:
        found = (
            (o.flag, getattr(args, o.name, None)),
            (o.variable, environ.get(o.variable) or None),
            (f"{path}: {o.name}", file.get(o.name)),
        )
        for i, (where, text) in enumerate(found):
            if text is None:
                continue
            try:
                values[o.name], rank[o.name] = o.parse(text), i
            except ValueError as e:
                raise ConfigError(f"{where}: {e}") from None
            break
    for a, b in _ALTERNATIVES:  # a flag --synthetic goes before a file's checkpoint, too
        if a in rank and b in rank and rank[a] != rank[b]:
            del values[a if rank[a] > rank[b] else b]
    return ServeConfig(**values)


def _read(path: Path) -> dict[str, str]:
    """The file's keys as option names, its values as the text of a flag."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"--config {path}: cannot be read: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config {path}: is no TOML: {e}") from None
    known = {o.name: o for o in OPTIONS}
    out: dict[str, str] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; the nearest is {near[0].replace('_', '-')}" if near else ""
            raise ConfigError(f"{path}: got the key {key!r}, want one of the options of expertd serve{hint}")
        if not isinstance(value, (str, int, float)):
            raise ConfigError(f"{path}: {key}: got {value!r}, want a string, a number, true or false")
        out[name] = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    return out
