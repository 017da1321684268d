"""The commands of the documents, found where readers find them.

sh      a command of a fenced shell block, of an indented block, or of a comment in a file of deploy/
python  a fenced Python block
span    a code span in prose that begins with a program: "run `make demo`"
"""

from __future__ import annotations

import ast
import builtins
import re
import shlex
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELLS = ("sh", "bash", "shell", "console")
_PROGRAMS = """expertd expertctl make python python3 pip docker kubectl helm kind promtool systemctl journalctl grpcurl
buf ghz kill curl perf_analyzer vllm ray sh bash git nvidia-smi apt-get opentelemetry-instrument"""
PROGRAMS = frozenset(_PROGRAMS.split())
"""What a code span or an indented line begins with where it is a command."""


@dataclass(frozen=True)
class Command:
    """page: its path below the root.  line: the first one, from 1.  text: as printed, without the comment behind it."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text.replace("\\\n", " "), comments=True)

    @property
    def program(self) -> str:
        """The first word behind assignments to variables."""
        if self.kind == "python":
            return "python"
        return _first(self.text)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.text.split())[:70]}"


def pages() -> list[Path]:
    """What users and operators read.  Not docs/log (notes of measurements), CHANGELOG.md and DECISIONS.md."""
    found = {p for where in ("*.md", "docs/*.md", "[a-z]*/README.md", "deploy/*/README.md") for p in ROOT.glob(where)}
    return sorted(p for p in found if p.name not in ("CHANGELOG.md", "DECISIONS.md") and "node_modules" not in p.parts)


def deploy_files() -> list[Path]:
    """Files of deploy/ with commands in their comments."""
    ends = {".service", ".toml", ".yaml", ".yml", ".tpl", ".txt", ""}
    return sorted(p for p in (ROOT / "deploy").rglob("*") if p.is_file() and p.suffix in ends)


def everything() -> list[Command]:
    """The commands of all pages and of deploy/, in the order in which they stand there."""
    out = [c for page in pages() for c in in_page(str(page.relative_to(ROOT)), page.read_text())]
    return out + [c for f in deploy_files() for c in in_comments(str(f.relative_to(ROOT)), f.read_text())]


def in_page(page: str, text: str) -> list[Command]:
    """Of a page in Markdown.  ValueError: a shell block that ends within a quote."""
    out: list[Command] = []
    prose = text
    for m in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
        first = text.count("\n", 0, m.start(3)) + 1
        if m[2] == "python":
            out.append(Command(page, first, "python", m[3]))
        elif m[2] in SHELLS:
            lines = re.sub(r"^\$ ", "", m[3], flags=re.MULTILINE)
            out += [Command(page, first + n, "sh", command) for n, command in _logical(page, lines)]
        prose = prose.replace(m[0], "\n" * m[0].count("\n"), 1)
    out += _indented(page, prose, r"^    (?! )(.+)$")
    for m in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose):
        span = " ".join(m[1].split())
        if len(span.split()) > 1 and _first(span) in PROGRAMS:
            out.append(Command(page, prose.count("\n", 0, m.start()) + 1, "span", span))
    return sorted(out, key=lambda c: c.line)


def in_comments(page: str, text: str) -> list[Command]:
    """Of comments, where a line is indented by five columns."""
    return _indented(page, text, r"^# {5}(.+)$")


def _indented(page: str, text: str, pattern: str) -> list[Command]:
    found = [(text.count("\n", 0, m.start()) + 1, m[1]) for m in re.finditer(pattern, text, re.MULTILINE)]
    return [Command(page, n, "sh", _bare(line)) for n, line in found if _first(line) in PROGRAMS]


def _first(text: str) -> str:
    words = (w.rpartition("/")[2] for w in text.split() if not re.match(r"[A-Za-z_]\w*=", w))
    return next(words, "")


def _logical(page: str, block: str) -> Iterator[tuple[int, str]]:
    """(line from 0, command): one goes on while a quote is open or a line ends in a backslash."""
    pending, first = "", 0
    for n, line in enumerate(block.splitlines()):
        if not pending:
            first = n
            if not line.strip() or line.lstrip().startswith("#"):
                continue
        pending += line + "\n"
        if not _open(pending):
            yield first, _bare(pending)
            pending = ""
    if pending:
        raise ValueError(f"{page}: a shell block ends within a command: {pending!r}")


def _open(text: str) -> bool:
    if text.endswith("\\\n"):
        return True
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def _bare(text: str) -> str:
    """Without the comment at the end of its last line."""
    text = text.strip()
    for m in re.finditer(r"\s+#", text):
        head = text[: m.start()]
        if not _open(head) and "\n" not in text[m.start() :].strip():
            return head
    return text


def free_names(block: str) -> set[str]:
    """Names that a Python block uses and nothing in it defines.  SyntaxError."""
    ast.parse(block)
    found: set[str] = set()

    def look(table: symtable.SymbolTable, defined: set[str]) -> None:
        own = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_parameter()}
        known = defined | own | ({s.get_name() for s in table.get_symbols() if s.is_namespace()})
        found.update(s.get_name() for s in table.get_symbols() if s.is_referenced() and s.get_name() not in known)
        for child in table.get_children():
            look(child, known)

    look(symtable.symtable(block, "block", "exec"), set(dir(builtins)))
    return found


def imports(block: str) -> str:
    """Its import statements alone, those within `with` and `def` as well."""
    nodes = [n for n in ast.walk(ast.parse(block)) if isinstance(n, (ast.Import, ast.ImportFrom))]
    return "\n".join(ast.unparse(n) for n in nodes)


def printed(block: str) -> list[str]:
    """What the comments behind print(...) say that it prints."""
    return re.findall(r"^print\(.*\)\s*#\s*(.+)$", block, re.MULTILINE)


def targets(makefile: str) -> set[str]:
    """Those of a Makefile."""
    return set(re.findall(r"^([a-z0-9_-]+):", makefile, re.MULTILINE))


def scripts(commands: Iterable[Command]) -> Iterator[tuple[Command, str]]:
    """Python files that commands run, by path below the root."""
    for c in commands:
        if c.kind != "python" and c.program in ("python", "python3"):
            yield from ((c, w) for w in c.words if re.fullmatch(r"[a-z][\w/]*/\w+\.py", w))
