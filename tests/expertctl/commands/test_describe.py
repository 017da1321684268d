"""expertctl describe: what it says for people."""

from __future__ import annotations

from argparse import Namespace
from io import StringIO

import pytest
from rich.console import Console

from expertctl.commands import versions
from expertctl.commands.describe import show
from expertd.common.tables import console
from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import weights_service_pb2 as weights_pb
from expertd_client.exchange.session import Session


@pytest.mark.parametrize(("told", "said"), [("0.0.0.0:50052", "node-3:50052"), ("10.0.0.5:50052", "10.0.0.5:50052")])
def test_the_admin_address_is_one_that_can_be_called_from_here(told, said):
    out = Console(file=StringIO(), width=100)
    show(out, "node-3:50051", pb.DescribeResponse(admin_address=told), Session())
    assert f"experts and weights can be changed at {said}\n" in "".join(
        line.rstrip() + "\n" for line in out.file.getvalue().splitlines()
    )


EVIL = "x\x1b[2J\x1b]0;title\x07\x9b31m\u202e"


def hostile(message):
    """The message with each number the largest, and each text one that a terminal would obey."""
    kinds = message.DESCRIPTOR
    for field in kinds.fields:
        repeated = hasattr(getattr(message, field.name), "append")
        if field.message_type is not None:
            inner = getattr(message, field.name)
            hostile(inner.add() if repeated else inner)
            if not repeated:
                inner.SetInParent()
        else:
            values = {field.CPPTYPE_STRING: EVIL if field.type == field.TYPE_STRING else b"x"}
            values |= {field.CPPTYPE_UINT64: 2**64 - 1, field.CPPTYPE_INT64: 2**63 - 1}
            values |= {field.CPPTYPE_UINT32: 2**32 - 1, field.CPPTYPE_INT32: 2**31 - 1}
            values |= {field.CPPTYPE_FLOAT: 3e38, field.CPPTYPE_DOUBLE: 1e308, field.CPPTYPE_BOOL: True}
            value = values.get(field.cpp_type, 1)  # an enum
            getattr(message, field.name).append(value) if repeated else setattr(message, field.name, value)
    return message


def test_a_hostile_server_does_nothing_to_the_terminal(monkeypatch):
    d = hostile(pb.DescribeResponse())
    out = console()
    out.file = paper = StringIO()
    show(out, "s:1", d, Session(transport="shm", refused={EVIL: EVIL}))
    said = paper.getvalue()
    assert "x\\x1b[2J" in said
    assert said.replace("\n", "").isprintable()


def test_versions_of_a_hostile_server_are_shown(monkeypatch, capsys):
    found = {
        "s:1": hostile(weights_pb.GetUpdateResponse()),
        "s:2": weights_pb.GetUpdateResponse(last_error="x\ns:1: well"),
    }
    monkeypatch.setattr(versions, "Updater", lambda *_, **__: Fake(found))
    shown = dict.fromkeys(("ca", "cert", "key", "token_file", "server_name"))
    args = Namespace(address=["s:1"], rollback=None, timeout=1.0, json=False, tls=False, **shown)
    assert versions.run(args) == 0
    said = capsys.readouterr().out
    assert said.replace("\n", "").isprintable()
    assert "s:2: the last update failed: x\\ns:1: well" in said
    assert versions.run(Namespace(**{**vars(args), "json": True})) == 0
    assert capsys.readouterr().out.strip().isprintable()


class Fake:
    """An Updater that has asked."""

    def __init__(self, found):
        self._found = found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def each(self, *_):
        return self._found
