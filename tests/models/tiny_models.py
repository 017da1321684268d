"""Tiny random models of every family that transformers has and expertd serves, and experts in this process for them."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import transformers

from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.forwarder import Forwarder
from expertd_client.requests.result import ForwardResult
from expertd_kernels import reference
from expertd_kernels.checkpoint import open_checkpoint

VOCABULARY = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1}
_LATENT = {
    **_GROUPS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "bailing_hybrid": {
        **_LATENT,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
        "num_experts_per_token": 2,
        "num_expert_group": 2,
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "head_dim": 8},
    "deepseek_v32": _LATENT,
    "deepseek_v4": {},
    "dots1": _GROUPS,
    "ernie4_5_moe": {},
    "exaone_moe": _GROUPS,
    "flex_olmo": {},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
    },
    "glm4_moe": _GROUPS,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "granitemoehybrid": {"layer_types": ["attention", "attention"]},
    "hunyuan_v1_moe": {"moe_intermediate_size": 64},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "mixtral": {},
    "nemotron_h": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_moe": {},
    "qwen3_next": _LINEAR,
    "solar_open": _GROUPS,
}
"""Model types, and what each needs beside the common sizes."""


def tiny_model(model_type: str, *, seed: int = 0, experts: int = 8, **sizes: int) -> Any:
    """A random float32 model whose experts' weights bf16 can hold, so that servers in float32 have the same ones."""
    config = transformers.CONFIG_MAPPING[model_type](
        **{**_SIZES, **dict.fromkeys(_EXPERTS, experts), **FAMILIES[model_type], **sizes}
    )
    return _random(transformers.AutoModelForCausalLM, config, seed)


def tiny_multimodal_model() -> Any:
    """Text and images: its language model stands below another one.  I is not H / 2, because a fused tensor of
    [E, 64, 64] could lie either way in this family's checkpoints."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = {**_SIZES, **dict.fromkeys(_EXPERTS, 8), "moe_intermediate_size": 48, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0], "patch_size": 4, "num_position_embeddings": 16}
    config = transformers.CONFIG_MAPPING["qwen3_vl_moe"](text_config=text, vision_config=vision)
    return _random(transformers.AutoModelForImageTextToText, config, 0)


def _random(auto_class: Any, config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = auto_class.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:  # larger than the initialization: they shall matter for the next token
                parameter.normal_(std=0.15).copy_(parameter.bfloat16())
    return model


def save(model: Any, folder: Path) -> Path:
    """The model as a checkpoint."""
    model.save_pretrained(folder)
    return folder


class Local(Forwarder):
    """The float32 reference on a checkpoint's experts.  tokens: of each request, in order."""

    def __init__(self, folder: Path) -> None:
        self.source = open_checkpoint(folder)
        self.weights = {layer: self.source.load(layer) for layer in self.source.layers}
        self.tokens: list[int] = []

    def forward_request(self, request: Any, *, timeout_s: float | None = None) -> ForwardResult:
        self.tokens.append(request.tokens)
        ids, x = request.topk_ids, request.hidden_states
        output = reference(self.weights[request.layer], x, ids, request.topk_weights).to(x.dtype)
        return ForwardResult(output, None, int((ids >= 0).sum()), pb.Timing(), pb.Load(), 0)

    def submit_request(self, request: Any, *, timeout_s: float | None = None) -> Future[ForwardResult]:
        future: Future[ForwardResult] = Future()
        future.set_result(self.forward_request(request))
        return future

    def close(self) -> None:
        pass


def generate(model: Any, ids: torch.Tensor, tokens: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """[B, S + tokens]: greedy."""
    mask = torch.ones_like(ids) if mask is None else mask
    found: torch.Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    return found
