"""Every expertd and expertctl command of the papers is one that the present parsers read."""

from __future__ import annotations

import re
import shlex

import pytest
from command_kit import ROOT, pasted, read

from expertd_server.config.options import OPTIONS

PAGES = sorted(p for where in ("*.md", "docs/*.md", "[a-z]*/README.md") for p in ROOT.glob(where))
COMMANDS = [(str(p.relative_to(ROOT)), words) for p in PAGES for words in pasted(p.read_text())]


def test_commands_are_found():
    assert {"README.md", "docs/install.md"} <= {name for name, _ in COMMANDS}


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=[f"{n}: {shlex.join(w)[:60]}" for n, w in COMMANDS])
def test_the_parser_reads_it(name, words, monkeypatch):
    if words[:2] == ["expertd", "serve"] and not {"--checkpoint", "--synthetic", "--config"} & set(words):
        words = [*words, "--synthetic", "tiny:bf16"]  # the page leaves it out
    read(words, monkeypatch)


def test_every_variable_of_deploy_is_an_option():
    """Or one that a file of deploy/ declares for itself."""
    files = [p for p in (ROOT / "deploy").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    named = {(v, p.name) for p in files for v in re.findall(r"\bEXPERTD_[A-Z_]+", p.read_text())}
    assert len(named) > 10
    own = {("EXPERTD_WHEEL", "wheel.py")}
    assert {(v, name) for v, name in named - own if v not in {o.variable for o in OPTIONS}} == set()


def test_an_option_that_there_is_not_is_red(monkeypatch):
    with pytest.raises(pytest.fail.Exception, match="the parser ended with 2"):
        read(["expertd", "serve", "--max-token-count", "3"], monkeypatch)
