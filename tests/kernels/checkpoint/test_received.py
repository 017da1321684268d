"""Tensors that arrive in parts are read as those of files are, whatever the format."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from expertd_kernels.checkpoint import CheckpointError, open_checkpoint
from expertd_kernels.checkpoint.received import _LEAST_PART, Received, _Arriving
from expertd_kernels.checkpoint.tensors import Stored

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


@pytest.fixture
def receiving(checkpoint_folder: Callable[[str], Path]) -> tuple[Received, str, list[int], int]:
    """(received, a wanted tensor's name, its shape, its bytes)."""
    checkpoint = open_checkpoint(checkpoint_folder("bf16-sharded-qwen3moe1l"))
    found = next(t for t in checkpoint.needed(0, [0]) if t.nbytes > 4 * _LEAST_PART)
    return Received(checkpoint, {0: [0]}), found.name, list(found.shape), found.nbytes


def test_parts_that_cost_more_than_they_bring_are_refused(receiving) -> None:
    """Bytes that wait are bounded by the server; what is kept of a part without bytes would not be."""
    received, name, shape, nbytes = receiving
    for offset, size in ((0, 0), (nbytes, 0), (0, 1), (_LEAST_PART, _LEAST_PART - 1)):
        with pytest.raises(CheckpointError, match=f"a part of {size} bytes, want at least 4096, or the end"):
            received.put(name, "BF16", shape, offset, bytes(size))
    assert (received.kept_bytes, received.waiting_bytes) == (0, 0)
    assert received.put(name, "BF16", shape, nbytes - 1, b"\1")
    assert received.put(name, "BF16", shape, 0, bytes(_LEAST_PART))


def test_a_tensor_without_elements_is_refused(receiving) -> None:
    received, name, *_ = receiving
    with pytest.raises(CheckpointError, match=r"a part of 0 bytes|shape"):
        received.put(name, "BF16", [0, 1 << 39], 0, b"")
    assert not received.ready


def test_a_name_of_any_length_is_refused(receiving) -> None:
    received, name, shape, _ = receiving
    for long in ("x" * 2000, name.replace("layers.0", "layers." + "0" * 5000), "a." * 3000 + name):
        with pytest.raises(CheckpointError, match=r"a tensor.s name: got \d+ characters, want at most 1024") as e:
            received.put(long, "BF16", shape, 0, bytes(_LEAST_PART))
        assert len(str(e.value)) < 200


def test_parts_may_come_in_any_order_and_overlap_nothing() -> None:
    def arriving() -> _Arriving:
        return _Arriving(Stored("t", "U8", (1000,), None, 0, 1000))  # type: ignore[arg-type]

    parts = [(at, at + 10) for at in range(0, 1000, 10)]
    for seed in range(20):
        random.Random(seed).shuffle(parts)
        tensor = arriving()
        for n, (begin, end) in enumerate(parts):
            assert not tensor.whole
            for wrong in parts[:n]:
                for other in (wrong, (wrong[0] - 1, wrong[0] + 1), (wrong[1] - 1, wrong[1] + 1), (0, 1000)):
                    if seed == 0:
                        with pytest.raises(CheckpointError, match="overlap"):
                            tensor.add(*other)
            tensor.add(begin, end)
            assert tensor.begins == sorted(tensor.begins)
            assert all(e < b for e, b in zip(tensor.ends, tensor.begins[1:], strict=False))
        assert tensor.whole


def test_many_parts_apart_take_no_time_that_grows_with_their_square() -> None:
    tensor = _Arriving(Stored("t", "U8", (1 << 20,), None, 0, 1 << 20))  # type: ignore[arg-type]
    begun = time.process_time()
    for begin in range(0, 200_000, 2):
        tensor.add(begin, begin + 1)
    assert time.process_time() - begun < 10, "100 000 parts; looking at each of those before takes minutes"
