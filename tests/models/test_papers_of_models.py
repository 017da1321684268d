"""docs/models.md names the families that are tested, and names that there are."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from tiny_models import FAMILIES

PAPER = (Path(__file__).parents[2] / "docs/models.md").read_text()


def test_the_families_are_those_that_are_tested():
    named = re.search(r"\*\*Families\*\*: (.*?)\. Each", PAPER, re.DOTALL)[1]
    assert sorted(re.split(r",\s+", named)) == sorted(FAMILIES)


def test_what_it_imports_is_there():
    imports = re.findall(r"^from (\S+) import (.+)$", PAPER, re.MULTILINE)
    assert imports
    for module, names in imports:
        assert all(hasattr(importlib.import_module(module), name) for name in names.split(", "))
    for module, name in re.findall(r"`(expertd_client\.\w+)\.(\w+)`", PAPER):
        assert hasattr(importlib.import_module(module), name)
