"""Formats that `expertd quantize` writes: canonical weights -> tensors as other tools store them, and their config.

    int4, int8         compressed-tensors pack-quantized      e4m3_block128   fp8 (DeepSeek-V3, transformers)
    e4m3_channel       compressed-tensors float-quantized     mxfp8           compressed-tensors mxfp8-quantized
    mxfp4              gpt-oss's own for gpt-oss, else compressed-tensors mxfp4-pack-quantized
    nvfp4              ModelOpt W4A16_NVFP4 (its second-level scale multiplies, so it is kept exactly)

Each is the inverse of a reader: reading what is written here gives the same canonical weights, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.weights.canonical import QuantTensor
from expertd_kernels.weights.scheme import WHOLE, Element, ScaleType, Scheme

__all__ = ["FORMATS", "Part", "Target", "projections", "target_for"]

Config = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Part:
    """One projection of one expert: rows of a QuantTensor, without the expert dimension."""

    n: int
    k: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    global_scale: Tensor | None


def projections(q: QuantTensor, slot: int) -> Iterator[Part]:
    """The projections of one expert of a matrix, in the order of its segments."""
    assert q.scales is not None, "what is written is quantized"
    n = q.shape[1] // q.segments
    scale_rows = q.scales.shape[1] // q.segments
    for s in range(q.segments):
        here = slice(s * scale_rows, (s + 1) * scale_rows)
        yield Part(
            n,
            q.shape[2],
            q.codes[slot, s * n : (s + 1) * n],
            q.scales[slot, here],
            None if q.zeros is None else q.zeros[slot, here],
            None if q.global_scales is None else q.global_scales[slot, s],
        )


@dataclass(frozen=True)
class Target:
    """A format to write.

    encode        a part -> tensors by suffix; None for a format that takes a whole layer (gpt-oss)
    config        (scheme, names of the modules that stay unquantized) -> quantization_config
    multiple      rows and columns must be multiples of the scale's block for other tools to read it
    """

    name: str
    encode: Callable[[Part, Scheme], Mapping[str, Tensor]] | None
    config: Callable[[Scheme, Sequence[str]], Config]
    multiple: bool = True


def _words(raw: Tensor) -> Tensor:
    """[n, bytes] u8 -> [n, ceil(bytes / 4)] int32, little-endian, the last word filled with zeros."""
    spare = -raw.shape[1] % 4
    if spare:
        raw = torch.nn.functional.pad(raw, (0, spare))
    return raw.reshape(-1).view(torch.int32).view(raw.shape[0], -1)


def _packed_down(fields: Tensor, bits: int) -> Tensor:
    """[n, c] u8 fields -> [ceil(n * bits / 32), c] int32 packed along n, low bits first."""
    per_byte = 8 // bits
    turned = fields.t().contiguous()
    spare = -turned.shape[1] % per_byte
    if spare:
        turned = torch.nn.functional.pad(turned, (0, spare))
    raw = turned if bits == 8 else turned[:, 0::2] | (turned[:, 1::2] << 4)
    return _words(raw).t().contiguous()


def _pack_quantized(p: Part, scheme: Scheme) -> dict[str, Tensor]:
    int4 = scheme.element is Element.INT4
    raw = p.codes if int4 else p.codes.view(torch.uint8) ^ 0x80  # value + 128
    out = {"weight_packed": _words(raw), "weight_scale": p.scales, "weight_shape": torch.tensor([p.n, p.k])}
    if p.zeros is not None:
        fields = p.zeros if int4 else p.zeros.view(torch.uint8) ^ 0x80
        out["weight_zero_point"] = _packed_down(fields, 4 if int4 else 8)
    return out


def _plain_and_scale(suffix: str, scale: str) -> Callable[[Part, Scheme], dict[str, Tensor]]:
    return lambda p, scheme: {suffix: p.codes, scale: p.scales}


def _nvfp4(p: Part, scheme: Scheme) -> dict[str, Tensor]:
    assert p.global_scale is not None, "nvfp4 has a second-level scale"
    return {"weight": p.codes, "weight_scale": p.scales, "weight_scale_2": p.global_scale.reshape(())}


def _ct_config(form: str) -> Callable[[Scheme, Sequence[str]], Config]:
    def config(scheme: Scheme, kept: Sequence[str]) -> Config:
        group = scheme.group_size
        strategy = "group" if group else "channel" if scheme.rows == 1 else "tensor"
        weights: Config = {
            "num_bits": scheme.element.bits,
            "type": "int" if scheme.element.integer else "float",
            "symmetric": not scheme.zeros,
            "strategy": strategy,
            "group_size": group,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "memoryless_minmax",
            "observer_kwargs": {},
        }
        if scheme.scale is ScaleType.E8M0:
            weights["scale_dtype"] = "torch.uint8"
        if scheme.zeros:
            weights["zp_dtype"] = "torch.int8"
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "format": form,
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": None,
                    "output_activations": None,
                }
            },
            "ignore": list(kept),
            "kv_cache_scheme": None,
        }

    return config


def _fp8_config(scheme: Scheme, kept: Sequence[str]) -> Config:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [scheme.rows, scheme.cols],
        "modules_to_not_convert": list(kept),
    }


def _gptoss_config(scheme: Scheme, kept: Sequence[str]) -> Config:
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"quant_method": "mxfp4", "modules_to_not_convert": names}


def _modelopt_config(scheme: Scheme, kept: Sequence[str]) -> Config:
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": list(kept),
        "producer": {"name": "expertd", "version": ""},
    }


FORMATS: Mapping[str, Target] = {
    t.name: t
    for t in (
        Target("pack-quantized", _pack_quantized, _ct_config("pack-quantized")),
        Target("float-quantized", _plain_and_scale("weight", "weight_scale"), _ct_config("float-quantized")),
        Target("mxfp8-quantized", _plain_and_scale("weight", "weight_scale"), _ct_config("mxfp8-quantized")),
        Target(
            "mxfp4-pack-quantized",
            _plain_and_scale("weight_packed", "weight_scale"),
            _ct_config("mxfp4-pack-quantized"),
        ),
        Target("fp8", _plain_and_scale("weight", "weight_scale_inv"), _fp8_config, multiple=False),
        Target("gpt-oss-mxfp4", None, _gptoss_config),
        Target("modelopt-nvfp4", _nvfp4, _modelopt_config),
    )
}
"""What can be written, by the name that --help and the summary use."""


def target_for(scheme: Scheme, gptoss: bool) -> Target:
    """The format that holds `scheme`.  gptoss: the source has gpt-oss's fused, interleaved tensors.  ValueError where
    no format that other tools read holds it."""
    e, row_wise = scheme.element, scheme.rows == 1
    if e.integer and row_wise:
        return FORMATS["pack-quantized"]
    if scheme.name == "mxfp4":
        return FORMATS["gpt-oss-mxfp4" if gptoss else "mxfp4-pack-quantized"]
    if scheme.name == "mxfp8":
        return FORMATS["mxfp8-quantized"]
    if scheme.name == "nvfp4":
        return FORMATS["modelopt-nvfp4"]
    if e is Element.E4M3 and scheme.scale is ScaleType.F32:
        if (scheme.rows, scheme.cols) == (1, WHOLE):
            return FORMATS["float-quantized"]
        if (scheme.rows, scheme.cols) == (128, 128):
            return FORMATS["fp8"]
    raise ValueError(
        f"scheme {scheme.name!r}: no format that other tools read holds it; want int4_gN, int4_channel, int8_gN or"
        " int8_channel (each also with _zp), e4m3_block128, e4m3_channel, mxfp8, mxfp4 or nvfp4"
    )
