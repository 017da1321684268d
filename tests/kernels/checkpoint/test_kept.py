"""Tensors that are kept in a folder read as they did before."""

from __future__ import annotations

import pytest
import torch
import trained

from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.kept import open_kept, write_layer

HELD = {0: (1, 3), 1: (0,)}


@pytest.fixture
def source(tmp_path):
    return open_checkpoint(trained.saved(tmp_path / "1", trained.step(1)))


def kept(source, folder):
    for layer, experts in HELD.items():
        write_layer(folder, source.tensors(layer), experts)
    return folder


def test_the_weights_are_the_same(source, tmp_path):
    found = open_kept(kept(source, tmp_path / "kept"), source, HELD)
    assert found.layers == tuple(HELD)
    for layer, experts in HELD.items():
        mine, theirs = found.load(layer, experts), source.load(layer, experts)
        assert torch.equal(mine.w13.codes, theirs.w13.codes)
        assert torch.equal(mine.w2.codes, theirs.w2.codes)
        assert found.info(layer).num_experts == trained.E


def test_an_expert_that_was_not_kept_is_missed(source, tmp_path):
    folder = kept(source, tmp_path / "kept")
    with pytest.raises(CheckpointError, match="layer 0 lacks expert 2"):
        open_kept(folder, source, {0: (1, 2)})
    with pytest.raises(CheckpointError, match="there is no such file"):
        open_kept(folder, source, {5: (1,)})


def test_a_file_that_was_cut_is_refused(source, tmp_path):
    folder = kept(source, tmp_path / "kept")
    file = folder / "layer-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        open_kept(folder, source, HELD)
