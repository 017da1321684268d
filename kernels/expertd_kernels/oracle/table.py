"""The backend table: one row a backend.  Adding a backend = one row here and one module in backends/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expertd_kernels.oracle.backend import CPU_KERNEL, Backend, DeviceRange, SchemeSupport
from expertd_kernels.oracle.build_facts import CUDA_COMPILER, FLASHINFER_CUTLASS, FLASHINFER_TRTLLM
from expertd_kernels.weights.activation import ActivationKind
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant, Element, ScaleType

__all__ = ["BACKENDS", "ORDER"]

_ANYWHERE = tuple(DeviceRange(kind) for kind in ("cpu", "cuda", "rocm", "xpu"))
_EVERY_SCHEME = tuple(SchemeSupport(e, groups=None, blocks=None, zeros=e.integer, global_scale=True) for e in Element)

_GROUPS = frozenset({32, 64, 128, WHOLE})
_E8M0 = frozenset({ScaleType.E8M0})
_FLOATS = frozenset({ScaleType.F32, ScaleType.BF16, ScaleType.F16})
_POWERS = _FLOATS | _E8M0
_SM89_UP = (DeviceRange("cuda", (8, 9)),)
_E4M3_DOTS = (*_SM89_UP, DeviceRange("rocm", arch=frozenset({"gfx950"})))
"""Where Triton multiplies e4m3 as the checkpoints have it; older AMD GPUs have another e4m3."""
_SM90 = (DeviceRange("cuda", (9, 0), (9, 0)),)
_X86 = (DeviceRange("cpu", arch=frozenset({"x86_64"})),)
_SM10X = (DeviceRange("cuda", (10, 0), (10, 9)),)
_SM100_UP = (DeviceRange("cuda", (10, 0), (12, 9)),)
_GFX950 = (DeviceRange("rocm", arch=frozenset({"gfx950"})),)
_SILU = frozenset({ActivationKind.SILU_AND_MUL})

_RESULTS = "kernels/bench/results/"

_PLAIN_128: dict[str, Any] = {
    "functions": _SILU,
    "biased": False,
    "clamp": False,
    "hidden_multiple": 128,
    "intermediate_multiple": 128,
}
"""Of the lines of `aiter` that compute silu alone, without biases, on whole blocks of 128."""

GPT_OSS = (1.702, 1.0, 7.0)
"""alpha, beta and limit of gpt-oss's SWIGLUOAI, where a package has them built in."""

BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="gluon_sm90",
        target="expertd_kernels.backends.gluon_sm90",
        devices=(DeviceRange("cuda", (9, 0), (9, 0)),),
        schemes=(
            SchemeSupport(Element.INT4, groups=_GROUPS, zeros=True),
            SchemeSupport(Element.INT8, groups=_GROUPS, zeros=True),
            SchemeSupport(Element.E2M1, groups=frozenset({32})),
            SchemeSupport(Element.E4M3, groups=_GROUPS, blocks=frozenset({(128, 128), (WHOLE, WHOLE)})),
            SchemeSupport(Element.BF16),
        ),
        summary="weight-only, wgmma and bulk copies in Triton's Gluon dialect: for Hopper",
        needs={"triton": ">=3.6,<3.10"},
        hidden_multiple=8,
        max_experts=512,
        batch_invariant=True,
        capturable=True,
        in_place=True,
        ran=_SM90,
        measured=(_RESULTS + "gluon_sm90_h200.md",),
    ),
    Backend(
        name="gluon_w8a8",
        target="expertd_kernels.backends.gluon_w8a8",
        devices=_SM90,
        schemes=(
            SchemeSupport(
                Element.E4M3,
                groups=frozenset({WHOLE}),
                blocks=frozenset({(WHOLE, WHOLE)}),
                activations=frozenset({ActivationQuant.E4M3_TOKEN, ActivationQuant.E4M3_TENSOR}),
            ),
            SchemeSupport(
                Element.E4M3,
                blocks=frozenset({(128, 128)}),
                activations=frozenset({ActivationQuant.E4M3_GROUP128}),
                whole_blocks=True,
            ),
        ),
        summary="e4m3 weights with activations rounded to e4m3, in Triton's Gluon dialect: for Hopper",
        activations=frozenset(ActivationKind) - {ActivationKind.RELU2},
        needs={"triton": ">=3.6,<3.10"},
        hidden_multiple=128,
        intermediate_multiple=128,
        max_experts=512,
        batch_invariant=True,
        capturable=True,
        in_place=True,
        e4m3_inputs=True,
        mixed_schemes=False,
        ran=_SM90,
        measured=(_RESULTS + "w8a8_h200.md",),
    ),
    Backend(
        name="triton",
        target="expertd_kernels.backends.triton",
        devices=(DeviceRange("cuda", (8, 0)), DeviceRange("rocm"), DeviceRange("xpu")),
        schemes=_EVERY_SCHEME,
        summary="weight-only, portable Triton kernels for any scheme",
        needs={"triton": ">=3.6"},
        act_order=True,
        max_experts=512,
        batch_invariant=True,
        ran=_SM90,
        measured=(_RESULTS + "triton_h200.md",),
        capturable=True,
    ),
    Backend(
        name="triton_w8a8",
        target="expertd_kernels.backends.triton_w8a8",
        devices=(DeviceRange("cuda", (8, 0)), DeviceRange("rocm")),
        schemes=(
            SchemeSupport(
                Element.E4M3,
                groups=frozenset({WHOLE}),
                blocks=frozenset({(WHOLE, WHOLE)}),
                activations=frozenset({ActivationQuant.E4M3_TOKEN, ActivationQuant.E4M3_TENSOR}),
                devices=_E4M3_DOTS,
            ),
            SchemeSupport(
                Element.E4M3,
                blocks=frozenset({(128, 128)}),
                activations=frozenset({ActivationQuant.E4M3_GROUP128}),
                devices=_E4M3_DOTS,
            ),
            SchemeSupport(
                Element.E4M3,
                groups=frozenset({32}),
                scales=_E8M0,
                activations=frozenset({ActivationQuant.MXFP8}),
                devices=_E4M3_DOTS,
            ),
            SchemeSupport(
                Element.INT8,
                groups=frozenset({WHOLE}),
                blocks=frozenset({(WHOLE, WHOLE)}),
                activations=frozenset({ActivationQuant.INT8_TOKEN}),
            ),
        ),
        summary="portable Triton kernels for 8-bit weights with activations rounded to their type, e4m3 or int8",
        needs={"triton": ">=3.6"},
        max_experts=512,
        batch_invariant=True,
        ran=_SM90,
        measured=(_RESULTS + "triton_h200.md", _RESULTS + "w8a8_h200.md"),
        capturable=True,
    ),
    Backend(
        name="triton_w4a8",
        target="expertd_kernels.backends.triton_w4a8",
        devices=(DeviceRange("cuda", (8, 0)), DeviceRange("rocm")),
        schemes=(
            SchemeSupport(
                Element.INT4,
                groups=_GROUPS,
                activations=frozenset({ActivationQuant.E4M3_TOKEN, ActivationQuant.E4M3_GROUP128}),
                devices=_E4M3_DOTS,
            ),
            SchemeSupport(
                Element.INT4,
                groups=_GROUPS,
                zeros=True,
                activations=frozenset({ActivationQuant.E4M3_TOKEN, ActivationQuant.E4M3_GROUP128}),
                devices=_E4M3_DOTS,
            ),
            SchemeSupport(
                Element.INT4,
                groups=_GROUPS,
                zeros=True,
                activations=frozenset({ActivationQuant.INT8_TOKEN}),
            ),
            SchemeSupport(
                Element.E2M1,
                groups=frozenset({32}),
                scales=_E8M0,
                activations=frozenset({ActivationQuant.MXFP8}),
                devices=_E4M3_DOTS,
            ),
        ),
        summary="portable Triton kernels for 4-bit weights with activations rounded to e4m3, or int4's to int8",
        needs={"triton": ">=3.6"},
        max_experts=512,
        mixed_schemes=False,
        batch_invariant=True,
        capturable=True,
        ran=_SM90,
        measured=(_RESULTS + "numerics_h200.md",),
    ),
    Backend(
        name="flashinfer_trtllm",
        target="expertd_kernels.backends.flashinfer_trtllm",
        devices=(DeviceRange("cuda", (10, 0), (10, 9)),),
        schemes=(
            SchemeSupport(Element.INT4, groups=frozenset({32}), biased=False),
            SchemeSupport(
                Element.E2M1,
                groups=frozenset({32}),
                scales=_E8M0,
                activations=frozenset({ActivationQuant.NONE, ActivationQuant.MXFP8}),
            ),
            SchemeSupport(
                Element.E4M3,
                groups=frozenset({32}),
                scales=_E8M0,
                activations=frozenset({ActivationQuant.MXFP8}),
                biased=False,
            ),
            SchemeSupport(
                Element.E4M3,
                blocks=frozenset({(128, 128)}),
                activations=frozenset({ActivationQuant.E4M3_GROUP128}),
                biased=False,
                scales=_POWERS,
                whole_blocks=True,
            ),
            SchemeSupport(
                Element.E2M1,
                groups=frozenset({16}),
                scales=frozenset({ScaleType.E4M3}),
                global_scale=True,
                activations=frozenset({ActivationQuant.NVFP4}),
                functions=_SILU,
                biased=False,
                clamp=False,
            ),
            SchemeSupport(
                Element.E4M3,
                blocks=frozenset({(WHOLE, WHOLE)}),
                scales=_FLOATS,
                activations=frozenset({ActivationQuant.E4M3_TENSOR}),
                functions=_SILU,
                biased=False,
                clamp=False,
            ),
            SchemeSupport(Element.BF16, biased=False),
        ),
        summary="TRTLLM-generated kernels in FlashInfer, routes given; pads H and I to 128 (4 bits: 256)",
        activations=frozenset({ActivationKind.SILU_AND_MUL, ActivationKind.SWIGLUOAI}),
        needs={"flashinfer-python": ">=0.7.2,<0.8", FLASHINFER_TRTLLM: ""},
        max_experts=2047,
        mixed_schemes=False,
        deterministic=False,
    ),
    Backend(
        name="flashinfer_cutlass",
        target="expertd_kernels.backends.flashinfer_cutlass",
        devices=(DeviceRange("cuda", (8, 9), (12, 9)),),
        schemes=(
            SchemeSupport(Element.E2M1, groups=frozenset({32}), scales=_E8M0, devices=_SM90),
            SchemeSupport(
                Element.E2M1,
                groups=frozenset({32}),
                scales=_E8M0,
                activations=frozenset({ActivationQuant.MXFP8}),
                devices=_SM100_UP,
                ran=False,
            ),
            SchemeSupport(
                Element.E4M3,
                groups=frozenset({32}),
                scales=_E8M0,
                activations=frozenset({ActivationQuant.MXFP8}),
                devices=_SM10X,
                ran=False,
            ),
            SchemeSupport(
                Element.E2M1,
                groups=frozenset({16}),
                scales=frozenset({ScaleType.E4M3}),
                global_scale=True,
                activations=frozenset({ActivationQuant.NVFP4}),
                devices=_SM100_UP,
                ran=False,
                functions=_SILU,
                biased=False,
                clamp=False,
            ),
            SchemeSupport(
                Element.E4M3,
                blocks=frozenset({(WHOLE, WHOLE)}),
                scales=_FLOATS,
                activations=frozenset({ActivationQuant.E4M3_TENSOR}),
                functions=_SILU,
                biased=False,
                clamp=False,
            ),
            SchemeSupport(
                Element.E4M3,
                blocks=frozenset({(128, 128)}),
                activations=frozenset({ActivationQuant.E4M3_GROUP128}),
                biased=False,
                scales=_POWERS,
                devices=_SM90,
                whole_blocks=True,
            ),
            SchemeSupport(Element.BF16),
        ),
        summary="CUTLASS kernels in FlashInfer, routes given; pads H and I to 8 (e4m3: 16, 4 bits: 128)",
        unclamped=frozenset({ActivationKind.GELU_AND_MUL, ActivationKind.GELU_TANH_AND_MUL}),
        needs={"flashinfer-python": ">=0.7.2,<0.8", FLASHINFER_CUTLASS: ""},
        mixed_schemes=False,
        deterministic=False,
        ran=_SM90,
        measured=(_RESULTS + "numerics_h200.md", _RESULTS + "flashinfer_h200.md"),
    ),
    Backend(
        name="deepgemm",
        target="expertd_kernels.backends.deepgemm",
        devices=(*_SM90, DeviceRange("cuda", (10, 0), (10, 9))),
        schemes=(
            SchemeSupport(
                Element.E4M3,
                blocks=frozenset({(128, 128)}),
                activations=frozenset({ActivationQuant.E4M3_GROUP128}),
                scales=_POWERS,
                devices=_SM90,
                whole_blocks=True,
            ),
            SchemeSupport(Element.BF16, hidden_multiple=64, intermediate_multiple=64),
        ),
        summary="DeepGEMM's grouped GEMMs through sgl-deep-gemm, compiled at first use (needs nvcc)",
        needs={"sgl-deep-gemm": ">=0.1.5,<0.3", "triton": ">=3.6", CUDA_COMPILER: ""},
        mixed_schemes=False,
        deterministic=False,
        ran=_SM90,
        measured=(_RESULTS + "w8a8_h200.md",),
    ),
    Backend(
        name="humming",
        target="expertd_kernels.backends.humming",
        devices=(DeviceRange("cuda", (8, 0)),),
        schemes=(
            SchemeSupport(Element.INT4, groups=_GROUPS, zeros=True, whole_blocks=True),
            SchemeSupport(Element.INT8, groups=_GROUPS, zeros=True, whole_blocks=True),
            SchemeSupport(Element.E2M1, groups=frozenset({32}), scales=_E8M0, whole_blocks=True),
            SchemeSupport(Element.E4M3, groups=frozenset({32}), scales=_E8M0, whole_blocks=True),
            SchemeSupport(Element.E4M3, blocks=frozenset({(128, 128)}), whole_blocks=True),
        ),
        summary="weight-only grouped GEMMs of humming-kernels, compiled at first use (needs NVRTC)",
        needs={"humming-kernels": ">=0.1.19,<0.2", "triton": ">=3.6"},
        hidden_multiple=64,
        intermediate_multiple=64,
        deterministic=False,
        ran=_SM90,
        measured=(_RESULTS + "humming_h200.md",),
    ),
    Backend(
        name="marlin",
        target="expertd_kernels.backends.marlin",
        devices=(DeviceRange("cuda", (8, 0)),),
        schemes=(
            SchemeSupport(Element.INT4, groups=_GROUPS, zeros=True, whole_blocks=True),
            SchemeSupport(Element.INT8, groups=_GROUPS, whole_blocks=True),
            SchemeSupport(Element.E2M1, groups=frozenset({32}), scales=_E8M0, whole_blocks=True),
            SchemeSupport(
                Element.E4M3,
                groups=frozenset({128, WHOLE}),
                blocks=frozenset({(128, 128), (WHOLE, WHOLE)}),
                scales=_FLOATS,
                whole_blocks=True,
                ran=False,
            ),
        ),
        summary="weight-only, sglang's MoE Marlin kernels, compiled at first use (needs nvcc); pads H to 128",
        needs={"sglang": ">=0.5.23,<0.6", "triton": ">=3.6", CUDA_COMPILER: ""},
        hidden_multiple=64,
        intermediate_multiple=64,
        deterministic=False,
        ran=_SM90,
        measured=("docs/packages.md",),
    ),
    Backend(
        name="aiter",
        target="expertd_kernels.backends.aiter",
        devices=(DeviceRange("rocm", arch=frozenset({"gfx942", "gfx950"})),),
        schemes=(
            SchemeSupport(
                Element.E4M3,
                groups=frozenset({WHOLE}),
                scales=_FLOATS,
                activations=frozenset({ActivationQuant.E4M3_TOKEN}),
                devices=_GFX950,
                **_PLAIN_128,
            ),
            SchemeSupport(
                Element.E4M3,
                blocks=frozenset({(128, 128)}),
                scales=_POWERS,
                activations=frozenset({ActivationQuant.E4M3_GROUP128}),
                devices=_GFX950,
                **_PLAIN_128,
            ),
            SchemeSupport(Element.BF16, **_PLAIN_128),
            SchemeSupport(
                Element.E2M1,
                groups=frozenset({32}),
                scales=_E8M0,
                functions=frozenset({ActivationKind.SWIGLUOAI}),
                devices=_GFX950,
                whole_blocks=True,
            ),
        ),
        summary="fused MoE kernels of AMD's AITER, routes given; pads H and I of mxfp4 to 256",
        activations=frozenset({ActivationKind.SILU_AND_MUL, ActivationKind.SWIGLUOAI}),
        swigluoai=GPT_OSS,
        needs={"amd-aiter": ">=0.1.7.dev0"},
        mixed_schemes=False,
        deterministic=False,
    ),
    Backend(
        name="xpu",
        target="expertd_kernels.backends.xpu",
        devices=(DeviceRange("xpu", arch=frozenset({"xe2", "xe3"})),),
        schemes=(
            SchemeSupport(Element.INT4, groups=frozenset({32, 64, 128, 256}), whole_blocks=True),
            SchemeSupport(Element.INT4, groups=frozenset({WHOLE}), hidden_multiple=32, intermediate_multiple=32),
            SchemeSupport(Element.E2M1, groups=frozenset({32}), scales=_E8M0, whole_blocks=True),
            SchemeSupport(Element.E4M3, groups=frozenset({32}), scales=_E8M0, whole_blocks=True),
            SchemeSupport(
                Element.E4M3,
                blocks=frozenset({(128, 128)}),
                scales=_FLOATS,
                functions=frozenset(ActivationKind) - {ActivationKind.SWIGLUOAI},
                whole_blocks=True,
            ),
            SchemeSupport(Element.E4M3, blocks=frozenset({(WHOLE, WHOLE)})),
            SchemeSupport(Element.BF16),
        ),
        summary="weight-only, Intel's grouped GEMM through vllm-xpu-kernels' XpuFusedMoe",
        needs={"vllm-xpu-kernels": ">=0.1.16,<0.2"},
        swigluoai=GPT_OSS,
        hidden_multiple=8,
        intermediate_multiple=8,
        max_experts=1024,
        mixed_schemes=False,
        deterministic=False,
    ),
    Backend(
        name="cpu",
        target="expertd_kernels.backends.cpu",
        native_threads=True,
        devices=(DeviceRange("cpu"),),
        schemes=_EVERY_SCHEME,
        summary="weight-only C++ kernel on blocked weights; portable, AVX2, AVX-512 and AMX levels chosen at run time",
        needs={CPU_KERNEL: ""},
        compute_dtypes=frozenset({"bf16", "f32"}),
        act_order=True,
        batch_invariant=True,
        ran=_X86,
        measured=(_RESULTS + "cpu_xeon.md", _RESULTS + "cpu_zen3.md"),
    ),
    Backend(
        name="cpu_w4a8",
        target="expertd_kernels.backends.cpu_w4a8",
        native_threads=True,
        devices=(DeviceRange("cpu"),),
        schemes=(
            SchemeSupport(
                Element.INT4,
                groups=None,
                blocks=None,
                zeros=True,
                global_scale=True,
                activations=frozenset({ActivationQuant.INT8_GROUP, ActivationQuant.INT8_TOKEN}),
            ),
        ),
        summary="the same kernel with activations rounded to 8 bits by token, or by token and 16 columns",
        needs={CPU_KERNEL: ""},
        act_order=True,
        batch_invariant=True,
        ran=_X86,
        measured=(_RESULTS + "cpu_xeon.md", _RESULTS + "cpu_zen3.md"),
    ),
    Backend(
        name="cpu_torch",
        target="expertd_kernels.backends.cpu_torch",
        devices=(DeviceRange("cpu"),),
        schemes=_EVERY_SCHEME,
        summary="torch's own CPU operators, for machines without the compiled kernel: right, and slower than cpu",
        compute_dtypes=frozenset({"bf16", "f32"}),
        act_order=True,
        ran=_X86,
        measured=(_RESULTS + "numerics_cpu.md",),
        fallback=True,
    ),
    Backend(
        name="reference",
        target="expertd_kernels.backends.reference",
        devices=_ANYWHERE,
        schemes=_EVERY_SCHEME,
        summary="float32 on dequantized weights, one expert at a time: right everywhere, fast nowhere",
        compute_dtypes=frozenset({"bf16", "f32"}),
        act_order=True,
        batch_invariant=True,
        ran=(*_X86, *_SM90),
        measured=(_RESULTS + "numerics_h200.md", _RESULTS + "numerics_cpu.md"),
        fallback=True,
    ),
)

_CUDA = ("triton", "triton_w8a8", "flashinfer_cutlass", "deepgemm", "humming", "marlin", "triton_w4a8", "reference")
_HOPPER = ("triton", "triton_w8a8", "deepgemm", "humming", "triton_w4a8", "flashinfer_cutlass", "marlin", "reference")
_BLACKWELL = ("flashinfer_trtllm", *_CUDA)

ORDER: Mapping[str, Sequence[str]] = {
    "cpu": ("cpu", "cpu_w4a8", "cpu_torch", "reference"),
    "cuda": _CUDA,
    "sm90": ("gluon_sm90", "gluon_w8a8", *_HOPPER),
    "sm100": _BLACKWELL,
    "sm103": _BLACKWELL,
    "rocm": ("triton", "aiter", "triton_w8a8", "triton_w4a8", "reference"),
    "xpu": ("xpu", "triton", "reference"),
}
"""Order of preference by arch or kind of device, among rows of one grade (row.Grade): a row that is less well known
stands behind.  Rows not named follow in the order of the table."""
