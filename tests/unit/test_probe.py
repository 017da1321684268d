"""What this machine has: names of devices, and an accelerator that a process can use no more."""

import pytest
import torch

from expertd_kernels import probe


@pytest.mark.parametrize("name", ["cpu:0", "auto:1", "cuda:", "cuda:x", "cuda:-1", "sm90", ""])
def test_names_that_mean_nothing_are_refused(name):
    with pytest.raises(ValueError, match=r"want auto, cpu, cuda\[:N\] or xpu\[:N\]"):
        probe.detect_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(RuntimeError, match="'cuda:1' is not on this machine; --device cpu always is"):
        probe.detect_device("cuda:1")


def test_a_number_beyond_the_last_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match="'cuda:2' is not on this machine, which has cuda:0 to cuda:1"):
        probe.detect_device("cuda:2")


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
