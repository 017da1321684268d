"""The versions of SGLang that the adapter was tried with; a module for each, with what differs between them:

of_a_draft(layer)   whether a FusedMoE is being made for a draft model
"""

from __future__ import annotations

from expertd_client.engines.versions import Adapter

__all__ = ["ADAPTER"]

_BASE = "sglang.srt.layers.quantization.base_config:FusedMoEMethodBase"
ADAPTER = Adapter(
    package="sglang",
    home="expertd_client.engines.sglang",
    tried=("0.5.23", "0.5.22", "0.5.21"),
    overridden=(
        f"{_BASE}.apply",
        f"{_BASE}.create_moe_runner",
        f"{_BASE}.create_weights",
        "sglang.srt.layers.moe.moe_runner.base:DispatchMoeRunnerCore.run_from_dispatch",
        "sglang.srt.layers.moe.moe_runner.base:DispatchMoeRunnerCore.runner_backend",
    ),
)
