"""`expertd prepare`: Triton's cache has afterwards what a start would compile."""

import pytest

pytest.importorskip("triton.experimental.gluon")

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
