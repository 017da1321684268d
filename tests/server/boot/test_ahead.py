"""Layers read one ahead: which, when, how many at a time, and what loading says of its speed."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from waiting import until

from expertd_kernels.oracle.probe import detect_device
from expertd_kernels.packed.cache import PackedCache
from expertd_kernels.packed.integrity import boot_reference_experts
from expertd_kernels.sources.synthetic import SyntheticModel
from expertd_server.boot import layers as boot_module
from expertd_server.boot.ahead import ReadAhead, bound_text, storage_bytes
from expertd_server.boot.assignment import BootError, assign_layers, open_source
from expertd_server.boot.layers import boot_layers
from expertd_server.boot.prepare import Workshop
from expertd_server.config.serve import ServeConfig


class Source:
    """Notes what is read, and how many layers are read or held at a time."""

    def __init__(self, fails: int = -1) -> None:
        self.read: list[int] = []
        self.threads: list[str] = []
        self.fails = fails

    def load(self, layer, experts=None):
        self.read.append(layer)
        self.threads.append(threading.current_thread().name)
        if layer == self.fails:
            raise ValueError("a hole in the file")
        return f"layer {layer}"


def assignments(count: int):
    return [SimpleNamespace(info=SimpleNamespace(layer=n), whole=True, held=()) for n in range(count)]


def settled(source: Source, count: int) -> None:
    end = time.monotonic() + 10
    while len(source.read) < count and time.monotonic() < end:
        time.sleep(0.001)


def test_the_next_layer_is_read_while_nobody_waits_and_no_more_than_that():
    source, layers = Source(), assignments(4)
    ahead = ReadAhead(source, layers)
    assert ahead.take(layers[0]) == "layer 0"
    assert source.read == [0], "not before it is told to go on"
    ahead.go_on(layers[0])
    settled(source, 2)
    ahead.go_on(layers[0])
    until(lambda: "expertd-ahead" not in {t.name for t in threading.enumerate()})
    assert source.read == [0, 1], "one ahead"
    assert source.threads[1] == "expertd-ahead"
    assert ahead.take(layers[1]) == "layer 1"
    ahead.go_on(layers[3])
    assert source.read == [0, 1], "nothing follows the last"
    assert ahead.seconds > 0


def test_layers_that_the_cache_has_are_not_read_and_a_wrong_guess_is_dropped():
    source, layers = Source(), assignments(4)
    ahead = ReadAhead(source, layers, wanted=lambda a: a.info.layer != 1)
    ahead.take(layers[0])
    ahead.go_on(layers[0])
    assert source.read == [0]
    ahead.take(layers[1])
    ahead.go_on(layers[1])
    settled(source, 3)
    assert ahead.take(layers[3]) == "layer 3", "2 was read, and nobody came for it"
    assert source.read == [0, 1, 2, 3]


def test_an_error_of_the_reading_thread_comes_out_where_the_layer_is_asked_for():
    source, layers = Source(fails=1), assignments(3)
    ahead = ReadAhead(source, layers)
    ahead.take(layers[0])
    ahead.go_on(layers[0])
    with pytest.raises(ValueError, match="a hole in the file"):
        ahead.take(layers[1])
    ahead.go_on(layers[1])
    ahead.close()
    assert source.read == [0, 1, 2]


def test_without_a_list_each_layer_is_read_when_it_is_asked_for():
    source, layers = Source(), assignments(2)
    ahead = ReadAhead(source)
    ahead.take(layers[0])
    ahead.go_on(layers[0])
    ahead.take(layers[1])
    assert source.threads == ["MainThread"] * 2


def booted(monkeypatch, tmp_path=None, source=None):
    """(reads in order, boot) of the tiny model."""
    config = ServeConfig(synthetic="tiny:int4_g128")
    source = source or open_source(config)
    reads, load = [], SyntheticModel.load
    monkeypatch.setattr(SyntheticModel, "load", lambda self, *a: reads.append(a[0]) or load(self, *a))
    found = assign_layers(config, source, detect_device("cpu"), {})
    workshop = Workshop(source, torch.device("cpu"), None if tmp_path is None else PackedCache(tmp_path))
    return reads, lambda: boot_layers(found, workshop), workshop


def test_a_boot_reads_each_layer_once_and_from_the_cache_none(monkeypatch, tmp_path):
    reads, boot, workshop = booted(monkeypatch, tmp_path)
    first = boot()
    assert sorted(reads) == [0, 1]
    assert workshop.reading["seconds"] > 0
    second = boot()
    assert sorted(reads) == [0, 1]
    assert [b.from_cache for b in first + second] == [False, False, True, True]


def test_what_is_drawn_on_a_device_is_not_drawn_ahead(monkeypatch):
    source = SyntheticModel.parse("tiny:int4_g128")
    booted(monkeypatch, source=source)
    source.device = torch.device("meta")  # any that is not the CPU
    ahead, _ = boot_module._ahead([1, 2], SimpleNamespace(source=source))
    assert ahead == ()
    source.device = torch.device("cpu")
    assert boot_module._ahead([1, 2], SimpleNamespace(source=source))[0] == [1, 2]


def test_a_layer_that_cannot_be_read_stops_the_boot_with_its_number(monkeypatch):
    _, boot, _ = booted(monkeypatch)
    load = SyntheticModel.load

    def broken(self, layer, *a):
        if layer == 1:
            raise ValueError("a hole in the file")
        return load(self, layer, *a)

    monkeypatch.setattr(SyntheticModel, "load", broken)
    with pytest.raises(BootError, match="layer 1: a hole in the file"):
        boot()


def test_layers_like_one_that_was_compared_have_fewer_experts_compared():
    w = SyntheticModel.parse("qwen3-30b-a3b:int4_g128").load(0, range(2))
    each = w.w13.shape[1] * w.w13.shape[2] + w.w2.shape[1] * w.w2.shape[2]
    many = SimpleNamespace(num_experts=128, w13=w.w13, w2=w.w2)
    assert boot_reference_experts(many) == (64 << 20) // each == 14
    assert boot_reference_experts(many, later=True) == 2


def test_people_are_told_how_fast_it_was_and_why_not_faster():
    stages = {"load": 3.0, "pack": 1.0, "plan": 9.0}
    assert bound_text(8 * 10**9, 4.0, 8 * 10**9, stages) == (
        "read 8.00 GB at 2.00 GB/s (100% from storage); slowest step: storage"
    )
    assert bound_text(8 * 10**9, 4.0, 0, stages).endswith(
        "(0% from storage); slowest step: reading from the page cache"
    )
    assert bound_text(8 * 10**9, 4.0, 0, {**stages, "pack": 5.0}).endswith("slowest step: packing")
    assert bound_text(8 * 10**9, 4.0, 0, {**stages, "copy": 5.0}).endswith("slowest step: copying to the device")
    assert bound_text(0, 4.0, 0, stages) == "slowest step: generating weights", "a synthetic model"


def test_storage_is_what_the_system_counts(tmp_path):
    (tmp_path / "io").write_text("rchar: 5\nread_bytes: 4096\nwrite_bytes: 7\n")
    assert storage_bytes(tmp_path / "io") == 4096
    assert storage_bytes(tmp_path / "none") == 0
