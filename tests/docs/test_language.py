"""User pages have short sentences, and the terms of the glossary."""

import pytest

from language import EXCEPT, MOST_WORDS, PAGES, ROOT, findings, sentences

NAMES = [str(p.relative_to(ROOT)) for p in PAGES]


@pytest.mark.parametrize("name", sorted(set(NAMES) - EXCEPT.keys()))
def test_pages_are_in_plain_language(name):
    assert not findings((ROOT / name).read_text()), "python docs/language.py prints the findings of all pages"


def test_exceptions_are_still_needed():
    done = [name for name in EXCEPT if not findings((ROOT / name).read_text())]
    assert not done, "these are in plain language: take them out of EXCEPT"


def test_user_pages_are_among_them_and_lab_notes_are_not():
    assert {"README.md", "SECURITY.md", "docs/deploy.md", "client/README.md"} <= set(NAMES)
    assert not [n for n in NAMES if n.startswith("docs/log")]


def test_code_tables_and_links_are_taken_apart():
    page = (
        "# Head\nOne `a b`\ntwo. Three [four](x.md)!\n\n```sh\nno words\n```\n| x | y z |\n|---|---|\n- item\n- next\n"
    )
    assert list(sentences(page)) == ["Head One CODE two.", "Three four!", "x", "y z", "item", "next"]


def test_a_sentence_that_is_too_long_is_found():
    assert findings("word " * MOST_WORDS + ".") == []
    (found,) = findings("word " * (MOST_WORDS + 1) + ".")
    assert found.startswith(f"{MOST_WORDS + 1} words: word word")
    assert findings("name, " * 40) == [], "names in a row are no sentence"


@pytest.mark.parametrize(
    ("text", "term"),
    [("A holder answers.", "replica"), ("the row `cpu` is slow", "backend"), ("It is a tournament.", "autotuning")],
)
def test_a_replaced_term_is_found(text, term):
    (found,) = findings(text)
    assert term in found


def test_words_that_only_contain_a_term_are_not_found():
    assert findings("Shareholders compromise; inline assembly adds rows of a tensor.") == []
