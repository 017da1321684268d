"""vLLM whose routed experts live on expertd's servers (pip install '.[vllm]'; versions.ADAPTER has the versions).

    EXPERTD_ADDRESS=10.0.0.1:50051 vllm serve FRONTEND --compilation-config '{"cudagraph_mode": "PIECEWISE"}'

FRONTEND is a checkpoint without experts (`expertctl strip DIR FRONTEND`).  vLLM finds register() by its entry point
and calls it in each of its processes; where nobody names servers, its own classes do what they always did.

    plugin     our classes in place of vLLM's: RoutedExperts without weights, the runner around it
    refused    what cannot work, in sentences; imports no vLLM
    runs       dummy runs, and what CUDA graphs met, asked at a step's end; imports no vLLM
    versions   what differs between versions of vLLM
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """The entry point of the group vllm.general_plugins; may be called again."""
    from expertd_client.engines.vllm.plugin import install

    install()
