"""Answers in e4m3, over every way to a real server: the rounding of what it would have answered in bf16."""

import asyncio

import ml_dtypes
import numpy as np
import pytest
import torch
from in_process import hosts

from expertd.codec import ForwardResponseView, ScalesView, TensorView
from expertd.errors import BadDtypeError, BadResponseError, UnsupportedCombinationError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import (
    AioGrpcTransport,
    AsyncExpertClient,
    E4m3,
    ExpertClient,
    ExpertCluster,
    FunctionTransport,
    GrpcTransport,
)
from expertd_client.requests.e4m3 import quantize
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs
from expertd_server.boot.assignment import open_source
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address, Ranges

pytestmark = pytest.mark.timeout(90)

TINY = {"synthetic": "tiny:int4_g128", "threads": 1, "layers": Ranges.parse("1"), "device": "cpu"}
M, H, K, LAYER = 9, 256, 2, 1


@pytest.fixture(scope="module")
def server():
    with hosts(**TINY, tcp_listen=Address("127.0.0.1", 0)) as serve:
        yield serve()


@pytest.fixture(scope="module")
def tcp_server():
    with hosts(**TINY, tcp_listen=Address("127.0.0.1", 0), shm="off") as serve:
        yield serve().address


def batch(rows=M, seed=0):
    x, ids, w = random_inputs(rows, H, 8, K, seed=seed)
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16), ids.int().numpy(), w.float().numpy()


def same(got, want):
    assert isinstance(got, E4m3)
    assert got.codes.shape == want.codes.shape
    assert np.asarray(got.codes).tobytes() == np.asarray(want.codes).tobytes()
    assert np.asarray(got.scales).tobytes() == np.asarray(want.scales).tobytes()


@pytest.mark.parametrize("way", ["shm", "tcp", "stream", "unary"])
@pytest.mark.parametrize("hidden", ["bf16", "e4m3"])
def test_every_way_rounds_what_bf16_would_have_been(server, tcp_server, way, hidden):
    transports = {
        "shm": lambda: server.address,
        "tcp": lambda: tcp_server,
        "stream": lambda: GrpcTransport(server.address),
        "unary": lambda: GrpcTransport(server.address, unary=True),
    }
    with ExpertClient(transports[way](), timeout_s=20) as client:
        if way in ("shm", "tcp"):
            assert client.session().transport == way
        assert pb.DATA_TYPE_E4M3 in client.describe().output_dtypes
        for rows in (1, M, 64):
            x, ids, w = batch(rows, seed=rows)
            x = quantize(x) if hidden == "e4m3" else x
            want = quantize(client.forward(LAYER, x, ids, w).output)
            assert want.codes.any()
            for _ in range(2):  # the second time the answer's memory is used again
                answer = client.forward(LAYER, x, ids, w, output_dtype="e4m3")
                same(answer.output, want)
                assert answer.routes_computed == rows * K
                assert answer.output.widened().shape == (rows, H)
                answer.release()
            same(client.submit(LAYER, x, ids, w, output_dtype="e4m3").result(20).output, want)
        x, ids, w = batch()
        nothing = client.forward(LAYER, x[:0], ids[:0], w[:0], output_dtype="e4m3").output
        assert (nothing.codes.shape, nothing.scales.shape) == ((0, H), (0, 2))


@pytest.mark.parametrize("way", ["shm", "tcp", "stream"])
def test_an_event_loop_gets_the_same(server, tcp_server, way):
    x, ids, w = batch()
    address = {"shm": server.address, "tcp": tcp_server}.get(way)

    async def ask():
        async with AsyncExpertClient(address or AioGrpcTransport(server.address), timeout_s=20) as client:
            assert (await client.session()).transport == (way if address else "inline")
            plain = await client.forward(LAYER, x, ids, w)
            return plain.output, (await client.forward(LAYER, x, ids, w, output_dtype="e4m3")).output

    plain, got = asyncio.run(ask())
    same(got, quantize(plain))


def test_tensors_of_torch_are_answered_with_tensors(server):
    x, ids, w = batch()
    bf16 = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    for address in (server.address, GrpcTransport(server.address)):
        with ExpertClient(address, timeout_s=20) as client:
            client.session()
            got = client.forward(LAYER, bf16, torch.from_numpy(ids), torch.from_numpy(w), output_dtype="e4m3").output
            plain = client.forward(LAYER, x, ids, w).output
        assert isinstance(got.codes, torch.Tensor)
        same(got, quantize(plain))
        np.testing.assert_array_equal(got.widened().numpy(), quantize(plain).widened())


def test_what_it_costs_in_accuracy(server):
    """The documented bounds: of a value, and of an answer's norm, beside the layer's own tolerance."""
    config = ServeConfig(**TINY, listen=Address("127.0.0.1", 0))
    weights = open_source(config).load(LAYER, range(8))
    x, ids, w = random_inputs(64, H, 8, K, seed=5)
    exact = reference(weights, x, ids, w)
    with ExpertClient(server.address, timeout_s=20) as client:
        got = client.forward(LAYER, x, ids, w, output_dtype="e4m3").output
        plain = client.forward(LAYER, x, ids, w).output.float().numpy().copy()
    wide, scale = got.widened().numpy(), got.scales.numpy().repeat(128, axis=1)
    bound = np.maximum(2.0**-4 * np.abs(plain), 2.0**-10 * scale) + 2.0**-22 * np.abs(plain)
    assert (np.abs(wide - plain) <= bound).all()
    error = relative_error(torch.from_numpy(wide), exact)
    assert tolerance("bf16") < error <= 0.03 + tolerance("bf16"), error


def test_what_has_no_such_answer_says_so(server):
    x, ids, w = batch()
    with ExpertClient(server.address, timeout_s=20) as client:
        with pytest.raises(UnsupportedCombinationError, match="DIGEST of E4M3"):
            client.forward(LAYER, x, ids, w, output_dtype="e4m3", digest=True)
        with pytest.raises(BadDtypeError, match="'e4m3'"):
            client.slot(M, H, K, "e4m3")
    with (
        ExpertCluster([server.address], timeout_s=20) as cluster,
        pytest.raises(UnsupportedCombinationError, match="cluster: got output_dtype e4m3"),
    ):
        cluster.forward(LAYER, x, ids, w, output_dtype="e4m3")


@pytest.mark.parametrize("wrong", ["no scales", "another block", "too few scales", "too few codes"])
def test_an_answer_that_does_not_fit_is_an_error(wrong):
    codes, scales = bytes(M * H), bytes(M * 2 * 4)
    if wrong == "too few scales":
        scales = scales[4:]
    elif wrong == "too few codes":
        codes = codes[1:]
    view = None if wrong == "no scales" else ScalesView(64 if wrong == "another block" else 128, scales)

    def answer(request):
        return ForwardResponseView(request.request_id, TensorView.of_raw(pb.DATA_TYPE_E4M3, (M, H), codes, view))

    x, ids, w = batch()
    with ExpertClient(FunctionTransport(answer)) as client, pytest.raises(BadResponseError, match="output"):
        client.forward(LAYER, x, ids, w, output_dtype="e4m3")
