"""compressed-tensors checkpoints of shapes that no fixture has, written here from random codes.

The writer and the decoder in this file know the formats from their description only; nothing of the reader is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from expertd_kernels import ActivationQuant, Weights
from expertd_kernels.checkpoint import CheckpointError, open_checkpoint

Config = dict[str, Any]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(abs(hash(seed)) % (1 << 31))


def bit_stream(fields: Tensor, bits: int) -> Tensor:
    """[R, C] values below 2**bits -> [R, ceil(C * bits / 32)] int32: one little-endian stream a row."""
    planes = ((fields.numpy().astype(np.uint8)[:, :, None] >> np.arange(bits)) & 1).astype(np.uint8)
    flat = planes.reshape(fields.shape[0], -1)
    raw = np.packbits(np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32))), axis=1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(raw).view(np.int32).copy())


def weights_args(**values: Any) -> Config:
    return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **values}


def write(
    folder: Path, modules: Mapping[str, Mapping[str, Tensor]], groups: Config, H: int, I: int, **quant: Any
) -> None:
    """A Qwen3-MoE checkpoint of one layer; modules: "0.gate_proj" -> tensors."""
    names = {m.split(".")[0] for m in modules}
    folder.mkdir(exist_ok=True)
    config = {
        "model_type": "qwen3_moe", "num_experts": len(names), "num_experts_per_tok": 1, "hidden_size": H,
        "moe_intermediate_size": I, "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"],
                                **quant},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    at = "model.layers.0.mlp.experts"
    flat = {
        f"{at}.{m}.{s}": t.clone(memory_format=torch.contiguous_format)
        for m, tensors in modules.items()
        for s, t in tensors.items()
    }
    save_file(flat, folder / "model.safetensors")


Make = Callable[[int, int, torch.Generator], tuple[dict[str, Tensor], Tensor]]


def layer(make: Make, E: int, H: int, I: int, seed: int = 0) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """(tensors of every projection, the values they mean [E, n, k] by projection)."""
    modules: dict[str, dict[str, Tensor]] = {}
    values: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
    for e in range(E):
        for j, (p, (n, k)) in enumerate({"gate": (I, H), "up": (I, H), "down": (H, I)}.items()):
            tensors, value = make(n, k, generator(seed, e, j))
            modules[f"{e}.{p}_proj"] = tensors
            values[p].append(value)
    return modules, {p: torch.stack(v) for p, v in values.items()}


def check(w: Weights, values: Mapping[str, Tensor]) -> None:
    gate, up = w.w13.dequantize().chunk(2, dim=1)
    assert torch.equal(gate, values["gate"])
    assert torch.equal(up, values["up"])
    assert torch.equal(w.w2.dequantize(), values["down"])


def spread(scales: Tensor, group: int, k: int) -> Tensor:
    return scales.float().repeat_interleave(group, dim=1)[:, :k]


def integers(bits: int, group: int, form: str, zeros: str = "", order: bool = False) -> Make:
    """form: "packed" or "plain" (I8 weight); zeros: "", "packed" or "plain"."""

    def make(n: int, k: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        half = 1 << (bits - 1)
        size = group or k
        cols = -(-k // size)
        q = torch.randint(-half, half, (n, k), generator=g)
        scales = (torch.randn(n, cols, generator=g) * 0.01).bfloat16()
        z = torch.randint(-half, half, (n, cols), generator=g) if zeros else torch.zeros(n, cols, dtype=torch.long)
        group_of = torch.arange(k) // size
        tensors = {"weight_scale": scales}
        if order:
            group_of = group_of[torch.randperm(k, generator=g)]
            tensors["weight_g_idx"] = group_of.int()
        if form == "packed":
            tensors |= {"weight_packed": bit_stream(q + half, bits), "weight_shape": torch.tensor([n, k])}
        else:
            tensors["weight"] = q.to(torch.int8)
        if zeros == "packed":
            tensors["weight_zero_point"] = bit_stream((z + half).t(), bits).t()
        elif zeros:
            tensors["weight_zero_point"] = z.to(torch.int8)
        return tensors, (q - z[:, group_of]).float() * scales.float()[:, group_of]

    return make


def group_config(bits: int, group: int, zeros: str = "", **more: Any) -> Config:
    strategy = "group" if group else "channel"
    args = weights_args(num_bits=bits, strategy=strategy, group_size=group or None, symmetric=not zeros)
    return {"group_0": {"targets": ["Linear"], "weights": args, **more}}


@quick
@given(
    st.integers(2, 8), st.sampled_from([0, 8, 16, 32]), st.sampled_from(["", "packed", "plain"]), st.booleans(),
    st.integers(1, 3), st.integers(1, 60), st.integers(1, 40),
)  # fmt: skip
def test_packed_integers_of_any_shape(
    tmp_path: Path, bits: int, group: int, zeros: str, order: bool, E: int, H: int, I: int
) -> None:
    """2 to 8 bits, ragged groups, odd columns, one expert, one row, permuted columns: exact."""
    order = order and group > 0
    modules, values = layer(integers(bits, group, "packed", zeros, order), E, H, I)
    if order:  # gate and up of a real checkpoint see the same input order
        for e in range(E):
            modules[f"{e}.up_proj"], values["up"][e] = modules[f"{e}.gate_proj"], values["gate"][e]
    write(tmp_path, modules, group_config(bits, group, zeros), H, I)
    w = open_checkpoint(tmp_path).load(0)
    check(w, values)
    assert w.w13.scheme.element.value == ("int4" if bits <= 4 else "int8")
    assert w.w13.scheme.zeros == bool(zeros)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("zeros", ["", "plain"])
def test_plain_integers(tmp_path: Path, bits: int, zeros: str) -> None:
    """int-quantized and naive-quantized: I8, whatever the bits."""
    modules, values = layer(integers(bits, 16, "plain", zeros), 2, 40, 24)
    write(tmp_path, modules, group_config(bits, 16, zeros), 40, 24)
    w = open_checkpoint(tmp_path).load(0)
    check(w, values)
    assert w.w13.scheme.element.value == ("int8" if bits == 8 else "int4")


def test_plain_codes_beyond_their_bits_are_refused(tmp_path: Path) -> None:
    modules, _ = layer(integers(4, 16, "plain"), 1, 32, 16)
    modules["0.up_proj"]["weight"][3, 3] = 9
    write(tmp_path, modules, group_config(4, 16), 32, 16)
    with pytest.raises(CheckpointError, match=r"0\.up_proj\.weight: codes from -8 to 9; want 4-bit ones"):
        open_checkpoint(tmp_path).load(0)


def test_unused_g_idx_is_the_natural_order(tmp_path: Path) -> None:
    modules, values = layer(integers(4, 16, "packed"), 1, 32, 16)
    for tensors, k in ((modules["0.gate_proj"], 32), (modules["0.up_proj"], 32), (modules["0.down_proj"], 16)):
        tensors["weight_g_idx"] = torch.full((k,), -1, dtype=torch.int32)
    write(tmp_path, modules, group_config(4, 16), 32, 16)
    w = open_checkpoint(tmp_path).load(0)
    assert w.w13.columns is None
    check(w, values)


@pytest.mark.parametrize("form", ["packed", "plain"])
def test_idle_zero_points_of_a_symmetric_group(tmp_path: Path, form: str) -> None:
    """Older versions wrote them; they count only where the group is asymmetric, and may not be missing there."""
    modules, values = layer(integers(8, 16, form), 1, 32, 16)
    for tensors in modules.values():
        tensors["weight_zero_point"] = torch.zeros(tensors["weight_scale"].shape, dtype=torch.int8)
    write(tmp_path, modules, group_config(8, 16), 32, 16)
    w = open_checkpoint(tmp_path).load(0)
    assert w.w13.zeros is None
    check(w, values)
    modules["0.up_proj"]["weight_zero_point"][1, 1] = 3
    write(tmp_path, modules, group_config(8, 16), 32, 16)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_zero_point: zero points, but the .* is symmetric"):
        open_checkpoint(tmp_path).load(0)
    del modules["0.gate_proj"]["weight_zero_point"]
    write(tmp_path, modules, group_config(8, 16, "plain"), 32, 16)
    with pytest.raises(CheckpointError, match="asymmetric, but weight_zero_point is missing"):
        open_checkpoint(tmp_path).info(0)


def test_fused_packed_integers(tmp_path: Path) -> None:
    """All experts in one [E, ...] tensor under the fused names, gate rows first."""
    E, H, I = 2, 64, 48
    single, values = layer(integers(4, 16, "packed", "packed"), E, H, I)
    fused: dict[str, dict[str, Tensor]] = {"gate_up_proj": {}, "down_proj": {}}
    for suffix in ("weight_packed", "weight_scale", "weight_zero_point"):
        both = [torch.cat([single[f"{e}.{p}_proj"][suffix] for p in ("gate", "up")]) for e in range(E)]
        fused["gate_up_proj"][suffix] = torch.stack(both)
        fused["down_proj"][suffix] = torch.stack([single[f"{e}.down_proj"][suffix] for e in range(E)])
    fused["gate_up_proj"]["weight_shape"] = torch.tensor([E, 2 * I, H])
    fused["down_proj"]["weight_shape"] = torch.tensor([E, H, I])
    write(tmp_path, fused, group_config(4, 16, "packed"), H, I)
    check(open_checkpoint(tmp_path).load(0), values)


def e4m3(n: int, k: int, g: torch.Generator) -> Tensor:
    return (torch.randn(n, k, generator=g) * 64).to(torch.float8_e4m3fn)


def float8(strategy: str, block: tuple[int, int] = (128, 128), shape: tuple[int, ...] | None = None) -> Make:
    def make(n: int, k: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes = e4m3(n, k, g)
        sizes = {"tensor": (1, 1), "channel": (n, 1), "block": (-(-n // block[0]), -(-k // block[1]))}
        scales = (torch.rand(sizes[strategy], generator=g) * 0.01 + 0.001).bfloat16()
        rows = {"tensor": n, "channel": 1, "block": block[0]}[strategy]
        wide = spread(scales, {"tensor": k, "channel": k, "block": block[1]}[strategy], k)
        value = codes.float() * wide.repeat_interleave(rows, dim=0)[:n]
        return {"weight": codes, "weight_scale": scales.reshape(shape) if shape is not None else scales}, value

    return make


@quick
@given(
    st.sampled_from([("tensor", (128, 128)), ("channel", (128, 128)), ("block", (128, 128)), ("block", (16, 32))]),
    st.integers(1, 2), st.integers(1, 150), st.integers(1, 150),
)  # fmt: skip
def test_float8_of_any_shape(tmp_path: Path, how: tuple[str, tuple[int, int]], E: int, H: int, I: int) -> None:
    strategy, block = how
    modules, values = layer(float8(strategy, block, (1,) if strategy == "tensor" else None), E, H, I)
    args = weights_args(num_bits=8, type="float", strategy=strategy, group_size=None)
    if strategy == "block":
        args["block_structure"] = list(block) if H % 2 else f"{block[0]}x{block[1]}"  # both spellings are met
    write(tmp_path, modules, {"group_0": {"targets": ["Linear"], "weights": args}}, H, I)
    check(open_checkpoint(tmp_path).load(0), values)


def nvfp4(n: int, k: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(0, 16, (n, k), generator=g)
    scales = (torch.rand(n, k // 16, generator=g) * 400 + 1).to(torch.float8_e4m3fn)
    second = torch.rand(1, generator=g) * 5000 + 100
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    value = E2M1[codes] * (scales.float() / second).repeat_interleave(16, dim=1)
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": second}, value


@pytest.mark.parametrize("seed", range(5))
def test_the_global_scale_divides_to_the_last_bit(tmp_path: Path, seed: int) -> None:
    """A multiplication with the rounded reciprocal would be off by one unit in the last place for some scales."""
    modules, values = layer(nvfp4, 3, 64, 32, seed)
    for e in range(3):
        modules[f"{e}.down_proj"]["input_global_scale"] = torch.tensor([8.0])
        modules[f"{e}.gate_proj"]["input_global_scale"] = torch.tensor([16.0])
        modules[f"{e}.up_proj"]["input_global_scale"] = torch.tensor([4.0])
    args = weights_args(type="float", strategy="tensor_group", group_size=16)
    act = weights_args(type="float", strategy="tensor_group", group_size=16, dynamic="local")
    write(tmp_path, modules, {"g": {"targets": ["Linear"], "weights": args, "input_activations": act}}, 64, 32)
    w = open_checkpoint(tmp_path).load(0)
    check(w, values)
    assert w.w13.scheme.name == "nvfp4"
    assert w.w13.global_scales is not None
    assert w.checkpoint_activation is ActivationQuant.NVFP4
    assert w.input_scales is not None
    assert torch.equal(w.input_scales, torch.tensor([[0.25, 0.125]] * 3))


def test_global_scale_of_zero_is_refused(tmp_path: Path) -> None:
    modules, _ = layer(nvfp4, 1, 32, 16)
    modules["0.down_proj"]["weight_global_scale"] = torch.zeros(1)
    write(tmp_path, modules, {"g": {"weights": weights_args(type="float", group_size=16)}}, 32, 16)
    with pytest.raises(CheckpointError, match=r"0\.down_proj\.weight_global_scale: is 0"):
        open_checkpoint(tmp_path).load(0)


def mx(element: str) -> Make:
    def make(n: int, k: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        exponents = torch.randint(110, 130, (n, -(-k // 32)), generator=g).to(torch.uint8)
        scale = spread(torch.exp2(exponents.float() - 127), 32, k)
        if element == "e4m3":
            codes = e4m3(n, k, g)
            return {"weight": codes, "weight_scale": exponents}, codes.float() * scale
        fields = torch.randint(0, 16, (n, k), generator=g)
        packed = (fields[:, 0::2] | fields[:, 1::2] << 4).to(torch.uint8)
        return {"weight_packed": packed, "weight_scale": exponents}, E2M1[fields] * scale

    return make


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
@pytest.mark.parametrize(("E", "H", "I"), [(1, 32, 32), (3, 96, 160), (2, 48, 80)])
def test_mx_of_any_shape(tmp_path: Path, element: str, E: int, H: int, I: int) -> None:
    modules, values = layer(mx(element), E, H, I)
    args = weights_args(num_bits=8 if element == "e4m3" else 4, type="float", scale_dtype="torch.uint8")
    write(tmp_path, modules, {"group_0": {"targets": ["Linear"], "weights": args}}, H, I)
    check(open_checkpoint(tmp_path).load(0), values)


def test_group_is_chosen_by_the_tensors(tmp_path: Path) -> None:
    """Several config groups: the one whose bits and sizes are those of the tensors counts, whatever its targets say."""
    modules, values = layer(integers(4, 16, "packed"), 2, 64, 32)
    down, down_values = layer(integers(8, 0, "packed"), 2, 64, 32, seed=1)
    for e in range(2):
        modules[f"{e}.down_proj"] = down[f"{e}.down_proj"]
    values["down"] = down_values["down"]
    groups = {
        "attention": {"targets": ["re:.*self_attn.*"], "weights": weights_args(group_size=64)},
        "a": {"targets": ["re:.*(gate|up)_proj"], "weights": weights_args(group_size=16)},
        "b": {"targets": ["re:.*down_proj"], "weights": weights_args(num_bits=8, strategy="channel", group_size=None)},
    }
    write(tmp_path, modules, groups, 64, 32, format="mixed-precision")
    source = open_checkpoint(tmp_path)
    check(source.load(0), values)
    info = source.info(0)
    assert (info.w13.name, info.w2.name) == ("int4_g16", "int8_channel")


def test_targets_decide_where_the_tensors_do_not(tmp_path: Path) -> None:
    """Same storage, other activations."""
    modules, values = layer(integers(8, 0, "plain"), 1, 32, 16)
    channel = weights_args(num_bits=8, strategy="channel", group_size=None)
    act = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    groups = {
        "attention": {"targets": ["re:.*self_attn.*"], "weights": channel},
        "experts": {"targets": ["re:.*experts.*"], "weights": channel, "input_activations": act},
    }
    write(tmp_path, modules, groups, 32, 16)
    w = open_checkpoint(tmp_path).load(0)
    check(w, values)
    assert w.checkpoint_activation is ActivationQuant.INT8_TOKEN
    groups["attention"]["targets"] = ["re:.*"]
    write(tmp_path, modules, groups, 32, 16)
    with pytest.raises(CheckpointError, match="config groups attention and experts fit alike"):
        open_checkpoint(tmp_path).info(0)


def test_unknown_activations_are_left_out_and_named(tmp_path: Path) -> None:
    modules, _ = layer(integers(8, 0, "plain"), 1, 32, 16)
    act = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": False}
    config = group_config(8, 0, input_activations=act)
    write(tmp_path, modules, config, 32, 16)
    info = open_checkpoint(tmp_path).info(0)
    assert info.checkpoint_activation is ActivationQuant.NONE
    assert any("static asymmetric int8 for each tensor activations" in n for n in info.notes)


def change(modules: dict[str, dict[str, Tensor]], suffix: str, value: Tensor | None) -> None:
    if value is None:
        del modules["1.down_proj"][suffix]
    else:
        modules["1.down_proj"][suffix] = value


BROKEN = {
    "scale missing": ("weight_scale", None, r"1\.down_proj.*weight_scale' is missing"),
    "scale of another group": ("weight_scale", torch.ones(64, 4).bfloat16(), r"1\.down_proj: fits no config group"),
    "scale of other rows": ("weight_scale", torch.ones(32, 2).bfloat16(), r"1\.down_proj: fits no config group"),
    "too few words": ("weight_packed", torch.zeros(64, 3, dtype=torch.int32), r"1\.down_proj.*24 columns of 3"),
    "too few rows": ("weight_packed", torch.zeros(60, 4, dtype=torch.int32), r"1\.down_proj"),
    "shape says otherwise": ("weight_shape", torch.tensor([64, 31]), r"weight_shape: says \[64, 31\]; want \[64, 32\]"),
    "shape of three": ("weight_shape", torch.tensor([64, 32, 1]), r"weight_shape: shape \[3\], want \[2\]"),
    "zero points of other rows": ("weight_zero_point", torch.zeros(7, 2, dtype=torch.int32), r"weight_zero_point"),
    "g_idx too long": ("weight_g_idx", torch.zeros(33, dtype=torch.int32), r"weight_g_idx: shape \[33\], want \[32\]"),
    "g_idx out of range": ("weight_g_idx", torch.full((32,), 2).int(), r"weight_g_idx: group 2 to 2, but there are 2"),
    "g_idx unequal": ("weight_g_idx", torch.zeros(32, dtype=torch.int32), r"weight_g_idx: groups of unequal size"),
    "scale infinite": ("weight_scale", torch.full((64, 2), float("inf")).bfloat16(), r"weight_scale: a scale is NaN"),
    "a wrong type": ("weight_packed", torch.zeros(64, 4, dtype=torch.int64), r"1\.down_proj: fits no known format"),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_broken_tensors_are_named(tmp_path: Path, how: str) -> None:
    modules, _ = layer(integers(4, 16, "packed", "packed"), 2, 64, 32)
    suffix, value, want = BROKEN[how]
    change(modules, suffix, value)
    write(tmp_path, modules, group_config(4, 16, "packed"), 64, 32)
    with pytest.raises(CheckpointError, match=want):
        open_checkpoint(tmp_path).load(0)


def test_fused_weights_split_along_the_wrong_dimension_are_refused(tmp_path: Path) -> None:
    """A quantizer that cuts gpt-oss's [E, H, 2I] in half along H calls the halves gate_proj and up_proj: their shape
    [H / 2, 2I] is that of no projection."""
    H, I = 320, 192
    make = mx("e2m1")
    modules: dict[str, dict[str, Tensor]] = {}
    for p, (n, k) in {"gate": (H // 2, 2 * I), "up": (H // 2, 2 * I), "down": (I, H)}.items():
        modules[f"0.{p}_proj"] = make(n, k, generator(7))[0]
    args = weights_args(type="float", scale_dtype="torch.uint8")
    write(tmp_path, modules, {"group_0": {"targets": ["Linear"], "weights": args}}, H, I)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight_packed: shape \[160, 192\], that is 160 x 384"):
        open_checkpoint(tmp_path).info(0)


def test_sparse_and_rotated_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    modules, _ = layer(integers(4, 16, "packed"), 1, 32, 16)
    write(
        tmp_path, modules, group_config(4, 16), 32, 16, transform_config={"config_groups": {"R1": {"type": "hadamard"}}}
    )
    with pytest.raises(CheckpointError, match="transform_config"):
        open_checkpoint(tmp_path).info(0)
    sparse = {"compressed": torch.ones(4).bfloat16(), "bitmask": torch.ones(4, dtype=torch.uint8)}
    write(tmp_path, dict.fromkeys(modules, sparse), group_config(4, 16), 32, 16)
    with pytest.raises(CheckpointError, match=r"sparse weights .* are not read"):
        open_checkpoint(tmp_path).info(0)
    write(tmp_path, modules, {"g": {"weights": weights_args(num_bits=1)}}, 32, 16)
    with pytest.raises(CheckpointError, match="fits no config group"):
        open_checkpoint(tmp_path).info(0)


WEIRD: list[Any] = [None, [], {}, "x", -1, 0, 1 << 40, 2.5, True, [128], ["a", "b"], [0, 0], {"a": 1}]


def exact_or_refused(folder: Path, values: Mapping[str, Tensor]) -> None:
    """Whatever stands in the configuration: the exact weights, or an error that names the module."""
    refusal = ""
    try:
        check(open_checkpoint(folder).load(0), values)
    except CheckpointError as e:
        refusal = str(e)
    assert not refusal or "gate_proj" in refusal


@pytest.mark.parametrize("key", ["num_bits", "type", "symmetric", "strategy", "group_size", "block_structure"])
@pytest.mark.parametrize("value", WEIRD, ids=repr)
def test_weird_values_in_the_configuration(tmp_path: Path, key: str, value: Any) -> None:
    modules, values = layer(integers(4, 16, "packed"), 1, 32, 16)
    args = {**weights_args(group_size=16), key: value}
    write(tmp_path, modules, {"g": {"targets": ["Linear"], "weights": args}}, 32, 16)
    exact_or_refused(tmp_path, values)


@pytest.mark.parametrize("value", WEIRD, ids=repr)
def test_weird_groups_in_the_configuration(tmp_path: Path, value: Any) -> None:
    modules, values = layer(float8("channel"), 1, 32, 16)
    args = weights_args(num_bits=8, type="float", strategy="channel", group_size=None)
    for groups in (
        value,
        {"g": value},
        {"g": {"weights": value}},
        {"g": {"weights": args, "input_activations": value}},
        {"g": {"weights": args, "targets": value}},
        {"g": {"weights": args, "targets": ["re:("]}, "h": {"weights": args}},
    ):
        write(tmp_path, modules, groups, 32, 16)
        exact_or_refused(tmp_path, values)
