"""Which graphs the core launches for a batch on a device, by what its layer takes.  The driver is pretended
(pretended_device.py), everything else is what serves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from core_library import needs_core

from expertd.cxx import BuildError, find_compiler

pytestmark = [needs_core, pytest.mark.timeout(60)]
HERE = Path(__file__).parent
DRIVER = """
#include <cstdint>
#include <cstring>
using Stream = void*;
extern "C" {
int cuGraphLaunch(void* graph, Stream) { return reinterpret_cast<void (*)()>(graph)(), 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n, Stream) {
  return memcpy(reinterpret_cast<void*>(to), from, n), 0;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n, Stream) {
  return memcpy(to, reinterpret_cast<void*>(from), n), 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, Stream) {
  return memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), n), 0;
}
int cuEventRecord(void*, Stream) { return 0; }
int cuStreamWaitEvent(Stream, void*, unsigned) { return 0; }
int cuStreamWriteValue32_v2(Stream, uint64_t word, uint32_t value, unsigned) {
  return *reinterpret_cast<volatile uint32_t*>(word) = value, 0;
}
int cuEventCreate(void** event, unsigned) { return *event = event, 0; }
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    try:
        compiler = find_compiler()
    except BuildError as e:
        pytest.skip(str(e))
    command = [*compiler, "-std=c++17", "-fPIC", "-shared", str(folder / "driver.cpp"), "-o"]
    subprocess.run([*command, str(folder / "libcuda.so.1")], check=True, timeout=60)
    return folder


def launched(driver, takes_e4m3, nonfinite=0):
    """What batches of some kinds and sizes launched."""
    paths = [str(HERE), str(HERE.parents[1] / "kit"), *sys.path]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(HERE / "pretended_device.py"), str(int(takes_e4m3)), str(nonfinite)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_layer_gets_hidden_states_widened(driver):
    collected = ["COLLECT", "EXPERTS", "DELIVER"]
    assert launched(driver, False) == {
        "bf16 5": collected,
        "e4m3 5": collected,
        "bf16 200": [{"wide": [0, 199], "codes": [], "scales": []}, "COLLECT_ROUTES", "EXPERTS"],
        "e4m3 200": collected,
        "both": collected,
    }


def test_a_layer_that_takes_e4m3_gets_codes_which_copy_engines_bring_beside_what_is_rounded(driver):
    collected = ["COLLECT_E4M3", "EXPERTS", "DELIVER"]
    assert launched(driver, True) == {
        "bf16 5": collected,
        "e4m3 5": collected,
        "bf16 200": [{"wide": [0, 199], "codes": [], "scales": []}, "COLLECT_STAGED", "EXPERTS"],
        "e4m3 200": [{"wide": [], "codes": [0, 199], "scales": [0, 199]}, "COLLECT_STAGED", "EXPERTS"],
        "both": [{"wide": [0, 99], "codes": [100, 159], "scales": [100, 159]}, "COLLECT_STAGED", "EXPERTS"],
    }


def test_where_hidden_states_are_looked_at_e4m3_is_wide_and_no_copy_engine_brings_it(driver):
    found = launched(driver, True, nonfinite=1)
    assert found["e4m3 200"] == found["both"] == ["COLLECT_E4M3", "EXPERTS", "DELIVER"]
    assert found["bf16 200"][1:] == ["COLLECT_STAGED", "EXPERTS"]
