"""The contract's generated files are fresh, it keeps its style, and it keeps what version 1 promised."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from expertd.kserve import inference_pb2
from expertd.v1 import admin_service_pb2, placement_pb2, weights_service_pb2
from expertd.v1 import expert_service_pb2 as pb

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto"
CONTRACT = {
    "expertd/kserve/inference.proto": inference_pb2,
    "expertd/v1/admin_service.proto": admin_service_pb2,
    "expertd/v1/expert_service.proto": pb,
    "expertd/v1/placement.proto": placement_pb2,
    "expertd/v1/weights_service.proto": weights_service_pb2,
}
BASELINE = ROOT / "tests" / "golden" / "wire_v1.binpb"
BUF = ROOT / "node_modules" / ".bin" / "buf"

needs_buf = pytest.mark.skipif(not BUF.exists(), reason="buf is not installed: `make setup` installs it where npm is")


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def generate(to: Path) -> None:
    protoc = (sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}")
    run(*protoc, f"--python_out={to}", f"--pyi_out={to}", f"--descriptor_set_out={to}/set", *CONTRACT)
    run(*protoc, f"--grpc_python_out={to}", *(name for name in CONTRACT if name.endswith("_service.proto")))


def test_stubs_are_fresh(tmp_path: Path) -> None:
    """`make proto` would change nothing."""
    generate(tmp_path)
    made_files = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file
    assert {file.name for file in made_files} == {str(p.relative_to(PROTO)) for p in PROTO.rglob("*.proto")}
    for file in made_files:
        committed = descriptor_pb2.FileDescriptorProto()
        CONTRACT[file.name].DESCRIPTOR.CopyToProto(committed)
        assert _bare(file) == _bare(committed), f"{file.name} has changed: run `make proto`"

    grpc_stub = (PROTO / "expertd/v1/expert_service_pb2_grpc.py").read_text()
    if f"GRPC_GENERATED_VERSION = '{version('grpcio-tools')}'" not in grpc_stub:
        pytest.skip(f"grpcio-tools {version('grpcio-tools')} is not the one that made the committed stubs")
    made = sorted(p for p in (tmp_path / "expertd").rglob("*") if p.is_file())
    for path in made:
        assert path.read_text() == (PROTO / path.relative_to(tmp_path)).read_text(), f"{path.name}: run `make proto`"
    assert len(made) == 13


def _bare(file: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    """Without JSON names, which protoc fills in and a generated module has not."""
    messages = list(file.message_type)
    for message in messages:
        messages += message.nested_type  # they come later in this loop
        for field in message.field:
            field.ClearField("json_name")
    return file


def test_contract_keeps_every_name_number_and_type_of_version_1() -> None:
    """What `buf breaking` checks, as far as the wire goes, for machines without it."""
    current = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(current)
    baseline = descriptor_pb2.FileDescriptorSet.FromString(BASELINE.read_bytes()).file[0]
    assert facts(baseline)
    assert facts(baseline) <= facts(current)


def facts(file: descriptor_pb2.FileDescriptorProto) -> set[tuple[object, ...]]:
    found: set[tuple[object, ...]] = set()
    for message in file.message_type:
        for f in message.field:
            oneof = message.oneof_decl[f.oneof_index].name if f.HasField("oneof_index") else ""
            found.add((message.name, f.name, f.number, f.type, f.label, f.type_name, oneof))
    for enum in file.enum_type:
        found |= {(enum.name, v.name, v.number) for v in enum.value}
    for service in file.service:
        for m in service.method:
            found.add((service.name, m.name, m.input_type, m.output_type, m.client_streaming, m.server_streaming))
    return found


@needs_buf
def test_buf_lint() -> None:
    run(BUF, "lint", "proto")
    run(BUF, "format", "--diff", "--exit-code", "proto")


@needs_buf
def test_buf_breaking() -> None:
    run(BUF, "breaking", "proto", "--against", BASELINE)
