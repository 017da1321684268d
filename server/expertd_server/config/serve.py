"""ServeConfig: frozen, printable, and refused where its options contradict each other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from expertd_server.config.values import Address, Pins, Ranges, Shard, Split, parse_backend

__all__ = ["ConfigError", "ServeConfig"]


class ConfigError(Exception):
    """An option that cannot be used.  The text says which, from where, what was got and what is wanted."""


_LISTEN = Address("127.0.0.1", 50051)
"""Where nothing else is said."""


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
    split: Split | None = None
    routing_stats: Path | None = None
    move_rate: int = 0
    backend: str = "auto"
    oracle: str = "order"
    copies: int = 1
    cache: Path | None = None
    compute_dtype: str = "bf16"
    activations: str = "weight-only"
    deterministic: str = "no"
    memory_limit: int = 0
    threads: int = 0
    listen: Address = _LISTEN
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
    test_part_us: Split | None = None

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
        self._check_devices()
        self._check_security()
        if self.layer_template is not None and self.checkpoint is None:
            raise ConfigError("--layer-template: got it without --checkpoint, which it describes")

    def _check_devices(self) -> None:
        names = self.devices
        whole = [name if ":" in name or name == "cpu" else f"{name}:0" for name in names]
        if twice := next((n for n, w in zip(names, whole, strict=True) if whole.count(w) > 1), None):
            raise ConfigError(f"--device {self.device}: got {twice} more than once, want each device once")
        if len(names) > 1 and "auto" in names:
            raise ConfigError(f"--device {self.device}: got auto beside others, want the devices' names")
        if "cpu" in names and any(n.startswith("cpu:") for n in names):
            raise ConfigError(
                f"--device {self.device}: cpu is every memory node, want cpu, or nodes such as cpu:0,cpu:1"
            )
        if self.joins and self.oracle == "measure":
            raise ConfigError(
                f"--oracle measure: got it with --device {self.device}, want one device: it compares backends"
            )
        for flag, value in (
            ("--split", self.split),
            ("--routing-stats", self.routing_stats),
            ("--move-rate", self.move_rate or None),
            ("--test-part-us", self.test_part_us),
        ):
            if value is not None and not self.joins:
                raise ConfigError(
                    f"{flag}: got it with --device {self.device}, want several devices, such as cuda:0,cpu"
                )
        for flag, split in (("--split", self.split), ("--test-part-us", self.test_part_us)):
            if split is not None and len(split.counts) != len(names):
                got = len(split.counts)
                raise ConfigError(
                    f"{flag} {split}: got {got} number{'s' * (got > 1)}, want one for each of {len(names)} devices"
                )

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
    def devices(self) -> tuple[str, ...]:
        """The names in --device."""
        return tuple(name.strip() for name in self.device.split(","))

    @property
    def joins(self) -> bool:
        """Whether a layer's experts are shared among devices, or are a memory node's."""
        return len(self.devices) > 1 or self.device.startswith("cpu:")

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
