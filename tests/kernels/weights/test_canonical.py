"""Canonical weights against arithmetic written out by hand, and the float32 reference against plain loops."""

import math

import pytest
import torch

from expertd_kernels import Activation, ActivationKind, QuantTensor, Scheme, Weights, reference, relative_error
from expertd_kernels.sources.synthetic import SyntheticModel, random_inputs, random_weights
from expertd_kernels.weights.canonical import E2M1_VALUES, pack_nibbles, unpack_nibbles
from expertd_kernels.weights.float32 import apply_activation
from expertd_kernels.weights.serial import weights_from_tensors, weights_to_tensors

SCHEMES = ["int4_g32", "int4_g32_zp", "int4_channel", "int8_g16_zp", "int8_channel", "e4m3_block128", "e4m3_tensor",
           "e4m3_channel", "mxfp8", "mxfp4", "nvfp4", "bf16", "f16", "f32"]  # fmt: skip


@pytest.mark.parametrize("k", [1, 2, 7, 64])
def test_nibbles_round_trip_low_nibble_first(k):
    codes = torch.randint(0, 16, (3, k), dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (3, (k + 1) // 2)
    assert torch.equal(unpack_nibbles(packed, k), codes)
    assert int(packed[0, 0]) & 15 == int(codes[0, 0])


def by_hand(q: QuantTensor, e: int, n: int, k: int) -> float:
    """One weight of `q`, from its definition."""
    s = q.scheme
    _, N, K = q.shape
    j = k if q.columns is None else int((q.columns[e] == k).nonzero())
    code = q.codes[e, n, j // 2] >> (4 * (j % 2)) & 15 if s.element.packed else q.codes[e, n, j]
    value = E2M1_VALUES[int(code)] if s.element.name == "E2M1" else float(code)
    if not s.element.quantized:
        return value
    seg_rows = N // q.segments
    rows = s.rows or seg_rows
    cols = s.cols or K
    r = (n // seg_rows) * math.ceil(seg_rows / rows) + (n % seg_rows) // rows
    scale = q.scales[e, r, j // cols]
    scale = 2.0 ** (int(scale) - 127) if s.scale.value == "e8m0" else float(scale)
    if q.global_scales is not None:
        scale *= float(q.global_scales[e, n // seg_rows])
    zero = 8.0 if s.element.name == "INT4" else 0.0
    if q.zeros is not None:
        zero = float(q.zeros[e, r, j // cols])
    return (value - zero) * scale


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequantize_is_its_definition(scheme, act_order):
    w = random_weights(scheme, 2, 72, 45, act_order=act_order, signed_scales=True, seed=3)  # ragged in every direction
    for q in (w.w13, w.w2):
        full = q.dequantize()
        for e, n, k in [(0, 0, 0), (1, 44, 1), (0, 17, 33), (1, q.shape[1] - 1, q.shape[2] - 1)]:
            assert float(full[e, n, k]) == pytest.approx(by_hand(q, e, n, k), rel=1e-6, abs=1e-12)
        assert torch.equal(q.widen().dequantize(), full)
        assert torch.equal(q.experts([1]).dequantize()[0], full[1])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tensors_and_facts_make_the_same_weights_again(scheme):
    w = random_weights(scheme, 2, 64, 32, bias=True, act_order=True)
    again = weights_from_tensors(*weights_to_tensors(w))
    for a, b in ((w.w13, again.w13), (w.w2, again.w2)):
        assert a.scheme == b.scheme
        assert a.shape == b.shape
        assert {n: t.data_ptr() for n, t in a.tensors()} == {n: t.data_ptr() for n, t in b.tensors()}
    assert again.activation == w.activation


def test_wrong_tensors_are_refused_by_name():
    w = random_weights("int4_g32", 2, 64, 32).w2
    with pytest.raises(ValueError, match="scales missing"):
        QuantTensor(w.scheme, w.shape, w.codes)
    with pytest.raises(ValueError, match="zeros given, but the scheme has none"):
        QuantTensor(w.scheme, w.shape, w.codes, w.scales, zeros=torch.zeros(2, 64, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"codes is torch.uint8 \(2, 64, 15\)"):
        QuantTensor(w.scheme, w.shape, w.codes[..., :15], w.scales)
    with pytest.raises(ValueError, match="do not make a layer"):
        Weights(w, w)


def expert_by_hand(w: Weights, e: int, x: torch.Tensor) -> torch.Tensor:
    h = w.w13.dequantize()[e].double() @ x.double()
    if w.w13.bias is not None:
        h = h + w.w13.bias[e].double()
    I = w.intermediate_size
    a = w.activation
    if a.kind is ActivationKind.RELU2:
        y = torch.relu(h) ** 2
    else:
        g, u = h[:I], h[I:]
        if a.limit is not None:
            g, u = g.clamp(max=a.limit), u.clamp(-a.limit, a.limit)
        y = {
            ActivationKind.SILU_AND_MUL: lambda: g / (1 + torch.exp(-g)) * u,
            ActivationKind.GELU_AND_MUL: lambda: g * 0.5 * (1 + torch.erf(g / math.sqrt(2))) * u,
            ActivationKind.GELU_TANH_AND_MUL: lambda: (
                0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
            ),
            ActivationKind.SWIGLUOAI: lambda: (u + a.beta) * g / (1 + torch.exp(-a.alpha * g)),
        }[a.kind]()
    out = w.w2.dequantize()[e].double() @ y
    return out if w.w2.bias is None else out + w.w2.bias[e].double()


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("name", [k.value for k in ActivationKind] + ["silu_and_mul_limit1"])
def test_reference_is_a_plain_loop_over_tokens_and_routes(name, on_input):
    a = Activation.parse(name)
    w = random_weights("int4_g32_zp", 5, 64, 32, activation=a, bias=True)
    x, ids, tw = random_inputs(7, 64, 5, 1 if on_input else 3)
    ids[0] = -1
    ids[3, 0] = -1
    expected = torch.zeros(7, 64, dtype=torch.float64)
    for t in range(7):
        for e, r in zip(ids[t].tolist(), tw[t].tolist(), strict=True):
            if e >= 0:
                row = x[t].double()
                expected[t] += expert_by_hand(w, e, row * r) if on_input else r * expert_by_hand(w, e, row)
    out = reference(w, x, ids, tw, router_weight_on_input=on_input)
    assert relative_error(out, expected) < 1e-5
    assert float(out[0].abs().max()) == 0.0
    assert apply_activation(torch.randn(3, 64), a).shape == (3, 64 // a.segments)


def test_relative_error_never_forgives_nan_or_shape():
    ref = torch.ones(4)
    assert relative_error(torch.full((4,), float("nan")), ref) == float("inf")
    assert relative_error(torch.ones(5), ref) == float("inf")
    assert relative_error(torch.zeros(4), ref) == 1.0
    assert relative_error(torch.zeros(4), torch.zeros(4)) == 0.0
    assert relative_error(ref, torch.zeros(4)) == float("inf")


def test_shards_of_a_synthetic_model_agree():
    model = SyntheticModel.parse("tiny-oss:mxfp4")
    whole, part = model.load(1), model.load(1, [5, 2])
    assert torch.equal(part.w13.codes, whole.w13.codes[[5, 2]])
    assert torch.equal(part.w2.scales, whole.w2.scales[[5, 2]])
    assert not torch.equal(model.load(0).w13.codes, whole.w13.codes)
    with pytest.raises(ValueError, match="models: qwen3-30b-a3b"):
        SyntheticModel.parse("qwen3:int4_g128")


@pytest.mark.parametrize("zipf", [0.0, 1.2])
def test_random_routes_are_distinct_experts(zipf):
    _, ids, tw = random_inputs(512, 8, 16, 4, zipf_exponent=zipf)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert torch.allclose(tw.sum(1), torch.ones(512))
    share = (ids == 0).sum() / 512
    assert share < 0.4 if zipf == 0.0 else share > 0.7


def test_scheme_value_of_the_same_name_is_the_same_layer():
    a, b = random_weights("int4_g32", 2, 64, 32, seed=1), random_weights(Scheme.parse("int4_g32"), 2, 64, 32, seed=1)
    assert torch.equal(a.w13.codes, b.w13.codes)
