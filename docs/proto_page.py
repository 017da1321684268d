"""docs/proto.md: services, messages and enums of the contract, from the comments of the .proto files."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc

__all__ = ["FILES", "markdown"]

WIDTH = 140
ROOT = Path(__file__).resolve().parents[1]
FILES = tuple(f"expertd/v1/{n}.proto" for n in ("expert_service", "admin_service", "weights_service", "placement"))
_FIELD = pb.FieldDescriptorProto
_MESSAGES, _ENUMS, _SERVICES, _MEMBERS, _ONEOFS = 4, 5, 6, 2, 8
"""Numbers of fields in descriptor.proto: the path to a comment is made of them."""


def markdown(note: str) -> str:
    parts = [
        f"""# The contract, field by field

{note}

[proto/README.md](../proto/README.md) has the files. A number that is 0, a text that is "" and a message that is absent
mean "not given", unless the field says what 0 stands for. Errors: [errors.md](errors.md).
"""
    ]
    for file in _described():
        parts += list(_File(file).sections())
    return "\n".join(parts)


def _described() -> Sequence[pb.FileDescriptorProto]:
    """FILES as protoc describes them, comments included."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.binpb"
        words = ["protoc", f"-I{ROOT / 'proto'}", "--include_source_info", f"--descriptor_set_out={out}", *FILES]
        if protoc.main(words):
            raise ValueError("protoc does not read the contract")
        return pb.FileDescriptorSet.FromString(out.read_bytes()).file


class _File:
    """One .proto file as Markdown."""

    def __init__(self, file: pb.FileDescriptorProto) -> None:
        self._file = file
        self._comments = {tuple(x.path): x for x in file.source_code_info.location}

    def sections(self) -> Iterator[str]:
        yield f"## `{self._file.name.removeprefix('expertd/v1/')}`\n"
        for i, service in enumerate(self._file.service):
            yield f"### {service.name}\n{_wrapped(self._text(_SERVICES, i))}\n"
            yield (
                "| method | request | response | what it does |\n|---|---|---|---|\n"
                + "\n".join(
                    f"| `{m.name}` | {_streamed(m.client_streaming, m.input_type)} "
                    f"| {_streamed(m.server_streaming, m.output_type)} | {self._text(_SERVICES, i, _MEMBERS, k)} |"
                    for k, m in enumerate(service.method)
                )
                + "\n"
            )
        for i, message in enumerate(self._file.message_type):
            yield f"### {message.name}\n{_wrapped(self._text(_MESSAGES, i))}\n"
            if message.field:
                rows = "\n".join(self._fields(i, message))
                yield f"| field | number | type | meaning |\n|---|---|---|---|\n{rows}\n"
        for i, enum in enumerate(self._file.enum_type):
            rows = "\n".join(
                f"| `{v.name}` | {v.number} | {self._text(_ENUMS, i, _MEMBERS, k)} |" for k, v in enumerate(enum.value)
            )
            about = _wrapped(self._text(_ENUMS, i))
            yield f"### {enum.name}\n{about}\n\n| value | number | meaning |\n|---|---|---|\n{rows}\n"

    def _fields(self, i: int, message: pb.DescriptorProto) -> Iterator[str]:
        for k, field in enumerate(message.field):
            one_of = f"one of `{message.oneof_decl[field.oneof_index].name}`. " if field.HasField("oneof_index") else ""
            text = self._text(_MESSAGES, i, _MEMBERS, k)
            yield f"| `{field.name}` | {field.number} | {_type(field, message)} | {one_of}{text} |"

    def _text(self, *path: int) -> str:
        found = self._comments.get(path)
        return "" if found is None else " ".join(found.leading_comments.split()).replace("|", r"\|")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _streamed(streams: bool, name: str) -> str:
    return ("stream of " if streams else "") + _link(name)


def _link(name: str) -> str:
    short = name.rsplit(".", 1)[-1]
    return f"[{short}](#{short.lower()})"


def _type(field: pb.FieldDescriptorProto, message: pb.DescriptorProto) -> str:
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{nested.name}"):
            key, value = nested.field
            return f"map from {_scalar(key)} to {_scalar(value)}"
    return ("repeated " if field.label == _FIELD.LABEL_REPEATED else "") + _scalar(field)


def _scalar(field: pb.FieldDescriptorProto) -> str:
    if field.type in (_FIELD.TYPE_MESSAGE, _FIELD.TYPE_ENUM):
        return _link(field.type_name)
    return _FIELD.Type.Name(field.type).removeprefix("TYPE_").lower()
