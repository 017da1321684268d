"""Quantizing hidden states: three twins of the same bits, within the bound that is documented, and as a client asks."""

import asyncio

import ml_dtypes
import numpy as np
import pytest
import torch

from expertd.codec import ForwardResponseView, TensorView, decode_forward_request, encode_forward_request
from expertd.e4m3 import quantizer
from expertd.errors import BadDtypeError, BadShapeError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import AsyncExpertClient, E4m3, ExpertClient, ExpertCluster, FunctionTransport, Request
from expertd_client.requests.e4m3 import quantize, quantize_numpy, quantize_torch, widen_numpy
from expertd_kernels.backends.rounding import round_groups

built = pytest.mark.skipif(quantizer() is None, reason="libexpertd_e4m3.so is not built: python -m expertd.cxx")
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def rows(shape, dtype="f32", seed=0):
    """Magnitudes over many powers of two, also within a block; a row of zeros and one of tiny numbers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32) * np.exp2(rng.uniform(-12, 0, shape)).astype(np.float32)
    x *= np.exp2(rng.integers(-6, 6, (shape[0], 1))).astype(np.float32)
    x[1], x[2] = 0, x[2] * np.float32(1e-7)
    return x.astype(DTYPES[dtype])


def torch_of(x):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def wide(q):
    """f32 [M, H]: what the codes stand for."""
    codes, scales = np.asarray(q.codes), np.asarray(q.scales)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values * scales.repeat(128, axis=1)[:, : codes.shape[1]]


def same(a, b):
    np.testing.assert_array_equal(np.asarray(a.codes), np.asarray(b.codes))
    np.testing.assert_array_equal(np.asarray(a.scales), np.asarray(b.scales))


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 1024), (5, 200), (4, 1), (3, 127), (0, 128)], ids=str)
def test_cpp_numpy_and_torch_give_the_same_bits(shape, dtype):
    x = rows(shape, dtype) if shape[0] else np.empty(shape, DTYPES[dtype])
    got = quantize(x)
    assert (got.codes.shape, got.scales.shape) == (shape, (shape[0], -(-shape[1] // 128)))
    same(got, quantize_numpy(x))
    same(got, quantize_torch(torch_of(x)))
    same(got, quantize(torch_of(x)))


@pytest.mark.parametrize("shape", [(64, 1024), (5, 200), (3, 127), (0, 128)], ids=str)
def test_cpp_numpy_and_torch_widen_to_the_same_bits(shape):
    q = quantize_numpy(rows(shape) if shape[0] else np.empty(shape, np.float32))
    q.codes[:2, :7] = [0x7F, 0xFF, 0x80, 0x01, 0x87, 0x08, 0xFE]  # NaN, zero, subnormal and largest
    tensors = E4m3(torch.from_numpy(q.codes), torch.from_numpy(q.scales))
    for got in (q.widened(), widen_numpy(q), tensors.widened().numpy()):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, wide(q))


@built
def test_every_number_of_bf16_and_f16_is_rounded_as_torch_rounds_it():
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 128)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        x = bits.view(dtype)
        same(quantize(x), quantize_torch(torch_of(x)))


@pytest.mark.parametrize("make", [quantize, quantize_numpy, lambda x: quantize_torch(torch_of(x))])
def test_the_error_is_within_the_bound_that_is_documented(make):
    x = rows((64, 500))
    q = make(x)
    error = np.abs(wide(q) - x)
    scale = np.asarray(q.scales).repeat(128, axis=1)[:, :500]
    bound = np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * scale) + 2.0**-22 * np.abs(x)
    assert (error <= bound).all()
    assert (error > bound / 2).mean() > 0.1, "the bound is no wider than it must be"
    norm = np.linalg.norm(wide(q) - x) / np.linalg.norm(x)
    assert 0.015 < norm < 0.035, norm


@pytest.mark.parametrize("make", [quantize, quantize_numpy, lambda x: quantize_torch(torch_of(x))])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_nan_of_its_block_and_nothing_else(make, bad):
    x = rows((8, 300))
    x[4, 130] = bad
    got, sound = wide(make(x)), wide(make(np.where(np.isfinite(x), x, 0)))
    assert np.isnan(got[4, 128:256]).all()
    got[4, 128:256] = sound[4, 128:256]
    np.testing.assert_array_equal(got, sound)


def test_what_was_quantized_is_found_again_by_the_same_rule():
    """So kernels that round activations to e4m3 for themselves do not round what came as e4m3 a second time."""
    q = quantize(rows((64, 1024)))
    again = quantize(wide(q).astype(ml_dtypes.bfloat16))
    live = np.asarray(q.scales) > 2e-12
    codes = np.asarray(q.codes).reshape(64, -1, 128)
    np.testing.assert_array_equal(np.asarray(again.codes).reshape(64, -1, 128)[live], codes[live])
    np.testing.assert_allclose(again.scales[live], q.scales[live], rtol=2.0**-8)


@built
def test_other_memory_is_read_as_it_lies():
    x = rows((16, 600))
    for view in (x[:, ::2], x[::2], x[:, 100:356], x.T, x[::-1], x.astype(">f4")):
        same(quantize(view), quantize_numpy(np.ascontiguousarray(view, np.float32)))
    t = torch.from_numpy(x)
    for view in (t[:, ::2], t[::2], t.T, t[:, 100:356], t.clone().requires_grad_()):
        same(quantize(view), quantize_torch(view.detach().contiguous()))


def test_rows_that_are_quantized_already_are_checked_and_cut():
    x = rows((6, 200))
    q = quantize_numpy(x)
    fp8 = E4m3(q.codes.view(ml_dtypes.float8_e4m3fn), q.scales)
    same(fp8, q)
    same(E4m3(torch.from_numpy(q.codes).view(torch.float8_e4m3fn), torch.from_numpy(q.scales)), q)
    r = Request(0, fp8, np.zeros((6, 2), np.int32), np.ones((6, 2), np.float32))
    assert r.dtypes[:2] == (pb.DATA_TYPE_BF16, pb.DATA_TYPE_E4M3)
    for index in (slice(2, 5), np.array([4, 0]), np.array([1, 0, 0, 1, 0, 1], bool), torch.tensor([3, 1])):
        want = q.codes[np.asarray(index)] if not isinstance(index, slice) else q.codes[index]
        part = r.rows(index)
        np.testing.assert_array_equal(part.hidden_states.codes, want)
        assert part.hidden_states.scales.shape == (len(want), 2)
    with pytest.raises(BadShapeError, match=r"scales \[6, 1\], want \[M, H\] and \[M, ceil"):
        E4m3(q.codes, q.scales[:, :1])
    with pytest.raises(BadDtypeError, match="codes of float32"):
        E4m3(x, q.scales)
    with pytest.raises(BadDtypeError, match="both of one kind"):
        E4m3(torch.from_numpy(q.codes), q.scales)
    with pytest.raises(BadDtypeError, match="uint8"):
        Request(0, q.codes, np.zeros((6, 2), np.int32), np.ones((6, 2), np.float32))


def test_the_message_has_half_the_bytes_and_says_the_same():
    x = rows((32, 7168), "bf16")
    ids, weights = np.zeros((32, 8), np.int32), np.ones((32, 8), np.float32)
    plain = Request(0, x, ids, weights)
    request = plain.quantized()
    assert request.dtypes == (pb.DATA_TYPE_BF16, pb.DATA_TYPE_E4M3, pb.DATA_TYPE_I32, pb.DATA_TYPE_F32)
    assert request.quantized() is request
    data = encode_forward_request(request.view(1, 0))
    assert len(data) / len(encode_forward_request(plain.view(1, 0))) == pytest.approx(0.516, abs=0.002)
    t = decode_forward_request(data).hidden_states
    assert (t.dtype, t.shape, t.scales.block) == (pb.DATA_TYPE_E4M3, (32, 7168), 128)
    assert bytes(t.raw) == request.hidden_states.codes.tobytes()
    assert bytes(t.scales.raw) == request.hidden_states.scales.tobytes()


class Server:
    """Answers with the hidden states, and remembers what they came as."""

    def __init__(self, takes):
        self.came, self.asked = [], 0
        self.takes = takes

    def describe(self, request):
        self.asked += 1
        return pb.DescribeResponse(input_dtypes=[pb.DATA_TYPE_BF16, *([pb.DATA_TYPE_E4M3] if self.takes else [])])

    def serve(self, request):
        t = request.hidden_states
        self.came.append(t.dtype)
        values = TensorView.of_raw(pb.DATA_TYPE_F32, t.shape, np.zeros(t.shape, np.float32).tobytes())
        routes = int((np.frombuffer(request.topk_ids.raw, np.int32) >= 0).sum())
        return ForwardResponseView(request.request_id, values, routes_computed=routes)


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("kind", ["sync", "submit", "async"])
def test_a_client_asks_once_whether_the_server_takes_it(kind, takes):
    server = Server(takes)
    x, ids, w = rows((4, 256)), np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32)
    transport = FunctionTransport(server.serve, server.describe)
    if kind == "async":

        async def twice():
            async with AsyncExpertClient(transport, wire_dtype="e4m3") as client:
                for _ in range(2):
                    assert (await client.forward(0, x, ids, w)).output.dtype == np.float32

        asyncio.run(asyncio.wait_for(twice(), 20))
    else:
        with ExpertClient(transport, wire_dtype="e4m3") as client:
            for _ in range(2):
                answer = client.forward(0, x, ids, w) if kind == "sync" else client.submit(0, x, ids, w).result(20)
                assert answer.output.dtype == np.float32, "as the caller's tensor"
    assert server.came == [pb.DATA_TYPE_E4M3 if takes else pb.DATA_TYPE_F32] * 2
    assert server.asked == 1


def test_only_e4m3_can_be_asked_for():
    with pytest.raises(BadDtypeError, match="wire_dtype: got 'fp8', want 'e4m3'"):
        ExpertClient("127.0.0.1:1", wire_dtype="fp8")


@pytest.mark.parametrize("takes", [(True, True), (True, False)])
def test_a_cluster_quantizes_where_all_its_servers_take_it(takes):
    servers = {f"server{n}": Server(yes) for n, yes in enumerate(takes)}

    def described(n):
        def describe(request):
            d = servers[f"server{n}"].describe(request)
            d.model.hidden_size, d.model.fingerprint = 256, "f00d"
            d.layers.add(layer=0, num_experts=2, held=[pb.ExpertRange(first=n, count=1)])
            return d

        return describe

    def transport(address):
        n = int(address[-1])
        return FunctionTransport(servers[address].serve, described(n), address)

    x, w = rows((4, 256)), np.ones((4, 2), np.float32)
    ids = np.tile(np.arange(2, dtype=np.int32), (4, 1))
    with ExpertCluster(list(servers), transport=transport, wire_dtype="e4m3", timeout_s=20) as cluster:
        answer = cluster.forward(0, x, ids, w)
        assert answer.output.dtype == np.float32
        assert len(answer.parts) == 2
        one = np.where(np.arange(4)[:, None] < 2, ids, -1)
        one[:2, 1] = -1
        cluster.forward(0, x, one, w)  # some tokens alone, gathered from codes and scales
    want = pb.DATA_TYPE_E4M3 if all(takes) else pb.DATA_TYPE_F32
    assert servers["server0"].came == [want] * 2
    assert servers["server1"].came == [want]


def test_a_second_rounding_by_the_same_rule_changes_no_code_and_scales_by_2_to_the_minus_8():
    """Widened to bf16 on the way, as for layers that take no codes: what a w8a8 layer then makes of it.  Scales of
    another rule lose in it about as much as in the first rounding."""
    q = quantize(rows((64, 1024)))
    codes, scales = torch.from_numpy(np.asarray(q.codes)), torch.from_numpy(np.asarray(q.scales))
    meant = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)
    again, again_scales = round_groups(meant.bfloat16())
    assert torch.equal(again.view(torch.uint8), codes)
    apart = ((again_scales - scales) / scales).abs()
    assert 0 < float(apart.max()) <= 2**-8

    powers = torch.exp2(torch.ceil(torch.log2(scales))).repeat_interleave(128, 1)
    exact = (meant / powers).to(torch.float8_e4m3fn).float() * powers
    again, again_scales = round_groups(exact.bfloat16())
    lost = again.float() * again_scales.repeat_interleave(128, 1) - exact
    assert 0.01 < float(lost.norm() / exact.norm()) < 0.04
