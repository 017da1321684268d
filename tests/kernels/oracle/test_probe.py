"""What this machine has: names of devices, and an accelerator that a process can use no more."""

import importlib
import os
import sys

import pytest
import torch

from expertd_kernels.oracle import probe
from expertd_kernels.oracle.decision import Backend


@pytest.mark.parametrize("name", ["cpu:0", "auto:1", "cuda:", "cuda:x", "cuda:-1", "sm90", ""])
def test_names_that_mean_nothing_are_refused(name):
    with pytest.raises(ValueError, match=r"want auto, cpu, cuda\[:N\], rocm\[:N\] or xpu\[:N\]"):
        probe.detect_device(name)


def test_an_amd_gpu_is_called_rocm_or_cuda(monkeypatch):
    """torch itself calls it cuda."""
    from expertd_server.boot.assignment import resolve_device

    properties = type("Properties", (), {"gcnArchName": "gfx942:sramecc+:xnack-"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name in ("rocm", "rocm:3", "cuda:3", "auto"):
        assert (str(probe.detect_device(name)), probe.detect_device(name).capability) == ("rocm:gfx942", (9, 42))
    assert [str(resolve_device(n)[1]) for n in ("rocm", "rocm:3", "cuda:3")] == ["cuda", "cuda:3", "cuda:3"]
    with pytest.raises(RuntimeError, match="'rocm:8' is not on this machine, which has rocm:0 to rocm:7"):
        probe.detect_device("rocm:8")
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(RuntimeError, match="'rocm' is not on this machine"):
        probe.detect_device("rocm")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(RuntimeError, match="'cuda:1' is not on this machine; --device cpu always is"):
        probe.detect_device("cuda:1")


def test_a_number_beyond_the_last_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match="'cuda:2' is not on this machine, which has cuda:0 to cuda:1"):
        probe.detect_device("cuda:2")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A distribution called widget, installed in a folder of its own; its module counts how often it is imported."""
    site = tmp_path / "site"
    info = site / "widget-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: widget\nVersion: 1.2\n")
    (info / "RECORD").write_text("widget.py,,\nwidget-1.2.dist-info/RECORD,,\n")
    (site / "widget.py").write_text("import sys\nsys.imported = getattr(sys, 'imported', 0) + 1\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(sys, "imported", 0, raising=False)
    yield info
    sys.modules.pop("widget", None)


ROW = Backend("widgets", "", (), (), "", needs={"widget": ">=1"})


def asked(folder) -> tuple[str, int]:
    """(error, how often it was imported) of one process's question."""
    sys.modules.pop("widget", None)
    sys.imported = 0
    importlib.invalidate_caches()
    error = probe.installed_packages([ROW], probe_imports=True, folder=folder)["widget"].error
    return error, sys.imported


def test_a_package_that_imports_is_not_imported_again_by_the_next_start(package, tmp_path):
    cache = tmp_path / "cache"
    assert asked(None) == asked(None) == ("", 1), "without a folder nothing is remembered"
    assert asked(cache) == ("", 1)
    assert asked(cache) == ("", 0)
    os.utime(package / "RECORD", ns=(1, 1))
    assert asked(cache) == ("", 1), "installed anew"
    (cache / "imports.json").write_text("{")
    assert asked(cache) == ("", 1), "an unreadable memory is none"


@pytest.mark.parametrize("name", ["triton-rocm", "pytorch-triton-xpu"])
def test_tritons_of_torchs_other_builds_are_seen(name, tmp_path, monkeypatch):
    """They bring the module triton under a distribution's name of their own."""
    info = tmp_path / f"{name.replace('-', '_')}-9.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.8+git0123\n")
    row = Backend("tritons", "", (), (), "", needs={"triton": ">=3"})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert probe.installed_packages([row])["triton"].version == "9.8+git0123"
    monkeypatch.setattr(sys, "path", [])
    assert "triton" not in probe.installed_packages([row])


def test_a_package_that_does_not_import_is_asked_every_time(package, tmp_path):
    module = package.parent / "widget.py"
    module.write_text("raise OSError('libwidget.so: not found')\n")
    for _ in range(2):
        assert asked(tmp_path) == ("OSError: libwidget.so: not found", 0)
    module.write_text("import sys\nsys.imported += 1  # mended\n")
    assert asked(tmp_path) == ("", 1)


def test_a_folder_that_cannot_be_written_is_a_warning(package, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert asked(tmp_path / "file") == ("", 1)
    assert "cannot be kept in" in caplog.text


class Api:
    """torch.cuda as far as it is used.  error: what waiting ends with."""

    def __init__(self, error: str = "") -> None:
        self.error, self.chosen = error, []

    def synchronize(self, device):
        if self.error:
            raise RuntimeError(self.error)

    def set_device(self, device):
        self.chosen.append(device)


def test_a_device_is_lost_when_waiting_for_it_fails(monkeypatch):
    gpu = torch.device("cuda:1")
    monkeypatch.setattr(torch, "cuda", Api("CUDA error: an illegal memory access was encountered\nCompile with ..."))
    assert probe.device_fault(gpu) == "CUDA error: an illegal memory access was encountered"
    monkeypatch.setattr(torch, "cuda", Api())
    assert probe.device_fault(gpu) == ""
    assert probe.device_fault(torch.device("cpu")) == ""


def test_threads_compute_on_the_device_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(torch, "cuda", api := Api())
    for device in ("cpu", "cuda", "cuda:1"):
        probe.use_device(torch.device(device))
    assert api.chosen == [torch.device("cuda:1")], "without a number it is the thread's own"
