"""Patterns of configurations: those that tools write match as `re` says, those that run for ever are refused."""

from __future__ import annotations

import re
import time

import pytest

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
    begin = time.process_time()
    with pytest.raises(CheckpointError, match="quantization_config: dynamic") as e:
        matches(pattern, "a" * letters, "quantization_config: dynamic")
    assert time.process_time() - begin < 0.5
    assert len(str(e.value)) < 500


@pytest.mark.timeout(30)
def test_what_is_slow_has_a_budget_for_all_names_together():
    """Allowed on each name alone, and not on thousands of them."""
    pattern = r".*a.*a.*a.*ab"
    begin = time.process_time()
    with pytest.raises(CheckpointError, match="takes too long to match"):
        assert not any(matches(pattern, "a" * 150 + str(n), "dynamic") for n in range(1000))
    assert time.process_time() - begin < 3
