"""Tensors that arrive in parts are read as those of files are, whatever the format."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from expertd_kernels.checkpoint import CheckpointError, open_checkpoint
from expertd_kernels.checkpoint.received import Received

NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int32: "I32", torch.int64: "I64",
         torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3"}  # fmt: skip
FIXTURES = (
    "gptq-w4-g32-sym-descact-true-qwen3moe1l",
    "awq-gemm-w4-g64-autoawq-qwen3moe1l",
    "bf16-sharded-qwen3moe1l",
    "ct-nvfp4a16-qwen3moe1l",
    "ct-w4a16-g128-sym-qwen3moe1l",
    "hf-fp8-block128-qwen3moe1l",
    "mxfp4-oai-modelopt-gptoss-ns",
)


def pieces(folder: Path, cut: int) -> list[tuple]:
    """(name, dtype, shape, offset, bytes) of everything in the folder."""
    out = []
    for file in sorted(folder.glob("*.safetensors")):
        if file.name == "expected.safetensors":
            continue
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118 - it is no mapping
                t = f.get_tensor(name)
                data = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                out += [
                    (name, NAMES[t.dtype], list(t.shape), at, data[at : at + cut]) for at in range(0, len(data), cut)
                ]
    return out


@pytest.mark.parametrize("name", FIXTURES)
def test_the_canonical_weights_are_those_of_the_files(name: str, checkpoint_folder: Callable[[str], Path]) -> None:
    folder = checkpoint_folder(name)
    checkpoint = open_checkpoint(folder)
    layer = checkpoint.layers[0]
    info = checkpoint.info(layer)
    held = [e for e in range(info.num_experts) if e % 2]
    received = Received(checkpoint, {layer: held})
    arriving = pieces(folder, 70_001)
    random.Random(7).shuffle(arriving)
    for piece in arriving:
        received.put(*piece)
    assert received.missing() == []
    number, source = received.take()
    assert (number, received.take(), received.waiting_bytes) == (layer, None, 0)
    assert source.info(layer) == info
    mine, theirs = source.load(layer, held), checkpoint.load(layer, held)
    for matrix in ("w13", "w2"):
        found = dict(getattr(mine, matrix).tensors())
        wanted = dict(getattr(theirs, matrix).tensors())
        assert found.keys() == wanted.keys()
        for field, t in wanted.items():
            raw = (x.contiguous().view(-1).view(torch.uint8) for x in (found[field], t))
            assert torch.equal(*raw), (matrix, field)


def test_a_layer_is_ready_when_its_last_tensor_is(checkpoint_folder: Callable[[str], Path]) -> None:
    folder = checkpoint_folder("bf16-sharded-qwen3moe1l")
    checkpoint = open_checkpoint(folder)
    received = Received(checkpoint, {checkpoint.layers[0]: [0]})
    mine = [p for p in pieces(folder, 1 << 30) if ".experts.0." in p[0]]
    for piece in mine[:-1]:
        assert received.put(*piece)
        assert not received.ready
    assert "layer 0: " in received.missing()[0]
    assert received.put(*mine[-1])
    assert received.ready
    assert received.put(*mine[-1])  # once more, the same
    assert received.kept_bytes == sum(len(p[4]) for p in mine)
    with pytest.raises(CheckpointError, match="was put before with other bytes"):
        received.put(*mine[0][:4], bytes(len(mine[0][4])))


@pytest.mark.parametrize(
    ("dtype", "shape", "offset", "says"),
    [
        ("BF17", [4], 0, "dtype 'BF17', want one of"),
        ("BF16", [1] * 9, 0, "9 extents"),
        ("BF16", [1 << 41], 0, "at most 8 and 2.40 elements"),
        ("BF16", [2, 2], 1, "bytes 1 to 9, but BF16"),
    ],
)
def test_headers_are_not_believed(
    dtype: str, shape: list[int], offset: int, says: str, checkpoint_folder: Callable[[str], Path]
) -> None:
    checkpoint = open_checkpoint(checkpoint_folder("bf16-sharded-qwen3moe1l"))
    name = next(t.name for t in checkpoint.needed(0, [0]))
    received = Received(checkpoint, {0: [0]})
    with pytest.raises(CheckpointError, match=says):
        received.put(name, dtype, shape, offset, bytes(8))
    assert not received.put("model.norm.weight", dtype, shape, offset, bytes(8))
    assert received.kept_bytes == 0
