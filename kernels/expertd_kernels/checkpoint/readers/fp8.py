"""quant_method fp8: e4m3 weights as DeepSeek-V3 and transformers store them, and the e2m1 experts of the same method.

Despite its name `weight_scale_inv` multiplies.  Three places of the scales:
- beside each weight: `weight_scale_inv` (f32, bf16 or e8m0) [ceil(N/128), ceil(K/128)], or `weight_scale`: one number
  or one a row;
- in a fused tensor of all experts beside weights that are stored apart (`experts.gate_up_proj_scale_inv`
  [E, ceil(2I/128), ceil(K/128)]): what transformers writes for a model it quantized itself;
- `expert_dtype: fp4`: `weight` holds two e2m1 a byte with e8m0 scales for 32 columns.
"""

from __future__ import annotations

from dataclasses import replace

from expertd_kernels.checkpoint.formats import Format
from expertd_kernels.checkpoint.readers.floats import Floats, layout_floats, read_floats
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant, Element

__all__ = ["FORMATS", "is_autoround_fp8", "layout", "read"]

_SCALES = ("weight_scale_inv", "weight_scale", "scale_inv", "scale")
_FUSED_SCALE = {"gate": "gate_up_proj_scale_inv", "up": "gate_up_proj_scale_inv", "down": "down_proj_scale_inv"}


def layout(unit: Unit) -> Layout:
    """Activations are rounded by groups where weights have blocks, also where the configuration forgot to say so."""
    found = layout_floats(unit, _floats(unit))
    by_block = found.activation is ActivationQuant.E4M3_TOKEN and found.scheme.cols != WHOLE
    return replace(found, activation=ActivationQuant.E4M3_GROUP128) if by_block else found


def read(unit: Unit) -> Part:
    return read_floats(unit, _floats(unit))


def _floats(unit: Unit) -> Floats:
    codes = "weight" if unit.has("weight") else ""
    block = _block_size(unit)
    own = [s for s in _SCALES if unit.has(s)]
    if len(own) > 1:
        raise unit.error(f"has scales {' and '.join(own)}", "one of them")
    if unit.stored(codes).dtype != "F8_E4M3":
        return Floats(Element.E2M1, codes, own[0] if own else _SCALES[0])
    activation, input_scale = _activation(unit)
    if own:
        return Floats(Element.E4M3, codes, own[0], block, input_scale=input_scale, activation=activation)
    rows = unit.stored(codes).shape[0]
    fused_rows = {"gate": (0, 2 * rows), "up": (rows, 2 * rows), "down": (0, rows)}
    if unit.projection not in fused_rows:
        raise unit.error("has no scales", " or ".join(_SCALES))
    fused = [t for name, t in unit.siblings.items() if name in _FUSED_SCALE.values()]
    if len({t.dtype for t in fused}) > 1:
        raise unit.error(" and ".join(f"{t.name} is {t.dtype}" for t in fused), "one dtype")
    return Floats(
        Element.E4M3,
        codes,
        _FUSED_SCALE[unit.projection],
        block or (128, 128),
        activation=activation,
        sibling_rows=fused_rows[unit.projection],
    )


def _block_size(unit: Unit) -> tuple[int, int] | None:
    """weight_block_size of the configuration."""
    size = unit.setting("weight_block_size")
    if size is None:
        return None
    if not (isinstance(size, list) and len(size) == 2 and all(type(x) is int and x > 0 for x in size)):
        raise unit.error(f"weight_block_size {size!r:.80}", "two positive integers, as [128, 128]")
    return size[0], size[1]


def _activation(unit: Unit) -> tuple[ActivationQuant, str]:
    """(how activations are to be rounded where weights are not scaled by block, suffix of the static scale)."""
    how = unit.setting("activation_scheme", "dynamic")
    if how not in ("dynamic", "static"):
        raise unit.error(f"activation_scheme {how!r:.80}", "dynamic or static")
    if how == "dynamic":
        return ActivationQuant.E4M3_TOKEN, ""
    return ActivationQuant.E4M3_TENSOR, "activation_scale" if unit.has("activation_scale") else "input_scale"


def _fused_scales(unit: Unit) -> str | None:
    """Rule of the hybrid row."""
    name = _FUSED_SCALE.get(unit.projection, "")
    return None if name in unit.siblings else f"{name or 'a fused scale'} does not stand beside the experts"


def is_autoround_fp8(unit: Unit) -> bool:
    """Whether auto-round made it, as plain fp8 and not in one of its block formats (mx_fp, nv_fp)."""
    if unit.quant.get("quant_method") != "auto-round":
        return False
    data_type = unit.setting("data_type")
    if isinstance(data_type, str):
        return data_type.startswith("fp")
    return not any(t.dtype in ("U8", "F8_E8M0") for s, t in unit.tensors.items() if "scale" in s)


def _fp8(unit: Unit) -> str | None:
    other = unit.quant.get("quant_method") == "auto-round" and not is_autoround_fp8(unit)
    return f"data_type is {unit.setting('data_type')!r}, want fp8" if other else None


_METHODS = frozenset({"fp8", "fbgemm_fp8", "auto-round"})
_OPTIONAL = frozenset({"bias", "input_scale", "activation_scale", "input_scale_ub"})
_FLOAT_SCALE = "F32 BF16 F16 F8_E8M0 U8"

FORMATS = (
    *(
        Format(
            name,
            "fp8",
            _METHODS,
            {weight: "F8_E4M3", scale: _FLOAT_SCALE},
            optional=_OPTIONAL,
            rule=_fp8,
            detected_by=f"quant_method fp8, `{weight or 'gate_up_proj'}` F8_E4M3 and `{scale}`",
            packing="e4m3 [N, K]",
            scales=shape,
            activation="dynamic: groups of 128 (block) or tokens; static: tensor",
            fixture=fixture,
        )
        for name, weight, scale, shape, fixture in (
            ("fp8_block", "weight", "weight_scale_inv", "F32, BF16, e8m0 [N/128, K/128]", "hf-fp8-dsstyle-deepseekv3"),
            ("fp8_scale", "weight", "weight_scale", "F32 one number or one a row", ""),
            ("fp8_block_short", "weight", "scale", "F32, BF16, e8m0 [N/128, K/128]", ""),
            ("fp8_fused", "", "scale_inv", "F32 [2I/128, K/128], blocks along the fused rows", ""),
        )
    ),
    Format(
        "fp8_hybrid",
        "fp8",
        _METHODS,
        {"weight": "F8_E4M3"},
        absent=frozenset(_SCALES),
        optional=_OPTIONAL,
        rule=_fused_scales,
        detected_by="quant_method fp8, `weight` F8_E4M3 of each expert, `experts.*_scale_inv` of all together",
        packing="e4m3 [N, K]",
        scales="F32 [E, 2I/128, K/128]",
        activation="dynamic: groups of 128",
        fixture="hf-fp8-block128-qwen3moe1l",
    ),
    *(
        Format(
            f"fp8_experts_fp4{'' if scale == 'scale' else '_inv'}",
            "fp8",
            _METHODS,
            {"weight": "I8 U8", scale: "F8_E8M0 U8"},
            optional=_OPTIONAL,
            rule=_fp8,
            detected_by=f"quant_method fp8 (expert_dtype fp4), `weight` I8 and `{scale}` e8m0",
            packing="I8 [N, K/2], low nibble = even k, e2m1",
            scales="e8m0 [N, K/32]",
        )
        for scale in ("weight_scale_inv", "scale")
    ),
    Format(
        "fp8_e5m2",
        "fp8",
        frozenset({"*"}),
        {"weight": "F8_E5M2"},
        refusal="e5m2 weights are not read: no kernel here computes them; convert the checkpoint to e4m3",
        detected_by="`weight` F8_E5M2",
        packing="e5m2 [N, K]",
    ),
)
