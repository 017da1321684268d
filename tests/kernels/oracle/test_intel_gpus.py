"""Names and ids as torch prints them on such machines, and the generation that decides about the row `xpu`."""

from types import SimpleNamespace

import pytest
import torch

from expertd_kernels import decide, problem_of
from expertd_kernels.oracle.intel_gpus import XE_IDS, xe_generation
from expertd_kernels.oracle.probe import assumed_packages, detect_device
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_weights

DEVICES = [
    ("Intel(R) Arc(TM) 140V GPU (16GB)", 0x64A0, "xe2"),
    ("Intel(R) Graphics [0x64a0]", 0, "xe2"),
    ("Intel(R) Graphics [0xe20b]", 0xE20B, "xe2"),
    ("Intel(R) Arc(TM) 130V GPU (8GB)", 0, "xe2"),
    ("Intel(R) Arc(TM) B580 Graphics", 0, "xe2"),
    ("Intel(R) Arc(TM) Pro B60 Graphics", 0, "xe2"),
    ("Intel(R) Arc(TM) Pro B70 Graphics", 0xE223, "xe2"),
    ("Intel(R) Arc(TM) B390 GPU", 0xB080, "xe3"),
    ("Intel(R) Arc(TM) B390 GPU", 0, "xe3"),
    ("Intel(R) Graphics [0xFD80]", 0, "xe3"),
    ("Intel(R) Arc(TM) A770 Graphics", 0x56A0, "xe"),
    ("Intel(R) Data Center GPU Max 1550", 0x0BD5, "xe"),
    ("Intel(R) Arc(TM) Graphics", 0x7D55, "xe"),
]


@pytest.mark.parametrize(("name", "device_id", "generation"), DEVICES)
def test_the_generation_of_a_device(name, device_id, generation):
    assert xe_generation(name, device_id) == generation


def test_no_id_is_of_two_generations():
    assert not set.intersection(*(set(ids) for ids in XE_IDS.values()))


@pytest.mark.parametrize(("name", "device_id", "generation"), DEVICES)
def test_detection_and_the_row_that_follows(monkeypatch, name, device_id, generation):
    """With the property that newer versions of torch have, and without it, as older ones are."""
    properties = SimpleNamespace(name=name, **({"device_id": device_id} if device_id else {}))
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda i: properties)
    device = detect_device("xpu")
    assert (device.kind, device.arch) == ("xpu", generation)
    weights = random_weights("int4_g128", 4, 256, 128)
    chosen = decide(problem_of(weights, device, top_k=2, packages=dict(assumed_packages(BACKENDS)))).chosen
    assert chosen.name == ("triton" if generation == "xe" else "xpu")
