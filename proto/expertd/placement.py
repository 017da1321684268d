"""Which server holds which experts: a frozen value, the contract's Placement message, and its JSON.

Experts may have several holders (replicas); a placement is complete when each has at least one.  The JSON:

    {"version": 1, "epoch": "3", "fingerprint": "8f2c...", "num_experts": {"0-23": 128},
     "servers": [{"address": "10.0.0.1:50051", "layers": {"0-23": "0-63"}},
                 {"address": "10.0.0.2:50051", "layers": {"0-11": "64-127", "12-23": "64-126,127"}}]}

What each field means stands in placement.proto.  It is protobuf's JSON: 64-bit numbers are written as strings and read
in both forms.  Unknown keys are refused: a word that is misspelt must not be ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from google.protobuf import json_format

from expertd.common.files import read_file
from expertd.common.ranges import format_ranges, merged, parse_ranges
from expertd.errors import PlacementError, printable
from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import placement_pb2

__all__ = [
    "MOST_BYTES",
    "MOST_EXPERTS",
    "MOST_HELD",
    "MOST_LAYERS",
    "MOST_OF_MODEL",
    "MOST_SERVERS",
    "VERSION",
    "Placement",
    "Server",
    "expert_ids",
]

VERSION = 1
"""Of the message."""
MOST_EXPERTS = 1 << 16
"""Of a layer."""
MOST_LAYERS = 1 << 12
MOST_OF_MODEL = 1 << 19
"""Experts of all layers of a model together."""
MOST_SERVERS = 1 << 14
MOST_HELD = 1 << 21
"""Experts of all layers that all servers of a placement hold together."""
MOST_BYTES = 8 << 20
"""Of a placement in JSON."""


@dataclass(frozen=True)
class Server:
    """One server.  address: as gRPC takes it; layers: the expert ids it holds by layer, ascending, never empty."""

    address: str
    layers: Mapping[int, tuple[int, ...]]

    def __post_init__(self) -> None:
        if not self.address.isprintable() or self.address.split() != [self.address]:
            raise PlacementError.about("server address", got=repr(self.address), want='"host:port"')
        for layer, experts in self.layers.items():
            if layer < 0 or not experts or list(experts) != sorted(set(experts)) or experts[0] < 0:
                raise PlacementError.about(
                    f"{self.address}: experts of layer {layer}", got=list(experts), want="at least one, ascending, >= 0"
                )


@dataclass(frozen=True)
class Placement:
    """See the module's text.  num_experts: how many experts each layer of the model has, held or not."""

    servers: tuple[Server, ...]
    num_experts: Mapping[int, int]
    epoch: int = 0
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.epoch < 0:
            raise PlacementError.about("epoch", got=repr(self.epoch), want="a number >= 0")
        self._check_sizes()
        seen: set[str] = set()
        for server in self.servers:
            if server.address in seen:
                raise PlacementError.about("servers", got=f"{server.address} twice", want="each address once")
            seen.add(server.address)
            for layer, experts in server.layers.items():
                if experts[-1] >= self.num_experts.get(layer, 0):
                    raise PlacementError.about(
                        f"{server.address}: layer {layer}",
                        got=f"expert {experts[-1]}",
                        want=f"ids below {self.num_experts[layer]}"
                        if layer in self.num_experts
                        else "a layer of num_experts",
                    )

    def _check_sizes(self) -> None:
        """Whatever a placement says is bounded before a table is made of it."""
        held = sum(len(experts) for s in self.servers for experts in s.layers.values())
        for what, got, most in (
            ("num_experts: layers", len(self.num_experts), MOST_LAYERS),
            ("num_experts: a layer", max(self.num_experts.values(), default=0), MOST_EXPERTS),
            ("num_experts: all layers", sum(self.num_experts.values()), MOST_OF_MODEL),
            ("servers", len(self.servers), MOST_SERVERS),
            ("servers: experts that they hold", held, MOST_HELD),
        ):
            if got > most:
                raise PlacementError.about(what, got=got, want=f"at most {most}")

    @cached_property
    def _holders(self) -> Mapping[int, list[tuple[str, ...]]]:
        """By layer, then by expert id: the addresses of its holders, in the order of `servers`."""
        table: dict[int, list[list[str] | tuple[()]]] = {layer: [()] * n for layer, n in self.num_experts.items()}
        for server in self.servers:
            for layer, experts in server.layers.items():
                row = table[layer]
                for expert in experts:
                    found = row[expert]
                    if isinstance(found, list):
                        found.append(server.address)
                    else:
                        row[expert] = [server.address]
        return {layer: [tuple(found) for found in row] for layer, row in table.items()}

    def holders(self, layer: int, expert: int) -> tuple[str, ...]:
        """Addresses of the servers that hold it; () = nobody.  Raises PlacementError for what the model has not."""
        row = self._holders.get(layer)
        if row is None or not 0 <= expert < len(row):
            raise PlacementError.about(
                "placement",
                got=f"layer {layer}, expert {expert}",
                want=f"layers {format_ranges(self.num_experts)}" if row is None else f"experts 0-{len(row) - 1}",
            )
        return row[expert]

    def missing(self) -> dict[int, tuple[int, ...]]:
        """Experts that nobody holds, by layer; {} = complete."""
        gaps = {layer: tuple(e for e, h in enumerate(row) if not h) for layer, row in self._holders.items()}
        return {layer: gap for layer, gap in gaps.items() if gap}

    def check_complete(self) -> None:
        """Raises PlacementError that names what nobody holds."""
        missing = self.missing()
        if missing:
            text = ", ".join(
                f"experts {experts} of {'layer' if layers.isdigit() else 'layers'} {layers}"
                for layers, experts in _fold(missing).items()
            )
            raise PlacementError(
                f"placement: {text} have no server; want a server for each expert: correct the file, or start servers"
                " for them"
            )

    def to_message(self) -> placement_pb2.Placement:
        """The contract's message."""
        counts = {layer: (n,) for layer, n in self.num_experts.items()}
        servers = [placement_pb2.PlacedServer(address=s.address, layers=_fold(s.layers)) for s in self.servers]
        return placement_pb2.Placement(
            version=VERSION,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            num_experts={layers: int(n) for layers, n in _fold(counts).items()},
            servers=servers,
        )

    @classmethod
    def from_message(cls, message: placement_pb2.Placement) -> Placement:
        """The inverse.  Raises PlacementError that names the field and what was expected there."""
        if message.version != VERSION:
            raise PlacementError.about(
                "placement version", got=message.version, want=VERSION, remedy="use an expertd that knows it"
            )
        num_experts: dict[int, int] = {}
        left = MOST_OF_MODEL
        for layers, n in sorted(message.num_experts.items()):
            if not 0 < n <= MOST_EXPERTS:
                raise PlacementError.about(f"num_experts of layers {layers}", got=n, want=f"1 to {MOST_EXPERTS}")
            left -= n * _unfold("num_experts", num_experts, layers, n, left // n)
        if len(message.servers) > MOST_SERVERS:
            raise PlacementError.about("servers", got=len(message.servers), want=f"at most {MOST_SERVERS}")
        servers = []
        left = MOST_HELD
        for server in message.servers:
            held: dict[int, tuple[int, ...]] = {}
            for layers, text in sorted(server.layers.items()):
                experts = _ranges(f"{server.address}: layers {layers}", text, min(left, MOST_EXPERTS))
                left -= len(experts) * _unfold(server.address, held, layers, experts, left // len(experts))
            servers.append(Server(server.address, held))
        return cls(tuple(servers), num_experts, message.epoch, message.fingerprint)

    def to_json(self) -> str:
        """The JSON, for people and files."""
        return json_format.MessageToJson(self.to_message(), preserving_proto_field_name=True) + "\n"

    @classmethod
    def from_file(cls, path: Path) -> Placement:
        """from_json() of a file; where it raises PlacementError, its text begins with the file's name."""
        try:
            return cls.from_json(read_file(path, MOST_BYTES))
        except OSError as error:
            raise PlacementError(f"{path}: cannot be read: {error.strerror}") from None
        except PlacementError as error:
            raise PlacementError(f"{path}: {error.message}") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Placement:
        """The inverse.  Raises PlacementError that names the key and what was expected there."""
        if len(text) > MOST_BYTES:
            raise PlacementError.about("placement", got=f"{len(text)} bytes", want=f"at most {MOST_BYTES}")
        message = placement_pb2.Placement()
        servers = _servers(text)
        if servers > MOST_SERVERS:  # before it takes seconds to read them
            raise PlacementError.about("servers", got=servers, want=f"at most {MOST_SERVERS}")
        try:
            json_format.Parse(text, message)
        except (json_format.ParseError, UnicodeDecodeError) as error:
            raise PlacementError(f"placement: {printable(' '.join(str(error).split()))}") from error
        return cls.from_message(message)

    @classmethod
    def from_describe(cls, answers: Mapping[str, pb.DescribeResponse]) -> Placement:
        """What the servers at these addresses say that they hold; epoch: the largest among them.  Raises
        PlacementError where they do not serve the same model."""
        num_experts: dict[int, int] = {}
        servers = []
        left = MOST_HELD
        first: tuple[str, pb.DescribeResponse] | None = None
        for address, answer in answers.items():
            if first is None:
                first = (address, answer)
            elif answer.model != first[1].model:
                raise PlacementError.about(
                    f"model of {address}",
                    got=_model(answer),
                    want=f"that of {first[0]}, {_model(first[1])}",
                    remedy="their partial sums must not be added",
                )
            layers: dict[int, tuple[int, ...]] = {}
            for held in answer.layers:
                if num_experts.setdefault(held.layer, held.num_experts) != held.num_experts:
                    raise PlacementError.about(
                        f"experts of layer {held.layer}",
                        got=f"{held.num_experts} at {address}",
                        want=num_experts[held.layer],
                    )
                experts = expert_ids(address, held, left)
                left -= len(experts)
                if experts:
                    layers[held.layer] = experts
            servers.append(Server(address, layers))
        fingerprint = "" if first is None else first[1].model.fingerprint
        return cls(
            tuple(servers), num_experts, max((a.placement_epoch for a in answers.values()), default=0), fingerprint
        )


def expert_ids(address: str, layer: pb.Layer, most: int = MOST_HELD) -> tuple[int, ...]:
    """The experts of a layer that the server at `address` says it holds, ascending.  Raises PlacementError where it
    names others than the layer has, or more than `most`."""
    below = min(layer.num_experts, MOST_EXPERTS)
    pairs = merged((r.first, r.first + r.count - 1) for r in layer.held if r.count)
    if pairs and pairs[-1][1] >= below:
        raise PlacementError.about(
            f"{address}: layer {layer.layer}", got=f"experts up to {pairs[-1][1]}", want=f"ids below {below}"
        )
    if sum(last - first + 1 for first, last in pairs) > most:
        raise PlacementError.about(f"{address}: layer {layer.layer}", got="too many experts", want=f"{most} at most")
    return tuple(n for first, last in pairs for n in range(first, last + 1))


def _model(answer: pb.DescribeResponse) -> str:
    m = answer.model
    family, fingerprint = printable(m.family or "unnamed", 64), printable(m.fingerprint or "unknown", 128)
    return f"{family} with hidden size {m.hidden_size}, fingerprint {fingerprint}"


def _fold(by_layer: Mapping[int, tuple[int, ...]]) -> dict[str, str]:
    """{layer: ids} -> {"0-11": "0-63"}: layers with the same ids share a key."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for layer in sorted(by_layer):
        groups.setdefault(by_layer[layer], []).append(layer)
    return {format_ranges(layers): format_ranges(ids) for ids, layers in groups.items()}


_T = TypeVar("_T")


def _unfold(where: str, into: dict[int, _T], layers: str, value: _T, most: int) -> int:
    """How many layers have the value now, `most` at most."""
    found = _ranges(where, layers, min(most, MOST_LAYERS - len(into)))
    for layer in found:
        if layer in into:
            raise PlacementError.about(f"{where}: layers", got=f"layer {layer} under two keys", want="each layer once")
        into[layer] = value
    return len(found)


def _ranges(where: str, text: str, most: int) -> tuple[int, ...]:
    try:
        return parse_ranges(text, most)
    except ValueError as error:
        raise PlacementError(f"{where}: {error}") from None


def _servers(text: str | bytes) -> int:
    """How many servers a JSON lists; 0 where it is none, which is told by whoever reads it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return 0
    servers = found.get("servers") if isinstance(found, dict) else None
    return len(servers) if isinstance(servers, list) else 0
