"""kernels/bench/suite_rows.py: what the GPU tests came to, by row."""

from pathlib import Path

import pytest

import suite_rows
from suite_rows import row_of, summary_by_row

CASES = """
<testcase classname="tests.gpu.test_gluon_sm90" name="test_a[int4_g128-8]" time="2.5"/>
<testcase classname="tests.gpu.test_gluon_sm90" name="test_b" time="4">
<failure message="assert 1 == 2&#10; more">x</failure></testcase>
<testcase classname="tests.gpu.test_steady_layers" name="test_c[triton-mxfp4]" time="1">
<error message="setup"/></testcase>
<testcase classname="tests.gpu.test_server_gpu" name="test_d" time="0.5">
<skipped message="no NVLink">y</skipped></testcase>
<testcase classname="" name="tests.gpu.test_broken" time="0"><error message="collection failure">z</error></testcase>
<testcase time="0.17"/>
"""
REPORT = f'<testsuites><testsuite name="pytest">{CASES}</testsuite></testsuites>'


def test_a_summary_counts_by_row_and_names_what_failed_and_why_others_were_skipped(tmp_path):
    (tmp_path / "tests.xml").write_text(REPORT)
    said = summary_by_row([tmp_path / "tests.xml"]).splitlines()
    assert "| gluon_sm90 | 1 | 1 | 0 | 6 |" in said
    assert "| triton | 0 | 1 | 0 | 1 |" in said
    assert "| (server_gpu) | 0 | 0 | 1 | 0 |" in said
    assert "| all | 1 | 3 | 1 | 8 |" in said
    assert "FAILED tests.gpu.test_gluon_sm90::test_b: assert 1 == 2" in said
    assert "FAILED tests.gpu.test_broken::import: collection failure" in said
    assert "skipped 1: no NVLink" in said
    assert said[-5] == "4 s tests.gpu.test_gluon_sm90::test_b", "the slowest first"


@pytest.mark.parametrize(
    ("module", "name", "row"),
    [
        ("tests.gpu.test_gluon_w8a8", "test_x[e4m3_block128]", "gluon_w8a8"),
        ("tests.gpu.test_triton_gpu", "test_x", "triton"),
        ("tests.gpu.test_packages_gpu", "test_x[flashinfer_cutlass]", "flashinfer_cutlass"),
        ("tests.gpu.test_shared_scratch", "test_x[gluon_sm90-int4_g128]", "gluon_sm90"),
        ("tests.server.engine.test_graphs", "test_x[cuda]", "(graphs)"),
    ],
)
def test_a_test_belongs_to_the_row_that_its_parameters_or_its_file_name(module, name, row):
    assert row_of(module, name) == row


def test_every_file_with_a_gpu_test_is_found():
    found = {p.name for p in suite_rows.gpu_files(Path(__file__).parents[3])}
    assert {"test_gluon_sm90.py", "test_graphs.py", "test_counted.py"} <= found
    assert "test_cpu.py" not in found
