"""Tensors that lie in memory are read as those of files are, without a copy on the host where they need no reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from expertd_kernels.checkpoint import CheckpointError, open_checkpoint
from expertd_kernels.checkpoint.in_memory import Bytes, load_on
from expertd_kernels.checkpoint.received import Received
from expertd_kernels.checkpoint.tensors import Counter
from expertd_kernels.sources.quantized import QuantizedSource
from expertd_kernels.weights.canonical import Weights

CPU = torch.device("cpu")
NAME = "model.layers.0.mlp.experts.0.up_proj.weight"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.name != "expected.safetensors":
            with safe_open(file, "pt") as f:
                out |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - it is no mapping
    return out


def same(a: Weights, b: Weights) -> bool:
    pairs = [(getattr(a, m), getattr(b, m)) for m in ("w13", "w2")]
    fields = [(x, y) for q, r in pairs for x, y in zip(q.tensors(), r.tensors(), strict=True)]
    return all(n == m and torch.equal(t.view(torch.uint8), u.view(torch.uint8)) for (n, t), (m, u) in fields)


def put_in_memory(received: Received, name: str, t: torch.Tensor) -> bool:
    return received.put_memory(name, "BF16", list(t.shape), lambda _: t.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "direct"),
    [
        ("bf16-sharded-qwen3moe1l", True),
        ("bf16-fusedv5-qwen3moe1l", True),
        ("bf16-fused-gptoss-ns", False),  # gate and up rows alternate, and there are biases
    ],
)
def test_weights_are_those_of_the_files(name: str, direct: bool, checkpoint_folder: Callable[[str], Path]) -> None:
    folder = checkpoint_folder(name)
    checkpoint = open_checkpoint(folder)
    layer = checkpoint.layers[0]
    held = [e for e in range(checkpoint.info(layer).num_experts) if e % 2]
    received = Received(checkpoint, {layer: held})
    for tensor, t in tensors(folder).items():
        put_in_memory(received, tensor, t.bfloat16())
    taken = received.take()
    assert taken is not None
    source = taken[1]
    assert (load_on(source._recipe_of(layer, held), CPU) is not None) == direct
    assert load_on(checkpoint._recipe_of(layer, held), CPU) is None  # they lie in files
    want = checkpoint.load(layer, held)
    assert same(source.load_on(CPU, layer, held), want)
    assert same(source.load(layer, held), want)
    assert same(
        QuantizedSource(source, "int8").load(layer, held), QuantizedSource(checkpoint, "int8").load(layer, held)
    )


def test_bytes_go_where_room_is_made(checkpoint_folder: Callable[[str], Path]) -> None:
    folder = checkpoint_folder("bf16-sharded-qwen3moe1l")
    checkpoint = open_checkpoint(folder)
    layer, made = checkpoint.layers[0], []

    def room(nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    received = Received(checkpoint, {layer: [1]}, place=room)
    for name, t in tensors(folder).items():
        data = t.reshape(-1).view(torch.uint8).numpy().tobytes()
        for at in range(0, len(data), 5000) if len(data) > 10000 else (0,):
            stop = len(data) if len(data) <= 10000 or at + 10000 > len(data) else at + 5000
            received.put(name, "BF16", list(t.shape), at, data[at:stop])
            if stop == len(data):
                break
    taken = received.take()
    assert taken is not None
    assert len(made) == 3
    assert same(taken[1].load_on(CPU, layer, [1]), checkpoint.load(layer, [1]))


@pytest.fixture
def received(checkpoint_folder: Callable[[str], Path]) -> Received:
    checkpoint = open_checkpoint(checkpoint_folder("bf16-sharded-qwen3moe1l"))
    return Received(checkpoint, {checkpoint.layers[0]: [0]})


def shape_of(received: Received) -> list[int]:
    layer = received._checkpoint.tensors(received._checkpoint.layers[0])
    return list(layer.apart[0]["up"]["weight"].shape)


def test_memory_of_another_size_is_refused(received: Received) -> None:
    with pytest.raises(CheckpointError, match="10 bytes, but BF16"):
        received.put_memory(NAME, "BF16", shape_of(received), lambda _: torch.empty(10, dtype=torch.uint8))


def test_memory_of_other_experts_is_not_asked_for(received: Received) -> None:
    other = NAME.replace("experts.0", "experts.1")
    assert not received.put_memory(other, "BF16", shape_of(received), lambda _: pytest.fail("was asked for"))


def test_memory_is_put_once_or_once_more_and_no_bytes_afterwards(received: Received) -> None:
    t = torch.zeros(shape_of(received), dtype=torch.bfloat16)
    assert put_in_memory(received, NAME, t)
    kept = received.kept_bytes
    assert put_in_memory(received, NAME, t)
    assert received.kept_bytes == kept == t.nbytes
    with pytest.raises(CheckpointError, match="was put before with other bytes"):
        received.put(NAME, "BF16", list(t.shape), 0, t.view(torch.uint8).numpy().tobytes())


def test_bytes_beyond_the_end_are_refused() -> None:
    shard = Bytes(Path("t"), torch.arange(10, dtype=torch.uint8), Counter())
    out = np.empty(4, np.uint8)
    seen: list[int] = []
    shard.fill(out, 6, "t", lambda piece: seen.append(piece.nbytes))
    assert (out.tolist(), seen) == ([6, 7, 8, 9], [4])
    with pytest.raises(CheckpointError, match="bytes 7 to 11 of 10"):
        shard.fill(out, 7, "t")
