"""New weights for a server on a GPU: quantized there, from bytes and from a trainer's GPU memory, with the bits of a
start."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import trained
from updating import Server

from expertd.errors import UpdateFailedError
from expertd_client.weights import Updater

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on an accelerator, this machine has none"),
]
ROOT = Path(__file__).resolve().parents[2]
TRAINER = """
import sys
sys.path.insert(0, sys.argv[1])
import trained
from expertd_client.weights import Updater
with Updater([sys.argv[2]], cuda_ipc=True) as updater, updater.version() as update:
    update.put_all({name: t.cuda() for name, t in trained.step(2).items()})
    assert update.sent_bytes < 1 << 20
"""


@pytest.fixture
def serve():
    with ExitStack() as stack:
        yield lambda config: Server(stack, config)


def config(folder, number, **more):
    at = trained.saved(folder / str(number), trained.step(number))
    return trained.config(at, device="cuda", quantize="int4_g128", max_tokens=64, threads=0, **more)


def test_answers_are_those_of_a_start_with_the_new_weights(serve, tmp_path):
    want = serve(config(tmp_path, 2)).answers()
    server = serve(config(tmp_path, 1))
    first = server.answers()
    server.update(trained.step(2))
    assert server.answers() == want
    with Updater([server.host.address]) as updater:
        updater.rollback()
    assert server.answers() == first


def test_a_folder_is_quantized_there_too(serve, tmp_path):
    want = serve(config(tmp_path, 2)).answers()
    server = serve(config(tmp_path, 1))
    with Updater([server.host.address]) as updater:
        updater.from_checkpoint(str(tmp_path / "2"))
    assert server.answers() == want


def test_a_trainers_gpu_memory_is_read_where_it_lies(serve, tmp_path):
    want = serve(config(tmp_path, 2)).answers()
    server = serve(config(tmp_path, 1, held=tmp_path / "held.json"))
    command = [sys.executable, "-c", TRAINER, str(ROOT / "tests" / "kit"), server.host.address]
    subprocess.run(command, check=True, timeout=120)
    assert server.answers() == want


def test_a_nan_is_named_and_the_old_version_goes_on(serve, tmp_path):
    server = serve(config(tmp_path, 1))
    first, tensors = server.answers(), trained.step(2)
    tensors["model.layers.1.mlp.experts.2.down_proj.weight"][3, 4] = float("nan")
    with (
        Updater([server.host.address]) as updater,
        pytest.raises(UpdateFailedError, match=r"layers\.1\.mlp\.experts\.2\.down_proj"),
        updater.version() as update,
    ):
        update.put_all(tensors)
    assert server.answers() == first


def test_a_layer_like_the_served_one_is_not_warmed_up_again(serve, tmp_path):
    server = serve(config(tmp_path, 1))
    before = server.host.residence.booted[0].served.measured
    stages = server.host.residence.weights.workshop.seconds
    warm = stages["warm_up"]
    server.update(trained.step(2))
    assert server.host.residence.booted[0].served.measured == before
    assert stages["warm_up"] == warm
