"""The kernels around the GEMMs of gluon_sm90 and gluon_w8a8 in Triton's interpreter, and how routes are cut."""

import pytest

pytest.importorskip("triton.experimental.gluon")

from interpreted import interpreted
from routing_cases import CASES

from expertd_kernels.backends.gluon.shared.grouping import Chunks


@pytest.fixture(scope="module")
def interpreter():
    """ask(case name) -> what went wrong, "" = nothing."""
    with interpreted("routing_cases.py") as ask:
        yield lambda name: ask(name)["failed"]


@pytest.mark.parametrize("name", CASES)
def test_a_case_in_the_interpreter(interpreter, name):
    failed = interpreter(name)
    assert not failed, failed


@pytest.mark.parametrize("experts", [1, 60, 128, 512])
@pytest.mark.parametrize("top_k", [1, 6, 8, 32])
def test_chunks_hold_all_routes_and_compile_nothing_between_powers_of_two(experts, top_k):
    compiled = {}
    for tokens in [m for p in range(4, 13) for m in (1 << p, (1 << p) + 1, 3 << (p - 1), (2 << p) - 1)] + [8192]:
        c = Chunks.of(tokens * top_k, experts)
        assert (c.number - 1) * c.size < tokens * top_k <= c.number * c.size
        assert c.padded >= experts
        assert c.size < 1 << 15, "counts of a chunk are int16"
        compiled[tokens] = (c.size, c.padded, c.rows)
        rows, columns = Chunks.table((1 << (tokens - 1).bit_length()) * top_k, experts)
        assert (rows >= c.number) & (columns == c.padded), "a layer's scratch is for a power of two"
    powers = {compiled[t] for t in compiled if t & (t - 1) == 0}
    assert set(compiled.values()) == powers
