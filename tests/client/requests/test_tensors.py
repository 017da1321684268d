"""Arrays of the caller <-> tensors on the wire: every dtype, without a copy where the memory allows it, and back."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from expertd.codec import Spelling, TensorView
from expertd.errors import BadDtypeError, BadResponseError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.tensors import Synthetic, checked_dtype, from_wire, keep_or, take, to_wire, wire_dtype

DTYPES = {
    "f32": (np.float32, torch.float32, pb.DATA_TYPE_F32),
    "f16": (np.float16, torch.float16, pb.DATA_TYPE_F16),
    "bf16": (ml_dtypes.bfloat16, torch.bfloat16, pb.DATA_TYPE_BF16),
    "i32": (np.int32, torch.int32, pb.DATA_TYPE_I32),
    "i64": (np.int64, torch.int64, pb.DATA_TYPE_I64),
}
FLOATS = ("f32", "f16", "bf16")


def sent(x):
    """`x` as it travels."""
    return to_wire(x, checked_dtype(x, "x", tuple(DTYPES)))


def received(view, x):
    """What comes of an answer to the hidden states `x`."""
    return from_wire(view, tuple(x.shape), sent(x).dtype, getattr(x, "device", None) if torch.is_tensor(x) else None)


def numbers(name, shape=(3, 4)):
    """1, 2, 3, ... in numpy and in torch."""
    values = np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)
    return values.astype(DTYPES[name][0]), torch.from_numpy(values).to(DTYPES[name][1])


@pytest.mark.parametrize("name", DTYPES)
def test_numpy_and_torch_send_the_same_bytes(name):
    array, tensor = numbers(name)
    a, b = sent(array), sent(tensor)
    assert (a.dtype, a.shape, a.spelling) == (b.dtype, b.shape, b.spelling) == (DTYPES[name][2], (3, 4), Spelling.RAW)
    assert bytes(a.raw) == bytes(b.raw) == array.tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_contiguous_memory_is_sent_as_it_lies(name):
    array, tensor = numbers(name)
    for x, address in ((array, array.ctypes.data), (tensor, tensor.data_ptr())):
        assert np.frombuffer(sent(x).raw, np.uint8).ctypes.data == address


def test_other_memory_is_brought_into_order():
    array, tensor = numbers("bf16")
    assert bytes(sent(array.T).raw) == np.ascontiguousarray(array.T).tobytes()
    assert bytes(sent(tensor.T).raw) == np.ascontiguousarray(array.T).tobytes()
    assert bytes(sent(array[:, ::2]).raw) == np.ascontiguousarray(array[:, ::2]).tobytes()
    big_endian = np.arange(1, 5, dtype=">f4")
    assert bytes(sent(big_endian).raw) == big_endian.astype("<f4").tobytes()
    assert sent(tensor.float().requires_grad_()).shape == (3, 4)


def test_empty_tensors_keep_their_shape():
    for x in (np.empty((0, 8), ml_dtypes.bfloat16), torch.empty(0, 8, dtype=torch.bfloat16)):
        view = sent(x)
        assert view.shape == (0, 8)
        assert len(view.raw) == 0
        for empty in (TensorView.of_raw(view.dtype, (0, 8), b""), TensorView(view.dtype, (0, 8))):
            back = received(empty, x)
            assert type(back) is type(x)
            assert tuple(back.shape) == (0, 8)
            assert back.dtype == x.dtype


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", FLOATS)
def test_an_answer_comes_back_as_what_was_sent(name, offset):
    array, tensor = numbers(name)
    message = bytes(offset) + array.tobytes() + b"tail"
    view = TensorView.of_raw(DTYPES[name][2], (3, 4), memoryview(message)[offset : offset + array.nbytes])
    out = received(view, array)
    assert isinstance(out, np.ndarray)
    assert out.dtype == array.dtype
    assert out.flags.aligned
    np.testing.assert_array_equal(out, array)
    again = received(view, tensor)
    assert isinstance(again, torch.Tensor)
    assert again.dtype == tensor.dtype
    assert torch.equal(again, tensor)


def test_an_answer_may_be_written_to():
    array, tensor = numbers("f32")
    for x in (array, tensor):
        message = bytes(bytearray(array.tobytes()))  # of its own, as a transport hands it over
        out = received(TensorView.of_raw(pb.DATA_TYPE_F32, (3, 4), memoryview(message)), x)
        out += 1
        assert float(out[0, 0]) == 2.0


def test_an_aligned_answer_is_a_view_that_keeps_its_message():
    message = numbers("f32")[0].tobytes()
    address = np.frombuffer(message, np.uint8).ctypes.data
    out = from_wire(TensorView.of_raw(pb.DATA_TYPE_F32, (3, 4), memoryview(message)), (3, 4), pb.DATA_TYPE_F32, None)
    del message
    assert out.ctypes.data == address
    assert out.ravel().tolist() == list(range(1, 13))


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (TensorView.of_raw(pb.DATA_TYPE_F32, (4, 3), bytes(48)), "shape"),
        (TensorView.of_raw(pb.DATA_TYPE_F32, (3, 4), bytes(47)), "47 bytes"),
        (TensorView.of_raw(pb.DATA_TYPE_I32, (3, 4), bytes(48)), "dtype i32"),
        (TensorView.of_raw(77, (3, 4), bytes(48)), "dtype 77"),
        (TensorView(pb.DATA_TYPE_F32, (3, 4), Spelling.FLOATS, pb.FloatValues(values=[1] * 12)), "field 4"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(view, words):
    with pytest.raises(BadResponseError, match=words):
        from_wire(view, (3, 4), pb.DATA_TYPE_F32, None)


@pytest.mark.parametrize("bad", [np.zeros(2), np.zeros(2, np.int16), torch.zeros(2, dtype=torch.float64), [1.0], None])
def test_what_cannot_travel_is_refused_by_name(bad):
    with pytest.raises(BadDtypeError, match="topk_weights: got"):
        checked_dtype(bad, "topk_weights", FLOATS)


@pytest.mark.parametrize(("x", "allowed"), [(np.zeros(2, np.int32), FLOATS), (torch.zeros(2), ("i32", "i64"))])
def test_what_travels_elsewhere_is_refused_here(x, allowed):
    with pytest.raises(BadDtypeError, match="want one of " + ", ".join(allowed)):
        checked_dtype(x, "x", allowed)


INDEX = np.array([3, 0, 3])
MASK = np.array([True, False, False, True])


@pytest.mark.parametrize("of", [np.asarray, torch.as_tensor])
def test_rows_by_slice_number_and_truth(of):
    array = np.arange(8, dtype=np.float32).reshape(4, 2).astype(ml_dtypes.bfloat16)
    tensor = torch.arange(8).reshape(4, 2).bfloat16()
    for x in (array, tensor):
        assert take(x, slice(1, 3)).tolist() == [[2, 3], [4, 5]]
        assert take(x, of(INDEX)).tolist() == [[6, 7], [0, 1], [6, 7]]
        assert take(x, of(MASK)).tolist() == [[0, 1], [6, 7]]
        assert take(x, of(INDEX)).dtype == x.dtype
    assert np.shares_memory(take(array, slice(1, 3)), array)


@pytest.mark.parametrize("of", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("x", [np.arange(4, dtype=np.int32), torch.arange(4, dtype=torch.int32), np.arange(4)])
def test_what_is_not_kept_becomes_another_number_of_the_same_dtype(of, x):
    out = keep_or(x, of(MASK), -1)
    assert out.tolist() == [0, -1, -1, 3]
    assert (type(out), out.dtype) == (type(x), x.dtype)


def test_a_synthetic_tensor_carries_its_seed_alone():
    view = sent(Synthetic((5, 2), 7, "i32", 1.5))
    assert (view.dtype, view.shape) == (pb.DATA_TYPE_I32, (5, 2))
    assert view.synthetic == pb.SyntheticValues(seed=7, zipf_exponent=1.5)


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_has_three_names(name):
    of_numpy, of_torch, number = DTYPES[name]
    assert wire_dtype(name) == wire_dtype(of_numpy) == wire_dtype(np.dtype(of_numpy)) == wire_dtype(of_torch) == number


@pytest.mark.parametrize("bad", ["fp8", "float8", np.float64, torch.float64, 3, object()])
def test_an_unknown_dtype_is_refused(bad):
    with pytest.raises(BadDtypeError, match="want one of f32"):
        wire_dtype(bad)
