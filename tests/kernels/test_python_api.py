"""The public Python API: the examples of docs/python.md as they stand, and rows that come grouped by expert."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import expertd_kernels
from expertd_kernels import (
    NAMED_DEVICES,
    ActivationQuant,
    batched_routes,
    build,
    decide,
    detect_device,
    grouped_routes,
    problem_of,
    reference,
    relative_error,
    tolerance,
)
from expertd_kernels.oracle.probe import installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_weights

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
CPU = detect_device("cpu")
ROWS = ("cpu", "cpu_torch", "reference")


def test_the_examples_run_one_after_the_other_and_are_right():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    assert len(blocks) == 3
    torch.manual_seed(0)
    names = {}
    for block in blocks:
        exec(block, names)
    right = reference(names["weights"], names["hidden_states"], names["topk_ids"], names["topk_weights"])
    assert relative_error(names["out"], right) <= tolerance("bf16")
    assert names["by_row"].shape == (6, 256)
    for e, at in ((0, 0), (2, 3), (5, 4)):
        ids = torch.full((1, 1), e, dtype=torch.int32, device=names["on"])
        alone = reference(names["weights"], names["rows"][at : at + 1], ids, torch.ones_like(ids).float())
        assert relative_error(names["by_row"][at : at + 1], alone) <= 2 * tolerance("bf16")
    assert names["by_expert"][0, :3].any(dim=1).all()
    assert not names["by_expert"][0, 3:].any()
    assert not names["by_expert"][1].any()


def test_every_public_name_is_there():
    for name in expertd_kernels.__all__:
        assert getattr(expertd_kernels, name) is not None


def test_installed_packages_are_reckoned_with_unless_others_are_given():
    """Not to be told of packages is not the same as to be told that there are none."""
    w = random_weights("int4_g32", 2, 64, 32)
    assert problem_of(w, CPU).packages == installed_packages(BACKENDS)
    assert problem_of(w, CPU, packages={}).packages == {}
    bare = decide(problem_of(w, NAMED_DEVICES["sm90"], packages={}))
    assert bare.chosen.name == "reference", "without triton nothing else runs there"
    assert any("package triton" in r for v in bare.verdicts if v.backend == "triton" for r in v.refusals)


def test_counts_become_routes():
    ids, weights = grouped_routes(torch.tensor([2, 0, 3, 1]), 8)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[0], [0], [2], [2], [2], [3], [-1], [-1]]
    assert weights.tolist() == [[1.0]] * 8
    assert grouped_routes(torch.tensor([0, 0]), 3)[0].tolist() == [[-1]] * 3
    assert grouped_routes(torch.tensor([1]), 0)[0].shape == (0, 1)
    ids, weights = batched_routes(torch.tensor([2, 0, 3], dtype=torch.int32), 3)
    assert ids.tolist() == [[0], [0], [-1], [-1], [-1], [-1], [2], [2], [2]]
    assert weights.shape == (9, 1)


def built(w, backend, **asked):
    """The row's experts; skipped with the oracle's sentence where it does not run here."""
    decision = decide(problem_of(w, CPU, **asked), pin=backend)
    if decision.chosen is None:
        pytest.skip("; ".join(next(v.refusals for v in decision.verdicts if v.backend == backend)))
    return build(decision, w)


@pytest.mark.parametrize("backend", ROWS)
@pytest.mark.parametrize("scheme", ["int4_g32_zp", "mxfp4", "bf16"])
def test_grouped_rows_give_what_their_tokens_would(backend, scheme):
    E, H, T = 4, 64, 5
    w = random_weights(scheme, E, H, 32, bias=True)
    experts = built(w, backend)
    counts = torch.tensor([2, 0, 5, 1])
    padded = torch.randn(E, T, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.full((E * T, H), float("nan"), dtype=torch.bfloat16)
    by_expert = experts(padded.flatten(0, 1), *batched_routes(counts, T), out=out).view(E, T, H)
    rows = torch.cat([padded[e, :n] for e, n in enumerate(counts.tolist())])
    contiguous = experts(rows, *grouped_routes(counts, len(rows)))
    at = 0
    for e, n in enumerate(counts.tolist()):
        ids = torch.full((n, 1), e, dtype=torch.int32)
        right = reference(w, padded[e, :n], ids, torch.ones(n, 1))
        assert relative_error(by_expert[e, :n], right) <= tolerance("bf16")
        assert relative_error(contiguous[at : at + n], right) <= tolerance("bf16")
        assert not by_expert[e, n:].any()
        at += n


def test_grouped_rows_with_rounded_activations_and_zero_points_keep_both():
    """Zero points and each row's own activation scales, in the grouped form too: dropping either is far outside."""
    E, T, H = 3, 6, 64
    w = random_weights("int4_g32_zp", E, H, 32)
    how = ActivationQuant.INT8_GROUP
    experts = built(w, "cpu_w4a8", activation_quant=how)
    size = torch.logspace(-2, 2, E * T)[:, None]  # rows of very different size: one scale for all would drown most
    rows = (torch.randn(E * T, H, generator=torch.Generator().manual_seed(2)) * size).bfloat16()
    ids, ones = batched_routes(torch.tensor([6, 2, 4]), T)
    out, right = experts(rows, ids, ones).float(), reference(w, rows, ids, ones)
    here = ids[:, 0] >= 0
    each = (out - right).norm(dim=1)[here] / right.norm(dim=1)[here]
    assert float(each.max()) <= 2 * tolerance("bf16", how)
    middle = replace(w, w13=replace(w.w13, zeros=torch.full_like(w.w13.zeros, 8)))
    assert relative_error(reference(middle, rows, ids, ones), right) > 5e-2
