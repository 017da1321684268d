"""The batch that proves experts: what it holds, whatever part of them is compared."""

from __future__ import annotations

import pytest
import torch

from expertd_kernels import detect_device, problem_of
from expertd_kernels.packed.integrity import BOOT_WEIGHTS, LATER_WEIGHTS, boot_reference_experts, prove, reference_rows
from expertd_kernels.sources.synthetic import random_weights

E, H, INNER = 6, 64, 32


def proof(compared: int | None, top_k: int = 2):  # type: ignore[no-untyped-def]
    w = random_weights("int4_g32", E, H, INNER)
    return w, prove(w, problem_of(w, detect_device("cpu"), top_k=top_k), reference_experts=compared)


@pytest.mark.parametrize(("compared", "rows"), [(None, E), (E, E), (E + 3, E), (3, 3), (2, 2), (1, 1)])
def test_every_expert_has_a_row_and_those_that_are_compared_come_first(compared: int | None, rows: int) -> None:
    w, p = proof(compared)
    assert (p.experts_compared, p.num_experts) == (rows, E)
    assert len(p.x) == E + 1
    assert sorted(p.dominant.tolist()) == [-1, *range(E)]
    assert p.dominant[rows] == -1, "the row without a route"
    assert (p.ids[rows] == -1).all()
    first = p.dominant[:rows].tolist()
    assert first[0] == 0
    assert rows == 1 or first[-1] == E - 1
    want = reference_rows(w, p.x[: rows + 1], p.ids[: rows + 1], p.weights[: rows + 1], False)
    assert torch.equal(p.expected, want)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_routes_of_a_row_go_to_its_own_kind_each_expert_once(top_k: int) -> None:
    _, p = proof(3, top_k)
    compared = set(p.dominant[:3].tolist())
    for row, dominant in zip(range(len(p.x)), p.dominant.tolist(), strict=True):
        there = [e for e in p.ids[row].tolist() if e >= 0]
        assert len(there) == len(set(there)) == (0 if dominant < 0 else min(top_k, 3))
        assert dominant < 0 or {e in compared for e in there} == {dominant in compared}
        if dominant >= 0:
            assert p.weights[row][p.ids[row] == dominant].tolist() == [1.0]
            assert (p.weights[row] <= 1.0).all()
            assert (p.weights[row] > 0.0).all()


def test_no_expert_is_no_proof() -> None:
    with pytest.raises(ValueError, match="0 reference experts, want at least 1"):
        proof(0)


def test_a_boot_compares_as_many_experts_as_it_has_time_for() -> None:
    w = random_weights("int8_channel", 40, 1024, 512)
    each = 3 * 1024 * 512
    assert boot_reference_experts(w) == min(40, BOOT_WEIGHTS // each)
    assert boot_reference_experts(w, later=True) == LATER_WEIGHTS // each == 8
    assert boot_reference_experts(random_weights("int8_channel", 2, 64, 32)) == 2
