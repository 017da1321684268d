"""Variables of the files of deploy/ are options; the kit that reads commands sees wrong ones.  The commands of the
documents: tests/docs/test_commands.py."""

from __future__ import annotations

import re

import pytest
from command_kit import ROOT, read

from expertd_server.config.options import OPTIONS


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
