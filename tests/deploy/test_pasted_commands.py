"""Every expertd and expertctl command of the papers is one that the present parsers read."""

from __future__ import annotations

import shlex

import pytest
from command_kit import ROOT, pasted, read

PAGES = sorted(p for where in ("*.md", "docs/*.md", "[a-z]*/README.md") for p in ROOT.glob(where))
COMMANDS = [(str(p.relative_to(ROOT)), words) for p in PAGES for words in pasted(p.read_text())]


def test_commands_are_found():
    assert {"README.md", "docs/install.md"} <= {name for name, _ in COMMANDS}


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=[f"{n}: {shlex.join(w)[:60]}" for n, w in COMMANDS])
def test_the_parser_reads_it(name, words, monkeypatch):
    if words[:2] == ["expertd", "serve"] and not {"--checkpoint", "--synthetic", "--config"} & set(words):
        words = [*words, "--synthetic", "tiny:bf16"]  # the page leaves it out
    read(words, monkeypatch)


def test_an_option_that_there_is_not_is_red(monkeypatch):
    with pytest.raises(pytest.fail.Exception, match="the parser ended with 2"):
        read(["expertd", "serve", "--max-token-count", "3"], monkeypatch)
