"""Which batches are measured, and that they reach the experts and the routes that they say."""

import torch

from expertd_kernels.measure import surface
from expertd_kernels.measure.surface import batch_of, grid, measured_surface


def test_the_corners_come_first_and_no_batch_is_larger_than_the_server_takes():
    points = grid(32, 8, 64)
    assert {(1, 1), (1, 64), (32, 32), (32, 512)} <= set(points[:8])
    assert all(-(-routes // min(8, experts)) <= 64 for experts, routes in points)
    assert (32, 32 * 64) not in points
    assert points[:4] == [(1, 1), (32, 32), (1, 4), (32, 128)]
    assert grid(1, 2, 4096) == [(1, 1), (1, 4), (1, 16), (1, 64)]


def test_a_batch_has_its_routes_at_its_experts_and_never_one_twice_in_a_token():
    slots = torch.tensor([5, 7, 9, 11, 13])
    for experts, routes in ((1, 1), (2, 8), (3, 12), (5, 5), (5, 80)):
        seen = set()
        for turn in range(6):
            ids, weights = batch_of(slots, experts, routes, 2, turn)
            assert ids.dtype is torch.int32
            assert ids.shape == weights.shape
            used = ids[ids >= 0].tolist()
            assert len(used) == routes
            assert len(set(used)) == experts
            assert all(len(set(row)) == len(row) for row in ([i for i in r if i >= 0] for r in ids.tolist()))
            seen |= set(used)
        assert seen == set(slots.tolist()), "others come into play each turn"


def test_medians_of_turns_are_kept_and_the_corners_stay_when_time_is_over(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(surface.time, "perf_counter", lambda: now[0])

    def seconds(experts, routes, turn):
        now[0] += 1
        return 1.0 if turn in (0, 1, 3) else routes * 1e-6

    found = measured_surface(seconds, grid(8, 2, 100), budget_s=10)
    assert [p[:2] for p in found] == [(1, 1), (1, 4), (8, 8), (8, 32)], "few and many experts"
    assert [p.microseconds for p in found] == [1, 4, 8, 32]
