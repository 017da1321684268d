"""The CUDA bench's parts that need no GPU: names of shapes, the suite, its files, its refusal without a GPU."""

import argparse
import csv

import pytest
import torch

from expertd_kernels import Scheme
from expertd_kernels.bench import cuda


def test_shapes_by_name_slice_and_numbers():
    assert cuda.shape_of("qwen3-30b-a3b").num_experts == 128
    assert cuda.shape_of("deepseek-v3/64").num_experts == 64
    free = cuda.shape_of("E60-k6-H3584-I1280")
    assert (free.num_experts, free.top_k, free.hidden_size, free.intermediate_size) == (60, 6, 3584, 1280)
    for wrong in ("qwen9", "deepseek-v3/x", "E60-k6"):
        with pytest.raises(ValueError, match="want a model, MODEL/EXPERTS"):
            cuda.shape_of(wrong)


def test_the_suite_names_real_shapes_and_schemes():
    for shape, scheme, routing in cuda.SUITE:
        assert cuda.shape_of(shape).hidden_size > 0
        assert Scheme.parse(scheme).name == scheme
        assert routing in ("uniform", "zipf")


def test_csv_has_a_line_a_point_with_machine_and_ceilings(tmp_path):
    row = {"shape": "s", "M": 8, "us": 1.5}
    result = {"machine": {"gpu": "G", "commit": "c"}, "ceilings": {"read_gb_s": 1.0}, "rows": [row, {**row, "M": 32}]}
    cuda.write_csv(tmp_path / "out.csv", result)
    lines = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [line["M"] for line in lines] == ["8", "32"]
    assert {(line["gpu"], line["commit"], line["read_gb_s"]) for line in lines} == {("G", "c", "1.0")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    args = argparse.Namespace(shape=None, scheme=None, backend=None, routing=None, m=None, json=None, csv=None)
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        cuda.run(args)
