"""Other versions of transformers than the installed one, from the sources that `make vendor` fetches: equal tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from fetch_engines import pinned
from hosts import hosts
from tiny_models import save, tiny_model

from expertd_client.transformers.versions import ADAPTER

EXAMPLES = Path(__file__).parents[2] / "client/examples"
FAMILIES = ("qwen3_moe", "gpt_oss")
CODE = """
import sys
import transformers, transformers_model
print(transformers.__version__)
for checkpoint, address in zip(sys.argv[1::2], sys.argv[2::2]):
    assert transformers_model.main(checkpoint, address) == 0
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """[checkpoint, address, ...] of the families."""
    folders = [save(tiny_model(family), tmp_path_factory.mktemp(family)) for family in FAMILIES]
    with hosts([{"checkpoint": folder} for folder in folders]) as addresses:
        yield [str(part) for pair in zip(folders, addresses, strict=True) for part in pair]


@pytest.mark.parametrize("version", [v for v in ADAPTER.tried if v != transformers.__version__])
def test_another_version_says_the_same_with_its_experts_served(version, served):
    site = pinned()["transformers", version]
    if not site.is_dir():
        pytest.skip(f"transformers {version} is not fetched: `make vendor`")
    path = os.pathsep.join([str(site), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error::UserWarning:expertd_client", "-c", CODE, *served]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == version
    assert done.stdout.count("24 greedy tokens: equal") == len(FAMILIES)


def test_the_installed_version_is_one_of_them():
    assert transformers.__version__ in ADAPTER.tried
