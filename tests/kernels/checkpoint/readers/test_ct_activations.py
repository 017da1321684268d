"""How a group of compressed-tensors wants activations rounded: what is one of ours, and what is near and is not."""

from __future__ import annotations

import pytest

from expertd_kernels import ActivationQuant
from expertd_kernels.checkpoint.readers.ct_config import Group, activation_of


def group(activations) -> Group:
    return Group("group_0", 8, "float", "channel", None, None, True, activations, ())


def asked(bits=8, kind="float", strategy="token", dynamic=True, size=None, symmetric=True):
    of = {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": dynamic, "symmetric": symmetric}
    return of if size is None else of | {"group_size": size}


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (asked(), ActivationQuant.E4M3_TOKEN),
        (asked(strategy="TOKEN", kind="FLOAT"), ActivationQuant.E4M3_TOKEN),
        (asked(kind="int"), ActivationQuant.INT8_TOKEN),
        (asked(kind="int", strategy="group", size=128), ActivationQuant.INT8_GROUP),
        (asked(strategy="tensor", dynamic=False), ActivationQuant.E4M3_TENSOR),
        (asked(strategy="group", size=32), ActivationQuant.MXFP8),
        (asked(strategy="group", size=128), ActivationQuant.E4M3_GROUP128),
        (asked(bits=4, strategy="group", size=32), ActivationQuant.MXFP4),
        (asked(bits=4, strategy="tensor_group", size=16, dynamic="local"), ActivationQuant.NVFP4),
        ({"strategy": "token", "dynamic": True}, ActivationQuant.INT8_TOKEN),
    ],
)
def test_what_is_one_of_ours(of, expected):
    assert activation_of(group(of)) == (expected, ())


@pytest.mark.parametrize(
    ("of", "how"),
    [
        (asked(bits=9), "dynamic float9 for each token"),
        (asked(bits=4), "dynamic float4 for each token"),
        (asked(dynamic=False), "static float8 for each token"),
        (asked(symmetric=False), "dynamic asymmetric float8 for each token"),
        (asked(strategy="tensor"), "dynamic float8 for each tensor"),
        (asked(bits=4, strategy="tensor", dynamic=False), "static float4 for each tensor"),
        (asked(strategy="group", size=64), "dynamic float8 for each group"),
        (asked(strategy="group", size=33), "dynamic float8 for each group"),
        (asked(strategy="group", size=32, dynamic=False), "static float8 for each group"),
        (asked(bits=6, strategy="group", size=32), "dynamic float6 for each group"),
        (asked(bits=4, strategy="group", size=64), "dynamic float4 for each group"),
        (asked(bits=4, strategy="group", size=16, symmetric=False), "dynamic asymmetric float4 for each group"),
        (asked(bits=4, strategy="channel", size=16), "dynamic float4 for each channel"),
    ],
)
def test_what_is_near_is_not_rounded_and_said(of, how):
    found, (note,) = activation_of(group(of))
    assert found is ActivationQuant.NONE
    assert f"asks for {how} activations" in note


def test_who_asks_for_nothing_gets_nothing():
    assert activation_of(group(None)) == (ActivationQuant.NONE, ())
