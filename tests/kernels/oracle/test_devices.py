"""Names that people give to devices."""

import pytest

from expertd_kernels import NAMED_DEVICES, Device
from expertd_kernels.oracle.devices import KINDS, PRODUCTS, arch_of, named_device
from expertd_kernels.oracle.table import ORDER


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("h100", "sm90"), ("H200", "sm90"), ("h20", "sm90"), ("NVIDIA H100 80GB HBM3", "sm90"),
        ("h100-sxm5-80gb", "sm90"),
        ("H100 NVL", "sm90"), ("b200", "sm100"), ("GB200", "sm100"), ("b300", "sm103"), ("a100", "sm80"),
        ("NVIDIA A100-PCIE-40GB", "sm80"), ("a10", "sm86"), ("l4", "sm89"), ("l40s", "sm89"), ("rtx4090", "sm89"),
        ("NVIDIA GeForce RTX 4090", "sm89"), ("rtx 5090", "sm120"), ("rtx-pro-6000", "sm120"), ("t4", "sm75"),
        ("mi300x", "gfx942"), ("AMD Instinct MI325X", "gfx942"), ("mi355x", "gfx950"), ("arc b580", "xe2"),
        ("Intel Arc B580", "xe2"), ("a770", "xe"), ("cuda", "sm90"), ("rocm", "gfx942"), ("XPU", "xe2"),
        ("sm90a", "sm90"), ("sm_121", "sm121"), ("gfx90a", "gfx90a"), ("gfx1201", "gfx1201"), ("grace", "aarch64"),
    ],
)  # fmt: skip
def test_products_architectures_and_kinds(name, arch):
    assert named_device(name).arch == arch


@pytest.mark.parametrize("name", ["", "auto", "cpu", "cuda:0", "sm1", "h1000", "gfx", "foo", "100"])
def test_other_names_mean_nothing(name):
    assert named_device(name) is None


def test_every_name_is_one_device():
    everything = [p for products in PRODUCTS.values() for p in products]
    assert len(set(everything)) == len(everything)
    assert all(arch_of(p) == arch for arch, products in PRODUCTS.items() for p in products)
    assert all(named_device(p) is not None for p in everything)
    for name, device in NAMED_DEVICES.items():
        assert named_device(name) == device
    assert {named_device(k).kind for k in KINDS} == set(KINDS)
    assert set(KINDS) < set(ORDER)


def test_what_an_unlisted_architecture_becomes():
    assert named_device("sm121") == Device("cuda", "sm121", (12, 1))
    assert named_device("gfx90a") == Device("rocm", "gfx90a", (9, 10))
    assert named_device("gfx942") == Device("rocm", "gfx942", (9, 42))
