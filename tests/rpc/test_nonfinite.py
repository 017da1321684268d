"""`--nonfinite`: NaN and infinity in hidden states and weights, by every way to a real server."""

import ml_dtypes
import numpy as np
import pytest
from in_process import hosts

from expertd.errors import NonFiniteHiddenStatesError, NonFiniteWeightsError
from expertd_client import E4m3, ExpertClient, GrpcTransport
from expertd_client.requests.e4m3 import quantize
from expertd_client.transports.shm.connection import ShmTransport
from expertd_client.transports.tcp.connection import TcpTransport

pytestmark = pytest.mark.timeout(90)

H, K, M = 256, 2, 4
WAYS = ("stream", "unary", "shm", "tcp")


@pytest.fixture(scope="module", params=["pass", "refuse", "zero"])
def server(request):
    with hosts(synthetic="tiny:int4_g128", tcp="on", nonfinite=request.param) as serve:
        yield request.param, serve().address


def client_of(address, way):
    offers = {"shm": [ShmTransport()], "tcp": [TcpTransport(address)]}.get(way, [])
    client = ExpertClient(GrpcTransport(address, unary=way == "unary", offers=offers), timeout_s=20)
    if offers:
        assert client.session().transport == way
    return client


def request(dtype=np.float32):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((M, H)).astype(dtype)
    return x, np.tile(np.array([[1, 4]], np.int32), (M, 1)), rng.uniform(0.1, 1, (M, K)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_hidden_states(server, way, dtype):
    policy, address = server
    x, ids, w = request(dtype)
    with client_of(address, way) as client:
        clean = x.copy()
        clean[2, 17] = 0
        want = np.array(client.forward(0, clean, ids, w).output, np.float32)
        x[2, 17] = np.nan
        if policy == "refuse":
            with pytest.raises(NonFiniteHiddenStatesError, match=r"hidden_states\[2, 17\]: got nan"):
                client.forward(0, x, ids, w)
        else:
            got = np.array(client.forward(0, x, ids, w).output, np.float32)
            np.testing.assert_array_equal(got[[0, 1, 3]], want[[0, 1, 3]])
            if policy == "zero":
                np.testing.assert_array_equal(got[2], want[2])
            else:
                assert np.isnan(got[2]).all()
        np.testing.assert_array_equal(np.array(client.forward(0, clean, ids, w).output, np.float32), want)


@pytest.mark.parametrize("way", WAYS)
def test_codes_and_scales_of_e4m3(server, way):
    policy, address = server
    x, ids, w = request()
    q = quantize(x)
    codes, scales = q.codes.copy(), q.scales.copy()
    codes[1, 3] = 0x7F  # NaN
    scales[3, 1] = np.inf
    with client_of(address, way) as client:
        want = np.array(client.forward(0, q, ids, w).output, np.float32)
        if policy == "refuse":
            with pytest.raises(NonFiniteHiddenStatesError, match=r"hidden_states\[1, 3\]: got nan"):
                client.forward(0, E4m3(codes, scales), ids, w)
            return
        got = np.array(client.forward(0, E4m3(codes, scales), ids, w).output, np.float32)
        np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])
        assert np.isfinite(got[[1, 3]]).all() == (policy == "zero")


@pytest.mark.parametrize("way", WAYS)
def test_weights(server, way):
    policy, address = server
    x, ids, w = request()
    with client_of(address, way) as client:
        clean = w.copy()
        clean[1, 0] = 0
        want = client.forward(0, x, ids, clean).output
        w[1, 0] = np.inf
        if policy == "zero":
            np.testing.assert_array_equal(client.forward(0, x, ids, w).output, want)
        else:
            with pytest.raises(NonFiniteWeightsError, match=r"topk_weights\[1, 0\]: got inf"):
                client.forward(0, x, ids, w)
