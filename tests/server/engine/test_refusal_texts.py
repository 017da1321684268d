"""One table of texts of refusals, in Python and in C++."""

import string

import pytest

from expertd.errors import TABLE, BadShapeError, InvalidRequestError
from expertd_server.engine.refusal_texts import HEADER, REASONS, TEXTS, header, refusal


def test_the_header_is_made_of_the_table():
    assert HEADER.read_text() == header(), "python -m expertd_server.engine.refusal_texts writes it"


def test_reasons_are_those_of_the_error_table():
    assert REASONS[0] == ""
    assert set(REASONS[1:]) <= set(TABLE)
    assert len(set(REASONS)) == len(REASONS)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_one_line_a_reason_and_named_values(name):
    error, text = TEXTS[name]
    assert error.reason in REASONS
    assert '"' not in text, "it would end the literal in C++"
    assert "\n" not in text
    values = [value for _, value, *_ in string.Formatter().parse(text) if value is not None]
    assert all(values)
    found = refusal(name, **dict.fromkeys(values, 7))
    assert type(found) is error
    assert found.message == text.format(**dict.fromkeys(values, 7))
    assert text.split(":")[0], "the subject comes first"


def test_a_refusal_tells_its_values():
    found = refusal("hidden_shape", shape=[3, 255], hidden_size=256)
    assert isinstance(found, BadShapeError)
    assert isinstance(found, InvalidRequestError)
    assert found.message == "hidden_states: got [3, 255], want [M, 256]"
