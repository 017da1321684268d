"""Packages that are installed and cannot build their kernels: refused with what is missing, never chosen."""

import shutil

import pytest

from expertd_kernels import NAMED_DEVICES, Problem, Scheme, decide
from expertd_kernels.oracle import build_facts
from expertd_kernels.oracle.build_facts import CUDA_COMPILER, FACTS, FLASHINFER_CUTLASS, FLASHINFER_TRTLLM
from expertd_kernels.oracle.probe import assumed_packages, installed_packages
from expertd_kernels.oracle.table import BACKENDS


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with these programs on its PATH, nothing built, and no package of FlashInfer's."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "FLASHINFER_CUBIN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(build_facts, "find_spec", lambda name: None)

    def having(*programs):
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in programs else None)
        return tmp_path / ".cache" / "flashinfer"

    return having


def ask(device, scheme, facts):
    s = Scheme.parse(scheme)
    packages = {**assumed_packages(BACKENDS), **facts}
    return decide(Problem(NAMED_DEVICES[device], s, s, 128, 2048, 768, 8, packages=packages))


def test_an_image_with_gcc_alone_builds_nothing(machine):
    machine("gcc", "g++", "c++")
    found = {name: FACTS[name]() for name in FACTS}
    assert found[CUDA_COMPILER].error == "nvcc not found, and its kernels are compiled at first use"
    assert found[FLASHINFER_CUTLASS].error.startswith("nvcc and ninja not found")
    d = ask("sm90", "bf16", found)
    refused = {v.backend: " ".join(v.refusals) for v in d.verdicts}
    for row in ("flashinfer_cutlass", "deepgemm"):
        assert "nvcc" in refused[row], row
    remedies = {v.backend: [r.remedy for r in v.refusals] for v in d.verdicts}
    assert "nvcc on PATH" in remedies["flashinfer_cutlass"][0].command


def test_with_the_tools_it_is_built_ahead_and_never_in_a_call(machine):
    """FlashInfer's own build in the first call had compiled 2 of 249 files after eight minutes on an H200's host."""
    cache = machine("nvcc", "ninja", "c++")
    assert FACTS[CUDA_COMPILER]().error == ""
    for fact, backend in ((FLASHINFER_CUTLASS, "flashinfer_cutlass"), (FLASHINFER_TRTLLM, "flashinfer_trtllm")):
        found = FACTS[fact]()
        assert found.error == "FlashInfer's MoE module is not built here"
        assert found.remedy == f"expertd prepare --backend {backend}"
    built = cache / "0.7.2/100a/cached_ops/fused_moe_trtllm_sm100/fused_moe_trtllm_sm100.so"
    built.parent.mkdir(parents=True)
    built.touch()
    assert FACTS[FLASHINFER_CUTLASS]().error, "another module"
    trtllm = FACTS[FLASHINFER_TRTLLM]()
    assert "cubins" in trtllm.error
    assert trtllm.remedy == "python -m flashinfer download-cubin"


def test_what_was_built_before_needs_no_tools(machine):
    cache = machine()
    assert FACTS[FLASHINFER_CUTLASS]().error
    for path in ("0.7.2/90a/cached_ops/fused_moe_90/fused_moe_90.so", "cubins/moe.cubin"):
        (cache / path).parent.mkdir(parents=True, exist_ok=True)
        (cache / path).touch()
    assert FACTS[FLASHINFER_CUTLASS]().error == ""
    assert FACTS[FLASHINFER_TRTLLM]().error.startswith("nvcc and ninja"), "another module"
    other = cache / "0.7.2/100a/cached_ops/fused_moe_trtllm_sm100/fused_moe_trtllm_sm100.so"
    other.parent.mkdir(parents=True)
    other.touch()
    assert FACTS[FLASHINFER_TRTLLM]().error == ""


def test_nvcc_below_cuda_home_counts(machine, monkeypatch, tmp_path):
    machine("c++", "ninja")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert FACTS[CUDA_COMPILER]().error == ""


def test_the_probe_looks_them_up(machine):
    machine()
    found = installed_packages(BACKENDS)
    assert all(found[name].error for name in FACTS)
