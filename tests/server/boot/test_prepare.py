"""What is run before SERVING, so that no caller waits for a compiler: every size that has kernels of its own."""

import torch

from expertd_kernels import Device, Problem, Scheme
from expertd_kernels.common.sizes import planned
from expertd_kernels.oracle.decision import decide
from expertd_server.boot import prepare as module
from expertd_server.boot.assignment import Assignment
from expertd_server.boot.prepare import Workshop, warm_up
from expertd_server.engine.sizes import padded

INT4 = Scheme.parse("int4_g32")


class Records:
    """Experts that note what they are called with."""

    backend = "records"

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Size, torch.dtype, torch.Size, list[int]]] = []

    def __call__(self, x, ids, weights, **more):
        self.calls.append((x.shape, x.dtype, ids.shape, sorted({int(i) for i in ids.flatten()})))
        assert weights.shape == ids.shape
        return x


def warmed(max_tokens: int, routes=(), **problem) -> Records:
    p = Problem(Device("cpu", "x86_64"), INT4, INT4, 3, 64, 32, **problem)
    experts = Records()
    workshop = Workshop(None, torch.device("cpu"), max_tokens=max_tokens, routes=routes)
    took = warm_up(experts, Assignment(None, (0, 1, 2), decide(p)), workshop, on_cpu=module.warm_sizes(max_tokens))
    again, experts.calls = experts.calls[1::2], experts.calls[::2]
    assert again == experts.calls, "each is computed, and then timed"
    assert [(tokens, k) for tokens, k, _ in took] == [(c[0][0], c[2][1]) for c in experts.calls]
    assert all(0 < ns < 1e9 for _, _, ns in took)
    return experts


def test_sizes_are_those_that_batches_are_padded_to_and_the_largest():
    assert [c[0][0] for c in warmed(100).calls] == [1, 2, 4, 8, 16, 32, 64, 96, 100, 128]
    assert [c[0][0] for c in warmed(4).calls] == [1, 2, 4]
    assert [c[0][0] for c in warmed(1).calls] == [1]
    assert {c[0][0] for c in warmed(5000).calls} == {padded(n) for n in range(1, 5001)} | {5000}


def test_every_batch_is_planned_for_a_size_that_was_warmed_up():
    """Rows choose kernels by planned(tokens): none is met first under load."""
    for most in (1, 5, 100, 511, 512, 513, 700, 1024, 2900, 4096, 5000):
        warm = {planned(n) for n in module.warm_sizes(most)}
        assert {planned(n) for tokens in range(1, most + 1) for n in (tokens, padded(tokens)) if n > 512} <= warm, most
        assert {padded(n) for n in range(1, min(most, 512) + 1)} <= warm, most


def test_other_numbers_of_routes_are_warmed_up_where_they_are_named():
    """Rows that come grouped by expert have one."""
    assert [(c[0][0], c[2][1]) for c in warmed(2, routes=(1, 2), top_k=2).calls] == [
        (1, 2), (2, 2), (1, 1), (2, 1)
    ]  # fmt: skip


def test_tokens_have_as_many_routes_as_requests_also_where_fewer_experts_are_held():
    for top_k in (2, 3, 8):
        for x, dtype, ids, used in warmed(8, top_k=top_k, compute_dtype="f32").calls:
            assert (x[1], dtype) == (64, torch.float32)
            assert ids == (x[0], top_k)
            assert set(used) <= {-1, 0, 1, 2}
            assert (-1 in used) == (top_k > 3)


def test_layers_that_take_e4m3_are_warmed_up_so_too():
    """What an engine on a GPU calls; every size, once."""
    coded = []

    class Taking(Records):
        takes_e4m3 = True

        def of_e4m3(self, codes, scales, ids, weights, *, out):
            assert (codes.dtype, scales.dtype, out.dtype) == (torch.float8_e4m3fn, torch.float32, torch.bfloat16)
            assert scales.shape == (len(codes), 2)
            coded.append((codes.shape, ids.shape))

    p = Problem(Device("cpu", "x86_64"), INT4, INT4, 3, 256, 32, top_k=2)
    experts, workshop = Taking(), Workshop(None, torch.device("cpu"), routes=(1,))
    warm_up(experts, Assignment(None, (0, 1, 2), decide(p)), workshop, on_cpu=(1, 4))
    assert coded == [(x, ids) for x, _, ids, _ in experts.calls[::2]]
    assert len(coded) == 4
