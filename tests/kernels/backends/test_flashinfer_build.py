"""FlashInfer's modules, built ahead: which of them, for which GPU."""

import sys
from types import SimpleNamespace

import pytest

from expertd_kernels.backends.flashinfer_build import MODULES, build_module


@pytest.fixture
def flashinfer(monkeypatch, tmp_path):
    """A stand-in for flashinfer.jit.fused_moe: what was built, with the GPUs that it was told."""
    import os

    built = []

    def of(name):
        library = tmp_path / f"{name}.so"

        def build(verbose):
            assert verbose, "who waits for a quarter of an hour wants to see that it goes on"
            built.append((name, os.environ["FLASHINFER_CUDA_ARCH_LIST"]))
            library.touch()

        return lambda: SimpleNamespace(build=build, jit_library_path=library)

    names = {name for modules in MODULES.values() for name in modules.values()}
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flashinfer.jit", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flashinfer.jit.fused_moe", SimpleNamespace(**{n: of(n) for n in names}))
    yield built
    os.environ.pop("FLASHINFER_CUDA_ARCH_LIST", None)


@pytest.mark.parametrize(
    ("backend", "capability", "name", "arch"),
    [
        ("flashinfer_cutlass", (8, 9), "gen_cutlass_fused_moe_sm89_module", "8.9"),
        ("flashinfer_cutlass", (9, 0), "gen_cutlass_fused_moe_sm90_module", "9.0a"),
        ("flashinfer_trtllm", (10, 3), "gen_trtllm_gen_fused_moe_sm100_module", "10.3a"),
    ],
)
def test_the_module_of_the_gpu_is_built(flashinfer, backend, capability, name, arch):
    assert build_module(backend, capability).exists()
    assert flashinfer == [(name, arch)]


def test_a_gpu_without_a_module_is_refused(flashinfer):
    with pytest.raises(ValueError, match=r"flashinfer_trtllm: got compute capability 9.0, want .*: 10.0, 10.3"):
        build_module("flashinfer_trtllm", (9, 0))
    assert not flashinfer
