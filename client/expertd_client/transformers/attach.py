"""attach and detach: a model's experts are set aside and modules that call servers stand in their place.

Replacing the modules needs nothing of the model but their names, so it works for every family whose blocks call
`self.experts(hidden_states, topk_ids, topk_weights)`, whatever experts_implementation its configuration names.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from expertd.errors import UnsupportedCombinationError
from expertd_client.clients.forwarder import Forwarder
from expertd_client.engines.served import Found, Servers, forwarder_to, max_tokens_of
from expertd_client.engines.torch_experts import RemoteExperts
from expertd_client.transformers.find import find_experts

# Why it is so: decision 99 in DECISIONS.md.
__all__ = ["Attachment", "attach", "detach"]


class Attachment:
    """A model's tie to its servers; made by attach().

    forwarder   what its experts are called through
    layers      layer -> name of the module that calls it

    As a context manager it ends with detach().
    """

    def __init__(self, model: torch.nn.Module, forwarder: Forwarder, owned: bool) -> None:
        self.forwarder = forwarder
        self.layers: dict[int, str] = {}
        self._model = model
        self._owned = owned
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def close(self) -> None:
        """detach(model)."""
        detach(self._model)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def replace(self, found: Found, remote: _Layer) -> None:
        """For attach()."""
        self.layers[found.layer] = found.name
        self._model.set_submodule(found.name, remote)

    def watch(self, decoder: torch.nn.Module, padding: _Padding) -> None:
        """For attach(): `padding` sees every call of the module whose attention mask is that of the tokens."""
        self._hooks.append(decoder.register_forward_pre_hook(padding.look, with_kwargs=True))

    def undo(self) -> None:
        """For detach(): all or nothing."""
        kept = {name: _layer(self._model, name).replaced() for name in self.layers.values()}
        for name, module in kept.items():
            self._model.set_submodule(name, module)
        for hook in self._hooks:
            hook.remove()
        if self._owned:
            self.forwarder.close()


class _Padding:
    """Which tokens of the batch under way are padding, by the decoder's attention mask.  Of each thread for itself; in
    a compiled graph the mask flows from look() to without() as any tensor does."""

    def __init__(self) -> None:
        self._compiled: Tensor | None = None
        self._eager = threading.local()

    def look(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook.  Only a mask with one entry for each token of this call says which are padding: with a
        cache it covers earlier tokens too, and the model's own masks have other shapes."""
        del module
        tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        if tokens is None and args:
            tokens = args[0]
        mask = kwargs.get("attention_mask")
        real = None
        if isinstance(mask, Tensor) and isinstance(tokens, Tensor) and mask.shape == tokens.shape[:2]:
            real = mask.reshape(-1, 1) != 0
        if torch.compiler.is_compiling():
            self._compiled = real
        else:
            self._eager.real = real

    def without(self, topk_ids: Tensor) -> Tensor:
        """The routes of real tokens; those of padding become nobody's."""
        real = self._compiled if torch.compiler.is_compiling() else getattr(self._eager, "real", None)
        if real is None or real.numel() * topk_ids.shape[-1] != topk_ids.numel():
            return topk_ids
        return topk_ids.masked_fill(~real.to(topk_ids.device).view(*topk_ids.shape[:-1], 1), -1)


class _Layer(RemoteExperts):
    """What stands in place of a transformers module; it keeps that one where nothing moves, counts or saves it."""

    def __init__(
        self, attachment: Attachment, layer: int, replaced: torch.nn.Module | None, padding: _Padding, **options: Any
    ) -> None:
        super().__init__(attachment.forwarder, layer, **options)
        self.attachment = attachment
        self._replaced = (replaced,)  # in a tuple: nn.Module would register it
        self._padding = padding

    def replaced(self) -> torch.nn.Module:
        [module] = self._replaced
        if module is None:
            raise UnsupportedCombinationError.about(
                "detach",
                got="a model that was loaded without its experts",
                want="experts to put back",
                remedy="load the checkpoint with from_pretrained",
            )
        return module

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, self._padding.without(topk_ids), topk_weights)


def attach(model: torch.nn.Module, to: Servers, *, timeout_s: float | None = None, keep: bool = True) -> Attachment:
    """The experts of every MoE layer of `model` are computed by servers from now on.

    model       a transformers model in evaluation mode, on any device
    to          "host:port"; several in a list, or a Placement; or a forwarder, which stays the caller's
    timeout_s   of each call; None = that of a forwarder in `to`, else no limit
    keep        the modules that are replaced are kept, for detach(); without, their memory is free

    Raises UnsupportedCombinationError where the model's experts cannot be replaced, PlacementError where a server's
    layers, experts or sizes are not the model's, UnavailableError where not all experts have a server within 10 s.
    """
    found = find_experts(model)
    forwarder = forwarder_to(to)
    attachment = Attachment(model, forwarder, owned=forwarder is not to)
    try:
        limit = max_tokens_of(found.values(), forwarder)
    except BaseException:
        if forwarder is not to:
            forwarder.close()
        raise
    decoders: dict[str, _Padding] = {}
    for one in found.values():
        decoder = one.name.partition(".layers.")[0] if ".layers." in one.name else ""
        if decoder not in decoders:
            decoders[decoder] = _Padding()
            attachment.watch(model.get_submodule(decoder), decoders[decoder])
        module = model.get_submodule(one.name)
        kept = module if keep else None
        remote = _Layer(attachment, one.layer, kept, decoders[decoder], max_tokens=limit, timeout_s=timeout_s)
        attachment.replace(one, remote.train(module.training))
    return attachment


def detach(model: torch.nn.Module) -> None:
    """Puts the experts back that attach() replaced, and closes the connection if attach() made it."""
    found = {module.attachment for module in model.modules() if isinstance(module, _Layer)}
    if not found:
        raise UnsupportedCombinationError.about(
            "detach", got=f"a {type(model).__name__} with experts of its own", want="a model that was attached"
        )
    for attachment in found:
        attachment.undo()


def _layer(model: torch.nn.Module, name: str) -> _Layer:
    module = model.get_submodule(name)
    assert isinstance(module, _Layer), f"{name}: somebody else replaced it since"
    return module
