"""The numbers that plans follow: one file a room says on which GPU they were measured, others get their share."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from expertd_kernels.backends import gluon
from expertd_kernels.backends.gluon.shared.measured import numbers
from expertd_kernels.backends.gluon.w8a8.plan import Plan8, Shape8, rules8
from expertd_kernels.backends.gluon.weight_only.codec import codec_of
from expertd_kernels.backends.gluon.weight_only.planning import Plans, heuristic
from expertd_kernels.backends.gluon.weight_only.rules import rules_of
from expertd_kernels.weights.scheme import Scheme

FILES = sorted(Path(gluon.__file__).parent.glob("*/plans/rules.json"))
INT4 = codec_of(Scheme.parse("int4_g128"))
QWEN3 = (128, 8, 2048, 768)


def test_counts_go_with_multiprocessors_and_limits_do_not(tmp_path):
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"gpu": "a", "multiprocessors": 100, "counts": {"many": 50}, "limits": {"short": 7}}))
    assert numbers(file, None) == {"multiprocessors": 100, "many": 50, "short": 7}
    assert numbers(file, 40) == {"multiprocessors": 40, "many": 20, "short": 7}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.parent.parent.name)
def test_every_number_was_measured_on_the_gpu_of_a_tuned_table(file):
    said = json.loads(file.read_text())
    table = json.loads((FILES[-1].parent / "nvidia_h200.json").read_text())
    assert (said["gpu"], said["multiprocessors"]) == (table["gpu"], table["multiprocessors"])


@pytest.mark.parametrize("rules", [rules_of, rules8])
def test_on_the_gpu_of_the_file_the_numbers_are_those_of_the_file(rules):
    there = rules()
    assert asdict(rules(there.multiprocessors)) == asdict(there)
    half = rules(there.multiprocessors // 2)
    assert half.multiprocessors == there.multiprocessors // 2
    assert half != there


def test_a_tuned_table_is_for_the_gpu_with_as_many_multiprocessors():
    assert Plans.for_layer("NVIDIA H200", rules_of().multiprocessors, INT4, INT4, QWEN3).tuned
    slice_of_one = Plans.for_layer("NVIDIA H200", 60, INT4, INT4, QWEN3)
    assert not slice_of_one.tuned
    assert slice_of_one.rules == rules_of(60)


def test_ctas_are_counted_for_the_multiprocessors_that_are_there():
    """Qwen3-30B's 1342 pairs of row tiles at 32 tokens: on 132 multiprocessors 1.45 rounds of 7 * 132 CTAs or 2.03 of
    5 * 132, which have the longer stages; on 78 of them 2.46 of 7 * 78 or 3.44 of 5 * 78, and those idle less."""
    large, small = (heuristic((INT4, INT4), QWEN3, 32, rules_of(n)).w13 for n in (132, 78))
    assert (large.columns, small.columns) == (128, 256)
    few = [Plan8.of(1, Shape8(8, 2, 4096, 14336), rules=rules8(n)).few[1].parts for n in (132, 33)]
    assert few == [4, 1]
