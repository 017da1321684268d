"""Mistakes that serving engines have made with quantized experts, each as a test against this code, and what the oracle
decides where their selectors were silent or wrong."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from expertd_kernels import (
    NAMED_DEVICES,
    Activation,
    ActivationQuant,
    Problem,
    Scheme,
    batched_routes,
    decide,
    problem_of,
)
from expertd_kernels.backends import cpu_torch, reference
from expertd_kernels.backends import flashinfer_trtllm as trtllm
from expertd_kernels.backends.gluon.weight_only.codec import codec_of
from expertd_kernels.backends.gluon.weight_only.planning import heuristic
from expertd_kernels.backends.portable.layout import layout_of
from expertd_kernels.backends.portable.tiling import Facts, make_plan
from expertd_kernels.checkpoint import CheckpointError, open_checkpoint
from expertd_kernels.common.problem import Device
from expertd_kernels.oracle.decision import RULES, backend_module
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.float32 import reference as compute
from expertd_kernels.weights.numerics import relative_error

H, I, GROUP = 64, 32, 32
BLOCK = "model.layers.0.mlp.experts"
PACKAGES = dict(assumed_packages(BACKENDS))
CPU = Device("cpu", "x86_64")


# Checkpoints: what the config says, and what the tensors say.


def _words(codes: torch.Tensor) -> torch.Tensor:
    """[8 * R, C] codes 0..15 -> [R, C] int32, eight along the first axis, low bits first."""
    word = torch.zeros(codes.shape[0] // 8, codes.shape[1], dtype=torch.int64)
    for i in range(8):
        word |= codes[i::8].long() << (4 * i)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()


def gptq(folder: Path, sym: bool = True, bias: bool = False, **quant) -> dict[str, torch.Tensor]:
    """A GPTQ checkpoint (version 1) of two experts; what its projections mean, by name."""
    g = torch.Generator().manual_seed(7)
    tensors, means = {}, {}
    for e in range(2):
        for name, n, k in (("gate", I, H), ("up", I, H), ("down", H, I)):
            q = torch.randint(0, 16, (n, k), generator=g)
            zeros = torch.full((n, k // GROUP), 8) if sym else torch.randint(1, 16, (n, k // GROUP), generator=g)
            scales = (torch.rand(k // GROUP, n, generator=g) * 0.1 + 0.01).half()
            at = f"{BLOCK}.{e}.{name}_proj"
            tensors[f"{at}.qweight"] = _words(q.t().contiguous())
            tensors[f"{at}.qzeros"] = _words((zeros - 1).contiguous()).t().contiguous()
            tensors[f"{at}.scales"] = scales
            tensors[f"{at}.g_idx"] = (torch.arange(k) // GROUP).int()
            if bias:
                tensors[f"{at}.bias"] = torch.randn(n, generator=g).half()
                means[f"{e}.{name}.bias"] = tensors[f"{at}.bias"].float()
            spread = torch.arange(k) // GROUP
            means[f"{e}.{name}"] = (q - zeros[:, spread]).float() * scales.t().float()[:, spread]
    tensors["model.layers.0.mlp.gate.weight"] = torch.randn(2, H, generator=g).bfloat16()
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.randn(H, H, generator=g).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "qwen3_moe", "hidden_size": H, "moe_intermediate_size": I, "num_experts": 2,
        "num_experts_per_tok": 1, "num_hidden_layers": 1,
        "quantization_config": {
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": sym, "desc_act": False, **quant,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return means


def check(folder: Path, means: dict[str, torch.Tensor]):
    w = open_checkpoint(folder).load(0)
    gate, up = w.w13.dequantize().chunk(2, dim=1)
    for e in range(2):
        for name, got in (("gate", gate[e]), ("up", up[e]), ("down", w.w2.dequantize()[e])):
            assert torch.equal(got, means[f"{e}.{name}"]), name
    return w


@pytest.mark.parametrize("bits", [[4], [4, 8], "4", 4.5, None, True])
def test_bits_that_are_a_list_or_no_number_are_refused_by_name(tmp_path, bits):
    gptq(tmp_path, bits=bits)
    with pytest.raises(CheckpointError, match=r"bits .* want 2, 3, 4 or 8"):
        open_checkpoint(tmp_path).load(0)


def test_zero_points_are_read_from_the_tensors_not_guessed_from_the_method(tmp_path):
    w = check(tmp_path, gptq(tmp_path, sym=True))
    assert w.w13.zeros is None
    assert problem_of(w, CPU).w13.name == "int4_g32"


def test_zero_points_that_are_there_make_the_scheme_asymmetric(tmp_path):
    w = check(tmp_path, gptq(tmp_path, sym=False))
    assert w.w13.zeros is not None
    assert w.w13.scheme.name == "int4_g32_zp"
    d = decide(problem_of(w, NAMED_DEVICES["xpu-xe2"], packages=PACKAGES))
    assert "zero points are not computed" in str(next(v for v in d.verdicts if v.backend == "xpu").refusals)


def test_zero_points_that_the_config_denies_are_an_error_not_a_choice(tmp_path):
    gptq(tmp_path, sym=False)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["sym"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="zero points other than 8"):
        open_checkpoint(tmp_path).load(0)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"ignore": None},
        {"dynamic": {}},
        {"modules_to_not_convert": [["model.layers.0.mlp.gate"], ["lm_head", ["model.embed_tokens"]]]},
        {"modules_to_not_convert": [[]], "ignore": [["re:.*gate"]]},
    ],
)
def test_a_router_that_no_list_names_and_lists_in_lists_change_nothing(tmp_path, more):
    """The router is told by its name and its tensors; lists of exceptions are not what decides."""
    means = gptq(tmp_path, **more)
    w = check(tmp_path, means)
    assert w.num_experts == 2
    assert w.hidden_size == H


def test_a_bias_comes_into_the_bias_not_into_the_zero_points_and_each_matrix_has_its_own(tmp_path):
    means = gptq(tmp_path, bias=True)
    w = check(tmp_path, means)
    assert w.w13.zeros is None
    for e in range(2):
        assert torch.equal(w.w13.bias[e], torch.cat([means[f"{e}.gate.bias"], means[f"{e}.up.bias"]]))
        assert torch.equal(w.w2.bias[e], means[f"{e}.down.bias"])


def test_two_quantizations_at_once_are_refused(tmp_path):
    """A method that the tensors contradict: the error shows both."""
    gptq(tmp_path, quant_method="fp8")
    with pytest.raises(CheckpointError, match=r"fits no known format.*'fp8'.*qweight"):
        open_checkpoint(tmp_path).info(0)
    gptq(tmp_path, quant_method=["gptq", "awq"])
    with pytest.raises(CheckpointError, match="fits no known format"):
        open_checkpoint(tmp_path).info(0)


# Backends: what adapters call.  What each computes and packs: test_lessons_computed.py, test_lessons_packing.py.


def test_no_adapter_calls_an_entry_point_that_routes_or_fixes_a_routing_method():
    """Packages offer the same kernels with routing inside; an adapter that took one would ignore the routes given."""
    folder = Path(reference.__file__).parent
    called = set()
    for file in folder.glob("*.py"):
        tree = ast.parse(file.read_text())
        called |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("trtllm_")}
        names = {k.arg for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords}
        names |= {
            a.arg for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) for a in n.args.args + n.args.kwonlyargs
        }
        assert not names & {"routing_logits", "router_logits", "gating_output", "e_score_correction_bias"}, file.name
    assert called
    assert all(name.endswith("_routed_moe") for name in called), called
    for b in BACKENDS:
        assert list(inspect.signature(backend_module(b).pack).parameters) == ["weights", "problem"], b.name
    call = inspect.signature(type(cpu_torch.experts(*_small())).__call__).parameters
    assert list(call)[1:4] == ["hidden_states", "topk_ids", "topk_weights"]


def _small():
    w = random_weights("int4_g32", 2, 64, 32)
    p = problem_of(w, CPU)
    return cpu_torch.pack(w, p), p


def test_the_one_adapter_that_names_a_routing_method_gives_the_routes_beside_it():
    """FlashInfer's TRTLLM entry points ask for a method and read it only where they route: every form gives ids and
    weights, no logits and no bias of a router, and none of the numbers of a method."""
    tree = ast.parse(Path(trtllm.__file__).read_text())
    names = {k.arg: ast.unparse(k.value) for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords}
    assert names["routing_bias"] == "None"
    sizes = next(n for n in ast.walk(tree) if isinstance(n, ast.Dict) and "'routing_method_type'" in ast.unparse(n))
    given = {ast.literal_eval(k): ast.unparse(v) for k, v in zip(sizes.keys, sizes.values, strict=True)}
    assert {k: given[k] for k in ("n_group", "topk_group", "routed_scaling_factor")} == dict.fromkeys(
        ("n_group", "topk_group", "routed_scaling_factor"), "None"
    )
    others = [f for f in Path(trtllm.__file__).parent.glob("*.py") if "routing_method" in f.read_text()]
    assert [f.name for f in others] == ["flashinfer_trtllm.py"]


@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g128_zp", "mxfp4", "int8_channel", "e4m3_block128", "bf16"])
def test_blocks_of_tokens_follow_the_load_of_the_experts(scheme):
    """A block of 64 tokens for an expert that gets two would multiply 62 rows of nothing."""
    s = Scheme.parse(scheme)
    codec = codec_of(s)

    def blocks(experts, tokens):
        w13, w2 = layout_of(s, 2 * 768, 2048, 2), layout_of(s, 2048, 768, 1)
        portable = make_plan(Facts(experts, 8, 2, w13, w2, 2048, 768, multiprocessors=132), tokens).rows
        hopper = heuristic((codec, codec), (experts, 8, 2048, 768), tokens)
        return portable, hopper.w13.rows, hopper.w2.rows

    assert max(blocks(128, 1)) <= 16
    assert max(blocks(128, 16)) <= 16, "one row an expert"
    assert max(blocks(512, 128)) <= 16, "two rows an expert"
    assert min(blocks(128, 2048)) >= 64, "128 rows an expert"
    assert min(blocks(8, 128)) >= 64, "as many rows, on fewer experts"
    for experts in (8, 60, 128, 512):
        sizes = [blocks(experts, tokens) for tokens in (1, 8, 32, 128, 512, 2048, 8192)]
        pairs = [ab for small, large in itertools.pairwise(sizes) for ab in zip(small, large, strict=True)]
        assert all(min(a, 128) <= b for a, b in pairs), "where blocks are many, 192 tokens gain nothing over 128"
        for tokens, found in zip((8, 32, 128, 512, 2048), sizes[1:], strict=False):
            mean = max(1.0, tokens * 8 / experts)
            assert max(found) <= max(16, 4 * mean), (experts, tokens, found)


def test_awq_rows_grouped_by_expert_keep_zero_points(checkpoint_folder):
    """The form in which all-to-all libraries hand rows over: [E, T, H] and counts."""
    w = open_checkpoint(checkpoint_folder("awq-gemm-w4-g64-gateunquant-autoawq-qwen3moe1l")).load(0)
    assert w.w2.zeros is not None
    E, T = w.num_experts, 3
    rows = random_inputs(E * T, w.hidden_size, E, 1)[0]
    ids, ones = batched_routes(torch.arange(E) % (T + 1), T)
    right = compute(w, rows, ids, ones)
    p = problem_of(w, CPU)
    assert relative_error(cpu_torch.experts(cpu_torch.pack(w, p), p)(rows, ids, ones), right) < 1e-2
    middle = replace(w, w2=replace(w.w2, zeros=torch.full_like(w.w2.zeros, 8)))
    assert relative_error(compute(middle, rows, ids, ones), right) > 5e-2, "zero points that are dropped are seen"


def test_sizes_rounded_for_one_backend_are_not_left_so_for_the_next():
    w = random_weights("mxfp4", 2, 96, 32, activation=Activation.parse("swigluoai"), bias=True)
    p = problem_of(w, NAMED_DEVICES["sm100"], packages=PACKAGES)
    padded = trtllm.pack(w, p)
    assert padded.meta["w13"]["cols"] == padded.meta["w13"]["rows"] == 256
    assert (w.hidden_size, w.intermediate_size) == (96, 32)
    back = trtllm.unpack(padded)
    assert (back.hidden_size, back.intermediate_size) == (96, 32)
    cpu = problem_of(back, CPU)
    again = cpu_torch.pack(back, cpu)
    fresh = cpu_torch.pack(w, cpu)
    assert {n: t.shape for n, t in again.tensors.items()} == {n: t.shape for n, t in fresh.tensors.items()}


# Decisions: rows where engines were silent, wrong, or had no second choice.


def ask(device, scheme, **more):
    s = Scheme.parse(scheme)
    return decide(Problem(NAMED_DEVICES[device], s, s, 128, 2048, 768, 8, packages=PACKAGES, **more))


def why(decision, backend):
    return "; ".join(next(v.refusals for v in decision.verdicts if v.backend == backend))


def test_sm90_with_int4_zero_points():
    d = ask("sm90", "int4_g128_zp")
    assert d.chosen.name == "gluon_sm90"
    assert "needs compute capability 10.0" in why(d, "flashinfer_trtllm")


def test_sm90_without_the_hopper_kernels_falls_to_portable_ones_that_take_zero_points_and_bias():
    d = ask("sm90", "int4_g128_zp", bias=True, act_order=True)
    assert d.chosen.name == "triton"
    assert why(d, "gluon_sm90") == "does not permute columns (activation order)"


def test_xpu_with_gptq_int4_sym_g128():
    d = ask("xpu-xe2", "int4_g128")
    assert d.chosen.name == "xpu"
    assert next(v for v in d.verdicts if v.backend == "triton").eligible, "there is a second choice"


def test_xpu_with_awq_is_not_served_by_dropping_the_zero_points():
    d = ask("xpu-xe2", "int4_g128_zp")
    assert d.chosen.name == "triton"
    assert why(d, "xpu") == "int4_g128_zp: zero points are not computed"


def test_xpu_without_its_package_says_so_and_has_a_second_choice():
    s = Scheme.parse("int4_g128")
    some = {n: v for n, v in PACKAGES.items() if n != "vllm-xpu-kernels"}
    d = decide(Problem(NAMED_DEVICES["xpu-xe2"], s, s, 128, 2048, 768, 8, packages=some))
    assert d.chosen.name == "triton"
    assert why(d, "xpu") == "package vllm-xpu-kernels>=0.1.16,<0.2 is not installed"


def test_sm100_with_mxfp4_and_bias():
    gpt_oss = {"activation": Activation.parse("swigluoai"), "bias": True}
    d = ask("sm100", "mxfp4", **gpt_oss)
    assert why(d, "flashinfer_trtllm") == ""
    s = Scheme.parse("mxfp4")
    real = Problem(NAMED_DEVICES["sm100"], s, s, 128, 2880, 2880, 4, packages=PACKAGES, **gpt_oss)
    assert decide(real, pin="flashinfer_trtllm").chosen is not None, "2880 is padded, not refused"


def test_gptq_with_bias_is_served_on_every_platform_with_the_bias():
    for device in NAMED_DEVICES:
        d = ask(device, "int4_g128", bias=True)
        assert d.chosen is not None
        assert d.chosen.bias
        assert not [r for rule in RULES if (r := rule(d.chosen, d.problem))]


def test_gptq_in_groups_of_32_with_bias_on_sm100_does_not_lose_the_bias():
    d = ask("sm100", "int4_g32", bias=True)
    assert d.chosen.name == "triton"
    assert why(d, "flashinfer_trtllm") == "does not add expert biases"
    assert why(ask("sm100", "int4_g32"), "flashinfer_trtllm") == ""


def test_an_activation_quantized_checkpoint_is_not_served_weight_only_in_silence():
    facts = {"checkpoint_activation": ActivationQuant.E4M3_GROUP128}
    rounded = ask("sm100", "e4m3_block128", activation_quant=ActivationQuant.E4M3_GROUP128, **facts)
    assert rounded.chosen.name == "triton_w8a8"
    assert why(rounded, "flashinfer_trtllm") == ""
    plain = ask("sm100", "e4m3_block128", **facts)
    assert plain.chosen.name == "triton"
    assert "to stay in bf16" in why(plain, "flashinfer_trtllm")
    assert plain.problem.checkpoint_activation is ActivationQuant.E4M3_GROUP128
