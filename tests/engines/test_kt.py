"""RemoteKTMoEWrapper: with kt-kernel's recorded signature, and inside SGLang's own kt method (its source, from `make
vendor`), against the whole layer."""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
from collections import namedtuple
from types import ModuleType, SimpleNamespace

import kit
import pytest
import signatures
import torch
from fetch_engines import pinned
from kit import TOP_K, E, H, batch, expert_sum
from vendor import load_file

from expertd.errors import BadShapeError, UnsupportedCombinationError
from expertd_client.engines import kt, settings
from expertd_client.engines.kt import RemoteKTMoEWrapper

VERSION = "0.7.2"
RECORDED = json.loads(signatures.place("kt_kernel", VERSION).read_text())
CLASS = "kt_kernel.experts:KTMoEWrapper"
BASE = "kt_kernel.experts_base:BaseMoEWrapper"
LAYER = 3


@pytest.fixture
def connected(monkeypatch):
    """Experts in this process, for whoever names the server "here:1"."""
    found = kit.Connected()
    monkeypatch.setitem(settings._CONNECTIONS, (os.getpid(), settings.Settings(("here:1",))), found)
    return found


def wrapper(**options):
    sizes = {"layer_idx": LAYER, "num_experts": E, "num_experts_per_tok": TOP_K, "hidden_size": H}
    host = {"cpuinfer_threads": 4, "threadpool_count": 1, "chunked_prefill_size": 512, "method": "AMXINT4"}
    return RemoteKTMoEWrapper(
        **{**sizes, "moe_intermediate_size": 32, "weight_path": "expertd://here:1", **host, **options}
    )


def loaded(**options):
    made = wrapper(**options)
    made.load_weights(torch.arange(E))
    return made


def test_the_constructor_takes_what_kt_kernels_takes():
    recorded = ast.parse(f"def f{RECORDED[f'{CLASS}.__new__']}: 0").body[0].args
    names = [a.arg for a in recorded.args][1:]
    ours = list(inspect.signature(RemoteKTMoEWrapper).parameters)
    positional = names[: names.index("mode") + 2]  # up to those of training
    assert ours[: len(positional)] == positional
    inspect.signature(RemoteKTMoEWrapper).bind(**dict.fromkeys(names))


def test_kt_kernels_source_has_what_is_recorded():
    site = pinned()["kt_kernel", VERSION]
    if not site.is_dir():
        pytest.skip(f"kt-kernel {VERSION} is not fetched: `make engines`")
    assert signatures.record("kt_kernel", VERSION, site) == RECORDED


@pytest.mark.parametrize("name", [n for n in signatures.KT_METHODS if n != "load_weights_from_tensors"])
def test_each_method_takes_what_kt_kernels_takes(name):
    recorded = ast.parse(f"def f{RECORDED[f'{BASE}.{name}']}: 0").body[0].args
    names = [a.arg for a in recorded.args]
    ours = list(inspect.signature(getattr(RemoteKTMoEWrapper, name)).parameters)
    assert ours == names


@pytest.mark.parametrize("name", signatures.KT_STATIC)
def test_the_static_methods_are_there(name):
    recorded = ast.parse(f"def f{RECORDED[f'{CLASS}.{name}']}: 0").body[0].args
    assert list(inspect.signature(getattr(RemoteKTMoEWrapper, name)).parameters) == [a.arg for a in recorded.args]


def test_routes_of_the_gpus_experts_are_not_sent(connected):
    mask = torch.tensor([True, False] * (E // 2))
    made = loaded(gpu_experts_mask=mask)
    assert made.num_gpu_experts == E // 2
    x, ids, weights = batch(6)
    ids[5] = 0  # a token of the GPU alone
    made.submit_forward(x, ids, weights, 7)
    kept = ids.clone()
    ids.fill_(1)  # what was given may be overwritten
    y = made.sync_forward(x, 7)
    remote = kept.masked_fill(mask[kept.long()], -1)
    torch.testing.assert_close(y.double(), expert_sum(x, remote, weights))
    assert not y[5].any()
    assert y[:5].any()
    [request] = connected.forwarder.seen
    assert request.layer == LAYER
    assert request.tokens == int((remote >= 0).any(1).sum()) < 6
    [found] = connected.found
    assert (found.layer, found.experts, found.hidden_size, found.intermediate_size) == (LAYER, E, H, 32)


def test_the_first_experts_are_the_gpus_where_only_their_number_is_given(connected):
    made = loaded(num_gpu_experts=3)
    assert made.gpu_experts_mask.tolist() == [True] * 3 + [False] * (E - 3)
    x, ids, weights = batch(5)
    y = made.forward(x.bfloat16(), ids, weights, 0)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(
        y.double(), expert_sum(x.bfloat16(), ids.masked_fill(ids < 3, -1), weights), rtol=2e-2, atol=2e-2
    )


def test_ids_of_places_become_the_models(connected):
    places = torch.randperm(E, generator=torch.Generator().manual_seed(1))
    made = wrapper()
    made.load_weights(places)
    x, ids, weights = batch(5)
    torch.testing.assert_close(made.forward(x, ids, weights, 0).double(), expert_sum(x, places[ids.long()], weights))
    for wrong in (places[:-1], places + 1, places[None]):
        with pytest.raises(BadShapeError, match="physical_to_logical_map_cpu"):
            made.load_weights(wrong)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_deferred_experts_per_token": 2}, "got 2 deferred experts a token, want none"),
        ({"mode": "sft"}, "got mode 'sft'"),
        ({"lora_rank": 8}, "got lora_rank of training"),
        ({"cpu_save": True}, "got cpu_save"),
        ({"swiglu_limit": 10.0}, "got swiglu_limit 10.0"),
        ({"weight_path": "/models/x"}, "got weight_path '/models/x', want expertd://HOST:PORT"),
    ],
)
def test_what_a_server_cannot_do_is_refused(options, said):
    with pytest.raises(UnsupportedCombinationError, match=said.replace("(", r"\(")):
        wrapper(**options)


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(BadShapeError, match=rf"gpu_experts_mask: got \[3\], want \[{E}\]"):
        wrapper(gpu_experts_mask=torch.zeros(3, dtype=torch.bool))


def test_calls_out_of_turn_are_refused(connected):
    x, ids, weights = batch(2)
    with pytest.raises(UnsupportedCombinationError, match="got no load_weights before it"):
        wrapper().submit_forward(x, ids, weights, 0)
    made = loaded()
    with pytest.raises(UnsupportedCombinationError, match="got no call under way"):
        made.sync_forward(x, 0)
    made.submit_forward(x, ids, weights, 0)
    with pytest.raises(UnsupportedCombinationError, match="got a call under way"):
        made.submit_forward(x, ids, weights, 0)
    with pytest.raises(UnsupportedCombinationError, match="got weights as tensors"):
        made.load_weights_from_tensors(x, x, x, ids)
    torch.testing.assert_close(made.sync_forward(x, 0).double(), expert_sum(x, ids, weights))


def sglangs(monkeypatch, version):
    """SGLang's kt_ep_wrapper.py, with stand-ins for the few functions that it imports."""
    Dispatched = namedtuple("Dispatched", ["hidden_states", "topk_output"])
    Combined = namedtuple("Combined", ["hidden_states"])
    parallel = SimpleNamespace(tp_rank=0)
    location = SimpleNamespace(physical_to_logical_map_cpu=torch.arange(E).repeat(LAYER + 1, 1))
    modules = {
        "sglang.srt.arg_groups.overrides": {"model_config_of": None},
        "sglang.srt.layers.quantization.base_config": {"FusedMoEMethodBase": object},
        "sglang.srt.runtime_context": {"get_exec": None, "get_parallel": lambda: parallel, "get_schedule": None},
        "sglang.srt.utils": {"get_compiler_backend": lambda: "eager"},
        "sglang.srt.layers.moe.token_dispatcher": {"StandardCombineInput": Combined},
        "sglang.srt.layers.moe.topk": {"TopKOutputChecker": SimpleNamespace(format_is_bypassed=lambda _: False)},
        "sglang.srt.eplb.expert_location_dispatch": {"get_global_expert_location_metadata": lambda: location},
    }
    for name, values in modules.items():
        parts = name.split(".")
        for n in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:n]), ModuleType(".".join(parts[:n])))
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    path = pinned()["sglang", version] / "sglang/srt/layers/moe/kt_ep_wrapper.py"
    if not path.exists():
        pytest.skip(f"SGLang {version} is not fetched: `make vendor`")
    monkeypatch.setitem(sys.modules, kt._SGLANG, ModuleType(kt._SGLANG))  # load_file puts the real one there
    return load_file(path, kt._SGLANG), Dispatched


class OnTheGpu:
    """SGLang's method of the experts that it keeps: those below num_gpu_experts."""

    num_gpu_experts = 0

    def create_weights(self, layer, num_experts, **sizes):
        self.made = num_experts

    def create_moe_runner(self, layer, config):
        pass

    def apply(self, layer, dispatched):
        x, (weights, ids, _) = dispatched.hidden_states, dispatched.topk_output
        assert int(ids.max()) < self.num_gpu_experts
        return SimpleNamespace(hidden_states=expert_sum(x, ids, weights).to(x.dtype))


@pytest.mark.parametrize("version", signatures.adapter("sglang").tried)
@pytest.mark.parametrize("on_gpu", [0, 3])
def test_sglangs_own_kt_method_gives_the_whole_layer(connected, monkeypatch, on_gpu, version):
    monkeypatch.setitem(sys.modules, "kt_kernel", ModuleType("kt_kernel"))
    kt.install()
    module, dispatched = sglangs(monkeypatch, version)
    assert module.KTRANSFORMERS_AVAILABLE
    assert module.KTMoEWrapper is RemoteKTMoEWrapper
    config = module.KTConfig(LAYER, on_gpu, 4, 1, "expertd://here:1", 512, 0, "AMXINT4", LAYER + 1)
    method = module.KTEPWrapperMethod(OnTheGpu(), config)
    layer = SimpleNamespace(top_k=TOP_K, intermediate_size_per_partition=32, moe_tp_size=1)
    method.create_weights(layer, E, H, 32, torch.float32)
    method.process_weights_after_loading(layer)
    method.create_moe_runner(layer, SimpleNamespace(activation="silu", num_local_experts=E))
    x, ids, weights = batch(9)
    Topk = namedtuple("Topk", ["topk_weights", "topk_ids", "router_logits"])
    wanted = expert_sum(x, ids, weights)
    out = method.apply(layer, dispatched(x, Topk(weights, ids.clone(), None)))
    torch.testing.assert_close(out.hidden_states.double(), wanted)
    sent = sum(int((request.topk_ids >= 0).sum()) for request in connected.forwarder.seen)
    assert sent == int((ids >= on_gpu).sum()) > 0


def test_install_gives_the_class_to_a_module_that_was_imported_before(connected, monkeypatch):
    monkeypatch.setitem(sys.modules, "kt_kernel", ModuleType("kt_kernel"))
    early = ModuleType(kt._SGLANG)
    early.KTRANSFORMERS_AVAILABLE = False
    monkeypatch.setitem(sys.modules, kt._SGLANG, early)
    kt.install()
    assert early.KTMoEWrapper is sys.modules["kt_kernel"].KTMoEWrapper is RemoteKTMoEWrapper
    assert early.KTRANSFORMERS_AVAILABLE
