"""The facade of the Open Inference Protocol: NVIDIA's own client on a checkpoint of others, and what it refuses."""

import importlib.util
import json
import random
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.internal import encoder
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from in_process import hosts
from safetensors.numpy import load_file

from expertd.errors import BadByteCountError, ExpertdError
from expertd.kserve import inference_pb2 as kserve
from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import expert_service_pb2_grpc as stubs
from expertd_kernels import tolerance
from expertd_server.config.values import Address
from expertd_server.transports.kserve import messages as kserve_messages
from expertd_server.transports.kserve.messages import read_request

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gptq-w4-g128-sym-descact-false-qwen3moe1l"
H, K = 256, 4
TOKEN, OTHER = "abcdefghijklmnopqrst", "uvwxyzuvwxyzuvwxyzuv"
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def serve():
    """A host with the facade: serve(**changes of its configuration)."""
    with hosts(checkpoint=FIXTURE, kserve=True) as start:
        yield start


@pytest.fixture(scope="module")
def host(serve):
    return serve(metrics_listen=Address("127.0.0.1", 0))


def ask(address, method, request, answer, **more):
    with grpc.insecure_channel(address) as channel:
        data = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(request.SerializeToString(), **more)
        return answer.FromString(data)


def batch(case="M5"):
    tensors = load_file(FIXTURE / "expected.safetensors")
    return {name: tensors[f"{case}.{name}"] for name in ("hidden_states", "topk_ids", "topk_weights", "expected")}


def request(typed=False, **arrays):
    kinds = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "float16": "FP16"}
    made = kserve.ModelInferRequest(model_name="layer_0", id="seven")
    for name, a in arrays.items():
        x = made.inputs.add(name=name, datatype=kinds[a.dtype.name], shape=a.shape)
        if typed:
            field = {"FP32": "fp32_contents", "INT64": "int64_contents", "INT32": "int_contents"}[x.datatype]
            getattr(x.contents, field).extend(a.ravel().tolist())
        else:
            made.raw_input_contents.append(a.tobytes())
    return made


def arrays(**changes):
    found = batch()
    del found["expected"]
    return {**found, **changes}


def test_nvidias_client_gets_what_the_checkpoints_tool_expects(host):
    if importlib.util.find_spec("tritonclient") is None:
        pytest.skip("tritonclient is not installed: make test installs it")
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("triton_calls.py")),
        host.address,
        str(FIXTURE),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said["errors"]) == 6
    assert max(said["errors"].values()) < tolerance("bf16"), said["errors"]
    assert (said["live"], said["ready"], said["model_ready"]) == (True, True, [True, False, False])
    assert said["server"]["name"] == "expertd"
    assert [x["name"] for x in said["model"]["inputs"]] == ["hidden_states", "topk_ids", "topk_weights"]
    assert said["model"]["inputs"][0]["shape"] == ["-1", str(H)]
    assert said["config"]["config"]["input"][1] == {
        "name": "topk_ids",
        "data_type": "TYPE_INT32",
        "dims": ["-1", str(K)],
    }
    assert said["async"] == 20
    codes = {name: status.removeprefix("StatusCode.") for name, (status, _) in said["refused"].items()}
    assert codes == {
        "layer": "NOT_FOUND", "name": "NOT_FOUND", "version": "NOT_FOUND", "shape": "INVALID_ARGUMENT",
        "expert": "INVALID_ARGUMENT", "dtype": "INVALID_ARGUMENT", "timeout": "DEADLINE_EXCEEDED",
        "shared": "UNIMPLEMENTED", "cuda": "UNIMPLEMENTED", "statistics": "UNIMPLEMENTED",
    }  # fmt: skip
    assert "send raw contents" in said["refused"]["shared"][1]


@pytest.mark.parametrize("typed", [False, True])
def test_raw_and_typed_contents_give_the_bytes_of_forward(host, typed):
    found = arrays()
    answer = ask(host.address, "ModelInfer", request(typed, **found), kserve.ModelInferResponse)
    with grpc.insecure_channel(host.address) as channel:
        f32 = pb.DATA_TYPE_F32
        want = stubs.ExpertServiceStub(channel).Forward(
            pb.ForwardRequest(
                hidden_states=pb.Tensor(dtype=f32, shape=[5, H], raw=found["hidden_states"].tobytes()),
                topk_ids=pb.Tensor(dtype=pb.DATA_TYPE_I64, shape=[5, K], raw=found["topk_ids"].tobytes()),
                topk_weights=pb.Tensor(dtype=f32, shape=[5, K], raw=found["topk_weights"].tobytes()),
            )
        )
    assert answer.raw_output_contents[0] == want.output.raw
    assert (answer.model_name, answer.model_version, answer.id) == ("layer_0", "1", "seven")
    assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("FP32", [5, H])
    assert answer.parameters["routes_computed"].int64_param == want.routes_computed == 20
    assert answer.parameters["backend"].string_param == want.timing.backend


def test_no_tokens_and_the_end_of_time(host):
    none = arrays(**{name: a[:0] for name, a in arrays().items()})
    answer = ask(host.address, "ModelInfer", request(**none), kserve.ModelInferResponse)
    assert (list(answer.outputs[0].shape), answer.raw_output_contents[0]) == ([0, H], b"")
    late = request(**arrays())
    late.parameters["timeout"].int64_param = 1
    with pytest.raises(grpc.RpcError) as e:
        ask(host.address, "ModelInfer", late, kserve.ModelInferResponse)
    assert e.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def change(work):
    made = request(**arrays())
    work(made)
    return made


WRONG = {
    "model_name": (lambda r: setattr(r, "model_name", "layer_007"), "LAYER_NOT_HELD", 'want "layer_0"'),
    "not held": (lambda r: setattr(r, "model_name", "layer_1"), "LAYER_NOT_HELD", "got 1"),
    "unknown input": (lambda r: setattr(r.inputs[0], "name", "x"), "MALFORMED_MESSAGE", "got 'x'"),
    "twice": (lambda r: setattr(r.inputs[0], "name", "topk_ids"), "MALFORMED_MESSAGE", "'topk_ids' once more"),
    "missing": (lambda r: (r.inputs.pop(), r.raw_input_contents.pop()), "MALFORMED_MESSAGE", "none named topk_weights"),
    "too few raw": (lambda r: r.raw_input_contents.pop(), "MALFORMED_MESSAGE", "2 raw contents of 3 inputs"),
    "both": (lambda r: r.inputs[0].contents.fp32_contents.append(1), "MALFORMED_MESSAGE", "raw and typed contents"),
    "datatype": (lambda r: setattr(r.inputs[0], "datatype", "FP64"), "BAD_DTYPE", "got 'FP64'"),
    "rank": (lambda r: r.inputs[0].shape.append(1), "BAD_SHAPE", "want two extents"),
    "negative": (lambda r: r.inputs[0].shape.__setitem__(0, -1), "BAD_SHAPE", "want two extents"),
    "size": (lambda r: r.raw_input_contents.__setitem__(0, b"1234"), "BAD_BYTE_COUNT", "4 bytes"),
    "output": (lambda r: r.outputs.add(name="logits"), "MALFORMED_MESSAGE", 'want "output"'),
    "shared": (lambda r: r.inputs[0].parameters["shared_memory_region"].SetInParent(), "UNIMPLEMENTED", "send raw"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told(host, name):
    work, reason, text = WRONG[name]
    with pytest.raises(grpc.RpcError) as e:
        ask(host.address, "ModelInfer", change(work), kserve.ModelInferResponse)
    assert text in e.value.details()
    assert dict(e.value.trailing_metadata())["expertd-reason"] == reason


def test_typed_contents_are_of_their_datatype():
    made = request(typed=True, **arrays())
    made.inputs[0].datatype = "INT32"
    with pytest.raises(ExpertdError, match="got fp32_contents, want int_contents"):
        read_request(made.SerializeToString())
    made.inputs[0].datatype = "BF16"
    with pytest.raises(ExpertdError, match="want FP32, INT32 or INT64; send raw"):
        read_request(made.SerializeToString())


def test_typed_contents_are_counted_as_values():
    """Raw contents are counted in bytes, which whoever sends values does not know."""
    made = request(typed=True, **arrays())
    shape = list(made.inputs[0].shape)
    for values, got in (([1.0], "1 value"), ([1.0, 2.0], "2 values")):
        made.inputs[0].contents.fp32_contents[:] = values
        text = f"hidden_states.contents: got {got}, want {shape[0] * shape[1]} for {shape}"
        with pytest.raises(BadByteCountError, match=re.escape(text)):
            read_request(made.SerializeToString())
    with pytest.raises(BadByteCountError, match=r"topk_ids\.contents: got 7 values, want"):
        read_request(typed_ids(7).SerializeToString())


def typed_ids(count):
    made = request(typed=True, **arrays())
    made.inputs[1].contents.ClearField("int64_contents")
    made.inputs[1].contents.int64_contents.extend([1] * count)
    return made


def many(add, count):
    """A request with so many of what `add` adds one of."""
    made = request(**arrays())
    for n in range(count):
        add(made, n)
    return made


LONG = {
    "parameters of an input": (
        lambda: many(lambda r, n: r.inputs[0].parameters[f"{n:x}"].SetInParent(), 110_000),
        "more than 64 fields",
    ),
    "parameters": (lambda: many(lambda r, n: r.parameters[f"{n:x}"].SetInParent(), 110_000), "more than 64 fields"),
    "parameters of the output": (
        lambda: many(lambda r, n: (r.outputs[0] if n else r.outputs.add()).parameters[f"{n}"].SetInParent(), 9000),
        "at most 16384; send fewer",
    ),
    "ids": (lambda: typed_ids(1_000_000), "1000004 bytes of typed elements, want at most 131072"),
    "extents": (lambda: many(lambda r, n: r.inputs[0].shape.append(1), 100_000), "at most 16384; send fewer"),
    "inputs": (lambda: many(lambda r, n: r.inputs.add(), 4), "more than 3 inputs"),
    "id": (lambda: many(lambda r, n: setattr(r, "id", "x" * 20_000), 1), "at most 16384; send fewer"),
}


@pytest.mark.parametrize("name", LONG)
def test_what_is_too_long_is_refused_before_it_is_read(name, monkeypatch):
    make, text = LONG[name]
    data, read = make().SerializeToString(), []

    class Generated:
        class ModelInferRequest:
            @staticmethod
            def FromString(message):  # noqa: N802 - protobuf's name
                read.append(len(message))
                return kserve.ModelInferRequest.FromString(message)

    monkeypatch.setattr(kserve_messages, "kserve", Generated)
    tracemalloc.start()
    try:
        with pytest.raises(ExpertdError, match=text):
            read_request(data)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()
    assert sum(read) < 500


def test_typed_floats_are_read_where_they_are():
    """Their number is bounded by the message's length alone, as that of raw ones: they cost nothing."""
    x = np.random.default_rng(0).standard_normal((4000, H), np.float32)
    data = request(typed=True, **arrays(hidden_states=x)).SerializeToString()
    tracemalloc.start()
    try:
        view, _ = read_request(data)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()
    assert bytes(view.hidden_states.raw) == x.tobytes()


def test_typed_numbers_that_are_not_packed_are_read_and_bounded():
    made = request(typed=True, **arrays())
    packed = made.inputs[1].contents.SerializeToString()
    loose = b"".join(b"\x18" + bytes([n]) for n in made.inputs[1].contents.int64_contents)  # field 3 for each
    for spelled in (packed, loose, loose + b"\x18\x01" * 70_000):
        field = b"\x2a" + encoder._VarintBytes(len(spelled)) + spelled
        x = kserve.ModelInferRequest.InferInputTensor.FromString(made.inputs[1].SerializeToString())
        x.ClearField("contents")
        bare = kserve.ModelInferRequest.FromString(made.SerializeToString())
        del bare.inputs[1]
        body = x.SerializeToString() + field
        data = bare.SerializeToString() + b"\x2a" + encoder._VarintBytes(len(body)) + body
        if len(spelled) < 100:
            assert bytes(read_request(data)[0].topk_ids.raw) == arrays()["topk_ids"].tobytes()
            continue
        with pytest.raises(ExpertdError, match="140040 bytes of typed elements"):
            read_request(data)


def test_whatever_bytes_come_are_read_or_refused():
    """Raw contents are found as the generated class finds them, and nothing else is raised."""
    rng, good = random.Random(0), request(**arrays()).SerializeToString()
    taken = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(min(len(data), 200) if rng.random() < 0.8 else len(data))
            data[at : at + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
        data = bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
        try:
            view, _ = read_request(data)
        except ExpertdError:
            continue
        taken += 1
        whole = kserve.ModelInferRequest.FromString(data)
        by_name = {x.name: n for n, x in enumerate(whole.inputs)}
        assert bytes(view.hidden_states.raw) == whole.raw_input_contents[by_name["hidden_states"]]
    assert taken > 200
    with pytest.raises(ExpertdError, match="more than 64 fields"):
        read_request(b"\x22\x00" * 65)


def test_rights_are_those_of_forward_and_describe(serve, tmp_path):
    file = tmp_path / "callers.toml"
    file.write_text(f'[callers.pool]\ntokens = ["{TOKEN}"]\nrights = ["call"]\n'
                    f'[callers.eyes]\ntokens = ["{OTHER}"]\nrights = ["describe"]\n')  # fmt: skip
    address = serve(callers=file).address
    call, look = ({"metadata": [("authorization", f"Bearer {t}")]} for t in (TOKEN, OTHER))
    infer, name = request(**arrays()), kserve.ModelMetadataRequest(name="layer_0")
    assert ask(address, "ModelInfer", infer, kserve.ModelInferResponse, **call).outputs
    assert ask(address, "ModelMetadata", name, kserve.ModelMetadataResponse, **look).inputs
    assert ask(address, "ServerReady", kserve.ServerReadyRequest(), kserve.ServerReadyResponse).ready
    everybody = {"call": call, "describe": look, "none": {}, "unknown": {"metadata": [("authorization", "Bearer no")]}}
    asked = {
        "ModelInfer": ("call", infer),
        "ServerMetadata": ("describe", kserve.ServerMetadataRequest()),
        "ModelMetadata": ("describe", name),
        "ModelConfig": ("describe", name),
    }
    for method, (right, message) in asked.items():
        for who, more in everybody.items():
            if who == right:
                ask(address, method, message, getattr(kserve, f"{method}Response"), **more)
                continue
            with pytest.raises(grpc.RpcError) as e:
                ask(address, method, message, kserve.ModelInferResponse, **more)
            known = who in ("call", "describe")
            assert e.value.code().name == ("PERMISSION_DENIED" if known else "UNAUTHENTICATED"), (method, who)


def test_it_is_counted_and_listed(host):
    ask(host.address, "ModelInfer", request(**arrays()), kserve.ModelInferResponse)
    with pytest.raises(grpc.RpcError):
        ask(host.address, "ModelStatistics", kserve.ServerLiveRequest(), kserve.ServerLiveResponse)
    read = host.metrics.registry.get_sample_value
    labels = {"grpc_type": "unary", "grpc_service": "inference.GRPCInferenceService"}
    ok = {**labels, "grpc_method": "ModelInfer", "grpc_code": "OK"}
    assert read("grpc_server_handled_total", ok) >= 1
    assert read("grpc_server_handled_total", {**labels, "grpc_method": "other", "grpc_code": "UNIMPLEMENTED"}) >= 1
    assert read("grpc_server_handled_total", {**labels, "grpc_method": "ModelStatistics", "grpc_code": "OK"}) is None
    with grpc.insecure_channel(host.address) as channel:
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        find = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
        (answer,) = list(reflect(iter([find])))
        file = descriptor_pb2.FileDescriptorProto.FromString(answer.file_descriptor_response.file_descriptor_proto[0])
    assert file.package == "inference"


def test_without_the_option_there_is_nothing(serve):
    address = serve(kserve=False).address
    with pytest.raises(grpc.RpcError) as e:
        ask(address, "ServerLive", kserve.ServerLiveRequest(), kserve.ServerLiveResponse)
    assert e.value.code() is grpc.StatusCode.UNIMPLEMENTED
