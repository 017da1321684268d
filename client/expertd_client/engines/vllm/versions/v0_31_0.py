"""vLLM 0.31.0: in what the adapter uses as 0.32.0."""

from __future__ import annotations

from expertd_client.engines.vllm.versions.v0_32_0 import substituted

__all__ = ["substituted"]
