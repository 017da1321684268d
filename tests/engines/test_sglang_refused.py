"""What SGLang cannot do with remote experts, in sentences; without SGLang."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import expertd_client.engines.sglang
from expertd.errors import UnsupportedCombinationError
from expertd_client.engines.sglang.refused import Configured, refuse


def test_what_works_is_let_through():
    refuse("layers.0", Configured())


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Configured(cuda_graphs=("decode", "prefill")), "got CUDA graphs for decode and prefill, want none"),
        (
            Configured(cuda_graphs=("decode", "prefill")),
            "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled",
        ),
        (Configured(ep_size=4), "got expert parallelism over 4 ranks"),
        (Configured(a2a="deepep"), "got all-to-all by deepep"),
        (Configured(eplb=True), "got expert load balancing (EPLB)"),
        (Configured(redundant_experts=2), "got 2 redundant experts"),
        (Configured(fused_shared_experts=1), "got 1 fused shared experts"),
        (Configured(weights_on_input=True), "got router weights on the experts' inputs"),
        (Configured(no_combine=True), "got outputs of single experts"),
        (Configured(draft=True), "got a draft model with experts"),
        (Configured(lora=True), "got LoRA"),
        (Configured(method="KTEPWrapperMethod"), "got KTEPWrapperMethod for its experts"),
    ],
)
def test_what_a_server_would_compute_otherwise(found, said):
    with pytest.raises(UnsupportedCombinationError) as raised:
        refuse("layers.0", found)
    assert str(raised.value).startswith("layers.0: remote experts: got")
    assert said in str(raised.value)


def test_nothing_is_imported_where_nobody_names_servers(monkeypatch):
    monkeypatch.delenv("EXPERTD_ADDRESS", raising=False)
    expertd_client.engines.sglang.register()
    assert "expertd_client.engines.sglang.plugin" not in sys.modules


def test_ktransformers_wrapper_and_the_plugin_are_not_both_wanted(monkeypatch):
    monkeypatch.setenv("EXPERTD_KT", "1")
    monkeypatch.setenv("EXPERTD_ADDRESS", "here:1")
    with pytest.raises(UnsupportedCombinationError, match="got EXPERTD_KT=1 and EXPERTD_ADDRESS, want one of them"):
        expertd_client.engines.sglang.register()


def test_ktransformers_wrapper_is_put_in_place_where_it_is_wanted(monkeypatch):
    from expertd_client.engines.kt import RemoteKTMoEWrapper

    monkeypatch.setitem(sys.modules, "kt_kernel", ModuleType("kt_kernel"))
    monkeypatch.delenv("EXPERTD_ADDRESS", raising=False)
    expertd_client.engines.sglang.register()
    assert not hasattr(sys.modules["kt_kernel"], "KTMoEWrapper")
    monkeypatch.setenv("EXPERTD_KT", "1")
    expertd_client.engines.sglang.register()
    assert sys.modules["kt_kernel"].KTMoEWrapper is RemoteKTMoEWrapper
