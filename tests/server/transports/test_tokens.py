"""Tokens: each once, whole, and few at a time."""

from __future__ import annotations

import pytest

from expertd_server.transports import tokens as module
from expertd_server.transports.tokens import Tokens, has_share


def test_a_token_is_taken_once_and_whole():
    tokens: Tokens[str] = Tokens()
    token = bytes.fromhex(tokens.issue("one"))
    for wrong in (b"", token[:1], token[:-1], token + b"\0", bytes(32), token[::-1], b" " * 64):
        assert tokens.take(wrong) is None
    assert tokens.take(token) == "one"
    assert tokens.take(token) is None


def test_each_token_is_for_whom_it_was_issued():
    tokens: Tokens[str] = Tokens()
    issued = {name: bytes.fromhex(tokens.issue(name)) for name in ("one", "two", "three")}
    assert sorted(tokens.waiting()) == sorted(issued)
    assert [tokens.take(issued[name]) for name in ("two", "one", "three")] == ["two", "one", "three"]
    assert tokens.waiting() == []


def test_there_are_so_many_tokens_at_most(monkeypatch):
    monkeypatch.setattr(module, "_MOST", 3)
    tokens: Tokens[int] = Tokens()
    issued = [tokens.issue(n) for n in range(4)]
    assert [bool(token) for token in issued] == [True, True, True, False]
    assert tokens.take(bytes.fromhex(issued[1])) == 1
    assert tokens.issue(5)


def test_a_token_is_forgotten_after_its_time(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    tokens: Tokens[str] = Tokens()
    old = bytes.fromhex(tokens.issue("old"))
    now_s[0] += 0.9 * module._VALID_S
    new = bytes.fromhex(tokens.issue("new"))
    now_s[0] += 0.2 * module._VALID_S
    assert tokens.waiting() == ["new"]
    assert tokens.take(old) is None
    assert tokens.take(new) == "new"


def test_tokens_of_those_who_may_not_come_any_more_are_dropped():
    tokens: Tokens[str] = Tokens()
    issued = [bytes.fromhex(tokens.issue(name)) for name in ("good", "bad", "bad")]
    tokens.drop(lambda name: name == "bad")
    assert [tokens.take(token) for token in issued] == ["good", None, None]


@pytest.mark.parametrize("most", [1, 2, 3, 8, 255])
def test_who_comes_alone_gets_half_and_leaves_room_for_the_next(most):
    taken: list[str] = []
    for caller in ("one", "two", "three"):
        while has_share(taken.count(caller), len(taken), most):
            taken.append(caller)
    assert taken.count("one") == -(-most // 2)
    assert len(taken) <= most
    assert has_share(0, len(taken), most) == (len(taken) < most)


@pytest.mark.parametrize("said", [b"", b" " * 64, b"0" * 63, b"0" * 63 + b"\n", b"\xff" * 64])
def test_what_a_client_said_is_no_token_unless_it_has_the_form_of_one(said):
    tokens = Tokens()
    token = tokens.issue("me").encode()
    assert tokens.take_said(said) is None
    assert tokens.take_said(b" " + token[1:]) is None
    assert tokens.take_said(token) == "me"
    assert tokens.take_said(token) is None
