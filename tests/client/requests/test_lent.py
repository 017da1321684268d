"""Memory that is lent as a buffer: it goes back with the last array over it, once."""

import ctypes as C
import gc

import ml_dtypes
import numpy as np
import pytest
import torch

from expertd.common.dtypes import scales_of_row
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.e4m3 import E4m3
from expertd_client.requests.lent import lend
from expertd_client.requests.tensors import over_buffer

CPU = torch.device("cpu")
M, H = 3, 256


@pytest.fixture
def memory():
    """Bytes that stay where they are."""
    return (C.c_uint8 * (4 * M * H + 4 * M * scales_of_row(H)))(*(i % 251 for i in range(4 * M * H)))


def lent_at(memory, nbytes, given):
    return lend(C.addressof(memory), nbytes, lambda: given.append(1))


@pytest.mark.parametrize("device", [None, CPU], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (pb.DATA_TYPE_F32, np.dtype("<f4")),
        (pb.DATA_TYPE_F16, np.dtype("<f2")),
        (pb.DATA_TYPE_BF16, np.dtype(ml_dtypes.bfloat16)),
    ],
)
def test_an_array_is_a_view_and_gives_back_with_its_last_part(memory, device, number, kind):
    given = []
    nbytes = M * H * kind.itemsize
    array = over_buffer(lent_at(memory, nbytes, given), number, (M, H), device)
    assert tuple(array.shape) == (M, H)
    raw = array.view(torch.uint8).numpy() if device else array.view(np.uint8)
    assert raw.tobytes() == bytes(memory)[:nbytes]
    raw[0, 0] = 99
    assert memory[0] == 99, "it can be written to, where it lies"
    del raw
    part = array[1:, 3]
    del array
    gc.collect()
    assert not given
    del part
    gc.collect()
    assert given == [1]


def test_e4m3_is_codes_and_scales_of_one_piece(memory):
    given = []
    nbytes = M * H + 4 * M * scales_of_row(H)
    found = over_buffer(lent_at(memory, nbytes, given), pb.DATA_TYPE_E4M3, (M, H), None)
    assert isinstance(found, E4m3)
    assert (found.codes.shape, found.scales.shape) == ((M, H), (M, scales_of_row(H)))
    scales = found.scales
    del found
    gc.collect()
    assert not given
    del scales
    gc.collect()
    assert given == [1]


def test_a_tensor_larger_than_what_is_lent_is_no_view(memory):
    with pytest.raises(TypeError, match="too small"):
        over_buffer(lent_at(memory, 16, []), pb.DATA_TYPE_F32, (M, H), None)


def test_release_gives_back_once_and_the_end_gives_nothing_more(memory):
    given = []
    lent = lent_at(memory, 64, given)
    lent.release()
    lent.release()
    del lent
    gc.collect()
    assert given == [1]
    other = lent_at(memory, 64, given)
    del other
    gc.collect()
    assert given == [1, 1]
