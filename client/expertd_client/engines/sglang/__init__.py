"""SGLang whose routed experts live on expertd's servers; written for SGLang 0.5.23 (pip install '.[sglang]').

    EXPERTD_ADDRESS=10.0.0.1:50051 python -m sglang.launch_server --model-path FRONTEND \\
        --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled --disable-shared-experts-fusion

FRONTEND is a checkpoint without experts (`expertctl strip DIR FRONTEND`).  SGLang finds register() by its entry point
and calls it in each of its processes; where nobody names servers it changes nothing.

    plugin    a method without weights for SGLang's FusedMoE, and the runner's core that asks servers
    refused   what cannot work, in sentences; imports no SGLang
"""

from __future__ import annotations

import os

__all__ = ["register"]


def register() -> None:
    """The entry point of the group sglang.srt.plugins; may be called again."""
    if not os.environ.get("EXPERTD_ADDRESS"):
        return
    from expertd_client.engines.sglang.plugin import install

    install()
