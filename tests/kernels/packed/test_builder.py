"""The one gate before packing: the rules are asked again about the weights that were read, and what passes is what a
packer takes.  Everything here is one table seen from two sides."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from expertd_kernels import NAMED_DEVICES, Activation, ActivationKind, ActivationQuant, Refused, decide, problem_of
from expertd_kernels.measure.autotuning import measure
from expertd_kernels.oracle.probe import assumed_packages, detect_device
from expertd_kernels.oracle.rules import judge
from expertd_kernels.oracle.survey import SCHEMES
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import build, build_backend, pack
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.scheme import Element, ScaleType, Scheme

PACKAGES = dict(assumed_packages(BACKENDS))
SIZES = ((256, 128), (192, 96), (100, 60))
LAYERS = {
    "plain": {},
    "bias": {"bias": True},
    "activation order": {"act_order": True},
    "clamp": {"activation": Activation(limit=7.0)},
    "swigluoai": {"activation": Activation.parse("swigluoai")},
    "gelu": {"activation": Activation(ActivationKind.GELU_TANH_AND_MUL)},
    "relu2": {"activation": Activation(ActivationKind.RELU2)},
}
MORE_SCHEMES = (
    *("int4_g16", "int8_g64", "e4m3_g128"),
    Scheme(Element.E2M1, 1, 16, ScaleType.E4M3),
    *(Scheme.parse("int4_g64", t) for t in (ScaleType.F32, ScaleType.F16)),
)
HOMES = {
    row.name: [n for n, d in NAMED_DEVICES.items() if not row.devices or None in [r.refusal(d) for r in row.devices]]
    for row in BACKENDS
}
"""Names of the devices that a row runs on: on the others nothing else has to be asked."""


def one_scale(w):
    """Gate and up rows with the same scales where a scale is for a whole projection: what differs there is a matter of
    values, which no rule knows."""
    q = w.w13
    if q.global_scales is not None:
        q = replace(q, global_scales=q.global_scales[:, :1].expand_as(q.global_scales).contiguous())
    if q.scales is not None and q.scheme.rows == q.scheme.cols == 0:
        q = replace(q, scales=q.scales[:, :1].expand_as(q.scales).contiguous())
    return replace(w, w13=q)


@pytest.mark.parametrize("scheme", [*SCHEMES, *MORE_SCHEMES], ids=str)
def test_what_the_rules_let_pass_every_packer_takes(scheme):
    """A row that claims more than its packer has would meet an assertion here."""
    taken = 0
    for (H, I), (name, layer) in product(SIZES, LAYERS.items()):
        if name == "activation order" and not str(getattr(scheme, "name", scheme)).startswith("int4_g"):
            continue
        w = one_scale(random_weights(scheme, 2, H, I, **layer))
        for how in ActivationQuant:
            asked = replace(w, input_scales=torch.full((2, 2), 0.01)) if how.static else w
            problems = {
                n: problem_of(asked, d, top_k=2, activation_quant=how, packages=PACKAGES)
                for n, d in NAMED_DEVICES.items()
            }
            for row in BACKENDS:
                p = next((problems[n] for n in HOMES[row.name] if not judge(row, problems[n])), None)
                if p is not None and row.name != "reference":
                    pack(row, asked, p)
                    taken += 1
    assert taken > 10


SM90 = NAMED_DEVICES["sm90"]


def test_weights_that_are_not_what_headers_promised_are_refused_with_the_rules_sentences():
    """Headers told of static scales, groups of 128 and no bias; the weights that were read are others."""
    promised = replace(random_weights("e4m3_tensor", 2, 256, 128), input_scales=torch.ones(2, 2))
    p = problem_of(promised, SM90, activation_quant=ActivationQuant.E4M3_TENSOR, packages=PACKAGES)
    for name in ("gluon_w8a8", "triton_w8a8", "flashinfer_cutlass"):
        row = next(b for b in BACKENDS if b.name == name)
        assert judge(row, p) == ()
        with pytest.raises(Refused, match="static scales, and the checkpoint has none"):
            pack(row, replace(promised, input_scales=None), p)
    row = next(b for b in BACKENDS if b.name == "marlin")
    good = random_weights("int4_g128", 2, 256, 128)
    p = problem_of(good, SM90, packages=PACKAGES)
    for other, sentence in (
        (random_weights("int4_g256", 2, 256, 256), "group size 256"),
        (random_weights("int4_g128", 2, 256, 128, act_order=True), "does not permute columns"),
        (random_weights("int4_g128", 2, 256, 192), "I = 192 is no multiple of 128"),
    ):
        with pytest.raises(Refused, match=sentence):
            pack(row, other, p)


def test_build_and_tournament_ask_at_the_same_gate():
    here = detect_device("cpu")
    plain, order = (random_weights("int4_g32", 3, 64, 32, act_order=a) for a in (False, True))
    rows = tuple(replace(b, act_order=False) for b in BACKENDS if b.name == "cpu_torch")
    decision = decide(problem_of(plain, here, top_k=2), rows, order={})
    assert build(decision, plain).backend == "cpu_torch"
    with pytest.raises(Refused, match="does not permute columns"):
        build(decision, order)
    with pytest.raises(Refused, match="does not permute columns"):
        build_backend(rows[0], order, decision.problem)
    (found,) = measure(order, decision, rows, grid=(1,))
    assert found.refusal == "failed when measured: does not permute columns (activation order)"


def test_explain_says_that_static_scales_are_missing():
    w = random_weights("e4m3_tensor", 2, 256, 128)
    d = decide(problem_of(w, SM90, activation_quant=ActivationQuant.E4M3_TENSOR, packages=PACKAGES))
    assert d.chosen is None
    said = {v.backend: "; ".join(v.refusals) for v in d.verdicts}
    for name in ("gluon_w8a8", "triton_w8a8", "flashinfer_cutlass"):
        assert said[name] == "rounds activations to e4m3_tensor with static scales, and the checkpoint has none"
    assert "static" not in said["triton"], "a row that does not round so anyway is not asked for them"
