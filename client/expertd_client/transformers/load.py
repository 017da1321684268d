"""load_without_experts: a frontend of a model, without a byte of its experts."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import transformers

from expertd.errors import UnsupportedCombinationError
from expertd_client.engines.served import Servers
from expertd_client.engines.strip import is_expert, is_quantized, tensor_names
from expertd_client.transformers.attach import attach

__all__ = ["frontend_config", "load_without_experts"]

_NOT_OURS = r".*\.experts"
"""For transformers' quantizers, which put classes of their own in place of modules with this name."""


def load_without_experts(
    path: str | os.PathLike[str],
    to: Servers,
    *,
    model_class: type[Any] | None = None,
    timeout_s: float | None = None,
    **options: Any,
) -> Any:
    """from_pretrained of a checkpoint in a folder, whole or stripped, with servers in place of its experts.

    to            as attach takes it
    model_class   default: the one that config.json names
    options       for from_pretrained: dtype, device_map, attn_implementation, ...

    The modules of the experts are replaced while the model has no memory yet (on the meta device), so their tensors
    are neither allocated nor read.  Where only experts are quantized, transformers need not know the format.  Raises
    what attach raises, and ValueError for a folder that is no checkpoint.
    """
    root = Path(path)
    config = frontend_config(options.pop("config", None) or transformers.AutoConfig.from_pretrained(root), root)
    chosen = model_class or _named(config)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        chosen.__init__(self, *args, **kwargs)
        attach(self, to, timeout_s=timeout_s, keep=False)

    ignored = set(chosen._keys_to_ignore_on_load_unexpected or ()) | {r"(^|\.)experts\."}
    frontend: Any = type(
        chosen.__name__,
        (chosen,),
        {"__init__": init, "__module__": chosen.__module__, "_keys_to_ignore_on_load_unexpected": ignored},
    )
    model = frontend.from_pretrained(root, config=config, **options)
    model.__class__ = chosen
    return model


def frontend_config(config: Any, root: Path) -> Any:
    """The configuration with a quantization of what is left alone: of attention, if that is quantized, and of nothing
    else."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return config
    config = copy.deepcopy(config)
    if not is_quantized(name for name in tensor_names(root) if not is_expert(name)):
        del config.quantization_config
    elif isinstance(quantization, dict) and quantization.get("quant_method") in ("fp8", "mxfp4"):
        skipped = [*(quantization.get("modules_to_not_convert") or ()), _NOT_OURS]
        config.quantization_config = {**quantization, "modules_to_not_convert": skipped}
    return config


def _named(config: Any) -> type[Any]:
    """The class that wrote the checkpoint."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    raise UnsupportedCombinationError.about(
        "load_without_experts",
        got=f"architectures {config.architectures!r}, which transformers does not have",
        want="a model of transformers",
        remedy="name the class: model_class=",
    )
