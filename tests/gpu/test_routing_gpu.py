"""Routes grouped by expert on a GPU, compared exactly with torch: few and many routes, in calls that overlap."""

import pytest
import torch

pytestmark = pytest.mark.gpu

SIZES = (
    (3, 1), (512, 200), (1, 1031), (128, 4096), (128, 4097), (60, 8191), (8, 16384), (60, 20001), (128, 65536),
    (512, 65536), (128, 262144),
)  # fmt: skip
"""Experts, routes."""
ROUTINGS = ("spread", "one expert", "nowhere", "even")
NOTHING = -9
"""What stands in memory before."""


def routes(E: int, n: int, how: str) -> torch.Tensor:
    """ids [n]; "spread": some of them outside 0..E-1."""
    if how in ("one expert", "nowhere"):
        return torch.full((n,), E - 1 if how == "one expert" else -1, dtype=torch.int32, device="cuda")
    beyond = 2 if how == "spread" else 0
    return torch.randint(-beyond, E + beyond, (n,), dtype=torch.int32, device="cuda")


@pytest.fixture(autouse=True)
def _hopper():
    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernels wait for each other as an NVIDIA GPU from compute capability 9.0 on can")


@pytest.mark.parametrize("placed", [False, True], ids=["lists", "places"])
@pytest.mark.parametrize(("E", "n"), SIZES)
def test_grouped_routes_are_a_stable_sort(E, n, placed):
    from expertd_kernels.backends.gluon.shared.grouping import Chunks
    from expertd_kernels.backends.gluon.shared.launches import group

    table = torch.empty(Chunks.table(n, E), dtype=torch.int16, device="cuda")
    calls = []
    for how in ROUTINGS:
        unwritten = [torch.full((size,), NOTHING, dtype=torch.int32, device="cuda") for size in (E, n, n)]
        calls.append((routes(E, n, how), *unwritten))
    for ids, counts, lists, places in calls:  # one table: each call has to wait for the one before
        group(ids, table, counts, lists, E, places if placed else None)
    for how, (ids, counts, lists, places) in zip(ROUTINGS, calls, strict=True):
        here = ((ids >= 0) & (ids < E)).nonzero()[:, 0]
        order = here[torch.sort(ids[here], stable=True).indices]
        assert torch.equal(counts.long(), torch.bincount(ids[here], minlength=E)), f"counts, {how}"
        assert torch.equal(lists[: len(order)].long(), order), f"lists, {how}"
        assert bool((lists[len(order) :] == NOTHING).all()), f"entries beyond the last route are written, {how}"
        inverse = torch.full((n,), -1 if placed else NOTHING, dtype=torch.int32, device="cuda")
        if placed:
            inverse[order] = torch.arange(len(order), dtype=torch.int32, device="cuda")
        assert torch.equal(places, inverse), f"places, {how}"
