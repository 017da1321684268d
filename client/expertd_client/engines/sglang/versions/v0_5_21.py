"""SGLang 0.5.21: in what the adapter uses as 0.5.22."""

from __future__ import annotations

from expertd_client.engines.sglang.versions.v0_5_22 import of_a_draft

__all__ = ["of_a_draft"]
