"""docs/glossary.md: its terms are used, and what they replaced names no class and no module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
EXCEPTIONS = Path(__file__).with_name("glossary_exceptions.txt")
"""Names that still have a replaced word, one a line: MODULE, or MODULE:CLASS.  The list may only shrink."""
SOURCES = ("proto", "kernels", "server", "client")
MOST_TERMS = 40


def table(heading):
    """The first two columns below "## heading"."""
    text = GLOSSARY.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [(row[0], row[1]) for row in rows[2:]]


def sources():
    for top in SOURCES:
        for path in sorted((ROOT / top).glob("expert*/**/*.py")):
            if "_pb2" not in path.name:
                yield path


def names():
    """ "expertd.shm.client", "expertd.shm.client:Client", ...: every module, folder and class."""
    found = set()
    for path in sources():
        parts = path.relative_to(ROOT).with_suffix("").parts[1:]
        module = ".".join(part for part in parts if part != "__init__")
        found |= {module.rsplit(".", n)[0] for n in range(module.count(".") + 1)}
        found |= {f"{module}:{n.name}" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)}
    return found


def words(name):
    """ "expertd.shm.client:TcpDoor" -> {"tcp", "door"}; of a module the last part counts."""
    last = name.rpartition(":")[2] if ":" in name else name.rpartition(".")[2]
    found = [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", last)]
    return {form for w in found for form in (w, w.removesuffix("s"))}


def test_it_is_short_sorted_and_says_each_term_once():
    terms = [term.lower() for term, _ in table("Terms")]
    assert 0 < len(terms) <= MOST_TERMS
    assert terms == sorted(set(terms))
    assert all(len(meaning) > 20 for _, meaning in table("Terms"))


def test_every_term_is_used_in_code_and_papers():
    papers = [p for p in (ROOT / "docs").glob("*.md") if p != GLOSSARY]
    text = "\n".join(p.read_text() for p in [*sources(), *papers, ROOT / "README.md"])
    for term, _ in table("Terms"):
        spelled = re.escape(term).replace(r"\ ", "[ _-]?").replace(r"\-", "[ _-]?")
        assert re.search(rf"(?<![a-z]){spelled}", text, re.IGNORECASE), f"{term}: nothing is called so"


def test_replaced_words_name_no_class_and_no_module():
    replaced = {word for row, _ in table("Replaced terms") for word in row.split(", ")}
    named = {name for name in names() if words(name) & replaced}
    excepted = set(EXCEPTIONS.read_text().split())
    assert named - excepted == set(), "docs/glossary.md has other words for these"
    assert excepted - named == set(), f"no exceptions any more: take them out of {EXCEPTIONS.name}"


def test_words_are_found_in_names():
    assert words("a.b:TcpDoor") == {"tcp", "door"}
    assert words("a.doors") == {"doors", "door"}
    assert words("a.half_sent") == {"half", "sent"}
