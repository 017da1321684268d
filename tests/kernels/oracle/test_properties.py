"""The real table under any question: what holds for every problem, every device and every row."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from expertd_kernels import NAMED_DEVICES, Activation, ActivationKind, ActivationQuant, Problem, Scheme, decide
from expertd_kernels.oracle.decision import RULES
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.survey import SCHEMES
from expertd_kernels.oracle.table import BACKENDS, ORDER

PACKAGES = dict(assumed_packages(BACKENDS))
ADDED = ({"bias": True}, {"act_order": True}, {"deterministic": True}, {"batch_invariant": True})
"""Features that a problem can have on top: each can only add refusals."""


@st.composite
def problems(draw):
    limit = draw(st.sampled_from([None, 7.0]))
    some = draw(st.sets(st.sampled_from(sorted(PACKAGES)), max_size=len(PACKAGES)))
    return Problem(
        device=draw(st.sampled_from(list(NAMED_DEVICES.values()))),
        w13=Scheme.parse(draw(st.sampled_from(SCHEMES))),
        w2=Scheme.parse(draw(st.sampled_from(SCHEMES))),
        num_experts=draw(st.sampled_from([1, 60, 128, 1024, 4096])),
        hidden_size=draw(st.sampled_from([96, 100, 2048, 2880, 7168])),
        intermediate_size=draw(st.sampled_from([60, 96, 768, 1408, 2880])),
        top_k=draw(st.sampled_from([1, 8, 17])),
        activation=Activation(draw(st.sampled_from(list(ActivationKind))), limit=limit),
        activation_quant=draw(st.sampled_from(list(ActivationQuant))),
        compute_dtype=draw(st.sampled_from(["bf16", "f32"])),
        packages={name: PACKAGES[name] for name in some},
        **{k: draw(st.booleans()) for k in ("bias", "act_order", "deterministic", "batch_invariant")},
    )


@given(problems())
@settings(max_examples=150, deadline=None)
def test_a_chosen_backend_violates_no_rule_and_every_other_has_a_reason_or_a_lower_place(p):
    d = decide(p)
    assert {v.backend for v in d.verdicts} == {b.name for b in BACKENDS}
    eligible = [v.backend for v in d.verdicts if v.eligible]
    assert (d.chosen.name if d.chosen else None) == (eligible[0] if eligible else None)
    if d.chosen:
        assert [rule(d.chosen, p) for rule in RULES] == [None] * len(RULES)
    for v in d.verdicts:
        assert all(reason.strip() for reason in v.refusals)


@given(problems(), st.sampled_from(ADDED))
@settings(max_examples=150, deadline=None)
def test_another_feature_never_turns_a_refusal_into_silence(p, more):
    before = {v.backend: set(v.refusals) for v in decide(p).verdicts}
    after = {v.backend: set(v.refusals) for v in decide(replace(p, **more)).verdicts}
    for name, reasons in before.items():
        assert reasons <= after[name]


@given(problems())
@settings(max_examples=60, deadline=None)
def test_a_pin_changes_the_choice_and_no_verdict(p):
    free = decide(p)
    for v in free.verdicts:
        pinned = decide(p, pin=v.backend)
        assert pinned.verdicts == free.verdicts
        assert (pinned.chosen.name if pinned.chosen else None) == (v.backend if v.eligible else None)


def test_every_order_ends_in_the_reference_and_names_no_row_twice():
    for where, names in ORDER.items():
        assert names[-1] == "reference", where
        assert len(set(names)) == len(names)


def test_a_row_that_was_not_run_says_so_and_stands_behind_those_that_were():
    """On devices that the project's own kernels were measured on, nothing unproven is preferred to them."""
    unproven = {b.name for b in BACKENDS if b.hardware == "not run on hardware"}
    assert {"xpu", "aiter", "flashinfer_trtllm"} <= unproven
    names = [n for n in ORDER["sm90"] if n != "reference"]
    proven = [n not in unproven for n in names]
    assert proven == sorted(proven, reverse=True), names
