"""What SGLang's wheel for CUDA needs to start on a CPU, in place of compiled ops; and a plugin of sglang.srt.plugins
that writes down, in each process of an engine, what it sends and runs: a line of JSON each, in $EXPERTD_TEST_LOG."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from types import ModuleType
from typing import Any

_KEPT: list[Any] = []


def stand_ins() -> None:
    """torchvision; vLLM's rotary embedding, which SGLang imports and then does without; the gate of a shared expert,
    for which it has a Triton kernel alone."""
    torchvision_without_ops()
    if importlib.util.find_spec("vllm") is None and "vllm" not in sys.modules:
        ops = ModuleType("vllm._custom_ops")
        ops.rotary_embedding = None  # type: ignore[attr-defined]
        sys.modules |= {"vllm": ModuleType("vllm"), "vllm._custom_ops": ops}
    from sglang.kernels.ops.elementwise import elementwise

    elementwise.fused_gate_sigmoid_mul_add = _gated


def _gated(hidden_states: Any, gate: Any, shared: Any, out: Any) -> None:
    """out [M, H] += the shared expert's output, gated."""
    out += (hidden_states @ gate).sigmoid()[:, None] * shared


def torchvision_without_ops() -> None:
    """A torchvision that was built for another torch can be imported: its compiled ops have names."""
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor boxes) -> Tensor")
        _KEPT.append(library)


def write_down() -> None:
    """The plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from expertd_client.clients.client import ExpertClient
    from expertd_client.cluster import ExpertCluster

    for forwarder in (ExpertClient, ExpertCluster):
        for name in ("forward_request", "submit_request"):
            setattr(forwarder, name, _noted(getattr(forwarder, name)))
    step = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    HookRegistry.register(step, _step, HookType.AROUND)


def _noted(call: Any) -> Any:
    def forward(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _write(layer=request.layer, tokens=len(request.topk_ids))
        return call(self, request, *args, **kwargs)

    return forward


def _step(forward: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    modules = list(runner.model.named_modules())
    experts = [p.numel() for name, m in modules if type(m).__name__ == "FusedMoE" for p in m.parameters()]
    _write(step=len(batch.input_ids), expert_parameters=sum(experts))
    return forward(runner, batch, *args, **kwargs)


def _write(**found: Any) -> None:
    with open(os.environ["EXPERTD_TEST_LOG"], "a") as file:
        file.write(json.dumps({"pid": os.getpid(), **found}) + "\n")
