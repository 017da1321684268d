"""A copy of the repository in which a test adds something, and the places that CONTRIBUTING.md names for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["Tree", "places"]

ROOT = Path(__file__).parents[2]
PACKAGES = ("proto", "kernels", "server", "client", "docs")
COPIED = (*PACKAGES, "deploy", "tests")
_IGNORED = shutil.ignore_patterns("__pycache__", ".objects", "fixtures", "log", "results", "*.so.[0-9]*")


def places(section: str, **names: str) -> set[str]:
    """The files and folders that CONTRIBUTING.md says somebody has to write in "### Add ...": what each numbered line
    names before its first colon, with capital letters filled in."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(rf"^### {re.escape(section)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"CONTRIBUTING.md has no section {section!r}"
    named: set[str] = set()
    for line in re.findall(r"^\d+\. (.*)$", found[1], re.MULTILINE):
        named |= set(re.findall(r"`([\w./-]+/[\w./-]*)`", line.partition(":")[0]))
    for name, value in names.items():
        named = {path.replace(name, value) for path in named}
    return {path.rstrip("/") for path in named}


class Tree:
    """touched: files that were written, by their paths below the root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.touched: set[str] = set()
        for name in COPIED:
            shutil.copytree(ROOT / name, root / name, ignore=_IGNORED, copy_function=_link)
        for file in ("pyproject.toml", "CONTRIBUTING.md", "DECISIONS.md"):
            shutil.copy2(ROOT / file, root / file)
        (root / "tests" / "fixtures").mkdir()

    def write(self, path: str, text: str) -> None:
        """A new file."""
        file = self.root / path
        assert not file.exists()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        self.touched.add(path)

    def insert(self, path: str, before: str, text: str) -> None:
        """`text` before the only place where `before` stands."""
        file = self.root / path
        old = file.read_text()
        assert old.count(before) == 1, f"{path}: {before!r} stands there {old.count(before)} times"
        file.unlink()  # it is a link to the repository's own
        file.write_text(old.replace(before, text + before))
        self.touched.add(path)

    def python(self, *words: str, timeout_s: float = 200) -> str:
        """What `python WORDS` prints in the copy; it must end well."""
        path = os.pathsep.join(str(self.root / name) for name in PACKAGES)
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def passed(self, *words: str) -> int:
        """How many of the copy's tests that pytest's words name have passed; none may fail."""
        out = self.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *words)
        found = re.search(r"(\d+) passed", out)
        assert found, out[-2000:]
        return int(found[1])


def _link(source: str, target: str) -> None:
    """A file of the copy: a link where the file system allows one, since compiled libraries are large."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
