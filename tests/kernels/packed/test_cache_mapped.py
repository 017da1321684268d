"""What may happen to the file of a packed layer while it is mapped for days.  Wrong answers are never among it."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from cache_kit import NAME, Layer, scribble, turn

from expertd_kernels.backends import reference as backend
from expertd_kernels.common.protocol import ExpertsLostError
from expertd_kernels.native.library import kernel_error
from expertd_kernels.packed import mapping
from expertd_kernels.packed.cache import CacheError
from expertd_kernels.packed.file import ALIGN, read_entry

guarded = pytest.mark.skipif(bool(kernel_error()), reason=kernel_error() or "the library is there")


@guarded
def test_an_entry_overwritten_in_place_gives_no_answer_any_more(layer):
    experts = layer.experts()
    assert torch.equal(experts(*layer.inputs), layer.right)
    turn(layer.path, 2 * ALIGN + 5)
    for _ in range(2):
        with pytest.raises(ExpertsLostError, match=f"{NAME}: was overwritten while it was mapped: tensor w13") as e:
            experts(*layer.inputs)
    assert str(layer.path) in str(e.value)
    with pytest.raises(CacheError, match="its checksum differs"):
        layer.experts()


@guarded
def test_another_entry_copied_over_one_in_place_gives_no_answer(layer, tmp_path):
    """The same size, sound checksums, the right form: `cp other entry`."""
    other = Layer(tmp_path / "other", seed=1)
    experts = layer.experts()
    layer.path.chmod(0o644)
    inode = layer.path.stat().st_ino
    shutil.copyfile(other.path, layer.path)
    assert (layer.path.stat().st_ino, layer.path.stat().st_size) == (inode, other.path.stat().st_size)
    assert not torch.equal(experts._experts(*layer.inputs), layer.right), "the mapping does show the other weights"
    with pytest.raises(ExpertsLostError, match="was overwritten while it was mapped"):
        experts(*layer.inputs)


@guarded
def test_times_set_back_hide_nothing(layer):
    experts = layer.experts()
    before = layer.path.stat()
    turn(layer.path, 2 * ALIGN + 5)
    os.utime(layer.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert layer.path.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(ExpertsLostError, match="was overwritten"):
        experts(*layer.inputs)


@guarded
@pytest.mark.parametrize("size", [0, 1, ALIGN, 2 * ALIGN + 100])
def test_an_entry_that_is_cut_gives_no_answer_and_no_bus_error(layer, size):
    experts = layer.experts()
    os.truncate(layer.path, size)
    with pytest.raises(ExpertsLostError, match="while it was mapped"):
        experts(*layer.inputs)
    with pytest.raises(ExpertsLostError, match="was cut, or cannot be read any more, while it was mapped"):
        experts(*layer.inputs)


@guarded
def test_an_entry_that_is_cut_and_filled_again_is_judged_by_its_data(layer, caplog):
    """`cp` of the same file: between its two steps pages were gone, after them everything is as it was."""
    data = layer.path.read_bytes()
    experts = layer.experts()
    os.truncate(layer.path, 0)
    scribble(layer.path, 0, data)
    with caplog.at_level(logging.INFO):
        assert torch.equal(experts(*layer.inputs), layer.right)
    assert "its times changed, its data did not" in caplog.text


@guarded
@pytest.mark.parametrize("how", ["touch", "chmod", "another name", "renamed", "removed", "renamed over"])
def test_what_leaves_the_data_alone_goes_on(layer, tmp_path, how, caplog):
    experts = layer.experts()
    if how == "touch":
        layer.path.touch()
    elif how == "chmod":
        layer.path.chmod(0o600)
    elif how == "another name":
        os.link(layer.path, tmp_path / "more")
    elif how == "renamed":
        layer.path.rename(tmp_path / "elsewhere")
    elif how == "removed":
        layer.path.unlink()
    else:
        Layer(tmp_path, seed=1)  # written beside it and renamed, as every entry is
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert torch.equal(experts(*layer.inputs), layer.right)
    assert caplog.text.count("its times changed, its data did not") == 1, "the data is read once for a change"


@guarded
def test_an_entry_that_somebody_is_still_writing_to_is_lost_at_once(layer, monkeypatch):
    """Its checksums may be right now and wrong a moment later."""
    experts = layer.experts()
    sleep = mapping.time.sleep
    monkeypatch.setattr(mapping.time, "sleep", lambda s: (sleep(s), turn(layer.path, 0)))
    layer.path.touch()
    with pytest.raises(ExpertsLostError, match="is being written to while it is mapped"):
        experts(*layer.inputs)


def test_without_the_guard_an_entry_is_copied_and_nothing_matters_any_more(layer, monkeypatch):
    monkeypatch.setattr(mapping, "guard", lambda memory: None)
    entry = read_entry(layer.path)
    assert entry.file is None
    os.truncate(layer.path, 100)
    assert torch.equal(backend.experts(entry.packed, layer.problem)(*layer.inputs), layer.right)


def test_what_went_to_a_device_needs_no_file(layer):
    """Tensors that were in host memory when the layer was packed are copied there."""
    entry = read_entry(layer.path, device=torch.device("meta"))
    assert entry.file is None
    os.truncate(layer.path, 100)
    assert torch.equal(backend.experts(entry.packed, layer.problem)(*layer.inputs), layer.right)


@guarded
def test_descriptors_and_guards_go_with_the_experts(layer):
    def held() -> int:
        gc.collect()
        gc.collect()  # engines of other tests have descriptors
        return len(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system has no /proc/self/fd")
    before = held()
    some = [layer.experts() for _ in range(20)]
    assert held() >= before + 20
    del some
    assert held() == before
    many = 5000  # more than are guarded at a time
    assert all(read_entry(layer.path, verify=False).file is not None for _ in range(many))
