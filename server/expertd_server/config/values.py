"""What an option can be besides a number or a word: ranges, a shard, an address, pins of backends."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from expertd.common.ranges import parse_ranges

__all__ = ["Address", "Pins", "Ranges", "Shard", "Split", "parse_backend"]


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
    torch.distributed.  Where count does not divide E, a part has E // count experts or one more.  Where a part begins
    depends on the fraction rank / count alone: 1/2 ends where 3/6 does, so shards of different counts leave no gap."""

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
        return range(self.rank * num_experts // self.count, (self.rank + 1) * num_experts // self.count)

    def __str__(self) -> str:
        return f"{self.rank}/{self.count}"


@dataclass(frozen=True)
class Split:
    """How many experts of each layer each device holds, "96,32"."""

    counts: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Split:
        if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
            raise ValueError(f"got {text!r}, want a number of experts for each device of --device, as 96,32")
        return cls(tuple(map(int, text.split(","))))

    def __str__(self) -> str:
        return ",".join(map(str, self.counts))


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
