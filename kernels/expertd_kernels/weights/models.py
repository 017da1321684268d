"""Shapes of public MoE models, for synthetic weights, benchmarks and load tests.  Pure: imports no torch.

Each row is copied from the model's published config.json (hidden_size, moe_intermediate_size or intermediate_size,
number of routed experts, experts a token, layers with experts).
"""

from __future__ import annotations

from dataclasses import dataclass

from expertd_kernels.weights.activation import Activation, ActivationKind

__all__ = ["MODELS", "ModelShape"]

_SILU = Activation()
_OAI = Activation(ActivationKind.SWIGLUOAI, limit=7.0)


@dataclass(frozen=True)
class ModelShape:
    """E experts, top_k a token, H hidden, I intermediate, layers that have experts, whether experts have biases."""

    name: str
    family: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[int, ...]
    activation: Activation = _SILU
    bias: bool = False


def _rows() -> tuple[ModelShape, ...]:
    def m(name: str, family: str, e: int, k: int, h: int, i: int, layers: range) -> ModelShape:
        return ModelShape(name, family, e, k, h, i, tuple(layers))

    return (
        m("qwen3-30b-a3b", "qwen3_moe", 128, 8, 2048, 768, range(48)),
        m("qwen3-235b-a22b", "qwen3_moe", 128, 8, 4096, 1536, range(94)),
        m("qwen2-57b-a14b", "qwen2_moe", 64, 8, 3584, 2560, range(28)),
        m("qwen1.5-moe-a2.7b", "qwen2_moe", 60, 4, 2048, 1408, range(24)),
        m("mixtral-8x7b", "mixtral", 8, 2, 4096, 14336, range(32)),
        m("mixtral-8x22b", "mixtral", 8, 2, 6144, 16384, range(56)),
        m("deepseek-v2-lite", "deepseek_v2", 64, 6, 2048, 1408, range(1, 27)),
        m("deepseek-v3", "deepseek_v3", 256, 8, 7168, 2048, range(3, 61)),
        m("kimi-k2", "kimi_k2", 384, 8, 7168, 2048, range(1, 61)),
        m("glm-4.5-air", "glm4_moe", 128, 8, 4096, 1408, range(1, 46)),
        ModelShape("gpt-oss-20b", "gpt_oss", 32, 4, 2880, 2880, tuple(range(24)), _OAI, bias=True),
        ModelShape("gpt-oss-120b", "gpt_oss", 128, 4, 2880, 2880, tuple(range(36)), _OAI, bias=True),
        m("tiny", "qwen3_moe", 8, 2, 256, 128, range(2)),
        m("tiny-many", "qwen3_moe", 64, 4, 256, 128, range(4)),
        ModelShape("tiny-oss", "gpt_oss", 8, 2, 320, 192, (0, 1), _OAI, bias=True),
    )


MODELS: dict[str, ModelShape] = {row.name: row for row in _rows()}
"""Name -> shape.  The last three are for tests: small, many experts, and in tiny-oss not square and no multiple of
128."""
