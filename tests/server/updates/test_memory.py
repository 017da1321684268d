"""A trainer's allocations: each mapped once, and nothing outside of them is read."""

from __future__ import annotations

import contextlib

import pytest
import torch

from expertd.errors import ChangeRefusedError
from expertd.shm.cuda import CudaError
from expertd_server.updates import memory
from expertd_server.updates.memory import TrainerMemory, memory_refusal, room_on

HANDLE = bytes(64)


class Mapped:
    made = 0

    def __init__(self, handle, device):
        if handle != HANDLE:
            raise CudaError("no such memory")
        Mapped.made += 1
        self.address, self.bytes = 1 << 20, 1000

    def close(self):
        Mapped.made -= 1


@pytest.fixture
def memories(monkeypatch):
    """With the places of tensors instead of tensors."""
    Mapped.made = 0
    monkeypatch.setattr(memory, "MappedMemory", Mapped)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: array.__cuda_array_interface__)
    return TrainerMemory(torch.device("cuda:0"))


def test_tensors_of_one_allocation_are_read_where_they_lie(memories):
    at = [memories.tensor("t", HANDLE, offset, 100) for offset in (0, 900)]
    assert [a["data"][0] - (1 << 20) for a in at] == [0, 900]
    assert [a["shape"] for a in at] == [(100,), (100,)]
    assert Mapped.made == 1
    memories.close()
    memories.close()
    assert Mapped.made == 0


@pytest.mark.parametrize(("offset", "nbytes"), [(901, 100), (0, 1001), (1 << 63, 1)])
def test_bytes_outside_of_the_allocation_are_refused(memories, offset, nbytes):
    with pytest.raises(ChangeRefusedError, match="of an allocation of 1000 bytes"):
        memories.tensor("t", HANDLE, offset, nbytes)


@pytest.mark.parametrize("handle", [b"", bytes(63), bytes(65)])
def test_a_handle_of_another_length_is_refused(memories, handle):
    with pytest.raises(ChangeRefusedError, match="want 64"):
        memories.tensor("t", handle, 0, 1)


def test_a_handle_of_nothing_is_refused(memories):
    with pytest.raises(ChangeRefusedError, match="cannot be read: no such memory"):
        memories.tensor("t", bytes([1] * 64), 0, 1)


def test_so_many_allocations_and_no_more(memories, monkeypatch):
    monkeypatch.setattr(memory, "_MOST_MAPPED", 0)
    with pytest.raises(ChangeRefusedError, match="more than 0 allocations"):
        memories.tensor("t", HANDLE, 0, 1)


def test_a_cpu_has_neither_pinned_memory_nor_a_trainers():
    assert room_on(torch.device("cpu")) is None
    assert "no NVIDIA GPU" in memory_refusal(torch.device("cpu"))
