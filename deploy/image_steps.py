"""The images without Docker: the RUN steps of deploy/Dockerfile in a clean folder and environment, then the server.

    python deploy/image_steps.py cpu [--torch-index INDEX]    installs (200 MB), serves, and asks the health check
    python deploy/image_steps.py cuda --dry-run               pip says what it would install, nothing is served

What changes the system (apt-get, useradd) is left out and named; paths of the image lie below the folder.  The Python
is this one, not the image's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PLACES = ("/src", "/wheels", "/cache")
"""Folders of the images that steps name."""
SYSTEM = ("apt-get ", "useradd ")
PORT = "50051"
BOOT_S, STOP_S = 120, 60


class StepError(Exception):
    """A step failed, or the file is not as this program reads it."""


@dataclass(frozen=True)
class Stage:
    """One FROM.  base: another stage, or an image; steps: (instruction, its text) in their order."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def read(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name."""
    stages: dict[str, Stage] = {}
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", " ", lines).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            stages[name] = current = Stage(name, base)
        elif word and stages:
            current.steps.append((word, rest.strip()))
    return stages


def chain(stages: Mapping[str, Stage], target: str) -> list[tuple[str, str]]:
    """All steps of an image: those of its base first, and of the stage that it copies from before them."""
    if target not in stages:
        raise StepError(f"target: got {target!r}, want one of {', '.join(stages)}")
    stage, steps = stages[target], []
    if stage.base in stages:
        steps += chain(stages, stage.base)
    for word, text in stage.steps:
        if word == "COPY" and (m := re.match(r"--from=(\w+) ", text)):
            steps += chain(stages, m[1])
        steps.append((word, text))
    return steps


def last(steps: Sequence[tuple[str, str]], word: str) -> str:
    """What an instruction of which the last one counts says."""
    return [text for w, text in steps if w == word][-1]


def environment(steps: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Of all ENV steps."""
    pairs = [p.partition("=") for w, text in steps if w == "ENV" for p in shlex.split(text)]
    return {name: value for name, _, value in pairs}


class Image:
    """A folder that stands for an image: its places, and an environment of its own."""

    def __init__(self, folder: Path, arguments: Mapping[str, str], dry: bool) -> None:
        self.folder, self._dry = folder, dry
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(("EXPERTD_", "PYTHON"))}
        self._env |= {**arguments, "PATH": f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        self._at = folder
        for place in PLACES:
            (folder / place[1:]).mkdir()
        self._sh([sys.executable, "-m", "venv", str(folder / "venv")])

    def inside(self, text: str) -> str:
        """The same with the places of the image below the folder."""
        return re.sub(rf"(?<![\w./])({'|'.join(PLACES)})\b", lambda m: f"{self.folder}{m[1]}", text)

    def do(self, word: str, text: str) -> None:
        """One step.  StepError where it fails."""
        if word == "WORKDIR":
            self._at = Path(self.inside(text))
        elif word == "ENV":
            self._env |= {k: self.inside(v) for k, v in environment([(word, text)]).items()}
        elif word == "COPY" and not text.startswith("--from="):  # between stages there is one folder
            *sources, to = text.split()
            target = self._at / self.inside(to)
            for source in (p for pattern in sources for p in sorted(ROOT.glob(pattern))):
                if source.is_dir():
                    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "*.o", "__pycache__"))
                else:
                    shutil.copy2(source, target)
        elif word == "RUN":
            self._run(text)

    def _run(self, text: str) -> None:
        if text.startswith(SYSTEM):
            print(f"left out: {text}")
            return
        if self._dry and text.startswith("pip install"):
            text = text.replace("pip install", "pip install --dry-run", 1)
        print(f"run: {text}", flush=True)
        self._sh(["/bin/sh", "-euc", self.inside(text)])

    def _sh(self, command: list[str]) -> None:
        if code := subprocess.run(command, cwd=self._at, env=self._env, check=False).returncode:
            raise StepError(f"{shlex.join(command)}: exit code {code}")

    def serve(self, steps: Sequence[tuple[str, str]]) -> None:
        """The entry point with a small model, until the image's own health check is content; then SIGTERM."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        check = json.loads(last(steps, "HEALTHCHECK").partition("CMD ")[2])
        check = [w.replace(PORT, port) for w in check]
        env = {**self._env, "EXPERTD_LISTEN": f"127.0.0.1:{port}", "EXPERTD_METRICS_LISTEN": "127.0.0.1:0"}
        command = [*json.loads(last(steps, "ENTRYPOINT")), "--synthetic", "tiny:int4_g128"]
        with subprocess.Popen(command, cwd=self.folder, env=env) as server:
            try:
                waiting = [*check, "--wait", str(BOOT_S)]
                if subprocess.run(waiting, cwd=self.folder, env=env, check=False, timeout=2 * BOOT_S).returncode:
                    raise StepError(f"{shlex.join(check)}: the server does not serve")
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait(STOP_S)
        if server.returncode:
            raise StepError(f"{shlex.join(command)}: exit code {server.returncode} after SIGTERM, want 0")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("target", help="cpu, cuda, rocm or xpu")
    parser.add_argument("--torch-index", default="", metavar="INDEX", help="the build argument TORCH_INDEX")
    parser.add_argument("--dry-run", action="store_true", help="pip resolves and installs nothing")
    args = parser.parse_args()
    try:
        steps = chain(read(DOCKERFILE.read_text()), args.target)
        with tempfile.TemporaryDirectory(prefix="expertd-image-") as folder:
            image = Image(Path(folder), {"TORCH_INDEX": args.torch_index}, args.dry_run)
            for word, text in steps:
                image.do(word, text)
            if not args.dry_run:
                image.serve(steps)
    except StepError as e:
        print(f"image_steps: {e}", file=sys.stderr)
        return 1
    print(f"{args.target}: every step done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
