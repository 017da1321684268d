"""Host memory while layers are loaded: near one layer beside what stays, and never more than the plan of memory says.

Each case boots a checkpoint of several layers in a process of its own, which tells its peak of resident memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from expertd_kernels.checkpoint.synthetic_files import write_synthetic
from expertd_kernels.native.library import kernel_error

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are Linux's"),
    pytest.mark.skipif(bool(kernel_error()), reason=f"its layers are packed for the CPU kernel: {kernel_error()}"),
]
SLACK = 64 << 20
"""Threads, the allocator's rest, code that is loaded at the first layer."""

PLAIN_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
    "MALLOC_TOP_PAD_": "0",
}
"""What is freed goes back to the system at once.  By default glibc gives each thread an arena, and learns thresholds of
up to 32 MiB as it goes: the same boot then has peaks of 39 to 121 MB, by chance."""

BOOT = """
import json, sys
from pathlib import Path
import torch
from expertd_kernels.backends.footprint import canonical_bytes
from expertd_kernels.oracle.probe import detect_device, installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.cache import PackedCache
from expertd_server.boot.ahead import ReadAhead
from expertd_server.boot.assignment import assign_layers, open_source
from expertd_server.boot.layers import boot_layers
from expertd_server.boot.memory import plan_memory
from expertd_server.boot.prepare import Workshop
from expertd_server.config.serve import ServeConfig

def status(key):
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(key + ":"))

folder, how, quantize, cache = sys.argv[1:]
torch.set_num_threads(2)
config = ServeConfig(checkpoint=Path(folder), device="cpu", backend="cpu", quantize=quantize or None,
                     cache=Path(cache) if cache else None, max_tokens=16)
source = open_source(config)
found = assign_layers(config, source, detect_device("cpu"), installed_packages(BACKENDS))
plan = plan_memory(config, found)
source.load(found[0].info.layer, range(8))  # imports, threads
facts = {"layers": len(found), "layer": canonical_bytes(found[0].decision.problem), "weights": plan.weights,
         "said": plan.peak - plan.context}
for each in how.split(","):
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    if each == "boot":
        kept = boot_layers(found, Workshop(source, torch.device("cpu"), config.cache and PackedCache(config.cache),
                                           max_tokens=16))
    else:  # as for an accelerator: the host's copy goes as soon as it is taken
        ahead = ReadAhead(source, found)
        for a in found:
            ahead.take(a)
            ahead.go_on(a)
    facts[each] = status("VmHWM") - before
print(json.dumps({**facts, "anonymous": status("RssAnon")}))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for kind, hidden in (("gptq", 1024), ("bf16", 512)):  # about 100 MB a layer
        folder = tmp_path_factory.mktemp(kind)
        made[kind] = write_synthetic(folder, f"{kind}:0.4", hidden=hidden, intermediate=hidden // 2)
    return made


def boot(folder, how, quantize="", cache=""):
    command = [sys.executable, "-c", BOOT, str(folder), how, quantize, str(cache)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | PLAIN_MALLOC)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["layers"] == 4
    return found


def test_loading_holds_near_one_layer_beside_what_stays(folders):
    """On the way to a device one layer, on a CPU one that is packed and one that is read; the plan knows both."""
    found = boot(folders["gptq"], "device,boot")
    assert found["layer"] - SLACK <= found["device"] <= 1.2 * found["layer"] + SLACK, found
    assert found["weights"] <= found["boot"] <= found["weights"] + 2 * found["layer"] + SLACK, found
    assert found["boot"] <= found["said"] + SLACK, found


def test_quantizing_while_loading_holds_the_quantized_layer_and_a_few_experts(folders):
    found = boot(folders["bf16"], "device", "int4_g128")
    assert found["device"] <= 1.2 * found["layer"] + SLACK, found
    assert 4 * found["layer"] > 1.2 * found["layer"] + SLACK, "in bf16 it would not be"


def test_weights_mapped_from_a_cache_are_pages_that_others_share(folders, tmp_path):
    first, second = (boot(folders["gptq"], "boot", "", tmp_path) for _ in range(2))
    assert first["boot"] <= first["weights"] + 3 * first["layer"] + SLACK, first
    assert second["boot"] <= second["weights"] + SLACK, "found, so nothing was read"
    for found in (first, second):
        assert found["anonymous"] < 450 << 20, "half of it is there without any weights"
