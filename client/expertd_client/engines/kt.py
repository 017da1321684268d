"""RemoteKTMoEWrapper: kt-kernel's KTMoEWrapper whose experts a server computes, for engines with a KTransformers path.

    wrapper = RemoteKTMoEWrapper(layer_idx=3, ..., weight_path="expertd://10.0.0.1:50051", ...)
    wrapper.load_weights(physical_to_logical_map_cpu)
    wrapper.submit_forward(hidden_states, topk_ids, topk_weights, cuda_stream)     # under way
    y = wrapper.sync_forward(hidden_states, cuda_stream)

The arguments are those of kt_kernel.KTMoEWrapper 0.7.2 (tests/engines/kt_kernel.json compares them).  The engine keeps
the experts that `gpu_experts_mask` marks on its GPU; the others are computed by the servers that `weight_path` names:
one address, or several with commas, or the path of a placement.json.  EXPERTD_CLIENT has the other options
(expertd_client.engines.settings).  install() puts the class where SGLang looks for kt-kernel's.

Refused: deferred experts, training (mode "sft"), weights given as tensors, CUDA graphs, and a clamp or an alpha of
SwiGLU, which a server takes from its checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from expertd.errors import BadShapeError, UnsupportedCombinationError
from expertd_client.engines.served import Found
from expertd_client.engines.settings import Settings, connection_to, settings_of
from expertd_client.engines.torch_experts import RemoteExperts, Started

__all__ = ["RemoteKTMoEWrapper", "install"]

SCHEME = "expertd://"
_SGLANG = "sglang.srt.layers.moe.kt_ep_wrapper"


class RemoteKTMoEWrapper:
    """The experts of one layer that are not on the engine's GPU.

    layer_idx             index of the layer, as the server counts
    num_experts           of the model; num_experts_per_tok: routes a token; hidden_size, moe_intermediate_size: of one
    gpu_experts_mask      [num_experts] bool, True = computed by the engine; None = the first num_gpu_experts
    weight_path           "expertd://HOST:PORT[,HOST:PORT]" or "expertd:///path/of/placement.json"
    the others            describe CPU kernels of this host, and are not used: cpuinfer_threads, threadpool_count,
                          chunked_prefill_size, method, numa_nodes

    Raises UnsupportedCombinationError for what is refused (above), BadShapeError for a mask of another size.
    """

    _capture_sizes: list[int] = []  # noqa: RUF012 - of the class, as kt-kernel's

    def __init__(
        self,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask: Tensor | None = None,
        cpuinfer_threads: int = 0,
        threadpool_count: int = 0,
        weight_path: str = "",
        chunked_prefill_size: int = 0,
        cpu_save: bool = False,
        max_deferred_experts_per_token: int | None = None,
        method: str = "",
        numa_nodes: Sequence[int] | None = None,
        mode: str = "inference",
        num_gpu_experts: int = 0,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
        **training: Any,
    ) -> None:
        del cpuinfer_threads, threadpool_count, chunked_prefill_size, method, numa_nodes
        self.layer_idx = layer_idx
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        for got, want, remedy in (
            (f"mode {mode!r}" if mode != "inference" else "", "inference: a server computes no gradients", ""),
            (f"{', '.join(training)} of training" if training else "", "arguments of inference", ""),
            (
                f"{max_deferred_experts_per_token} deferred experts a token" if max_deferred_experts_per_token else "",
                "none: a layer's answer is complete when sync_forward returns",
                "--kt-max-deferred-experts-per-token 0",
            ),
            ("cpu_save" if cpu_save else "", "weights that stay at the server", ""),
            (
                f"swiglu_limit {swiglu_limit} and swiglu_alpha {swiglu_alpha}" if swiglu_limit or swiglu_alpha else "",
                "the activation of the server's checkpoint",
                "leave them 0",
            ),
        ):
            if got:
                raise self._refused(got, want, remedy)
        self.gpu_experts_mask = self._mask(gpu_experts_mask, num_gpu_experts)
        self.num_gpu_experts = int(self.gpu_experts_mask.sum())
        self._settings = self._settings_of(weight_path)
        self._found = Found(f"layer {layer_idx}", layer_idx, num_experts, hidden_size, moe_intermediate_size)
        self._remote: RemoteExperts | None = None
        self._routes: dict[torch.device, Tensor] = {}
        self._started: Started | None = None

    def load_weights(self, physical_to_logical_map_cpu: Tensor | None = None) -> None:
        """Loads nothing: connects, and compares the layer with what the server holds.

        physical_to_logical_map_cpu   [experts] of any integer dtype, the model's expert under each id that is routed
                                      to; None = the ids are the model's

        Raises PlacementError where the servers do not hold this layer, UnavailableError where they are not up within
        start_timeout_s, BadShapeError for ids beyond the model's.
        """
        logical = torch.arange(self.num_experts) if physical_to_logical_map_cpu is None else physical_to_logical_map_cpu
        logical = logical.long().cpu()
        if (
            logical.dim() != 1
            or len(logical) < self.num_experts
            or not 0 <= int(logical.min()) <= int(logical.max()) < (self.num_experts)
        ):
            raise BadShapeError.about(
                f"layer {self.layer_idx}: physical_to_logical_map_cpu",
                got=f"{list(logical.shape)} with ids of {int(logical.min())} to {int(logical.max())}",
                want=f"[{self.num_experts}] or more ids below {self.num_experts}",
            )
        on_gpu = torch.zeros(len(logical), dtype=torch.bool)
        on_gpu[: self.num_experts] = self.gpu_experts_mask  # the mask is by the id that is routed to
        self._routes = {torch.device("cpu"): logical.masked_fill(on_gpu, -1)}
        connection = connection_to(self._settings)
        limit = connection.max_tokens(self._found)
        self._remote = RemoteExperts(connection.forwarder, self.layer_idx, max_tokens=limit).eval()

    def load_weights_from_tensors(self, *tensors: Tensor, **more: Tensor) -> None:
        """Refused: UnsupportedCombinationError."""
        raise self._refused("weights as tensors", "those of the server's checkpoint", "call load_weights")

    def submit_forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, cuda_stream: int | None = None
    ) -> None:
        """Sends the routes of experts that are not on the GPU, and does not wait for the answer.

        hidden_states   [..., H]; topk_ids, topk_weights: [..., top_k].  They may be overwritten when this returns
        cuda_stream     the stream that wrote them (torch.cuda.Stream.cuda_stream); not used for tensors of the host
        """
        if self._remote is None or self._started is not None:
            got = "no load_weights before it" if self._remote is None else "a call under way"
            raise self._refused(got, "load_weights once, then submit_forward and sync_forward in turn")
        if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
            raise self._refused("a CUDA graph being captured", "eager calls: this one is host code", "disable graphs")
        with _stream(hidden_states, cuda_stream), torch.no_grad():
            x = hidden_states.detach().reshape(-1, hidden_states.shape[-1])
            ids = self._remaining(topk_ids.reshape(len(x), -1))
            self._started = self._remote.start(x, ids, topk_weights.detach().reshape(len(x), -1))

    def sync_forward(self, hidden_states: Tensor, cuda_stream: int | None = None) -> Tensor:
        """The answer to submit_forward: [M, H] in the dtype and on the device of hidden_states, the sum over the routes
        that were sent.  A token without one gets zeros."""
        started, self._started = self._started, None
        if self._remote is None or started is None:
            raise self._refused("no call under way", "submit_forward first")
        with _stream(hidden_states, cuda_stream), torch.no_grad():
            return self._remote.wait(started)

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, cuda_stream: int | None = None
    ) -> Tensor:
        """submit_forward and sync_forward."""
        self.submit_forward(hidden_states, topk_ids, topk_weights, cuda_stream)
        return self.sync_forward(hidden_states, cuda_stream)

    @staticmethod
    def set_capture_batch_sizes(capture_bs: list[int]) -> None:
        """Kept for get_capture_batch_sizes; there are no buffers."""
        RemoteKTMoEWrapper._capture_sizes = list(capture_bs)

    @staticmethod
    def get_capture_batch_sizes() -> list[int]:
        return RemoteKTMoEWrapper._capture_sizes

    @staticmethod
    def clear_buffer_cache() -> None:
        """Does nothing: there are no buffers."""

    def _remaining(self, ids: Tensor) -> Tensor:
        """The model's ids of the routes that travel; -1 for the GPU's and for -1."""
        if ids.device not in self._routes:
            self._routes[ids.device] = self._routes[torch.device("cpu")].to(ids.device)
        ids = ids.long()
        return self._routes[ids.device][ids.clamp(min=0)].masked_fill(ids < 0, -1)

    def _mask(self, given: Tensor | None, first: int) -> Tensor:
        mask = torch.arange(self.num_experts) < first if given is None else given.detach().cpu().bool()
        if mask.shape != (self.num_experts,):
            raise BadShapeError.about(
                f"layer {self.layer_idx}: gpu_experts_mask", got=list(mask.shape), want=f"[{self.num_experts}]"
            )
        return mask

    def _settings_of(self, weight_path: str) -> Settings:
        if not weight_path.startswith(SCHEME):
            raise self._refused(
                f"weight_path {weight_path!r}", f"{SCHEME}HOST:PORT of a server", f"--kt-weight-path {SCHEME}HOST:PORT"
            )
        address = {"EXPERTD_ADDRESS": weight_path.removeprefix(SCHEME)}
        settings = settings_of(None, {**os.environ, **address})
        if settings is None:
            raise self._refused("no address in weight_path", f"{SCHEME}HOST:PORT")
        return settings

    def _refused(self, got: str, want: str, remedy: str = "") -> UnsupportedCombinationError:
        return UnsupportedCombinationError.about(
            f"layer {self.layer_idx}: remote KTMoEWrapper", got=got, want=want, remedy=remedy
        )


def install() -> None:
    """From now on `from kt_kernel import KTMoEWrapper` gives RemoteKTMoEWrapper, whether kt-kernel is installed or not,
    and SGLang's module that may have imported it already has it, too."""
    module = sys.modules.get("kt_kernel") or ModuleType("kt_kernel")
    module.KTMoEWrapper = RemoteKTMoEWrapper  # type: ignore[attr-defined]
    sys.modules["kt_kernel"] = module
    imported = sys.modules.get(_SGLANG)
    if imported is not None:
        imported.KTMoEWrapper = RemoteKTMoEWrapper  # type: ignore[attr-defined]
        imported.KTRANSFORMERS_AVAILABLE = True  # type: ignore[attr-defined]


def _stream(x: Tensor, cuda_stream: int | None) -> AbstractContextManager[object]:
    """On a GPU: the caller's stream."""
    if not x.is_cuda or cuda_stream is None:
        return nullcontext()
    external: Any = torch.cuda.ExternalStream
    return torch.cuda.stream(external(cuda_stream, device=x.device))
