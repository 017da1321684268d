"""The memory that a layer takes on a row of the table, from its sizes alone: no weight is read, and no package imported
that the row needs.

    footprint("gluon_sm90", problem, tokens) -> Footprint(weights_bytes, scratch_bytes)

Packed weights follow from each row's packing, to the byte but for what depends on values (scales of gate and up that
differ where a package has one for both).  Scratch of our own rows is theirs; where a vendor's kernel allocates by
itself, it is what its intermediate matrices need, an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from expertd_kernels.backends import cutlass_layout, trtllm_layout
from expertd_kernels.backends.aiter_layout import MULTIPLE as AITER_MULTIPLE
from expertd_kernels.backends.cpu import spec_of, stream_size
from expertd_kernels.backends.cpu_torch import int4_fits
from expertd_kernels.backends.glue_space import MOST_BYTES, MOST_ROUTES, between, call_space, capacity, sorted_rows
from expertd_kernels.backends.gluon.shared.pieces import piece_tokens
from expertd_kernels.backends.gluon.shared.space import layer_space as gluon_space
from expertd_kernels.backends.gluon.shared.space import tokens_of, w8a8_space
from expertd_kernels.backends.gluon.w8a8.plan import Shape8
from expertd_kernels.backends.gluon.weight_only.codec import codec_of
from expertd_kernels.backends.gluon.weight_only.packed_matrix import TILE, round_up
from expertd_kernels.backends.marlin_layout import padded_rows
from expertd_kernels.backends.portable import layout as triton_layout
from expertd_kernels.backends.portable.space import CHUNK_TOKENS, Rounded, layer_space
from expertd_kernels.backends.scratch import Layout
from expertd_kernels.backends.xpu_layout import form_for as xpu_form
from expertd_kernels.backends.xpu_layout import int4_group
from expertd_kernels.common.problem import Problem
from expertd_kernels.native import library as native
from expertd_kernels.native.library import KernelMissingError
from expertd_kernels.native.processor import cpu_features
from expertd_kernels.weights.canonical import CODE_DTYPE
from expertd_kernels.weights.scheme import ActivationQuant, Element, ScaleType, Scheme

__all__ = ["Footprint", "canonical_bytes", "footprint", "packed_bytes"]


@dataclass(frozen=True)
class Footprint:
    """weights_bytes: as they are held while they serve, for good; scratch_bytes: of the largest call, which all layers
    of a stream share."""

    weights_bytes: int
    scratch_bytes: int


@dataclass(frozen=True)
class _Matrix:
    """w13 or w2 of E experts: [n, k] in segments."""

    E: int
    n: int
    k: int
    segments: int
    scheme: Scheme
    bias: bool
    columns: bool

    def codes(self, rows: int = 1, columns: int = 1) -> int:
        """Bytes of the codes, the rows of a segment and the columns padded to multiples of these."""
        padded = self.padded_rows(rows) * round_up(self.k, columns)
        return self.E * padded * self.scheme.element.bits // 8

    def padded_rows(self, multiple: int) -> int:
        return self.segments * round_up(self.n // self.segments, multiple)

    def scales(self, nbytes: int) -> int:
        """Bytes of the scales as formats store them, each of so many; 0 for weights that have none."""
        rows, columns = self.scheme.scale_shape(self.n, self.k, self.segments)
        return self.E * rows * columns * nbytes if self.scheme.element.quantized else 0

    def biases(self, nbytes: int, multiple: int = 1) -> int:
        return self.E * self.padded_rows(multiple) * nbytes if self.bias else 0

    def rest(self) -> int:
        """Second-level scales and the order of the columns, as they are."""
        return self.E * ((4 * self.segments if self.scheme.global_scale else 0) + (4 * self.k if self.columns else 0))


Weigh = Callable[[_Matrix, Problem], int]
Space = Callable[[Problem, int], int]


def _matrices(p: Problem) -> tuple[_Matrix, _Matrix]:
    segments, H, I, E = p.activation.segments, p.hidden_size, p.intermediate_size, p.num_experts
    return (
        _Matrix(E, segments * I, H, segments, p.w13, p.bias, p.act_order),
        _Matrix(E, H, I, 1, p.w2, p.bias, p.act_order),
    )


# ---- packed weights: bytes of a matrix -----------------------------------------------------------------------------


def _canonical(m: _Matrix, p: Problem) -> int:
    e = m.scheme.element
    codes = m.E * m.n * (-(-m.k // 2) if e.packed else m.k * CODE_DTYPE[e].itemsize)
    zeros = m.scales(1) if m.scheme.zeros else 0
    return codes + m.scales(m.scheme.scale.bits // 8) + zeros + m.biases(4) + m.rest()


def _cpu(m: _Matrix, p: Problem) -> int:
    stream = _stream(m)
    if stream is None:
        return _canonical(m, p)  # of another machine: this one cannot tell
    return m.E * stream[0] + m.biases(4, 16) + m.rest()


def _stream(m: _Matrix) -> tuple[int, int] | None:
    """(bytes, packed columns) of an expert in the C++ kernel's layout; None where the library is not there."""
    try:
        return stream_size(spec_of(m.scheme, (m.E, m.n, m.k), m.segments))[:2]
    except KernelMissingError:
        return None


def _triton(m: _Matrix, p: Problem) -> int:
    eight = p.activation_quant is not ActivationQuant.NONE
    lay = triton_layout.layout_of(m.scheme, m.n, m.k, m.segments, eight=eight)
    plain = m.biases(4) + m.rest()
    if not m.scheme.element.quantized:
        return m.codes() + plain
    rows = m.scheme.scale_shape(m.n, m.k, m.segments)[0]
    words = 4 * m.E * rows * lay.words(m.k, lay.spw)
    zeros = 4 * m.E * rows * lay.words(m.k, lay.zspw) if m.scheme.zeros else 0
    return m.codes(triton_layout.ROW_TILE, lay.block) + words + zeros + plain


def _gluon(m: _Matrix, p: Problem) -> int:
    codec, rows, columns = codec_of(m.scheme), m.padded_rows(TILE), round_up(m.k, TILE)
    groups = round_up(columns, codec.chunk) // codec.group if codec.planes else 0
    scales = m.E * rows * groups * codec.planes * codec.scale_bytes
    return m.codes(TILE, TILE) + scales + m.biases(4, TILE)


def _f32_scales(m: _Matrix, p: Problem) -> int:
    return m.codes() + m.scales(4) + m.biases(4)


def _aiter(m: _Matrix, p: Problem) -> int:
    if m.scheme.element is not Element.E2M1:
        return _f32_scales(m, p)
    rows, columns = m.padded_rows(AITER_MULTIPLE), round_up(m.k, AITER_MULTIPLE)
    return m.E * rows * (columns // 2 + columns // 32) + m.biases(4, AITER_MULTIPLE)


def _humming(m: _Matrix, p: Problem) -> int:
    scales = m.scales(4 if m.scheme.rows != 1 else 1 if m.scheme.scale is ScaleType.E8M0 else 2)
    zeros = m.scales(1) * m.scheme.element.bits // 8 if m.scheme.zeros else 0
    return m.codes() + scales + zeros + m.biases(2)


def _marlin(m: _Matrix, p: Problem) -> int:
    rows, groups = padded_rows(m.n), m.k // (m.scheme.cols or m.k)
    codes = m.E * rows * m.k * m.scheme.element.bits // 8
    scales = m.E * rows * groups
    zeros = scales // 2 if m.scheme.zeros else 0
    return codes + scales * (1 if m.scheme.scale is ScaleType.E8M0 else 2) + zeros + m.biases(4)


def _padded_form(m: _Matrix, multiple: int, group: int | None, scale_bytes: int, bias_bytes: int) -> int:
    """Forms of FlashInfer: codes padded to a multiple, and scales of groups with them; others' scales as f32."""
    codes, biases = m.codes(multiple, multiple), m.biases(bias_bytes, multiple)
    if group is not None:
        scales = m.E * m.padded_rows(multiple) * round_up(m.k, multiple) // group * scale_bytes
    else:
        scales = m.scales(4)
    return codes + scales + biases + m.rest()


def _cutlass(m: _Matrix, p: Problem) -> int:
    form = cutlass_layout.form_for(m.scheme, p.activation_quant)
    return _padded_form(m, cutlass_layout.MULTIPLES[form], cutlass_layout.GROUP.get(form), 1, 2)


def _trtllm(m: _Matrix, p: Problem) -> int:
    form = trtllm_layout.form_for(m.scheme)
    group, scale = trtllm_layout.GROUP.get(form), 2 if form == "int4" else 1
    return _padded_form(m, trtllm_layout.MULTIPLES[form], group, scale, 4)


def _xpu(m: _Matrix, p: Problem) -> int:
    form = xpu_form(m.scheme)
    if form == "int4":
        scales = 2 * m.E * m.n * (m.k // int4_group(m.scheme, m.k))
    elif form == "tensor":
        scales = 4 * m.E
    else:
        scales = m.scales(4 if form == "block" else 1)
    return m.codes() + scales + m.biases(2)


WEIGHTS: Mapping[str, Weigh] = {
    "reference": _canonical,
    "cpu": _cpu,
    "cpu_w4a8": _cpu,
    "cpu_torch": _canonical,
    "triton": _triton,
    "triton_w8a8": _triton,
    "triton_w4a8": _triton,
    "gluon_sm90": _gluon,
    "gluon_w8a8": _f32_scales,
    "humming": _humming,
    "marlin": _marlin,
    "deepgemm": _f32_scales,
    "aiter": _aiter,
    "flashinfer_cutlass": _cutlass,
    "flashinfer_trtllm": _trtllm,
    "xpu": _xpu,
}
"""What `pack` makes, without the originals that are kept for `unpack` where a row rounds ("exact_...").  A row that is
not here is taken to keep what it is given."""


def _cpu_map(m: _Matrix, p: Problem) -> int:
    """Activation order as the kernel reads it: a number for each packed column."""
    stream = _stream(m)
    return m.E * stream[1] * 4 if m.columns and stream is not None else 0


def _torch_pairs(m: _Matrix, p: Problem) -> int:
    """torch's int4 operator wants scales and zeros side by side."""
    pairs = p.compute_dtype == "bf16" and int4_fits(m.scheme, m.n, m.k, m.columns)
    return 2 * m.scales(2) if pairs else 0


def _by_rows(m: _Matrix, p: Problem) -> int:
    """Scales that are not by blocks are held spread to the rows, instead of as they were packed."""
    return 0 if m.scheme.rows == 128 else 4 * m.E * m.n - m.scales(4)


def _humming_padding(m: _Matrix, p: Problem) -> int:
    """The package pads outputs to multiples of 128."""
    return _humming(m, p) * (round_up(m.n, 128) - m.n) // m.n


BESIDE: Mapping[str, Weigh] = {
    "cpu": _cpu_map,
    "cpu_w4a8": _cpu_map,
    "cpu_torch": _torch_pairs,
    "gluon_w8a8": _by_rows,
    "humming": _humming_padding,
}
"""What `experts` makes of the packed tensors and keeps beside them or in their place."""


# ---- scratch: bytes of a call ----------------------------------------------------------------------------------------


def _gluon_scratch(p: Problem, tokens: int) -> int:
    m = tokens_of(min(tokens, piece_tokens(p.top_k, p.hidden_size)))
    return gluon_space(p.num_experts, p.hidden_size, p.intermediate_size, m, p.top_k).nbytes


def _w8a8_scratch(p: Problem, tokens: int) -> int:
    m = tokens_of(min(tokens, piece_tokens(p.top_k, p.hidden_size)))
    shape = Shape8(p.num_experts, p.top_k, p.hidden_size, p.intermediate_size)
    quant = p.activation_quant
    return w8a8_space(shape, quant is ActivationQuant.E4M3_GROUP128, quant is ActivationQuant.E4M3_TENSOR, m, 1).nbytes


def _triton_scratch(p: Problem, tokens: int) -> int:
    rounded = None
    if p.activation_quant is not ActivationQuant.NONE:
        w13, w2 = (_triton_rounding(m, p.activation_quant) for m in _matrices(p))
        rounded = (w13, w2)
    # blocks of the fewest rows: there are most of them, and 16 bytes each
    return Layout(
        layer_space(
            p.num_experts,
            p.hidden_size,
            p.intermediate_size,
            min(tokens, CHUNK_TOKENS),
            p.top_k,
            bm=8,
            rounded=rounded,
        )
    ).nbytes


def _triton_rounding(m: _Matrix, quant: ActivationQuant) -> Rounded:
    lay = triton_layout.layout_of(m.scheme, m.n, m.k, m.segments, eight=True)
    columns = {ActivationQuant.MXFP8: 32, ActivationQuant.E4M3_GROUP128: 128 if m.k > 128 else 0}.get(quant, 0)
    return Rounded(round_up(m.k, lay.block), columns, CODE_DTYPE[Element.E4M3])


def _routes(p: Problem, tokens: int) -> int:
    """Of a piece, in rows around another package's GEMMs."""
    width = max(p.activation.segments * p.intermediate_size, p.hidden_size)
    piece = max(1, min(MOST_ROUTES, MOST_BYTES // (2 * width)) // p.top_k)
    return min(tokens, piece) * p.top_k


def _between_scratch(p: Problem, tokens: int) -> int:
    routes = _routes(p, tokens)
    width, hidden = padded_rows(p.activation.segments * p.intermediate_size), padded_rows(p.hidden_size)  # marlin's
    extra = between(routes, width, p.intermediate_size, hidden, gathered=True)
    return Layout(call_space(routes, p.num_experts, extra, 8, 64)).nbytes


def _deepgemm_scratch(p: Problem, tokens: int) -> int:
    routes, width, alignment = _routes(p, tokens), p.activation.segments * p.intermediate_size, 128
    rows = capacity(routes, p.num_experts, alignment)
    extra = sorted_rows(rows, width, p.intermediate_size, p.hidden_size, p.w13.element is Element.E4M3)
    return Layout(call_space(routes, p.num_experts, extra, alignment)).nbytes


def _vendor_scratch(p: Problem, tokens: int) -> int:
    """Inputs and outputs of both GEMMs by route, and the sum, in bf16."""
    by_route = (p.activation.segments + 1) * p.intermediate_size + 2 * p.hidden_size
    return 2 * tokens * (p.top_k * by_route + p.hidden_size)


TILES = "avx512_amx"
"""The CPU kernel's level with matrix tiles."""

CPU_PASS_BYTES = 384 << 20
"""The C++ kernel's bound on what it keeps by route; see csrc/layer.cpp."""


def _uses_tiles(p: Problem) -> bool:
    """Whether the CPU kernel prepares rows for matrix tiles: by the level that runs, where the layer is for a processor
    like this one, else by what the processor can do."""
    if p.device.features == cpu_features() and not native.kernel_error():
        return native.level_in_use() == TILES
    return "amx_tile" in p.device.features


def _cpu_row(columns: int, width: int, group: int) -> int:
    """A row of activations: its numbers, `width` bytes each, padded, and for each piece a scale and two sums."""
    return columns * width // 64 * 64 + 128 + 12 * -(-columns // min(group or 128, 128))


def _cpu_scratch(p: Problem, tokens: int) -> int:
    """Rows of tokens, of the intermediate (f32, and as w2 reads it) and, for matrix tiles or an order of columns, of
    inputs by route; each thread's sums."""
    H, I, by_route = p.hidden_size, p.intermediate_size, p.act_order or _uses_tiles(p)
    m = max(1, min(tokens, 4096, CPU_PASS_BYTES // ((8 * I + 4 * H * by_route) * p.top_k)))
    wide = 2 if p.w13.element.integer and p.compute_dtype == "bf16" else 4
    routes, of_input = m * p.top_k, _cpu_row(H, wide, p.w13.cols)
    middle = _cpu_row(I, wide, p.w2.cols) + 4 * (round_up(I, 32) + 16)
    sums = native.default_threads() * 256 * m
    return m * of_input + routes * (middle + of_input * by_route) + 8 * 4 * (routes + m) + sums


def _float_scratch(p: Problem, tokens: int) -> int:
    """One expert as f32, the inputs and the sum."""
    expert = (p.activation.segments + 1) * p.intermediate_size * p.hidden_size
    return 4 * (expert + 3 * tokens * (p.hidden_size + p.top_k * p.intermediate_size))


SCRATCH: Mapping[str, Space] = {
    "gluon_sm90": _gluon_scratch,
    "gluon_w8a8": _w8a8_scratch,
    "triton": _triton_scratch,
    "triton_w8a8": _triton_scratch,
    "triton_w4a8": _triton_scratch,
    "humming": _between_scratch,
    "marlin": _between_scratch,
    "deepgemm": _deepgemm_scratch,
    "flashinfer_trtllm": _vendor_scratch,
    "flashinfer_cutlass": _vendor_scratch,
    "aiter": _vendor_scratch,
    "xpu": _vendor_scratch,
    "cpu": _cpu_scratch,
    "cpu_w4a8": _cpu_scratch,
    "cpu_torch": _float_scratch,
    "reference": _float_scratch,
}
"""Of the largest call, for every backend of the table; _vendor_scratch estimates what a package allocates by itself."""


def footprint(backend: str, problem: Problem, tokens: int) -> Footprint:
    """Of the layer that poses `problem`, on the row called `backend`, in batches of up to `tokens`."""
    beside, scratch = BESIDE.get(backend), SCRATCH.get(backend, _vendor_scratch)
    held = packed_bytes(backend, problem)
    if beside is not None:
        held += sum(beside(m, problem) for m in _matrices(problem))
    return Footprint(held, scratch(problem, tokens))


def packed_bytes(backend: str, problem: Problem) -> int:
    """Of what `pack` makes, without originals of what it rounds."""
    static = 8 * problem.num_experts if problem.activation_quant.static else 0
    return sum(WEIGHTS.get(backend, _canonical)(m, problem) for m in _matrices(problem)) + static


def canonical_bytes(problem: Problem) -> int:
    """Of the layer as readers make it: what lies in memory while it is packed."""
    return sum(_canonical(m, problem) for m in _matrices(problem))
