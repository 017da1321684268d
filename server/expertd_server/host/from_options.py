"""What a server's options say of its messages and of who may call it."""

from __future__ import annotations

from collections.abc import Sequence

from expertd.common.files import read_file
from expertd_kernels.sources.source import LayerInfo
from expertd_server.boot.assignment import WrongOptionError
from expertd_server.config.serve import ServeConfig
from expertd_server.service.reloading import MOST_BYTES, FileError
from expertd_server.transports.grpc import channelz
from expertd_server.transports.grpc.server import bindable
from expertd_server.transports.listening import listening
from expertd_server.transports.security import Gate, Security, check_tls

__all__ = ["largest_message", "message_bytes", "require_free_ports", "security_of"]

_MOST_BYTES = (1 << 31) - 1
"""Of a message: protobuf's and gRPC's own limit."""


def message_bytes(max_tokens: int, infos: Sequence[LayerInfo]) -> int:
    """What a request of max_tokens tokens needs with everything in its widest dtype, headers included."""
    widest = max(4 * i.hidden_size + 12 * i.top_k for i in infos)
    return max_tokens * widest + (64 << 10)


def largest_message(config: ServeConfig, infos: Sequence[LayerInfo]) -> int:
    """Bytes of the largest that is taken."""
    return config.max_message_bytes or min(message_bytes(config.max_tokens, infos), _MOST_BYTES)


def require_free_ports(config: ServeConfig) -> None:
    """What the server will listen on can be bound now: known before the model is read, which takes minutes.  Raises
    BootError."""
    for option, where in (
        ("--listen", config.listen),
        ("--tcp-listen", config.tcp_where),
        ("--metrics-listen", config.metrics_listen),
        ("--admin-listen", config.admin_listen),
    ):
        if where is not None:
            with listening(option, where), bindable(where):
                pass


def security_of(config: ServeConfig) -> Security:
    """Who may call gRPC, and what it serves beside expertd.v1.  Raises BootError, also where the files of its options
    cannot be used."""
    _check_files(config)
    return Security(
        config.tls_cert,
        config.tls_key,
        config.tls_client_ca,
        config.callers,
        config.reflection,
        config.health,
        config.kserve,
        _channelz(config),
    )


def _check_files(config: ServeConfig) -> None:
    """Raises WrongOptionError with the option of the file that cannot be read, or is not what the option wants."""
    for option in ("tls_cert", "tls_key", "tls_client_ca", "callers"):
        path = getattr(config, option)
        try:
            if path is not None:
                read_file(path, MOST_BYTES)
        except OSError as e:
            flag = f"--{option.replace('_', '-')}"
            raise WrongOptionError(f"{flag} {path}: cannot be read: {e.strerror}") from None
    try:
        Gate(config.callers)
    except FileError as e:
        raise WrongOptionError(f"--callers {e}") from None
    try:
        check_tls(Security(config.tls_cert, config.tls_key, config.tls_client_ca))
    except FileError as e:
        of = " and --tls-client-ca" if config.tls_client_ca else ""
        raise WrongOptionError(f"--tls-cert, --tls-key{of}: {e}") from None


def _channelz(config: ServeConfig) -> bool:
    """Whether it is served.  Raises BootError where it is asked for and cannot be."""
    how, why_not = config.channelz, channelz.missing()
    if how == "on" and why_not:
        raise WrongOptionError(f"--channelz on: {why_not}")
    return how == "on" or (how == "auto" and config.listen.loopback and not why_not)
