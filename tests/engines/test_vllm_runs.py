"""Full CUDA graphs that contain the experts' calls, as far as a process without vLLM and without a GPU can run them:
our plugin with stand-ins for vLLM's modules, a model runner and an output of both kinds."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from types import SimpleNamespace as Of

import kit
import pytest
import torch

from expertd.errors import UnavailableError
from expertd_client.engines import settings
from expertd_client.engines.vllm import runs


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(runs, "_checks", {})


class Runner:
    """As vLLM's: a step gives nothing until its tokens are sampled."""

    def __init__(self, output=None):
        self.output, self.seen = output, []

    def _dummy_run(self, tokens):
        self.seen.append(runs.in_dummy_run())
        return tokens

    def execute_model(self, scheduled):
        return None

    def sample_tokens(self, grammar):
        return self.output


class Later:
    def get_output(self):
        return "tokens"


@pytest.fixture
def runner(monkeypatch):
    """The class of one runner; the other module is not loaded."""
    made = type("GPUModelRunner", (Runner,), {})
    monkeypatch.setitem(sys.modules, runs.RUNNERS[0], Of(GPUModelRunner=made))
    monkeypatch.delitem(sys.modules, runs.RUNNERS[1], raising=False)
    return made


def lost():
    raise UnavailableError("the server ended")


def test_a_dummy_run_is_marked_once_and_also_where_it_fails(runner):
    runs.watch()
    first = runner._dummy_run
    runs.watch()
    assert runner._dummy_run is first
    made = runner()
    assert (made._dummy_run(3), made.seen, runs.in_dummy_run()) == (3, [True], False)
    with pytest.raises(TypeError):
        made._dummy_run()
    assert not runs.in_dummy_run()


def test_nobody_asks_where_graphs_contain_no_call(runner):
    runs.watch()
    assert runner("tokens").sample_tokens(None) == "tokens"
    assert runner.sample_tokens is Runner.sample_tokens


@pytest.mark.parametrize("kind", ["here", "later"])
def test_what_replays_met_is_raised_before_anybody_sees_their_tokens(runner, kind):
    output = "tokens" if kind == "here" else Later()
    asked = []
    runs.check_steps("server", lambda: asked.append(1))
    runs.check_steps("server", lambda: asked.append(1))  # of the next layer: one check is enough
    made = runner(output)
    assert made.execute_model(None) is None
    assert not asked, "its replays are not over"

    def tokens():
        sampled = made.sample_tokens(None)
        return sampled if kind == "here" else sampled.get_output()

    assert tokens() == "tokens"
    assert asked == [1]
    runs.check_steps("server", lost)
    made.output = "tokens" if kind == "here" else Later()
    with pytest.raises(UnavailableError, match="the server ended"):
        tokens()


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """vLLM's modules, whose names are classes without anything in them."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: self.made(module, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module):
        """Nothing."""

    def made(self, module, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *_: None})
        setattr(module, name, made)
        return made


@pytest.fixture
def plugin(monkeypatch):
    from expertd_client.engines.vllm.versions import ADAPTER

    before = dict(sys.modules)
    monkeypatch.setattr(sys, "meta_path", [StandIns(), *sys.meta_path])
    monkeypatch.setattr(type(ADAPTER), "installed", lambda self: Of(substituted=lambda layer: False))
    import expertd_client.engines.vllm.plugin as module

    yield module
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] == "vllm" or name == module.__name__:
            del sys.modules[name]
    del sys.modules["expertd_client.engines.vllm"].plugin


class Graphs:
    name = "FULL_AND_PIECEWISE"

    def has_full_cudagraphs(self):
        return True


def method(plugin, monkeypatch, options):
    """Of a layer in vLLM with full CUDA graphs."""
    connection = kit.Connected()
    wanted = settings.settings_of({"address": "here:1", **options}, {})
    monkeypatch.setitem(settings._CONNECTIONS, (plugin.os.getpid(), wanted), connection)
    config = Of(
        additional_config={"expertd": {"address": "here:1", **options}},
        compilation_config=Of(cudagraph_mode=Graphs(), mode=3, splitting_ops=["attention"]),
        parallel_config=Of(tensor_parallel_size=1, pipeline_parallel_size=1, prefill_context_parallel_size=1),
        lora_config=None,
        model_config=Of(runner_type="generate"),
    )
    for name, value in {
        "get_current_vllm_config": config,
        "is_breakable_cudagraph_enabled": False,
        "extract_layer_index": 3,
        "get_tensor_model_parallel_rank": 0,
        "get_tensor_model_parallel_world_size": 1,
        "in_piecewise_cudagraph": False,
        "get_forward_context": Of(is_padding=torch.tensor([False, False, True])),
    }.items():
        monkeypatch.setattr(plugin, name, lambda *_, value=value: value)
    monkeypatch.setattr(plugin, "current_platform", Of(is_cpu=lambda: False))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    layer = plugin.RemoteRoutedExperts.__new__(plugin.RemoteRoutedExperts)
    layer.expert_map_manager, layer.apply_router_weight_on_input = Of(num_fused_shared_experts=0), False
    moe = Of(
        moe_parallel_config=Of(enable_eplb=False),
        num_experts=kit.E,
        num_logical_experts=kit.E,
        is_lora_enabled=False,
        hidden_dim=kit.H,
        intermediate_size=32,
        is_sequence_parallel=False,
    )
    made = layer._get_quant_method("model.layers.3.mlp.experts", None, moe)
    made.moe = moe
    return made, connection.forwarder


def called(made):
    x = torch.rand(3, kit.H) + 0.5
    ids = torch.randint(kit.E, (3, kit.TOP_K))
    weights = torch.rand(3, kit.TOP_K)
    wanted = kit.expert_sum(x, ids, weights).float()
    wanted[2] = 0  # padding
    with torch.inference_mode():
        return made.apply(Of(kept=True), x, weights, ids, None, None), wanted


def test_a_dummy_run_calls_where_graphs_contain_the_call(plugin, monkeypatch, runner):
    """Zeros of a capture would be replayed for ever; and a capture needs a session that a call opened before."""
    made, forwarder = method(plugin, monkeypatch, {"graphs": True})
    with runs._dummy():
        found, wanted = called(made)
    assert torch.allclose(found, wanted)
    assert len(forwarder.seen) == 1
    assert hasattr(runner.sample_tokens, "expertd")
    devices = []
    monkeypatch.setattr(forwarder, "device_transport", lambda device: devices.append(device), raising=False)
    runner("tokens").sample_tokens(None)
    assert devices == [1], "the GPU on which the layer was made, whichever thread asks"


def test_full_graphs_are_refused_where_nobody_says_that_calls_go_from_gpu_to_gpu(plugin, monkeypatch, runner):
    with pytest.raises(plugin.UnsupportedCombinationError, match="got CUDA graphs FULL_AND_PIECEWISE"):
        method(plugin, monkeypatch, {})
    assert runner.sample_tokens is Runner.sample_tokens
