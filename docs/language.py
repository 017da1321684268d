"""Long sentences, and terms that the glossary replaced, in the user pages.

python docs/language.py [FILE...]     print them (default: all pages of the check)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["EXCEPT", "MOST_WORDS", "PAGES", "REPLACED", "findings", "main", "sentences"]

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 30
PAGES = sorted(
    p
    for where in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "[a-z]*/README.md")
    for p in ROOT.glob(where)
    if p.name != "glossary.md"
)
"""docs/log is not among them: it has lab notes.  Nor is the glossary: it lists the replaced terms."""

EXCEPT: Mapping[str, str] = {}
"""Page -> why it is not checked yet.  It may only shrink: a test fails for a page here without a finding."""

REPLACED: Mapping[str, str] = {
    r"rows? CODE|faster rows?|slower rows?|rows of the table": "backend",
    r"holders?": "replica",
    r"tournaments?": "autotuning",
    r"facade": "KServe endpoint",
    r"keeper": "coordinator",
    r"promis(?:e|es|ed)": "SLO, guarantee",
    r"the knee": "saturation point",
    r"company": "batching delay",
    r"weakness(?:es)?": "vulnerability",
    r"(?:numbers?|what) (?:that )?(?:is|are) none": "NaN, infinity",
    r"proofs?": "integrity record",
    r"\blegs?": "sub-request",
    r"doors?": "listener",
    r"told|tells of": "reports",
    r"knows? nobody|nobody's": "imports nothing",
    r"inline(?! assembly)": "over gRPC",
    r"drawn (?:by the server|tensors)": "generated",
}
"""Regular expression -> the term to use; docs/glossary.md explains the terms."""


def sentences(text: str) -> Iterator[str]:
    """Sentences of a Markdown page without code, links and tables' rules; each list item, heading and cell ends one."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |\||#))", text):
        for piece in block.split("|") if block.lstrip().startswith("|") else [block]:
            plain = " ".join(piece.split()).lstrip("#*- ")
            yield from (s for s in re.split(r"(?<=[.!?:])[*_)]*\s+", plain) if s.strip("-"))


def findings(text: str) -> list[str]:
    """A line for each long sentence and each replaced term."""
    found = []
    for sentence in sentences(text):
        words = re.findall(r"[\w'%.-]*\w[\w'%.-]*", sentence)
        if len(words) > MOST_WORDS and sentence.count(",") * 2.5 < len(words):  # names in a row are no sentence
            found.append(f"{len(words)} words: {sentence}")
        for pattern, term in REPLACED.items():
            if match := re.search(rf"\b(?:{pattern})\b", sentence, re.IGNORECASE):
                found.append(f"{match[0]!r}, better {term!r}: {sentence}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints all findings; 1 where there are some."""
    files = [Path(a) for a in (sys.argv[1:] if argv is None else argv)] or PAGES
    lines = [f"{path.name}: {line}" for path in files for line in findings(path.read_text())]
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
