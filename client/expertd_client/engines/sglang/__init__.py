"""SGLang whose routed experts live on expertd's servers (pip install '.[sglang]'; versions: versions.ADAPTER).

    EXPERTD_ADDRESS=10.0.0.1:50051 python -m sglang.launch_server --model-path FRONTEND \\
        --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled --disable-shared-experts-fusion

FRONTEND is a checkpoint without experts (`expertctl strip DIR FRONTEND`).  SGLang finds register() by its entry point
and calls it in each of its processes; where nobody names servers it changes nothing.  EXPERTD_KT=1 instead, with
--kt-weight-path expertd://10.0.0.1:50051: SGLang keeps some experts on its GPU and asks for the others as it asks
KTransformers (expertd_client.engines.kt).

    plugin     a method without weights for SGLang's FusedMoE, and the runner's core that asks servers
    refused    what cannot work, in sentences; imports no SGLang
    versions   what differs between versions of SGLang
"""

from __future__ import annotations

import os

from expertd.errors import UnsupportedCombinationError

__all__ = ["register"]


def register() -> None:
    """The entry point of the group sglang.srt.plugins; may be called again."""
    if os.environ.get("EXPERTD_KT") == "1":
        if os.environ.get("EXPERTD_ADDRESS"):
            raise UnsupportedCombinationError.about(
                "SGLang: remote experts",
                got="EXPERTD_KT=1 and EXPERTD_ADDRESS",
                want="one of them",
                remedy="with EXPERTD_KT, --kt-weight-path expertd://HOST:PORT names the servers",
            )
        from expertd_client.engines import kt

        kt.install()
    elif os.environ.get("EXPERTD_ADDRESS"):
        from expertd_client.engines.sglang.plugin import install

        install()
