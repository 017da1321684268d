"""Calls typed by hand: a real `buf curl` over server reflection.

The same request in every spelling gives the same answer."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np
import pytest

from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import expert_service_pb2_grpc as pb_grpc
from expertd_client import ExpertClient, Synthetic
from expertd_client.requests.e4m3 import quantize
from expertd_server.service.synthetic import generate_hidden, generate_ids, generate_weights

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT / "node_modules" / ".bin"), os.environ["PATH"]])
BUF = shutil.which("buf", path=PATH)

pytestmark = pytest.mark.skipif(BUF is None, reason="buf is not installed: make test installs it where npm is")

H, E, TOP_K, TOKENS, SEED = 256, 8, 2, 3, 11


def buf_curl(address, method, request, code=0):
    """What buf prints: messages as JSON values, one after the other; or its complaint where it fails with `code`."""
    text = request if isinstance(request, str) else json.dumps(request)
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", text]
    command.append(f"http://{address}/expertd.v1.ExpertService/{method}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    if code:
        return done.stderr
    messages, rest, decoder = [], done.stdout.strip(), json.JSONDecoder()
    while rest:
        message, end = decoder.raw_decode(rest)
        messages.append(message)
        rest = rest[end:].strip()
    return messages


@pytest.fixture(scope="module")
def batch():
    """The tensors that the server draws for SEED: hidden states bf16, ids i32, weights f32."""
    x = generate_hidden(SEED, TOKENS, H, "bf16").values.view(ml_dtypes.bfloat16).reshape(TOKENS, H)
    ids = generate_ids(SEED, TOKENS, TOP_K, E, 0.0, "i32").values.reshape(TOKENS, TOP_K)
    weights = generate_weights(SEED, TOKENS, TOP_K, "f32").values.reshape(TOKENS, TOP_K)
    return x, ids, weights


def tensor(array, spelling):
    """A Tensor in JSON."""
    of = {"bfloat16": "BF16", "float32": "F32", "int32": "I32", "int64": "I64"}
    out = {"dtype": f"DATA_TYPE_{of[array.dtype.name]}", "shape": list(array.shape)}
    if spelling == "raw":
        out["raw"] = base64.b64encode(array.tobytes()).decode()
    elif spelling == "synthetic":
        out["synthetic"] = {"seed": SEED}
    else:
        name = "ints" if array.dtype.kind == "i" else "floats"
        values = array.astype(np.int64) if name == "ints" else array.astype(np.float32)
        out[name] = {"values": values.ravel().tolist()}
    return out


def request(batch, spelling, **fields):
    names = ("hiddenStates", "topkIds", "topkWeights")
    return {"layer": 1, **{n: tensor(a, spelling) for n, a in zip(names, batch, strict=True)}, **fields}


@pytest.fixture(scope="module")
def expected(tiny_server, batch):
    """Output and digest as the Python client gets them."""
    with ExpertClient(tiny_server) as client:
        output = client.forward(1, *batch)
        digest = client.forward(1, *batch, digest=True)
    assert output.routes_computed == digest.routes_computed == TOKENS * TOP_K
    assert np.isfinite(output.output.astype(np.float32)).all()
    assert output.output.astype(np.float32).any()
    return output.output.tobytes(), digest.digest


@pytest.mark.parametrize("spelling", ["raw", "typed", "synthetic"])
def test_every_spelling_gives_the_same_output(tiny_server, batch, expected, spelling):
    (answer,) = buf_curl(tiny_server, "Forward", request(batch, spelling))
    assert base64.b64decode(answer["output"]["raw"]) == expected[0]
    assert answer["output"]["dtype"] == "DATA_TYPE_BF16"
    assert answer["output"]["shape"] == [TOKENS, H]
    assert answer["routesComputed"] == str(TOKENS * TOP_K)
    assert answer["timing"]["batchTokens"] == TOKENS


@pytest.mark.parametrize("spelling", ["raw", "typed", "synthetic"])
def test_every_spelling_gives_the_same_digest(tiny_server, batch, expected, spelling):
    (answer,) = buf_curl(tiny_server, "Forward", request(batch, spelling, outputForm="OUTPUT_FORM_DIGEST"))
    assert "output" not in answer
    assert answer["digest"]["crc32"] == expected[1].crc32
    assert answer["digest"]["sum"] == pytest.approx(expected[1].sum, rel=1e-12)
    assert answer["digest"]["sumOfSquares"] == pytest.approx(expected[1].sum_of_squares, rel=1e-12)


def test_spellings_may_be_mixed_and_ids_may_be_wider(tiny_server, batch, expected):
    x, ids, weights = batch
    mixed = {
        "layer": 1,
        "hiddenStates": tensor(x, "synthetic"),
        "topkIds": tensor(ids.astype(np.int64), "typed"),
        "topkWeights": tensor(weights, "raw"),
    }
    (answer,) = buf_curl(tiny_server, "Forward", mixed)
    assert base64.b64decode(answer["output"]["raw"]) == expected[0]


def test_the_python_client_and_the_generated_classes_agree(tiny_server, batch, expected):
    x, ids, weights = batch
    drawn = (
        Synthetic(x.shape, SEED, "bf16"),
        Synthetic(ids.shape, SEED, "i32"),
        Synthetic(weights.shape, SEED, "f32"),
    )
    for unary in (False, True):
        with ExpertClient(tiny_server, unary=unary) as client:
            assert client.forward(1, *drawn).output.tobytes() == expected[0]
            assert client.forward(1, *drawn, digest=True).digest == expected[1]
    message = pb.ForwardRequest(
        layer=1,
        hidden_states=pb.Tensor(dtype=pb.DATA_TYPE_BF16, shape=x.shape, raw=x.tobytes()),
        topk_ids=pb.Tensor(dtype=pb.DATA_TYPE_I32, shape=ids.shape, raw=ids.tobytes()),
        topk_weights=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=weights.shape, raw=weights.tobytes()),
    )
    with grpc.insecure_channel(tiny_server) as channel:
        assert pb_grpc.ExpertServiceStub(channel).Forward(message, timeout=60).output.raw == expected[0]


def test_a_stream_typed_by_hand(tiny_server, batch, expected):
    forwards = [
        json.dumps({"forward": request(batch, spelling, requestId=number)})
        for number, spelling in ((7, "typed"), (8, "synthetic"))
    ]
    bad = json.dumps({"forward": request(batch, "synthetic", requestId=9, layer=77)})
    answers = buf_curl(tiny_server, "StreamForward", "\n".join([forwards[0], bad, forwards[1]]))
    outputs = {a["forward"]["requestId"]: a["forward"]["output"]["raw"] for a in answers if "forward" in a}
    errors = [a["error"] for a in answers if "error" in a]
    assert sorted(outputs) == ["7", "8"]
    want = np.frombuffer(expected[0], ml_dtypes.bfloat16).astype(np.float32)
    for raw in outputs.values():  # they may have been computed as one batch, whose sums round differently
        got = np.frombuffer(base64.b64decode(raw), ml_dtypes.bfloat16).astype(np.float32)
        assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)
    assert [(e["requestId"], e["reason"]) for e in errors] == [("9", "LAYER_NOT_HELD")]


def test_e4m3_with_scales(tiny_server, batch):
    """Codes as the numbers that they are, and scales as numbers, too: client/examples/json_call.sh does so."""
    x, ids, weights = (a[:1] for a in batch)
    q = quantize(x)
    typed = {
        "layer": 0,
        "hiddenStates": {
            "dtype": "DATA_TYPE_E4M3",
            "shape": [1, H],
            "floats": {"values": q.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32).ravel().tolist()},
            "scales": {"block": 128, "floats": {"values": q.scales.ravel().tolist()}},
        },
        "topkIds": tensor(ids, "typed"),
        "topkWeights": tensor(weights, "typed"),
    }
    raw = {
        "dtype": "DATA_TYPE_E4M3",
        "shape": [1, H],
        "raw": base64.b64encode(q.codes.tobytes()).decode(),
        "scales": {"block": 128, "raw": base64.b64encode(q.scales.tobytes()).decode()},
    }
    with ExpertClient(tiny_server, wire_dtype="e4m3") as client:
        expected = client.forward(0, x, ids, weights).output.tobytes()
    for request in (typed, {**typed, "hiddenStates": raw}):
        (answer,) = buf_curl(tiny_server, "Forward", request)
        assert base64.b64decode(answer["output"]["raw"]) == expected
        assert answer["output"]["dtype"] == "DATA_TYPE_BF16"
    typed["hiddenStates"]["scales"]["floats"]["values"].append(1.0)
    assert "got 12 bytes, want 8" in buf_curl(tiny_server, "Forward", typed, code=3 * 8)


def test_describe(tiny_server):
    (answer,) = buf_curl(tiny_server, "Describe", {"includeDecisions": True})
    assert answer["model"]["hiddenSize"] == H
    assert answer["layers"][1]["numExperts"] == E
    assert answer["layers"][1]["verdicts"]


def test_a_refusal_is_readable(tiny_server, batch):
    text = buf_curl(
        tiny_server, "Forward", request(batch, "typed", layer=77), code=5 * 8
    )  # buf exits with 8 x the code
    assert "not_found" in text
    assert "77" in text
    shapeless = request(batch, "typed")
    shapeless["topkIds"]["shape"] = [TOKENS + 1, TOP_K]
    assert "invalid_argument" in buf_curl(tiny_server, "Forward", shapeless, code=3 * 8)
