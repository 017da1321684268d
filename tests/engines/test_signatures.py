"""Sources: what a package defines, read from its files; differences: what of it a caller would notice."""

from __future__ import annotations

import pytest

from expertd_client.engines.signatures import MissingNameError, Sources, differences

FILES = {
    "engine/__init__.py": "from typing import TYPE_CHECKING\nfrom .parts import make as build\nfrom .parts import *\n"
    "from engine import parts\nif TYPE_CHECKING:\n    current: Platform\nfrom .parts import Platform\n",
    "engine/parts.py": """
import torch
from dataclasses import dataclass
from typing import NamedTuple

LIMIT = 4

class Platform:
    def is_cpu(self) -> bool: ...
    @property
    def name(self): ...

def make(x: int, /, size: int = 3, *more, deep: bool = False, **rest) -> None: ...

class Base(torch.nn.Module):
    def __init__(self, moe, experts=None): ...
    def apply(self, layer, x): ...

class Layer(Base):
    kept: int = 5
    def load(self, weights):
        self.loaded = weights

@dataclass
class Config:
    size: int
    factor: float = 1.0
    names: list = field(default_factory=list)

@dataclass
class More(Config):
    last: str = "a"

class Output(NamedTuple):
    hidden_states: object
    scale: object = None

def _forward(hidden_states, layer_name): ...

register(op_name="moe_forward", op_func=_forward, fake_impl=None)
""",
}


@pytest.fixture
def sources(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return Sources(tmp_path)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("engine.parts:make", "(x, /, size=3, *more, deep=False, **rest)"),
        ("engine:build", "(x, /, size=3, *more, deep=False, **rest)"),  # by its other name
        ("engine:Layer", "(moe, experts=None)"),  # of its base, through a star
        ("engine:Layer.apply", "(self, layer, x)"),
        ("engine:Layer.load", "(self, weights)"),
        ("engine:parts.Layer.kept", "constant"),
        ("engine:current.is_cpu", "(self)"),  # of its annotation
        ("engine:Platform.name", "property"),
        ("engine:LIMIT", "constant"),
        ("engine:Platform", "()"),
        ("engine:Config", "(size, factor=1.0, names)"),
        ("engine:More", "(size, factor=1.0, names, last='a')"),
        ("engine:Output", "(hidden_states, scale=None)"),
        ("engine:More[size,factor,names]", {"size": "a field", "factor": "1.0", "names": "a field"}),
        ("engine:Layer{loaded,kept,apply}", dict.fromkeys(("loaded", "kept", "apply"), "an attribute")),
        ("engine.parts:op moe_forward", "(hidden_states, layer_name)"),
    ],
)
def test_what_a_name_is(sources, name, found):
    assert sources.signature(name) == found


@pytest.mark.parametrize(
    "name",
    [
        "engine:nothing",
        "engine:Layer.nothing",
        "engine.nothing:x",
        "engine:Config[nothing]",
        "engine:Layer{nothing}",
        "engine.parts:op other",
    ],
)
def test_what_is_not_there_is_missing(sources, name):
    with pytest.raises(MissingNameError):
        sources.signature(name)
    assert sources.signatures([name]) == {name: None}


@pytest.mark.parametrize(
    ("was", "now", "holds"),
    [
        ("(a, b=1)", "(a, b=1)", True),
        ("(a, b=1)", "(a, b=1, c=2)", True),
        ("(a, b=1)", "(a, b=2)", True),
        ("(a, b=1)", "(a, b=1, *, c=2)", True),
        ("(a, *, b)", "(a, b)", False),  # what was optional or by name would be needed in another place
        ("(a)", "(a, c)", False),
        ("(a, b=1)", "(a, c=2, b=1)", False),
        ("(a, b=1)", "(b, a=1)", False),
        ("(a, b=1)", "(a, b)", False),
        ("(a, b=1)", "(a)", False),
        ("(a, **rest)", "(a)", False),
        ("(a)", "(a, *, b)", False),
        ("(a)", "property", False),
        ("(a)", None, False),
        ({"x": "1"}, {"x": "2"}, True),
        ({"x": "1"}, None, False),
    ],
)
def test_what_a_caller_would_notice(was, now, holds):
    assert (differences({"m:f": was}, {"m:f": now}) == {}) is holds


def test_what_is_overridden_has_to_be_the_same():
    """The engine calls ours, and could pass what ours does not take."""
    was, now = {"m:C.apply": "(self, x)"}, {"m:C.apply": "(self, x, y=None)"}
    assert not differences(was, now)
    assert differences(was, now, ["m:C.apply"]) == {"m:C.apply": "is (self, x, y=None), was (self, x)"}
