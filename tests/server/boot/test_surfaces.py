"""What batches take is measured once for each kind of layer, and never keeps a layer from being served."""

import pytest
import torch

from expertd_kernels import detect_device, problem_of
from expertd_kernels.measure.surface import grid
from expertd_kernels.sources.synthetic import random_weights
from expertd_server.boot.prepare import Workshop
from expertd_server.boot.surfaces import surface_of

H, E, K = 64, 6, 2


class Counting:
    """Remembers which slots batches had routes to."""

    backend = "counting"

    def __init__(self, error=None):
        self.error, self.slots, self.calls = error, set(), 0

    def __call__(self, hidden_states, topk_ids, topk_weights, *, router_weight_on_input=False, out=None):
        if self.error is not None:
            raise self.error
        self.calls += 1
        self.slots |= set(topk_ids[topk_ids >= 0].tolist())
        return out.zero_()


@pytest.fixture
def problem():
    return problem_of(random_weights("int4_g32", E, H, 32), detect_device("cpu"), top_k=K)


def workshop():
    return Workshop(None, torch.device("cpu"), max_tokens=64)


def test_a_part_is_measured_with_batches_to_its_own_slots(problem):
    experts, w = Counting(), workshop()
    found = surface_of(experts, [1, 3, 5], problem, w, device="cpu")
    assert experts.slots == {1, 3, 5}
    assert [(p.experts, p.routes) for p in found] == sorted(grid(3, K, 64))
    assert all(p.microseconds > 0 for p in found)


def test_a_kind_is_measured_once_for_each_device(problem):
    experts, w = Counting(), workshop()
    first = surface_of(experts, range(E), problem, w, device="cpu:0")
    calls = experts.calls
    assert surface_of(experts, range(E), problem, w, device="cpu:0", measure=False) == first
    assert experts.calls == calls
    assert surface_of(experts, range(E), problem, w, device="cpu:1", measure=False) == (), "not while it serves"
    assert surface_of(experts, range(E), problem, w, device="cpu:1")
    assert experts.calls > calls


def test_a_layer_that_cannot_be_measured_has_no_surface(problem, caplog):
    assert surface_of(Counting(RuntimeError("no room")), range(E), problem, workshop(), device="cpu") == ()
    assert "cannot be measured: no room" in caplog.text
