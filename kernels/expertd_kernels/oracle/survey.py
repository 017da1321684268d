"""The oracle's whole answer, device by scheme by rounding of the activations by feature: for the golden file, the docs
page and the eye.  Pure.

Rules look at the device, the schemes and the features separately, so the refusals of a row factorize: what it says of
each device, of each scheme and of each feature is the whole survey of its refusals.  What depends on all of them
together is the decision, and that is listed for every combination.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from expertd_kernels.common.problem import NAMED_DEVICES, Device, Problem
from expertd_kernels.oracle.decision import Backend, decide
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.rules import judge
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.weights.activation import Activation, ActivationKind
from expertd_kernels.weights.scheme import ActivationQuant, Scheme

__all__ = ["ANY", "FEATURES", "ROUNDINGS", "SCHEMES", "decisions", "problem", "refusals"]

SCHEMES = (
    "int4_g32", "int4_g64", "int4_g128", "int4_g128_zp", "int4_channel", "int8_g128", "int8_channel", "int8_channel_zp",
    "e4m3_tensor", "e4m3_channel", "e4m3_block128", "mxfp8", "mxfp4", "nvfp4", "bf16", "f16", "f32",
)  # fmt: skip
"""One of each kind of weights that checkpoints hold."""

ROUNDINGS: Mapping[str, ActivationQuant] = {
    "weight-only": ActivationQuant.NONE,
    "a: e4m3 per token": ActivationQuant.E4M3_TOKEN,
    "a: e4m3 per 128 group": ActivationQuant.E4M3_GROUP128,
    "a: e4m3 static tensor": ActivationQuant.E4M3_TENSOR,
    "a: mxfp8": ActivationQuant.MXFP8,
    "a: mxfp4": ActivationQuant.MXFP4,
    "a: nvfp4": ActivationQuant.NVFP4,
    "a: int8 per token": ActivationQuant.INT8_TOKEN,
    "a: int8 per group": ActivationQuant.INT8_GROUP,
}
"""How the activations can be asked to be rounded."""

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "swigluoai": {"activation": Activation.parse("swigluoai")},
    "swigluoai + bias": {"activation": Activation.parse("swigluoai"), "bias": True},
    "gelu_and_mul": {"activation": Activation(ActivationKind.GELU_AND_MUL)},
    "gelu_tanh_and_mul": {"activation": Activation(ActivationKind.GELU_TANH_AND_MUL)},
    "relu2": {"activation": Activation(ActivationKind.RELU2)},
    "silu with clamp": {"activation": Activation(limit=10.0)},
    "activation order": {"act_order": True},
    "H, I = 2880": {"hidden_size": 2880, "intermediate_size": 2880},
    "H, I = 100": {"hidden_size": 100, "intermediate_size": 100},
    "1024 experts": {"num_experts": 1024},
    "f32 compute": {"compute_dtype": "f32"},
    "deterministic": {"deterministic": True},
    "batch-invariant": {"batch_invariant": True},
}
"""What a layer or a request can ask beyond scheme and rounding: fields of Problem that differ from the plain one."""


class Answer(NamedTuple):
    """chosen: the backend's name; "-" where no row serves this.  feature: ANY where no row serves the plain layer: a
    feature only adds refusals."""

    device: str
    scheme: str
    rounding: str
    feature: str
    chosen: str


ANY = "any"


def problem(device: Device, scheme: str, feature: str = "plain", rounding: str = "weight-only") -> Problem:
    """A Qwen3-30B-A3B-like layer of `scheme` on `device` with one feature, all packages assumed to be there."""
    s = Scheme.parse(scheme)
    plain = Problem(device, s, s, 128, 2048, 768, 8, packages=assumed_packages(BACKENDS))
    how = ROUNDINGS[rounding]
    return replace(plain, **FEATURES[feature], activation_quant=how, static_scales=how.static)


def decisions(features: Sequence[str] = tuple(FEATURES)) -> Iterator[Answer]:
    """Every combination, in the order of the tables."""
    for device_name, device in NAMED_DEVICES.items():
        for scheme, rounding in product(SCHEMES, ROUNDINGS):
            for feature in features:
                d = decide(problem(device, scheme, feature, rounding))
                if d.chosen is None and feature == "plain":
                    yield Answer(device_name, scheme, rounding, ANY, "-")
                    break
                yield Answer(device_name, scheme, rounding, feature, d.chosen.name if d.chosen else "-")


def refusals(backend: Backend) -> Iterator[tuple[str, str, str]]:
    """("device" | "scheme" | "feature" | "rounding", name, refusal) of everything that this row refuses by itself."""
    home = next((d for d in NAMED_DEVICES.values() if not _says(backend, problem(d, _easy(backend)), "runs on")), None)
    for name, device in NAMED_DEVICES.items():
        yield from (("device", name, r) for r in _against(backend, problem(device, _easy(backend)), home))
    if home is None:
        return
    for scheme in SCHEMES:
        yield from (("scheme", scheme, r) for r in judge(backend, problem(home, scheme)))
    easy = set(judge(backend, problem(home, _easy(backend))))
    for feature in FEATURES:
        found = judge(backend, problem(home, _easy(backend), feature))
        yield from (("feature", feature, r) for r in found if r not in easy)
    for rounding in ROUNDINGS:
        found = judge(backend, problem(home, _easy(backend), rounding=rounding))
        yield from (("rounding", rounding, r) for r in found)


def _says(backend: Backend, p: Problem, text: str) -> bool:
    return any(text in r or ("needs" in r and "this is" in r) for r in judge(backend, p))


def _easy(backend: Backend) -> str:
    """A scheme that the row serves where it runs: the background against which devices and features are shown.  Rather
    one that it serves weight-only, with all its functions and on all its devices."""
    served = []
    for name in SCHEMES:
        s = Scheme.parse(name)
        lines = [x for x in backend.schemes if x.element is s.element and x.refusal(s) is None]
        served += [name] if lines else []
        if any(ActivationQuant.NONE in x.activations and not x.devices and x.functions is None for x in lines):
            return name
    return (served or SCHEMES)[0]


def _against(backend: Backend, p: Problem, home: Device | None) -> tuple[str, ...]:
    """The refusals of `p` that are not there on the row's home device."""
    known = set(judge(backend, replace(p, device=home))) if home else set()
    return tuple(r for r in judge(backend, p) if r not in known)
