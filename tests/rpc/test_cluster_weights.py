"""Real servers of one checkpoint agree on its weights whatever they make of them; one of a changed copy is refused."""

from __future__ import annotations

import json
import shutil
import struct
import time
from pathlib import Path

import pytest
from in_process import hosts

from expertd_client.cluster import ExpertCluster
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs
from expertd_server.boot.assignment import open_source
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Ranges

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gptq-w4-g128-sym-descact-false-qwen3moe1l"
TENSOR = "model.layers.0.mlp.experts.5.down_proj.qweight"


@pytest.fixture
def served():
    """served(checkpoint, **options): the address of a server of it."""
    with hosts() as serve:
        yield lambda checkpoint, **options: serve(checkpoint=checkpoint, **options).address


def damaged(folder):
    """A copy of the checkpoint with one bit turned in the middle of one expert's tensor; its headers are the same."""
    shutil.copytree(FIXTURE, folder)
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        if TENSOR in header:
            first, end = header[TENSOR]["data_offsets"]
            data[8 + size + (first + end) // 2] ^= 16
            path.write_bytes(data)
            return folder
    raise AssertionError(f"{TENSOR} is not there")


@pytest.mark.timeout(120)
def test_a_damaged_copy_is_refused_and_other_backends_are_not(served, tmp_path):
    info = open_source(ServeConfig(checkpoint=FIXTURE)).info(0)
    good = [
        served(FIXTURE, backend="reference"),
        served(FIXTURE, backend="cpu_torch", experts=Ranges.parse("4-7")),
        served(FIXTURE, cache=tmp_path / "cache"),
        served(FIXTURE, cache=tmp_path / "cache"),  # from packed weights alone
    ]
    bad = served(damaged(tmp_path / "damaged"))
    x, ids, w = random_inputs(9, info.hidden_size, info.num_experts, info.top_k, seed=1)
    want = reference(open_source(ServeConfig(checkpoint=FIXTURE)).load(0), x, ids, w)
    with ExpertCluster(good, timeout_s=30.0) as cluster:
        cluster.forward(0, x, ids, w)
        assert not any(cluster.servers.values())
    with ExpertCluster(Joining(good[:1], bad), timeout_s=30.0) as cluster:
        end_s = time.monotonic() + 10
        while "other weights" not in cluster.servers.get(bad, "") and time.monotonic() < end_s:
            answer = cluster.forward(0, x, ids, w)
            assert relative_error(answer.output.float(), want) <= tolerance("bf16")
            assert {part.server for part in answer.parts} == {good[0]}
        assert f"{bad}: layer 0, experts 5: got other weights" in cluster.servers[bad]


class Joining:
    """A source that tells of one server, and then of another one."""

    every_s = 0.2

    def __init__(self, first, other):
        self._says = [tuple(first), (*first, other)]

    def read(self):
        return self._says.pop(0) if len(self._says) > 1 else self._says[0]
