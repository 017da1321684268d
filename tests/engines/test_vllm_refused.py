"""What vLLM cannot do with remote experts, in sentences; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace as Of

import pytest

from expertd.errors import UnsupportedCombinationError
from expertd_client.engines.vllm.refused import refuse_engine, refuse_layer


class Graphs:
    def __init__(self, name, full):
        self.name, self._full = name, full

    def has_full_cudagraphs(self):
        return self._full


def engine(*, graphs=("PIECEWISE", False), mode=3, lora=None, gathered=1, runner="generate", ranks=(1, 1)):
    tensor, pipeline = ranks
    return Of(
        compilation_config=Of(cudagraph_mode=Graphs(*graphs), mode=mode),
        lora_config=lora,
        parallel_config=Of(
            prefill_context_parallel_size=gathered, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline
        ),
        model_config=Of(runner_type=runner),
    )


def layer(*, experts=8, logical=8, balanced=False, lora=False):
    return Of(
        moe_parallel_config=Of(enable_eplb=balanced),
        num_experts=experts,
        num_logical_experts=logical,
        is_lora_enabled=lora,
    )


GOOD = {"fused_shared_experts": 0, "weights_on_input": False, "substituted": False}


def test_what_works_is_let_through():
    refuse_engine(engine(), cpu=False, breakable=False)
    refuse_engine(engine(graphs=("NONE", False), mode=0), cpu=True, breakable=False)
    refuse_engine(engine(ranks=(2, 2)), cpu=False, breakable=False)
    refuse_engine(engine(graphs=("FULL", True)), cpu=False, breakable=False, graphs=True)
    refuse_layer("layers.0", layer(), **GOOD)


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (engine(graphs=("FULL_AND_PIECEWISE", True)), {}, "got CUDA graphs FULL_AND_PIECEWISE, want graphs that are"),
        (engine(graphs=("FULL", True)), {}, '"cudagraph_mode": "PIECEWISE"'),
        (engine(graphs=("FULL", True)), {}, '"graphs": true'),
        (engine(graphs=("FULL", True), ranks=(2, 1)), {"graphs": True}, "FULL with 2 tensor- or pipeline"),
        (engine(graphs=("FULL", True), ranks=(1, 3)), {"graphs": True}, "FULL with 3 tensor- or pipeline"),
        (engine(), {"breakable": True}, "VLLM_USE_BREAKABLE_CUDAGRAPH=0"),
        (engine(), {"cpu": True}, "got a compiled model on a CPU, want an eager one"),
        (engine(lora=Of()), {}, "got LoRA"),
        (engine(gathered=2), {}, "got prefill context parallelism"),
        (engine(runner="draft"), {}, "got a draft model with experts"),
    ],
)
def test_an_engine_that_cannot_work(config, more, said):
    with pytest.raises(UnsupportedCombinationError) as raised:
        refuse_engine(config, **{"cpu": False, "breakable": False, **more})
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("moe", "more", "said"),
    [
        (layer(balanced=True), {}, "layers.0: remote experts: got expert load balancing (EPLB)"),
        (layer(experts=12), {}, "got 4 redundant experts, want none"),
        (layer(experts=6), {}, "got substituted experts"),
        (layer(), {"substituted": True}, "got substituted experts"),
        (layer(), {"fused_shared_experts": 1}, "got 1 fused shared experts"),
        (layer(), {"weights_on_input": True}, "got router weights on the experts' inputs"),
        (layer(lora=True), {}, "got LoRA on experts"),
    ],
)
def test_a_layer_that_a_server_would_compute_otherwise(moe, more, said):
    with pytest.raises(UnsupportedCombinationError) as raised:
        refuse_layer("layers.0", moe, **{**GOOD, **more})
    assert said in str(raised.value)
