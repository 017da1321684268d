"""AWQ, GEMM and GEMV packings: against a writer of our own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from expertd_kernels.checkpoint import CheckpointError, open_checkpoint, repack
from expertd_kernels.checkpoint.tensors import Counter, Shard, Stored

PREFIX = "model.layers.0.mlp.experts"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_columns(codes: Tensor, bits: int = 4) -> Tensor:
    """[rows, 8 C] codes -> [rows, C] int32, nibble i of a word from column 8c + ORDER[i].  8 bits: 4 C columns, in the
    order 0 2 1 3."""
    order = ORDER if bits == 4 else (0, 2, 1, 3)
    out = torch.zeros(codes.shape[0], codes.shape[1] * bits // 32, dtype=torch.int64)
    for i, column in enumerate(order):
        out |= codes[:, column :: len(order)].long() << (bits * i)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).int()


def projection(
    g: torch.Generator, pack: Any, n: int, k: int, group: int, zero_point: bool, version: str,
    dtype: torch.dtype = torch.float16, bits: int = 4,
) -> Any:  # fmt: skip
    """Tensors as AutoAWQ writes them, and the [n, k] f32 that they mean."""
    of = torch.arange(k) // (k if group == -1 else group)
    groups = int(of.max()) + 1
    q = torch.randint(0, 1 << bits, (n, k), generator=g)
    middle = torch.full((n, groups), 1 << (bits - 1))
    zeros = torch.randint(0, 1 << bits, (n, groups), generator=g) if zero_point else middle
    scales = (torch.randn(n, groups, generator=g) * 0.1).to(dtype)
    if version == "gemm":
        parts = {"qweight": pack_columns(q.t(), bits), "qzeros": pack_columns(zeros.t(), bits), "scales": scales.t()}
    else:
        spare = -groups % 8
        padded = torch.nn.functional.pad(zeros, (0, spare))
        parts = {
            "qweight": pack(q.t(), 4).t(),
            "qzeros": pack(padded.t(), 4).t(),
            "scales": torch.nn.functional.pad(scales, (0, spare)),
        }
    return parts, (q - zeros[:, of]).float() * scales.float()[:, of]


@pytest.fixture(scope="session")
def make(write_checkpoint: Callable[..., Path], pack_stream: Any) -> Callable[..., dict[tuple[int, str], Tensor]]:
    def run(
        folder: Path,
        *,
        group: int = 32,
        zero_point: bool = True,
        version: str = "gemm",
        experts: int = 2,
        hidden: int = 64,
        intermediate: int = 96,
        seed: int = 0,
        quant: dict[str, Any] | None = None,
        bits: int = 4,
    ) -> dict[tuple[int, str], Tensor]:
        g = torch.Generator().manual_seed(seed)
        tensors: dict[str, Tensor] = {}
        means: dict[tuple[int, str], Tensor] = {}
        sizes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
        for e in range(experts):
            for name, (n, k) in sizes.items():
                parts, means[e, name] = projection(g, pack_stream, n, k, group, zero_point, version, bits=bits)
                tensors |= {f"{PREFIX}.{e}.{name}_proj.{s}": t for s, t in parts.items()}
        config = {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group,
            "zero_point": zero_point,
            "version": version,
        }
        config |= quant or {}
        write_checkpoint(folder, tensors, quant=config, experts=experts, hidden=hidden, intermediate=intermediate)
        return means

    return run


def assert_means(folder: Path, means: dict[tuple[int, str], Tensor]) -> str:
    w = open_checkpoint(folder).load(0)
    gate, up = w.w13.dequantize().chunk(2, dim=1)
    for (e, name), want in means.items():
        assert torch.equal({"gate": gate, "up": up, "down": w.w2.dequantize()}[name][e], want), f"expert {e} {name}"
    return w.w13.scheme.name


@given(
    group=st.sampled_from([-1, 8, 16, 32, 128]),
    zero_point=st.booleans(),
    experts=st.integers(1, 3),
    hidden=st.sampled_from([8, 40, 64, 152]),
    intermediate=st.sampled_from([8, 24, 96, 136]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_reads_exactly(make: Callable[..., Any], **options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_means(Path(folder), make(Path(folder), **options))


@pytest.mark.parametrize(("zero_point", "name"), [(True, "int4_g32_zp"), (False, "int4_g32")])
@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_schemes(make: Callable[..., Any], tmp_path: Path, version: str, zero_point: bool, name: str) -> None:
    assert assert_means(tmp_path, make(tmp_path, version=version, zero_point=zero_point)) == name


@pytest.mark.parametrize(("zero_point", "name"), [(True, "int8_g32_zp"), (False, "int8_g32")])
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 96), (4, 36)])
def test_eight_bits(
    make: Callable[..., Any], tmp_path: Path, zero_point: bool, name: str, hidden: int, intermediate: int
) -> None:
    """Sizes that are multiples of 4 and not of 8, too."""
    means = make(tmp_path, bits=8, zero_point=zero_point, hidden=hidden, intermediate=intermediate)
    assert assert_means(tmp_path, means) == name


def test_eight_bits_are_refused_where_their_order_is_not_known_or_zero_points_are_denied(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    make(tmp_path, version="gemv", quant={"bits": 8})
    with pytest.raises(CheckpointError, match=r"bits 8 .* want 4: GEMV has no other"):
        open_checkpoint(tmp_path).load(0)
    (tmp_path / "denied").mkdir()
    make(tmp_path / "denied", bits=8, quant={"zero_point": False})
    with pytest.raises(CheckpointError, match=r"qzeros: zero points other than 128"):
        open_checkpoint(tmp_path / "denied").load(0)


def test_zero_points_that_the_config_denies_are_refused(make: Callable[..., Any], tmp_path: Path) -> None:
    make(tmp_path, quant={"zero_point": False})
    with pytest.raises(CheckpointError, match=r"qzeros: zero points other than 8"):
        open_checkpoint(tmp_path).load(0)


@pytest.mark.parametrize(
    ("quant", "says"),
    [
        ({"version": "gemv_fast"}, r"awq_other: this version of AWQ's packing is not read"),
        ({"version": "new"}, r"fits no known format; .*version 'new'"),
        ({"bits": 2}, r"bits 2 .* want 4 or 8"),
        ({"bits": 8}, r"scales: shape \[2, 96\], want \[2, 48\]"),
        ({"group_size": 0}, r"group_size 0 in .* want -1 or a number > 0"),
        ({"group_size": -2}, r"group_size -2 in .* want -1 or a number > 0"),
        ({"group_size": "32"}, r"group_size '32' in .* want -1 or a number > 0"),
        ({"group_size": 64}, r"gate_proj\.scales: shape \[2, 96\], want \[1, 96\]"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    make: Callable[..., Any], tmp_path: Path, quant: dict[str, Any], says: str
) -> None:
    make(tmp_path, quant=quant)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path).load(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [36, 45])
def test_columns_that_fill_no_word_and_scales_of_any_type(
    write_checkpoint: Callable[..., Path], pack_stream: Any, tmp_path: Path, hidden: int, dtype: torch.dtype
) -> None:
    """Where `down` is not quantized nothing asks for a hidden size of whole words."""
    g = torch.Generator().manual_seed(hidden)
    down = torch.randn(hidden, 24, generator=g).to(dtype)
    tensors, means = {f"{PREFIX}.0.down_proj.weight": down}, {(0, "down"): down.float()}
    for name in ("gate", "up"):
        parts, means[0, name] = projection(g, pack_stream, 24, hidden, 32, True, "gemm", dtype)
        tensors |= {f"{PREFIX}.0.{name}_proj.{s}": t for s, t in parts.items()}
    quant = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    write_checkpoint(tmp_path, tensors, quant=quant, experts=1, hidden=hidden, intermediate=24)
    assert_means(tmp_path, means)


def test_the_library_and_torch_repack_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the C++ library the same bits come out of torch; tensors of several pieces and odd sizes, too."""
    if not repack.uses_library():
        pytest.skip("the C++ library is not built: run `python -m expertd_kernels.native.csrc.build`")
    g = torch.Generator().manual_seed(1)
    shapes = ((8, 1), (16, 16), (40, 33), (64, 50), (8, 128), (136, 20), (400, 40), (4096, 24))
    words = {f"{r}x{c}": torch.randint(-(2**31), 2**31, (r, c), generator=g).int() for r, c in shapes}
    save_file(words, tmp_path / "w.safetensors")
    for name, stored in Shard(tmp_path / "w.safetensors", tmp_path, Counter()).tensors.items():
        columns = {w: torch.randperm(words[name].shape[0] * 32 // w, generator=g).int() for w in (4, 8)}

        def made(stored: Stored = stored, columns: dict[int, Tensor] = columns) -> list[Tensor]:
            parts = [repack.transpose_rows(stored), repack.transpose_rows(stored, -0x7F7F7F80)]
            parts += [repack.gather_rows(stored, c, width, flip) for width, c in columns.items() for flip in (0, 7)]
            parts += [repack.transpose_columns(stored, ORDER)]
            return [p if isinstance(p, Tensor) else p.read() for p in parts]

        with_library = made()
        with monkeypatch.context() as m:
            m.setattr(repack, "uses_library", lambda: False)
            without = made()
        for a, b in zip(with_library, without, strict=True):
            assert torch.equal(a, b), name
