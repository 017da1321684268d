"""What command lines learn from the server: through Python's stub, and with the real grpcurl and ghz where they are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(120)

FORWARD = "expertd.v1.ExpertService.Forward"
REQUEST = json.dumps(
    {
        "layer": 0,
        "outputForm": "OUTPUT_FORM_DIGEST",
        "hiddenStates": {"dtype": "DATA_TYPE_BF16", "shape": [4, 256], "synthetic": {"seed": 1}},
        "topkIds": {"dtype": "DATA_TYPE_I32", "shape": [4, 2], "synthetic": {"seed": 2, "zipfExponent": 1.1}},
        "topkWeights": {"dtype": "DATA_TYPE_F32", "shape": [4, 2], "synthetic": {"seed": 3}},
    }
)


def ask(address: str, **question: str) -> reflection_pb2.ServerReflectionResponse:
    with grpc.insecure_channel(address) as channel:
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        (answer,) = reflect(iter([reflection_pb2.ServerReflectionRequest(**question)]), timeout=20)
    return answer


def files(address: str, **question: str) -> dict[str, FileDescriptorProto]:
    found = ask(address, **question).file_descriptor_response.file_descriptor_proto
    return {f.name: f for f in map(FileDescriptorProto.FromString, found)}


@pytest.mark.parametrize("symbol", [FORWARD, "expertd.v1.ExpertService", "expertd.v1.Tensor", "expertd.v1.Tensor.raw"])
def test_a_method_is_a_symbol_like_another(tiny_server, symbol):
    """ghz asks for the method."""
    assert "expertd/v1/expert_service.proto" in files(tiny_server, file_containing_symbol=symbol)


@pytest.mark.parametrize("symbol", ["expertd.v1.ExpertService.Backward", "expertd.v1.Nothing", "Forward", ""])
def test_what_is_not_there_is_not_found(tiny_server, symbol):
    answer = ask(tiny_server, file_containing_symbol=symbol)
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_fields_have_json_names(tiny_server):
    """Those of nested messages and of imported files, too; the contract's own names stay."""
    found = files(tiny_server, file_containing_symbol=FORWARD)
    names = {}

    def walk(message):
        names.update({f.name: f.json_name for f in message.field})
        for nested in message.nested_type:
            walk(nested)

    for file in found.values():
        for message in file.message_type:
            walk(message)
    assert names["routes_computed"] == "routesComputed"
    assert names["layer"] == "layer"
    assert "" not in names.values()


def command(name: str, *words: str) -> str:
    """Standard output of a program that is installed."""
    if (program := shutil.which(name)) is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_grpcurl(tiny_server):
    said = command("grpcurl", "-plaintext", "-d", REQUEST, tiny_server, "expertd.v1.ExpertService/Forward")
    assert json.loads(said)["routesComputed"] == "8"
    assert "grpc.health.v1.Health" in command("grpcurl", "-plaintext", tiny_server, "list").split()
    told = command("grpcurl", "-plaintext", tiny_server, "describe", FORWARD)
    assert "rpc Forward ( .expertd.v1.ForwardRequest )" in told


def test_grpcurl_streams(tiny_server):
    """Two requests on one stream, each with its number."""
    message = json.loads(REQUEST)
    two = "".join(json.dumps({"forward": {**message, "requestId": i}}) for i in (7, 8))
    said = command("grpcurl", "-plaintext", "-d", two, tiny_server, "expertd.v1.ExpertService/StreamForward")
    assert sorted(re.findall(r'"requestId": "(\d)"', said)) == ["7", "8"]


def test_ghz(tiny_server):
    words = ["--insecure", "--call", FORWARD, "-d", REQUEST, "-n", "40", "-c", "4", "-O", "json", tiny_server]
    report = json.loads(command("ghz", *words))
    assert report["statusCodeDistribution"] == {"OK": 40}, report
