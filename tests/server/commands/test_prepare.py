"""`expertd prepare`: Triton's cache has afterwards what a start would compile."""

import pytest

pytest.importorskip("triton.experimental.gluon")

from expertd_kernels.backends import flashinfer_build
from expertd_server.commands.cli import main

SMALL = ["--layers", "0", "--max-tokens", "1", "--device", "h200"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("EXPERTD_COMPILE_PROCESSES", "2")
    return tmp_path / "triton"


@pytest.mark.slow
def test_kernels_are_there_and_a_start_need_not_look(cache, capsys):
    assert main(["prepare", "--synthetic", "qwen3-30b-a3b:bf16", *SMALL]) == 0
    said = capsys.readouterr().out
    assert f"in {cache}, for NVIDIA H200" in said
    (mark,) = cache.glob("expertd-compiled-*")
    names = {p.name.split(".")[0] for p in cache.rglob("*.cubin")}
    assert {"gemv", "collect", "deliver", "signal"} <= names
    mark.unlink()
    assert main(["prepare", "--synthetic", "qwen3-30b-a3b:bf16", *SMALL]) == 0
    assert mark.exists(), "the same layers have the same mark"


def test_layers_of_other_backends_have_nothing_to_compile(cache, capsys):
    assert main(["prepare", "--synthetic", "qwen3-30b-a3b:bf16", "--backend", "reference", *SMALL]) == 0
    assert "nothing to compile" in capsys.readouterr().out
    assert not cache.exists()


@pytest.mark.parametrize("device", ["cpu", "mi300x", "h9000"])
def test_another_device_is_refused_with_those_that_are_known(device, cache, capsys):
    assert main(["prepare", "--synthetic", "qwen3-30b-a3b:bf16", "--device", device]) == 2
    assert "h100" in capsys.readouterr().err


def test_a_backend_of_flashinfer_has_its_module_built(tmp_path, monkeypatch, capsys):
    asked = []

    def build_module(backend, capability):
        asked.append((backend, capability))
        if backend == "flashinfer_trtllm":
            raise ValueError("got compute capability 9.0")
        return tmp_path / "fused_moe_90.so"

    monkeypatch.setattr(flashinfer_build, "build_module", build_module)
    words = ["prepare", "--synthetic", "qwen3-30b-a3b:bf16", "--device", "h200", "--backend"]
    assert main([*words, "flashinfer_cutlass"]) == 0
    assert capsys.readouterr().out == f"flashinfer_cutlass: {tmp_path}/fused_moe_90.so\n"
    assert main([*words, "flashinfer_trtllm"]) == 2
    assert "got compute capability 9.0" in capsys.readouterr().err
    assert asked == [("flashinfer_cutlass", (9, 0)), ("flashinfer_trtllm", (9, 0))]
