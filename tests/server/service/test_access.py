"""Callers that were let in, looked at again with another file."""

from __future__ import annotations

import pytest

from expertd.errors import UnauthenticatedError
from expertd_server.service.access import CALL, parse_access
from expertd_server.service.reloading import FileError

ONE, TWO = "first-first-first", "second-second-second"


def access(one: str, two: str):
    text = (
        f'[callers.one]\ntokens = ["{one}"]\nrights = ["call"]\n[callers.two]\ntokens = ["{two}"]\nrights = ["call"]\n'
    )
    return parse_access([text.encode()])


def test_a_token_that_is_another_callers_now_lets_nobody_go_on():
    admitted = access(ONE, TWO).admit(ONE, [], CALL)
    access(ONE, TWO).check(admitted, CALL)
    with pytest.raises(UnauthenticatedError, match="what it showed is let in no more"):
        access(TWO, ONE).check(admitted, CALL)


def test_a_wrong_token_is_not_mended_by_a_certificate():
    known = parse_access([b'[callers.one]\ncertificates = ["one.example"]\nrights = ["call"]\n'])
    assert known.admit(None, ["one.example"], CALL) == "one"
    with pytest.raises(UnauthenticatedError, match="a token that is not known"):
        known.admit(ONE, ["one.example"], CALL)


@pytest.mark.parametrize("text", [b"a = [", b"\xff", b"a = " + b"[" * 100_000, b"a = " + b"1" * 10_000])
def test_what_cannot_be_read_as_toml_is_a_fault_of_the_file(text):
    with pytest.raises(FileError, match="the file of callers is no TOML"):
        parse_access([text])
