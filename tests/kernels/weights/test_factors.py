"""Factors of input columns (AWQ's pre_quant_scale): folded for every backend, widened where they cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from expertd_kernels import (
    Activation,
    ActivationKind,
    Refused,
    Scheme,
    Weights,
    build,
    decide,
    detect_device,
    problem_of,
    reference,
    relative_error,
)
from expertd_kernels.checkpoint import CheckpointError, open_checkpoint
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import experts_of, pack
from expertd_kernels.packed.file import read_packed, write_packed
from expertd_kernels.packed.selfcheck import self_check
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.factors import fold
from expertd_kernels.weights.scheme import ScaleType

E, H, I, K = 4, 256, 128, 2
INT4 = Scheme.parse("int4_g64", ScaleType.F32)
ROWS = {b.name: b for b in BACKENDS}


def with_factors(w: Weights, shared: bool = True, seed: int = 0) -> Weights:
    """bf16 factors from 1/8 to 8, so that a layer without them is far off."""
    g = torch.Generator().manual_seed(seed)

    def draw(q_experts: int, k: int) -> Tensor:
        return torch.exp2(torch.rand(q_experts, k, generator=g) * 6 - 3).bfloat16().float()

    one = draw(1 if shared else E, w.hidden_size).expand(E, -1).contiguous()
    return replace(w, w13=replace(w.w13, factors=one), w2=replace(w.w2, factors=draw(E, w.intermediate_size)))


def test_they_multiply_the_inputs_of_both_matrices() -> None:
    w = with_factors(random_weights(INT4, E, H, I, seed=1))
    plain = replace(w, w13=replace(w.w13, factors=None), w2=replace(w.w2, factors=None))
    x = torch.randn(1, H)
    ids, one = torch.tensor([[2]], dtype=torch.int32), torch.ones(1, 1)
    assert w.w13.factors is not None
    assert w.w2.factors is not None
    gate, up = (plain.w13.dequantize()[2] @ (x[0] * w.w13.factors[2])).chunk(2)
    h = torch.nn.functional.silu(gate) * up * w.w2.factors[2]
    assert relative_error(reference(w, x, ids, one), (plain.w2.dequantize()[2] @ h)[None]) < 1e-6
    assert relative_error(reference(plain, x, ids, one), reference(w, x, ids, one)) > 0.5


@pytest.mark.parametrize("scheme", [INT4, Scheme.parse("f32"), Scheme.parse("int8_channel_zp", ScaleType.F32)])
@pytest.mark.parametrize("kind", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_folded_weights_mean_the_same(scheme: Scheme, kind: str) -> None:
    w = with_factors(random_weights(scheme, E, H, I, activation=Activation(ActivationKind(kind)), bias=True, seed=2))
    x, ids, weights = random_inputs(9, H, E, K, dtype=torch.float32)
    plain, hidden = fold(w)
    assert plain.w13.factors is None
    assert plain.w2.factors is None
    assert hidden is not None
    assert relative_error(reference(plain, x * hidden, ids, weights), reference(w, x, ids, weights)) < 1e-6
    assert (plain.w13.scheme, plain.w2.scheme) == (w.w13.scheme, w.w2.scheme)
    assert fold(plain)[1] is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"activation": Activation.parse("swigluoai")}, "swigluoai is not linear in its up rows; widen w2"),
        ({"activation": Activation(limit=10.0)}, "silu_and_mul_limit10 is not linear in its up rows"),
        ({"scheme": Scheme.parse("int4_g64", ScaleType.BF16)}, "scales of int4_g64 cannot hold a factor for each row"),
        ({"scheme": Scheme.parse("nvfp4")}, "scales of nvfp4 cannot hold"),
        ({"scheme": Scheme.parse("e4m3_block128")}, "scales of e4m3_block128 cannot hold"),
        ({"shared": False}, "factors of w13's inputs differ between experts; widen w13"),
    ],
)
def test_what_cannot_be_folded_is_refused_and_never_dropped(change: dict[str, Any], says: str) -> None:
    shared, scheme = change.pop("shared", True), change.pop("scheme", INT4)
    w = with_factors(random_weights(scheme, E, H, I, seed=3, **change), shared)
    problem = problem_of(w, detect_device("cpu"), top_k=K)
    with pytest.raises(Refused, match=says):
        pack(ROWS["reference"], w, problem)
    widened = replace(w, w13=w.w13.widen(), w2=w.w2.widen())
    x, ids, weights = random_inputs(5, H, E, K, dtype=torch.float32)
    assert relative_error(reference(widened, x, ids, weights), reference(w, x, ids, weights)) < 1e-6


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", ["cpu", "cpu_torch", "reference"])
def test_every_row_computes_them(name: str, dtype: str, tmp_path: Path) -> None:
    w = with_factors(random_weights(INT4, E, H, I, seed=4))
    problem = problem_of(w, detect_device("cpu"), top_k=K, compute_dtype=dtype)
    if not decide(problem, pin=name).chosen:
        pytest.skip(f"{name}: {'; '.join(decide(problem, pin=name).verdicts[0].refusals)}")
    experts = build(decide(problem, pin=name), w)
    assert experts.backend == name
    found = self_check(experts, w, problem)
    assert found.ok, found.fault
    packed = pack(ROWS[name], w, problem)
    write_packed(tmp_path / "layer.packed", packed, {})
    mapped = experts_of(ROWS[name], read_packed(tmp_path / "layer.packed"), problem)
    again = self_check(mapped, w, problem)
    assert again.relative_error == found.relative_error
    plain = replace(w, w13=replace(w.w13, factors=None), w2=replace(w.w2, factors=None))
    assert not self_check(build(decide(problem, pin=name), plain), w, problem).ok


def test_a_packer_is_never_given_factors() -> None:
    from expertd_kernels.backends import cpu

    w = with_factors(random_weights(INT4, E, H, I))
    with pytest.raises(AssertionError, match=r"builder\.pack folds factors"):
        cpu.pack(w, problem_of(w, detect_device("cpu")))


def tensors_of(w4: int = 4, shared: bool = True, scale: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A ModelOpt AWQ layer."""
    g = torch.Generator().manual_seed(w4)
    out: dict[str, Tensor] = {}
    once = {k: (torch.rand(k, generator=g) + 0.5).bfloat16() for k in (H, I)}
    for e in range(E):
        for p, (n, k) in {"gate": (I, H), "up": (I, H), "down": (H, I)}.items():
            at = f"model.layers.0.mlp.experts.{e}.{p}_proj"
            out[f"{at}.weight"] = torch.randint(0, 256, (n // 2, k), generator=g).to(torch.uint8)
            out[f"{at}.weight_scale"] = (torch.rand(n, -(-k // 128), generator=g) * 0.02).to(scale)
            factors = once[k].clone() if shared else (torch.rand(k, generator=g) + 0.5).bfloat16()
            out[f"{at}.pre_quant_scale"] = factors
    return out


AWQ = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}


def values_of(tensors: dict[str, Tensor], e: int, p: str) -> Tensor:
    """[N, K] by the format's definition, one weight after another."""
    at = f"model.layers.0.mlp.experts.{e}.{p}_proj"
    packed, scale, factors = (tensors[f"{at}.{s}"] for s in ("weight", "weight_scale", "pre_quant_scale"))
    out = torch.empty(2 * packed.shape[0], packed.shape[1])
    for half in (0, 1):
        nibble = (packed >> (4 * half) & 15).int()
        out[half::2] = torch.where(nibble > 7, nibble - 16, nibble).float()
    return out * scale.float().repeat_interleave(128, dim=1)[:, : out.shape[1]] * factors.float()


@pytest.mark.parametrize(
    ("given", "config", "w13", "w2", "notes"),
    [
        ({}, {}, "int4_g128", "int4_g128", ["multiplies the hidden states before w13", "w13's up rows"]),
        ({"scale": torch.bfloat16}, {}, "int4_g128", "int4_g128", ["w13's up rows"]),
        (
            {"shared": False},
            {},
            "f32",
            "int4_g128",
            ["pre_quant_scale of .*up_proj is not that of .*gate_proj: w13 is widened to f32, 8 times the memory"],
        ),
        (
            {},
            {"model_type": "deepseek_v4"},
            "int4_g128",
            "f32",
            ["_limit10 is not linear in its up rows: w2 is widened to f32, 8 times the memory of int4_g128"],
        ),
    ],
)
def test_modelopt_awq_is_read_exactly_and_widening_is_said(
    given: dict[str, Any],
    config: dict[str, Any],
    w13: str,
    w2: str,
    notes: list[str],
    write_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    tensors = tensors_of(**given)
    config = {"model_type": "qwen3_moe", **config, "num_experts": E}
    source = open_checkpoint(
        write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I, quant=AWQ, **config)
    )
    info, w = source.info(0), source.load(0)
    assert (info.w13.name, info.w2.name) == (w.w13.scheme.name, w.w2.scheme.name) == (w13, w2)
    assert (info.w13, info.w2) == (w.w13.scheme, w.w2.scheme)
    said = "\n".join(info.notes)
    for note in notes:
        assert re.search(note, said), said
    gate_up = torch.cat([torch.stack([values_of(tensors, e, p) for e in range(E)]) for p in ("gate", "up")], dim=1)
    down = torch.stack([values_of(tensors, e, "down") for e in range(E)])
    for got, want in ((w.w13.dequantize(), gate_up), (w.w2.dequantize(), down)):
        torch.testing.assert_close(got, want, rtol=2e-7, atol=0)
    problem = problem_of(w, detect_device("cpu"), top_k=K)
    assert self_check(build(decide(problem, pin="cpu_torch"), w), w, problem).ok


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("pre_quant_scale", None, r"1\.up_proj: tensor 'pre_quant_scale' is missing"),
        ("pre_quant_scale", torch.full((H,), float("nan")).bfloat16(), r"pre_quant_scale: a factor is NaN"),
        ("pre_quant_scale", torch.zeros(H).bfloat16(), r"pre_quant_scale: a factor is .* not above 0"),
        ("pre_quant_scale", torch.ones(H // 2).bfloat16(), r"pre_quant_scale: shape \[128\], want \[256\]"),
        ("weight_scale", torch.ones(I, 1), r"weight_scale: shape \[128, 1\], want \[128, 2\]"),
        ("weight_scale_2", torch.ones(()), r"'weight_scale_2' is not known"),
    ],
)
def test_broken_modelopt_awq_is_refused_by_name(
    name: str, value: Tensor | None, says: str, write_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = tensors_of()
    at = f"model.layers.0.mlp.experts.1.up_proj.{name}"
    if value is None:
        del tensors[at]
    else:
        tensors[at] = value
    write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I, quant=AWQ)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path).load(0)


def test_a_real_checkpoint_stays_in_four_bits(checkpoint_folder: Callable[[str], Path]) -> None:
    path = checkpoint_folder("modelopt-int4-awq-qwen3moe1l")
    w, given = open_checkpoint(path).load(0), load_file(path / "expected.safetensors")
    problem = problem_of(w, detect_device("cpu"), top_k=4, compute_dtype="f32")
    experts = build(decide(problem), w)
    for m in (1, 5, 33):
        x, ids, weights = (given[f"M{m}.{k}"] for k in ("hidden_states", "topk_ids", "topk_weights"))
        assert relative_error(experts(x, ids.int(), weights), given[f"M{m}.expected"]) < 2e-3
    assert w.nbytes < 0.3 * 2 * w.num_experts * 3 * w.hidden_size * w.intermediate_size  # bf16 would be the rest
