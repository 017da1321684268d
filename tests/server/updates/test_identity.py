"""Servers, folders and trainers find the same identity of the same weights, whichever experts they have."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import trained
from safetensors.torch import save_file
from updating import IDS, Server, W, X

from expertd.errors import ExpertdError
from expertd_client import ExpertCluster
from expertd_client.weights import Updater
from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.sources.synthetic import SyntheticModel
from expertd_server.config.values import Ranges
from expertd_server.updates.identity import identity_of, sampled_names

pytestmark = pytest.mark.timeout(180)
HALVES = [{"experts": Ranges.parse(h)} for h in ("0-1", "2-3")]


def identity(server: Server) -> str:
    return server.client.describe().versions[0].identity


def changed(number: int, expert: int) -> dict[str, torch.Tensor]:
    """A step with other weights of one expert of layer 1, behind its first bytes."""
    tensors = trained.step(number)
    tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"].view(-1)[1000:] += 1
    return tensors


def test_it_is_of_all_weights_and_of_no_path(tmp_path):
    folders = [trained.saved(tmp_path / str(n), trained.step(n)) for n in (1, 2)]
    one, other = (identity_of(open_checkpoint(f)) for f in folders)
    assert one.startswith("sampled:")
    assert one != other
    assert identity_of(open_checkpoint(trained.saved(tmp_path / "copy", trained.step(1)))) == one
    split = trained.saved(tmp_path / "split", {})
    (split / "model.safetensors").unlink()
    tensors = trained.step(1)
    for n, name in enumerate(tensors):
        save_file({name: tensors[name]}, split / f"model-{n:05d}-of-{len(tensors):05d}.safetensors")
    assert identity_of(open_checkpoint(split)) == one, "in other files"


def test_a_fine_tune_that_the_fingerprint_does_not_see_is_seen(tmp_path):
    checkpoints = [
        open_checkpoint(trained.saved(tmp_path / str(n), tensors))
        for n, tensors in enumerate((trained.step(1), changed(1, 2)))
    ]
    assert checkpoints[0].fingerprint == checkpoints[1].fingerprint
    assert identity_of(checkpoints[0]) != identity_of(checkpoints[1])


def test_it_reads_64_kib_of_a_layer_at_most(tmp_path):
    checkpoint = open_checkpoint(trained.saved(tmp_path / "1", trained.step(1)))
    before = checkpoint.bytes_read
    identity_of(checkpoint)
    assert 0 < checkpoint.bytes_read - before <= len(checkpoint.layers) * 65536
    assert len(sampled_names(checkpoint)) == len(trained.LAYERS) * 3 * trained.E


def test_synthetic_weights_have_that_of_their_model():
    one, same, other = (identity_of(SyntheticModel.parse(f"tiny:{s}")) for s in ("bf16", "bf16", "int4_g128"))
    assert one.startswith("synthetic:")
    assert one == same != other


@pytest.fixture
def shards(tmp_path):
    """Two servers of one half of the experts each, and what starts one more."""
    folder = trained.saved(tmp_path / "1", trained.step(1))
    with ExitStack() as stack:
        yield [Server(stack, trained.config(folder, **half)) for half in HALVES], stack


def test_shards_of_one_folder_of_an_update_and_of_its_tensors_have_the_same_one(shards, tmp_path):
    (a, b), stack = shards
    first = identity(a)
    assert first == identity(b)
    with Updater([a.host.address, b.host.address]) as updater:
        with updater.version(7) as update:
            update.put_all(trained.step(2))
        seven = identity(a)
        assert seven == identity(b) != first
        new = trained.saved(tmp_path / "2", trained.step(2))
        assert updater.from_checkpoint(str(new)) == 8
        assert identity(a) == identity(b) == seven == identity(Server(stack, trained.config(new)))
        updater.rollback(7)
        assert identity(a) == seven


def test_what_changed_of_the_same_version_has_the_same_one(shards, tmp_path):
    """Differences are of no folder: they can be compared among themselves."""
    (a, b), _ = shards
    first = identity(a)
    with Updater([a.host.address, b.host.address]) as updater:
        with updater.version(2, base=1, delta=True) as update:
            update.put_all({n: t for n, t in changed(1, 2).items() if "experts.2" in n})
        assert identity(a) == identity(b) != first
        assert identity(a).startswith("changes:")


@pytest.mark.parametrize("held", [False, True])
def test_a_restart_has_that_of_what_it_serves(tmp_path, held):
    folder = trained.saved(tmp_path / "1", trained.step(1))
    options = {"held": tmp_path / "held.json"} if held else {}
    with ExitStack() as stack:
        server = Server(stack, trained.config(folder, **options))
        first = identity(server)
        with Updater(server.host.address) as updater, updater.version(2) as update:
            update.put_all(trained.step(2))
        second = identity(server)
        server.host.close()
        assert identity(Server(stack, trained.config(folder, **options))) == (second if held else first)


def test_a_trainer_that_does_not_put_what_is_sampled_leaves_it_unknown(shards):
    (a, _), _ = shards
    with Updater(a.host.address) as updater, updater.version(2) as update:
        update.put_all({n: t for n, t in trained.step(2).items() if "experts.3" not in n})
    assert not identity(a)


def test_shards_of_two_checkpoints_are_not_added_up(shards, tmp_path):
    """Same shapes, same fingerprint, no expert in common, both version 1."""
    (a, _), stack = shards
    tuned = trained.saved(tmp_path / "tuned", changed(1, 2))
    b = Server(stack, trained.config(tuned, **HALVES[1]))
    assert a.client.describe().model.fingerprint == b.client.describe().model.fingerprint
    refused = pytest.raises(ExpertdError, match=r"version 1 of the weights: got sampled:.*expertctl update")
    with ExpertCluster([a.host.address, b.host.address], timeout_s=5) as cluster, refused:
        cluster.forward(1, X, IDS, W)


def test_numbers_that_two_trainers_gave_to_other_weights_are_not_added_up(shards):
    (a, b), _ = shards
    for number, server in enumerate((a, b)):
        with Updater(server.host.address) as updater, updater.version(5) as update:
            update.put_all(trained.step(2 + number))
    refused = pytest.raises(ExpertdError, match="version 5 of the weights: got sampled:")
    with ExpertCluster([a.host.address, b.host.address], timeout_s=5) as cluster, refused:
        cluster.forward(0, X, IDS, W)


def test_a_folder_that_cannot_be_read_is_refused(tmp_path):
    folder: Path = trained.saved(tmp_path / "1", trained.step(1))
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match="bytes early"):
        identity_of(checkpoint)
