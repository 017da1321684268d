"""Writers of small checkpoints, made for the tests: slow, plain, independent of the readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cpu_levels
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor


def stream(fields: Tensor, bits: int) -> Tensor:
    """[fields, columns] -> [words, columns] int32: a column is one little-endian bit stream, low bits first."""
    count, columns = fields.shape
    words = -(-count * bits // 32)
    out = np.zeros((words, columns), dtype=np.uint32)
    for c in range(columns):
        number = sum(int(v) << (bits * i) for i, v in enumerate(fields[:, c].tolist()))
        out[:, c] = np.frombuffer(number.to_bytes(words * 4, "little"), dtype="<u4")
    return torch.from_numpy(out.view(np.int32))


@pytest.fixture(scope="session")
def pack_stream() -> Callable[[Tensor, int], Tensor]:
    return stream


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[..., Path]:
    """write(folder, tensors, experts=, hidden=, intermediate=, quant=, shards=, model_type=, **config) -> folder."""

    def write(
        folder: Path,
        tensors: Mapping[str, Tensor],
        *,
        experts: int,
        hidden: int,
        intermediate: int,
        quant: Mapping[str, Any] | None = None,
        shards: int = 1,
        model_type: str = "qwen3_moe",
        **config: Any,
    ) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        key = "intermediate_size" if model_type in ("gpt_oss", "mixtral") else "moe_intermediate_size"
        facts: dict[str, Any] = {
            "model_type": model_type,
            "hidden_size": hidden,
            key: intermediate,
            "num_experts" if model_type == "qwen3_moe" else "num_local_experts": experts,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 8,
        }
        facts |= {"quantization_config": dict(quant)} if quant else {}
        (folder / "config.json").write_text(json.dumps(facts | config))
        names = sorted(tensors)
        weight_map = {}
        for s in range(shards):
            file = f"model-{s + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
            mine = names[s::shards]
            save_file({n: tensors[n].contiguous() for n in mine}, folder / file)
            weight_map |= dict.fromkeys(mine, file)
        if shards > 1:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return write


@pytest.fixture
def own_triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles in this test alone what it is asked for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.fixture
def kept_triton_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton compiles what it has not compiled of these sources before, and what ptxas says is kept."""
    import kept_triton  # imports triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(kept_triton.folder()))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    with kept_triton.keep_logs():
        yield


@pytest.fixture(params=cpu_levels.KNOWN)
def cpu_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs at every instruction-set level of the CPU kernel, natively or emulated."""
    with cpu_levels.on_level(request.param):
        request.node.user_properties.append((cpu_levels.RAN, [request.param, cpu_levels.how(request.param)]))
        yield request.param
