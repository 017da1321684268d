"""GPTQ and AutoRound's GPTQ packings: against a writer of our own, over shapes and options that the fixtures lack."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertd_kernels.checkpoint import CheckpointError, open_checkpoint

PREFIX = "model.layers.2.mlp.experts"


@dataclass(frozen=True)
class Case:
    """A checkpoint to be written.  order: "natural", "grouped" (equal groups, permuted), "unequal", "apart" (grouped,
    gate and up each their own)."""

    bits: int = 4
    group: int = 32
    sym: bool = False
    version: int = 1
    order: str = "natural"
    bias: bool = False
    experts: int = 2
    hidden: int = 64
    intermediate: int = 96
    seed: int = 0
    quant: dict[str, Any] = field(default_factory=dict)


def projection(
    g: torch.Generator, pack: Any, n: int, k: int, c: Case, g_idx: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors as a GPTQ tool writes them, and the [n, k] f32 that they mean."""
    groups, top = int(g_idx.max()) + 1, 1 << c.bits
    q = torch.randint(0, top, (n, k), generator=g)
    zeros = torch.full((n, groups), top // 2) if c.sym else torch.randint(0, top, (n, groups), generator=g)
    scales = (torch.randn(groups, n, generator=g) * 0.1).half()
    if c.version == 1 and c.bits == 3:
        qzeros = pack((zeros - 1) % 8, 3)
    elif c.version == 1:  # one subtraction for the whole word, so that a zero point 0 borrows from its neighbour
        one_each = sum(1 << at for at in range(0, 32, c.bits))
        qzeros = ((pack(zeros, c.bits).long() - one_each) & 0xFFFFFFFF).to(torch.int64)
        qzeros = torch.where(qzeros >= 1 << 31, qzeros - (1 << 32), qzeros).int()
    else:
        qzeros = pack(zeros, c.bits)
    tensors = {"qweight": pack(q.t(), c.bits), "qzeros": qzeros.t(), "scales": scales, "g_idx": g_idx.int()}
    tensors |= {"bias": torch.randn(n, generator=g).half()} if c.bias else {}
    return tensors, (q - zeros[:, g_idx]).float() * scales.t().float()[:, g_idx]


def draw_order(g: torch.Generator, k: int, c: Case) -> Tensor:
    """[k] group of each input column."""
    natural = torch.arange(k) // (k if c.group == -1 else c.group)
    if c.order == "natural":
        return natural
    if c.order == "unequal":
        drawn = torch.randint(0, int(natural.max()) + 1, (k,), generator=g)
        drawn[: int(natural.max()) + 1] = torch.arange(int(natural.max()) + 1)
        return drawn
    return natural[torch.randperm(k, generator=g)]


@pytest.fixture(scope="session")
def make(write_checkpoint: Callable[..., Path], pack_stream: Any) -> Callable[..., Any]:
    """make(folder, case) -> {(expert, projection): [n, k] f32} that the written checkpoint means."""

    def run(folder: Path, c: Case) -> dict[tuple[int, str], Tensor]:
        g = torch.Generator().manual_seed(c.seed)
        tensors: dict[str, Tensor] = {}
        means: dict[tuple[int, str], Tensor] = {}

        def pack(fields: Tensor, bits: int) -> Tensor:
            return pack_stream(fields, bits)

        for e in range(c.experts):
            inputs = draw_order(g, c.hidden, c)
            for name, n, k in (
                ("gate", c.intermediate, c.hidden),
                ("up", c.intermediate, c.hidden),
                ("down", c.hidden, c.intermediate),
            ):
                g_idx = inputs if name != "down" and c.order != "apart" else draw_order(g, k, c)
                parts, means[e, name] = projection(g, pack, n, k, c, g_idx)
                tensors |= {f"{PREFIX}.{e}.{name}_proj.{s}": t for s, t in parts.items()}
        quant = {"quant_method": "gptq", "bits": c.bits, "group_size": c.group, "sym": c.sym}
        quant |= {"desc_act": c.order != "natural", "checkpoint_format": "gptq" if c.version == 1 else "gptq_v2"}
        sizes = {"experts": c.experts, "hidden": c.hidden, "intermediate": c.intermediate}
        write_checkpoint(folder, tensors, quant=quant | c.quant, **sizes)
        return means

    return run


def assert_means(folder: Path, means: dict[tuple[int, str], Tensor], exact_scheme: str | None = None) -> None:
    """The checkpoint in `folder` dequantizes to exactly these."""
    source = open_checkpoint(folder)
    info, w = source.info(2), source.load(2)
    assert (info.w13, info.w2) == (w.w13.scheme, w.w2.scheme)
    assert info.act_order == (w.w13.columns is not None or w.w2.columns is not None)
    gate, up = w.w13.dequantize().chunk(2, dim=1)
    for (e, name), want in means.items():
        got = {"gate": gate, "up": up, "down": w.w2.dequantize()}[name][e]
        assert torch.equal(got, want), f"expert {e} {name}"
    if exact_scheme is not None:
        assert {w.w13.scheme.name, w.w2.scheme.name} == {exact_scheme}


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    group=st.sampled_from([-1, 8, 16, 32, 64]),
    sym=st.booleans(),
    version=st.sampled_from([1, 2]),
    order=st.sampled_from(["natural", "grouped"]),
    experts=st.integers(1, 3),
    hidden=st.sampled_from([32, 64, 96]),
    intermediate=st.sampled_from([32, 64, 160]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_reads_exactly(make: Callable[..., Any], **options: Any) -> None:
    """Groups that do not divide K, one expert, all bit widths: the numbers are the writer's, to the last bit."""
    with tempfile.TemporaryDirectory() as folder:
        means = make(Path(folder), Case(**options))
        assert_means(Path(folder), means)


@pytest.mark.parametrize(("bits", "name"), [(2, "int4_g32"), (3, "int4_g32"), (4, "int4_g32"), (8, "int8_g32")])
@pytest.mark.parametrize("sym", [True, False])
def test_schemes(make: Callable[..., Any], tmp_path: Path, bits: int, name: str, sym: bool) -> None:
    means = make(tmp_path, Case(bits=bits, sym=sym))
    assert_means(tmp_path, means, name if sym else f"{name}_zp")


def test_intermediate_size_that_is_no_multiple_of_32(make: Callable[..., Any], tmp_path: Path) -> None:
    assert_means(tmp_path, make(tmp_path, Case(hidden=40, intermediate=56, group=16)))


def test_zero_points_of_zero_borrow_from_their_neighbours(make: Callable[..., Any], tmp_path: Path) -> None:
    """A quarter of the zero points are 0 with 2 bits: decoding field by field would be wrong for their neighbours."""
    assert_means(tmp_path, make(tmp_path, Case(bits=2, group=8, seed=3)))


def test_unequal_groups_are_refused(make: Callable[..., Any], tmp_path: Path) -> None:
    make(tmp_path, Case(order="unequal"))
    with pytest.raises(CheckpointError, match=r"g_idx: groups of unequal size; want groups of 32 columns"):
        open_checkpoint(tmp_path).info(2)


def test_gate_and_up_in_different_orders_are_widened_and_said_so(make: Callable[..., Any], tmp_path: Path) -> None:
    means = make(tmp_path, Case(order="apart"))
    assert_means(tmp_path, means)
    info = open_checkpoint(tmp_path).info(2)
    assert (info.w13.name, info.w2.name) == ("f32", "int4_g32_zp")
    assert any("different activation orders" in note for note in info.notes)


def test_bias(make: Callable[..., Any], tmp_path: Path) -> None:
    make(tmp_path, Case(bias=True))
    w = open_checkpoint(tmp_path).load(2)
    assert w.w13.bias is not None
    assert w.w2.bias is not None
    assert float(w.w13.bias.abs().min()) > 0


def test_dynamic_overrides_give_an_expert_its_own_bits(make: Callable[..., Any], tmp_path: Path) -> None:
    """`dynamic` says 8 bits for expert 1: the layer becomes int8, which holds both exactly."""
    four, eight = Case(bits=4, sym=True), Case(bits=8, sym=True, seed=1)
    means4 = make(tmp_path / "4", four)
    means8 = make(tmp_path / "8", eight)
    _replace(tmp_path / "4", tmp_path / "8", r"experts\.1\.")
    _edit_quant(tmp_path / "4", dynamic={r"-:.*router": {}, r"+:.*experts\.1\..*": {"bits": 8}})
    means = {key: (means8 if key[0] == 1 else means4)[key] for key in means4}
    assert_means(tmp_path / "4", means, "int8_g32")
    assert any("holds all of it exactly" in note for note in open_checkpoint(tmp_path / "4").info(2).notes)


def _replace(target: Path, source: Path, pattern: str) -> None:
    """Take the tensors whose names match from another checkpoint."""
    from safetensors.torch import load_file, save_file

    a, b = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    save_file({n: b[n] if re.search(pattern, n) else t for n, t in a.items()}, target / "model.safetensors")


def _edit_quant(folder: Path, **changes: Any) -> None:
    import json

    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bits": 5}, r"gate_proj: bits 5 .* want 2, 3, 4 or 8"),
        ({"bits": 8}, r"gate_proj.*(shape|rows)"),
        ({"group_size": 16}, r"gate_proj\.scales: shape"),
        ({"group_size": 0}, r"group_size 0"),
        ({"sym": True}, r"qzeros: zero points other than 8 .* sym true"),
        ({"checkpoint_format": "marlin"}, r"gptq_repacked: .*layout of one kernel"),
        ({"checkpoint_format": "gptq_v3"}, r"fits no known format; .*'gptq_v3'.*closest: .*gptq_v1"),
        ({"quant_method": "hqq"}, r"gate_proj: other_methods: checkpoints of .*hqq.* are not read"),
        ({"quant_method": "new"}, r"fits no known format; .*quant_method 'new'"),
        ({"bits": 4.0}, r"bits 4\.0"),
        ({"dynamic": {"+:(": {}}}, r"dynamic '\(' is no regular expression"),
    ],
)
def test_configurations_that_do_not_fit_the_tensors_are_refused(
    make: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    make(tmp_path, Case())
    _edit_quant(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path).load(2)


def test_order_that_the_config_denies_is_refused(make: Callable[..., Any], tmp_path: Path) -> None:
    make(tmp_path, Case(order="grouped"))
    _edit_quant(tmp_path, desc_act=False)
    with pytest.raises(CheckpointError, match=r"g_idx: columns are not in natural order.* desc_act true"):
        open_checkpoint(tmp_path).load(2)


@pytest.mark.parametrize(
    ("packing", "version"), [("auto_round:auto_gptq", 1), ("auto_round:gptqmodel", 2), ("auto_round", 2)]
)
def test_autoround_packings_tell_the_zero_points(
    make: Callable[..., Any], tmp_path: Path, packing: str, version: int
) -> None:
    means = make(tmp_path, Case(version=version, quant={"quant_method": "auto-round", "packing_format": packing}))
    assert_means(tmp_path, means, "int4_g32_zp")
    _edit_quant(tmp_path, packing_format="auto_round:something")
    with pytest.raises(CheckpointError, match=r"fits no known format.*auto_round:something"):
        open_checkpoint(tmp_path).info(2)


def test_autoround_extra_config_gives_a_projection_its_own_bits(make: Callable[..., Any], tmp_path: Path) -> None:
    quant = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    means4 = make(tmp_path / "4", Case(sym=True, quant=quant))
    means8 = make(tmp_path / "8", Case(sym=True, bits=8, quant=quant))
    _replace(tmp_path / "4", tmp_path / "8", "down_proj")
    _edit_quant(tmp_path / "4", extra_config={r".*\.down_proj": {"bits": 8}, "model.layers.2.mlp.gate": {"bits": 16}})
    assert_means(tmp_path / "4", {k: (means8 if k[1] == "down" else means4)[k] for k in means4})
    info = open_checkpoint(tmp_path / "4").info(2)
    assert (info.w13.name, info.w2.name) == ("int4_g32", "int8_g32")


def test_quantize_config_beside_an_unquantized_config_json_counts(make: Callable[..., Any], tmp_path: Path) -> None:
    """Old AutoGPTQ checkpoints: quantize_config.json, without a quant_method."""
    import json

    means = make(tmp_path, Case(sym=True))
    config = json.loads((tmp_path / "config.json").read_text())
    quant = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps({k: quant[k] for k in ("bits", "group_size", "sym")}))
    assert_means(tmp_path, means, "int4_g32")
