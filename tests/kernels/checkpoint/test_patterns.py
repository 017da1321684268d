"""Patterns of configurations: those that tools write match as `re` says, those that run for ever are refused."""

from __future__ import annotations

import contextlib
import itertools
import re
from types import SimpleNamespace

import pytest
from costs import cheaper

from expertd_kernels.checkpoint import patterns
from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.patterns import matches

NAMES = [
    "model.layers.0.mlp.experts.3.gate_proj",
    "model.layers.18.mlp.experts.127.down_proj",
    "model.language_model.layers.7.block_sparse_moe.experts.63.w2",
    "lm_head",
]


@pytest.mark.parametrize(
    "pattern",
    [
        r".*model\.layers\.0\.mlp\.gate.*",
        r".*experts.*_proj$",
        r"model\.layers\.(1[0-9]|2[0-3])\.mlp\.experts\..*",
        r"^(?!.*experts).*",
        r".*\.layers\.\d+\..*experts\.\d+\.(gate|up)_proj",
        r"(?:model\.)?(?P<where>layers|language_model)[.]\w{1,20}?.*",
        r"[(*+]|[]+*)]+|model.*",
    ],
)
def test_what_tools_write_matches_as_re_says(pattern):
    for name in NAMES:
        assert matches(pattern, name, "dynamic") == (re.match(pattern, name) is not None)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("pattern", "letters"),
    [
        (r"(a+)+b", 60),
        (r"(a*)*b", 60),
        (r"((a+))*b", 60),
        (r"(a|a)*b", 60),
        (r"(?:a|aa)+b", 60),
        (r"(a{1,9}){1,9}b", 60),
        (r"(?P<x>a+)+b", 60),
        (r"(?i:a+)+b", 60),
        (r"(x|(a+))+b", 60),
        ("a?" * 60 + "a" * 60, 60),
        (r".*.*.*.*.*.*.*.*.*b", 60),
        (r".*a.*a.*b", 5000),
        ("x" * 100_000, 10),
        ("(" * 5000, 10),
        ("(unclosed", 10),
    ],
)
def test_what_runs_for_ever_is_refused_at_once(pattern, letters):
    def refused():
        with pytest.raises(CheckpointError, match="quantization_config: dynamic") as e:
            matches(pattern, "a" * letters, "quantization_config: dynamic")
        assert len(str(e.value)) < 500

    assert cheaper(refused, ten_million_steps, 25)


def ten_million_steps():
    """A match that goes back ten million times: 20 ms."""
    assert re.match(".*.*.*b", "a" * 400) is None


@pytest.mark.parametrize(("takes_s", "names"), [(2**-3, 4), (2**-8, 128), (2**-11, 2000)])
def test_what_is_slow_has_a_budget_for_all_names_together(monkeypatch, takes_s, names):
    """Half a second over all names; a match of less than a millisecond costs nothing of it."""
    monkeypatch.setattr(patterns, "_paid", {})
    clock = itertools.count(0.0, takes_s)  # read before and after each match
    monkeypatch.setattr(patterns, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    pattern, matched = f"model{takes_s}.*", 0
    with contextlib.suppress(CheckpointError):
        while matched < 2000:
            assert not matches(pattern, "lm_head", "dynamic")
            matched += 1
    assert matched == names


def test_the_budget_is_of_real_time(monkeypatch):
    """A pattern that is allowed on each name alone, and slow on each."""
    monkeypatch.setattr(patterns, "_paid", {})
    with pytest.raises(CheckpointError, match="takes too long to match"):
        assert not any(matches(r".*a.*a.*a.*ab", "a" * 150 + str(n), "dynamic") for n in range(1000))
