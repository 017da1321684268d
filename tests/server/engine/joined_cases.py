"""A part on a GPU that is pretended, its rows brought and delivered by the kernels in Triton's interpreter: memory is
the host's, captures are kept.  Run by test_joined.py."""

import contextlib
import ctypes
import sys
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))

from interpreted import answer_cases

from expertd_kernels import build, decide, detect_device, problem_of, relative_error, tolerance
from expertd_kernels.packed.integrity import reference_rows
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_server.engine import joined as module
from expertd_server.engine.graphs import GraphPool

E, H, K = 8, 128, 2
SHARES = ([0, 2, 4, 6, 7], [1, 3, 5])
captured = []


class Gpu:
    type, index = "cuda", 0


class Stream:
    cuda_stream = 99

    def synchronize(self):
        """Nothing is under way."""


class Torch:
    """torch, for which that GPU's memory is the host's."""

    cuda = types.SimpleNamespace(
        stream=lambda s: contextlib.nullcontext(),
        CUDAGraph=lambda keep_graph: types.SimpleNamespace(raw_cuda_graph=lambda: 5),
    )

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, *shape, pin_memory=False, **more):
        return torch.zeros(*shape, **more)

    def empty(self, *shape, device=None, **more):
        return torch.empty(*shape, **more)


class Ctypes:
    """ctypes, with a driver that gives every graph the number 77."""

    def __getattr__(self, name):
        return getattr(ctypes, name)

    def CDLL(self, name):  # noqa: N802 - ctypes' name
        def instantiate(made, raw, flags):
            made._obj.value = 77
            return 0

        return types.SimpleNamespace(cuGraphInstantiateWithFlags=instantiate, cuGraphExecDestroy=lambda graph: None)


def pretend():
    module._library()
    to = torch.Tensor.to
    torch.Tensor.to = lambda t, *a, **more: t if a and isinstance(a[0], Gpu) else to(t, *a, **more)
    module.torch, module.C = Torch(), Ctypes()
    module.graphs_refusal, module.free_now = lambda device: "", lambda: 0
    GraphPool.record = lambda self, graph, body: captured.append(body)


def made(dtype):
    pretend_once()
    weights = random_weights("int4_g32", E, H, 64, seed=3)
    sites = [module.Site("cuda:0", Gpu(), None, Stream()), module.Site("cpu", torch.device("cpu"))]
    kinds = {"bf16": torch.bfloat16, "f32": torch.float32}
    space, parts = module.JoinedSpace(sites, kinds[dtype], 64), []
    for site, held in enumerate(SHARES):
        own = weights.experts(held)
        decision = decide(problem_of(own, detect_device("cpu"), top_k=K, compute_dtype=dtype))
        parts.append(module.Part(site, build(decision, own), held, capturable=True))
    return weights, space, module.join(space, parts, E, H, K)


def pretend_once(done=[]):  # noqa: B006 - remembers
    if not done:
        done.append(1)
        pretend()


def both_parts_answer_as_one_layer(dtype):
    weights, space, experts = made(dtype)
    captured.clear()
    with torch.inference_mode():
        for tokens in (1, 5, 40):
            x, ids, w = random_inputs(tokens, H, E, K, seed=tokens, dtype=space.dtype)
            ids[-1, 1] = -1
            if tokens > 1:
                ids[0] = -1
            right = reference_rows(weights, x, ids, w, False)
            before = len(captured)
            for call in range(3):
                out = experts(x, ids, w)
                assert relative_error(out, right) <= tolerance(dtype), (tokens, call)
                assert tokens == 1 or not out[0].any()
                assert len(captured) - before == (call > 0), "a size is captured when it has come twice"


def more_routes_a_token_find_room():
    weights, _, experts = made("bf16")
    with torch.inference_mode():
        x, ids, w = random_inputs(16, H, E, E, seed=1)
        right = reference_rows(weights, x, ids, w, False)
        assert relative_error(experts(x, ids, w), right) <= tolerance("bf16")


def a_larger_layer_takes_the_place_of_the_memory_of_all():
    weights, space, experts = made("bf16")
    x, ids, w = random_inputs(3, H, E, K, seed=2)
    with torch.inference_mode():
        for _ in range(2):
            experts(x, ids, w)
        before = space.memory(0, K, E, H)
        after = space.memory(0, K, E, 2 * H)
        assert after is not before
        assert experts in after.users
        right = reference_rows(weights, x, ids, w, False)
        assert relative_error(experts(x, ids, w), right) <= tolerance("bf16")


def graphs_that_are_dropped_are_captured_anew():
    _, space, experts = made("bf16")
    x, ids, w = random_inputs(3, H, E, K, seed=2)
    captured.clear()
    with torch.inference_mode():
        for _ in range(4):
            experts(x, ids, w)
        assert len(captured) == 1
        space.drop_graphs()
        for count in (1, 2, 2):
            experts(x, ids, w)
            assert len(captured) == count


CASES = {
    "both parts, bf16": lambda: both_parts_answer_as_one_layer("bf16"),
    "both parts, f32": lambda: both_parts_answer_as_one_layer("f32"),
    "more routes a token": more_routes_a_token_find_room,
    "dropped graphs": graphs_that_are_dropped_are_captured_anew,
    "a larger layer": a_larger_layer_takes_the_place_of_the_memory_of_all,
}

if __name__ == "__main__":
    answer_cases(CASES)
