"""Model families: how the expert tensors are named, which config keys hold the sizes, what the activation is.

One row a family.  The keys and names were compared with the families' public model code and with checkpoints that
their tools wrote.  The activation goes by family: config.hidden_act is wrong for some (gpt-oss says "silu").

A name is taken for an expert's tensor only if it matches a row's template in full, so routers (`mlp.gate`), shared
experts (`mlp.shared_experts`) and attention are never taken for experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.weights.activation import Activation, ActivationKind

__all__ = ["FAMILIES", "Family", "ModelConfig", "find_family", "unknown_family"]

Config = Mapping[str, Any]

_LLAMA = ("gate_proj", "up_proj", "down_proj")
_W123 = ("w1", "w3", "w2")


def _silu(config: Config) -> Activation:
    return Activation()


def _gelu_tanh(config: Config) -> Activation:
    return Activation(ActivationKind.GELU_TANH_AND_MUL)


def _relu2(config: Config) -> Activation:
    return Activation(ActivationKind.RELU2)


def _number(config: Config, key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"config.json: {key} is {value!r}, want a number > 0")
    return float(value)


def _swigluoai(config: Config) -> Activation:
    """gpt-oss: the constants are in the model code; newer configs carry them as swiglu_alpha and swiglu_limit."""
    alpha, limit = _number(config, "swiglu_alpha", 1.702), _number(config, "swiglu_limit", 7.0)
    return Activation(ActivationKind.SWIGLUOAI, alpha=alpha, limit=limit)


def _silu_clamped(config: Config) -> Activation:
    """DeepSeek-V4: silu(gate) * up with both clamped at swiglu_limit (10.0 in its published configuration)."""
    return Activation(limit=_number(config, "swiglu_limit", 10.0))


@dataclass(frozen=True)
class Family:
    """One row.

    name         what Describe reports; model_types: values of config.model_type
    blocks       where the experts hang below a layer
    names        (gate, up, down) of the projections, one expert a tensor; gate "" for an activation without mul
    fused        (gate and up, down) of [E, ...] tensors
    transposed   fused tensors lie input-first ([E, K, N]), unless a shape says otherwise
    interleaved  rows of the fused gate_up alternate gate, up
    num_experts, top_k, intermediate: config keys, the first that is there counts
    latent       key of a narrower input of the experts than hidden_size
    bias         every expert has biases: a checkpoint without them lacks them
    left_alone   what else a layer's block holds that this server does not touch
    """

    name: str
    model_types: tuple[str, ...]
    blocks: tuple[str, ...] = ("mlp.experts",)
    names: tuple[tuple[str, str, str], ...] = (_LLAMA,)
    fused: tuple[tuple[str, str], ...] = (("gate_up_proj", "down_proj"),)
    activation: Callable[[Config], Activation] = _silu
    transposed: bool = False
    interleaved: bool = False
    num_experts: tuple[str, ...] = ("n_routed_experts", "num_local_experts", "num_experts")
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    intermediate: tuple[str, ...] = ("moe_intermediate_size",)
    latent: str = ""
    bias: bool = False
    left_alone: str = "the router"


_MIXTRAL_BLOCKS = ("block_sparse_moe.experts", "mlp.experts")
_SHARED = "the router and the shared experts"
_PLAIN_SIZE = ("intermediate_size",)

FAMILIES: tuple[Family, ...] = (
    Family("qwen2_moe", ("qwen2_moe",), left_alone=_SHARED),
    Family("qwen3_moe", ("qwen3_moe",)),
    Family("qwen3_next", ("qwen3_next",), left_alone=_SHARED),
    Family("qwen3_5_moe", ("qwen3_5_moe", "qwen3_5_moe_text"), left_alone=_SHARED),
    Family("qwen3_vl_moe", ("qwen3_vl_moe", "qwen3_vl_moe_text"), transposed=True),
    Family(
        "qwen3_omni_moe",
        ("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_text"),
    ),
    Family("mixtral", ("mixtral",), _MIXTRAL_BLOCKS, (_W123, _LLAMA), intermediate=_PLAIN_SIZE),
    Family("phimoe", ("phimoe",), _MIXTRAL_BLOCKS, (_W123, _LLAMA), intermediate=_PLAIN_SIZE),
    Family("minimax", ("minimax", "minimax_m2"), _MIXTRAL_BLOCKS, (_W123, _LLAMA), intermediate=_PLAIN_SIZE),
    Family("deepseek_v2", ("deepseek_v2",), left_alone=_SHARED),
    Family("deepseek_v3", ("deepseek_v3", "deepseek_v32"), left_alone=_SHARED),
    Family("kimi_k2", ("kimi_k2", "kimi_k25"), left_alone=_SHARED),
    Family(
        "deepseek_v4",
        ("deepseek_v4",),
        ("ffn.experts", "mlp.experts"),
        (_W123, _LLAMA),
        activation=_silu_clamped,
        left_alone=_SHARED,
    ),
    Family("glm4_moe", ("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text", "glm_moe_dsa"), left_alone=_SHARED),
    Family("dots1", ("dots1",), left_alone=_SHARED),
    Family(
        "ernie4_5_moe",
        ("ernie4_5_moe",),
        num_experts=("moe_num_experts", "num_experts"),
        top_k=("moe_k", "num_experts_per_tok"),
        left_alone=_SHARED,
    ),
    Family("exaone_moe", ("exaone_moe",), left_alone=_SHARED),
    Family("afmoe", ("afmoe",), left_alone=_SHARED),
    Family("solar_open", ("solar_open",), left_alone=_SHARED),
    Family(
        "bailing_moe",
        ("bailing_moe", "bailing_moe_v2", "bailing_hybrid"),
        top_k=("num_experts_per_tok", "num_experts_per_token"),
        left_alone=_SHARED,
    ),
    Family("mimo_v2", ("mimo_v2_flash",)),
    Family(
        "hunyuan_moe",
        ("hunyuan_v1_moe",),
        top_k=("moe_topk", "num_experts_per_tok"),
        intermediate=("moe_intermediate_size", "intermediate_size"),
        left_alone=_SHARED,
    ),
    Family("olmoe", ("olmoe", "flex_olmo"), intermediate=_PLAIN_SIZE),
    Family("lfm2_moe", ("lfm2_moe",), ("feed_forward.experts",), (_W123, _LLAMA)),
    Family("jamba", ("jamba",), ("feed_forward.experts",), intermediate=_PLAIN_SIZE),
    Family(
        "longcat_flash",
        ("longcat_flash",),
        top_k=("moe_topk", "num_experts_per_tok"),
        intermediate=("expert_ffn_hidden_size", "moe_intermediate_size"),
    ),
    Family(
        "granitemoe",
        ("granitemoe", "granitemoeshared", "granitemoehybrid"),
        ("block_sparse_moe", "block_sparse_moe.experts"),
        fused=(("input_linear", "output_linear"), ("gate_up_proj", "down_proj")),
        intermediate=_PLAIN_SIZE,
        left_alone=_SHARED,
    ),
    Family(
        "llama4",
        ("llama4", "llama4_text"),
        ("feed_forward.experts",),
        transposed=True,
        intermediate=_PLAIN_SIZE,
        left_alone=_SHARED,
    ),
    Family(
        "gemma4",
        ("gemma4", "gemma4_text"),
        ("experts", "moe.experts"),
        activation=_gelu_tanh,
        top_k=("top_k_experts", "num_experts_per_tok"),
        left_alone="the router and the dense MLP",
    ),
    Family(
        "nemotron_h",
        ("nemotron_h",),
        ("mixer.experts",),
        (("", "up_proj", "down_proj"),),
        (("up_proj", "down_proj"),),
        _relu2,
        latent="moe_latent_size",
        left_alone=_SHARED,
    ),
    Family(
        "gpt_oss",
        ("gpt_oss",),
        activation=_swigluoai,
        transposed=True,
        interleaved=True,
        intermediate=_PLAIN_SIZE,
        bias=True,
    ),
)


_MOST_LAYERS = 10_000


def _first(config: Config, keys: tuple[str, ...]) -> Any:
    return next((config[k] for k in keys if config.get(k) is not None), None)


@dataclass(frozen=True)
class ModelConfig:
    """The language model's part of config.json (multimodal models nest it) read through the family's keys.

    Sizes are 0 where the config does not say; then the tensors decide alone.
    """

    family: Family
    raw: Config

    def _size(self, keys: tuple[str, ...], layer: int = 0, most: int = 1 << 24) -> int:
        value = _first(self.raw, keys)
        if isinstance(value, list) and value:
            value = value[min(layer, len(value) - 1)]
        if value is None:
            return 0
        if type(value) is not int or not 1 <= value <= most:
            raise CheckpointError(f"config.json: {' or '.join(keys)} is {value!r:.80}, want a number from 1 to {most}")
        return value

    def num_experts(self) -> int:
        return self._size(self.family.num_experts)

    def top_k(self, layer: int) -> int:
        return self._size(self.family.top_k, layer)

    def hidden_size(self) -> int:
        latent = self._size((self.family.latent,)) if self.family.latent else 0
        return latent or self._size(("hidden_size", "n_embd", "dim"))

    def intermediate_size(self, layer: int) -> int:
        return self._size(self.family.intermediate, layer)

    def num_layers(self) -> int:
        return self._size(("num_hidden_layers", "num_layers"), most=_MOST_LAYERS)

    def activation(self) -> Activation:
        """The family's.  Constants in the config that it does not take would change every answer: an error."""
        found = self.family.activation(self.raw)
        for key, value in self.raw.items():
            if key.startswith("swiglu_") and value is not None and found.limit is None:
                raise CheckpointError(
                    f"config.json: {key} is {value!r:.80}, but {self.family.name} is known with plain {found.name};"
                    " want a model whose activation is known, as gpt_oss and deepseek_v4 are"
                )
        return found

    def sparse_layers(self) -> tuple[int, ...] | None:
        """Layers that have experts by the config; None where it does not say.  The tensors decide all the same."""
        layers, config = self.num_layers(), self.raw
        first = [config.get(k) or 0 for k in ("first_k_dense_replace", "num_dense_layers")]
        step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
        said = any(k in config for k in ("first_k_dense_replace", "num_dense_layers", "decoder_sparse_step"))
        if not layers or not said or not isinstance(dense, list) or any(type(v) is not int for v in (*first, step)):
            return None
        left_out = {n for n in dense if type(n) is int}
        return tuple(n for n in range(max(first), layers) if n not in left_out and (n + 1) % step == 0)


_NESTED = (("text_config",), ("language_config",), ("llm_config",), ("thinker_config", "text_config"))
"""Where multimodal models keep the language model's configuration."""


def find_family(config: Config) -> ModelConfig | None:
    """The model's configuration by the family of its model_type; None if the family is not in the table."""
    views = [config]
    for path in _NESTED:
        inner: Any = config
        for key in path:
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            views.insert(0, {**config, **inner})
    by_type = {t: family for family in FAMILIES for t in family.model_types}
    for view in (*views, config):
        family = by_type.get(str(view.get("model_type")))
        if family is not None:
            return ModelConfig(family, views[0])
    return None


_BY_HIDDEN_ACT: Mapping[str, ActivationKind] = {
    "silu": ActivationKind.SILU_AND_MUL,
    "swish": ActivationKind.SILU_AND_MUL,
    "gelu": ActivationKind.GELU_AND_MUL,
    "gelu_pytorch_tanh": ActivationKind.GELU_TANH_AND_MUL,
    "gelu_tanh": ActivationKind.GELU_TANH_AND_MUL,
    "relu2": ActivationKind.RELU2,
}


def unknown_family(config: Config, template: str | None) -> ModelConfig:
    """A family made up for a user's --layer-template: activation by hidden_act, sizes by every known key.

    Without a template a CheckpointError that lists the known families.
    """
    kind = config.get("model_type")
    if template is None:
        known = ", ".join(sorted(t for f in FAMILIES for t in f.model_types))
        raise CheckpointError(
            f"config.json: model_type {kind!r} is no known family; known are {known}; for another one say where its"
            ' experts are: --layer-template "model.layers.{layer}.mlp.experts.{expert}.{proj}"'
        )
    nested = [config[k] for k in ("text_config", "language_config") if isinstance(config.get(k), Mapping)]
    merged = {**config, **(nested[0] if nested else {})}
    hidden_act = merged.get("hidden_act") or merged.get("mlp_hidden_act") or merged.get("hidden_activation")
    act = _BY_HIDDEN_ACT.get(str(hidden_act))
    if act is None:
        raise CheckpointError(
            f"config.json: hidden_act {hidden_act!r} of the unknown family {kind!r}; want one of"
            f" {', '.join(_BY_HIDDEN_ACT)}"
        )
    family = Family(
        str(kind or "unknown"),
        (),
        names=(_LLAMA, _W123, ("gate", "up", "down"), ("", "up_proj", "down_proj")),
        activation=lambda _: Activation(act),
        num_experts=("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
        top_k=("num_experts_per_tok", "moe_topk", "moe_k", "top_k"),
        intermediate=("moe_intermediate_size", "expert_ffn_hidden_size"),
    )
    return ModelConfig(family, merged)
