"""A checkpoint as a whole: fingerprint, several layers, mixed schemes, the parts that make them fit, the benchmark."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from expertd_kernels.checkpoint import CheckpointError, bench, open_checkpoint, repack
from expertd_kernels.checkpoint.fit import common, convert, join_halves, split, split_layout
from expertd_kernels.checkpoint.formats import formats
from expertd_kernels.checkpoint.memory import empty
from expertd_kernels.checkpoint.readers.protocol import Layout, Part
from expertd_kernels.checkpoint.synthetic_files import KINDS, write_synthetic
from expertd_kernels.checkpoint.tensors import PAGE_BYTES, PIECE_BYTES, Counter, Shard
from expertd_kernels.weights.canonical import pack_nibbles
from expertd_kernels.weights.scheme import WHOLE, Element, ScaleType, Scheme

ROOT = Path(__file__).resolve().parents[3]
E, H, I = 2, 32, 16


@pytest.fixture
def plain(write_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    g = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    tensors = {
        f"model.layers.{n}.mlp.experts.{e}.{name}.weight": torch.randn(shape, generator=g)
        for n in (0, 2)
        for e in range(E)
        for name, shape in shapes.items()
    }
    return write_checkpoint(tmp_path / "plain", tensors, experts=E, hidden=H, intermediate=I)


def merged(folder: Path) -> dict[str, Tensor]:
    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


def test_the_fingerprint_is_of_the_model_and_not_of_its_files(
    plain: Path, write_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    first = open_checkpoint(plain).fingerprint
    other = write_checkpoint(tmp_path / "b", merged(plain), experts=E, hidden=H, intermediate=I, shards=3)
    assert open_checkpoint(other).fingerprint == first
    save_file({n: t + 0.01 for n, t in merged(plain).items()}, plain / "model.safetensors")  # a fine-tune of it
    assert open_checkpoint(plain).fingerprint != first
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert open_checkpoint(other).fingerprint != first


def test_layers_load_from_many_threads_at_once(plain: Path) -> None:
    source = open_checkpoint(plain)
    want = {n: source.load(n).w13.codes for n in source.layers}
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(10):
            if not torch.equal(source.load(n).w13.codes, want[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in source.layers for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


INT4 = Scheme(Element.INT4, 1, 32, ScaleType.F16)
F32 = Scheme(Element.F32)


@pytest.mark.parametrize(
    ("schemes", "want"),
    [
        ([INT4, INT4], INT4),
        ([INT4, Scheme(Element.INT4, 1, 32, ScaleType.F16, zeros=True)], "int4_g32_zp"),
        ([INT4, Scheme(Element.INT8, 1, 64, ScaleType.F16)], "int8_g32"),
        ([INT4, Scheme(Element.INT4, 1, WHOLE, ScaleType.F16)], "int4_g32"),
        ([INT4, Scheme(Element.INT4, 1, 48, ScaleType.F16)], F32),
        ([INT4, Scheme(Element.INT4, 1, 32, ScaleType.BF16)], Scheme(Element.INT4, 1, 32, ScaleType.F32)),
        ([INT4, Scheme(Element.BF16)], F32),
        ([Scheme(Element.F16), Scheme(Element.BF16)], F32),
        ([INT4, Scheme(Element.E4M3, 1, 32, ScaleType.F32)], F32),
        ([Scheme(Element.E4M3, 128, 128, ScaleType.F32), Scheme(Element.E4M3, 1, WHOLE, ScaleType.F32)], "e4m3_g128"),
        ([Scheme(Element.E4M3, WHOLE, WHOLE, ScaleType.F32), Scheme(Element.E4M3, 1, 32, ScaleType.E8M0)], "e4m3_g32"),
    ],
)
def test_one_scheme_for_many(schemes: list[Scheme], want: Scheme | str) -> None:
    got = common(schemes)
    assert (got.name if isinstance(want, str) else got) == want
    assert common(reversed(schemes)).name == got.name


def values(part: Part, scheme: Scheme, n: int, k: int) -> Tensor:
    """[n, k] f32 that a part means."""
    return convert(part, scheme, F32, n, k).codes if scheme != F32 else part.codes  # type: ignore[return-value]


def random_part(scheme: Scheme, n: int, k: int, seed: int = 0) -> Part:
    g = torch.Generator().manual_seed(seed)
    shape = scheme.scale_shape(n, k)
    if scheme.element is Element.INT4:
        codes = pack_nibbles(torch.randint(0, 16, (n, k), generator=g))
        zeros = torch.randint(0, 16, shape, generator=g, dtype=torch.uint8) if scheme.zeros else None
    elif scheme.element is Element.INT8:
        codes = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
        zeros = torch.randint(-128, 128, shape, generator=g, dtype=torch.int8) if scheme.zeros else None
    else:
        codes, zeros = torch.randn(n, k, generator=g).to(torch.float8_e4m3fn), None
    return Part(codes, torch.randn(shape, generator=g).half().float(), zeros, bias=torch.randn(n, generator=g))


CONVERSIONS = [
    (Scheme(Element.INT4, 1, 32, ScaleType.F32), Scheme(Element.INT4, 1, 32, ScaleType.F32, zeros=True)),
    (Scheme(Element.INT4, 1, 32, ScaleType.F32), Scheme(Element.INT8, 1, 16, ScaleType.F32)),
    (Scheme(Element.INT4, 1, 32, ScaleType.F32, zeros=True), Scheme(Element.INT8, 1, 16, ScaleType.F32, zeros=True)),
    (Scheme(Element.INT8, 1, WHOLE, ScaleType.F32), Scheme(Element.INT8, 1, 24, ScaleType.F32, zeros=True)),
    (Scheme(Element.E4M3, 16, 16, ScaleType.F32), Scheme(Element.E4M3, 4, 8, ScaleType.F32)),
    (Scheme(Element.E4M3, WHOLE, WHOLE, ScaleType.F32), Scheme(Element.E4M3, 1, WHOLE, ScaleType.F32)),
]


@pytest.mark.parametrize(("old", "new"), CONVERSIONS, ids=lambda s: s.name)
@pytest.mark.parametrize(("n", "k"), [(40, 72), (8, 32), (17, 50)])
def test_a_converted_part_means_the_same(old: Scheme, new: Scheme, n: int, k: int) -> None:
    part = random_part(old, n, k)
    got = convert(part, old, new, n, k)
    assert got.scales is not None
    assert tuple(got.scales.shape) == new.scale_shape(n, k)
    assert torch.equal(values(got, new, n, k), values(part, old, n, k))
    assert got.bias is part.bias


@pytest.mark.parametrize("rows", [1, WHOLE, 4, 6, 16, 128])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [16, 18, 7])
def test_gate_up_splits_into_halves_that_mean_the_same(rows: int, interleaved: bool, half: int) -> None:
    """Blocks of rows that straddle the border of gate and up, too."""
    k, layout = 24, Layout(Scheme(Element.E4M3, rows, 8, ScaleType.F32), 2 * half, 24, bias=True)
    part = random_part(layout.scheme, 2 * half, k)
    whole = values(part, layout.scheme, 2 * half, k)
    want = (whole[0::2], whole[1::2]) if interleaved else (whole[:half], whole[half:])
    scheme = split_layout(layout, interleaved).scheme
    for got, rows_wanted in zip(split(part, layout, interleaved), want, strict=True):
        assert torch.equal(values(got, scheme, half, k), rows_wanted)
    assert part.bias is not None
    first, second = (part.bias[0::2], part.bias[1::2]) if interleaved else (part.bias[:half], part.bias[half:])
    gate, up = split(part, layout, interleaved)
    assert gate.bias is not None
    assert up.bias is not None
    assert torch.equal(gate.bias, first)
    assert torch.equal(up.bias, second)


def test_joining_is_the_inverse_of_splitting() -> None:
    layout = Layout(INT4.with_scale(ScaleType.F32), 32, 64)
    part = random_part(layout.scheme, 32, 64)
    again = join_halves(*split(part, layout, interleaved=False))
    assert isinstance(again.codes, Tensor)
    assert isinstance(part.codes, Tensor)
    assert torch.equal(again.codes, part.codes)


def test_large_tensors_are_read_alike_wherever_they_lie_in_a_page(tmp_path: Path) -> None:
    """Also where the copy takes a detour: to a place a few bytes further into its page than the file's bytes are."""
    size, tail = 2 * PIECE_BYTES + 1000, 5
    words = torch.randint(0, 256, (size + tail,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    save_file({"w": words}, tmp_path / "w.safetensors")
    shard = Shard(tmp_path / "w.safetensors", tmp_path, Counter())
    offset, room = shard.tensors["w"].offset, np.empty(size + 2 * PAGE_BYTES, np.uint8)
    level = (offset - room.ctypes.data) % PAGE_BYTES
    for further in (0, 1, 8, 31, 32, 100):
        out = room[level + further : level + further + size]
        out.fill(0xA5)
        before = shard.counter.bytes
        shard.fill(out, offset, "w")
        assert np.array_equal(out, words[:size].numpy()), further
        assert shard.counter.bytes - before == size
        with pytest.raises(CheckpointError, match=r"w: w\.safetensors ends \d+ bytes early"):
            shard.fill(out, offset + tail + 1, "w")


@pytest.mark.parametrize("shape", [(3, 5), (3 << 20, 2), (0, 4)])
def test_large_matrices_are_writable_and_of_their_shape(shape: tuple[int, ...]) -> None:
    t = empty(shape, torch.int16)
    assert tuple(t.shape) == shape
    t.fill_(7)
    assert int(t.sum()) == 7 * t.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_files_of_every_kind_load_and_are_measured(kind: str, tmp_path: Path) -> None:
    figures = bench.measure(write_synthetic(tmp_path, f"{kind}:0.0005", hidden=256, intermediate=128), repeats=1)
    assert figures.layers == 1
    # An activation order is read twice, to plan and to load: 1 % of real matrices, more of these small ones.
    assert 0 <= figures.read_overhead < (0.15 if kind == "gptq-order" else 0.05)
    assert figures.load_s > 0
    assert figures.largest_layer_bytes > 0


def test_the_benchmark_command(checkpoint_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint_folder("gptq-w4-g128-sym-descact-false-qwen3moe1l")
    assert bench.main(["--checkpoint", str(path), "--experts", "0-1", "--repeats", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bytes_read"] == figures["bytes_on_disk"] > 0
    assert figures["safetensors_s"] > 0 < figures["safetensors_again_s"]
    assert figures["repacking"].startswith("C++ library" if repack.uses_library() else "torch (cpu kernel: ")
    assert bench.main(["--checkpoint", str(path), "--repeats", "1"]) == 0
    assert "safetensors alone" in capsys.readouterr().out
    assert bench.main(["--checkpoint", str(path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_the_table_of_formats_is_complete() -> None:
    """Every column that the docs print is filled, and every fixture that a row names is one of the known ones."""
    named = {row.fixture for row in formats() if row.fixture}
    for row in formats():
        assert row.detected_by, row.name
        assert row.packing or row.refusal, row.name
    own = {p.name for p in (ROOT / "tests" / "fixtures").iterdir() if p.is_dir()}
    shared = ROOT.parent / "shared" / "fixtures"  # more of them, where the whole collection is at hand
    if shared.is_dir():
        assert named <= own | {p.name for p in shared.iterdir()}
    assert own & named, "no row's fixture is in the repository"
