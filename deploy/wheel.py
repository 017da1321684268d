"""Wheels to give away: built by ziglang against an old glibc, checked, and tried as a stranger would.

    python deploy/wheel.py build [--machine x86_64,aarch64] [--out dist]    needs hatchling, ziglang and auditwheel
    python deploy/wheel.py try dist/expertd-*x86_64.whl                     clean environment: base alone, then a server

`build` fails where the library wants more of a system than the wheel's name says, or shows other symbols than its own.
`try` installs the wheel (and torch: 200 MB where the index has CPU builds), serves a fixture and calls it, and runs the
kernel's self-test as the same compiler makes it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

from expertd_kernels.native.csrc import build as native

ROOT = Path(__file__).resolve().parents[1]
FIXTURE = ROOT / "tests" / "fixtures" / "gptq-w4-g128-sym-descact-false-qwen3moe1l"
SELF_TEST = ROOT / "tests" / "kernels" / "native" / "self_test.cpp"


class WheelError(Exception):
    """The wheel is not what its name says."""


def build(machine: str, out: Path) -> Path:
    """The wheel for `machine`, made from this tree without a build environment of its own."""
    out.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(ROOT),
    ]
    _run(command, {"EXPERTD_WHEEL": machine})
    (made,) = out.glob(f"expertd-*-manylinux_*_{machine}.whl")
    return made


def check(wheel: Path) -> str:
    """What the wheel needs of a system, as a line.  WheelError where that is more than its name promises."""
    found = json.loads(_run([sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]))
    promised, needed = (_glibc(tag) for tag in (wheel.stem, found["overall_tag"]))
    if needed > promised or found["external_libs"]:
        raise WheelError(
            f"{wheel.name}: needs {found['overall_tag']} and the libraries {found['external_libs'] or 'of the system'}:"
            f" {found['versioned_symbols']}"
        )
    shown = exported(wheel)
    if foreign := [
        f"{s} of {name}" for name, symbols in shown.items() for s in symbols if not s.startswith("expertd_")
    ]:
        raise WheelError(f"{wheel.name}: libraries show symbols that are not their own: {', '.join(foreign[:5])}")
    versions = {v for of_library in found["versioned_symbols"].values() for v in of_library}
    newest = max(versions, key=lambda v: [int(x) for x in re.findall(r"\d+", v)])
    return f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, {', '.join(shown)}; newest symbol {newest}"


def exported(wheel: Path) -> dict[str, list[str]]:
    """The names that each library of the wheel defines for others."""
    found = {}
    with zipfile.ZipFile(wheel) as z:
        for path in (n for n in z.namelist() if n.endswith(".so")):
            with z.open(path) as f, tempfile.TemporaryFile() as copy:
                copy.write(f.read())
                table = ELFFile(copy).get_section_by_name(".dynsym")
                names = [s.name for s in table.iter_symbols() if s.name and s["st_shndx"] != "SHN_UNDEF"]
            found[Path(path).name] = names
    return found


def _glibc(tag: str) -> tuple[int, int]:
    """ "manylinux_2_28_x86_64" -> (2, 28); a tag of one system alone: newer than any."""
    m = re.search(r"manylinux_(\d+)_(\d+)_", tag)
    return (int(m[1]), int(m[2])) if m else (99, 0)


def attempt(wheel: Path) -> None:
    """Uses the wheel in an environment that has nothing else.  Raises WheelError or CalledProcessError."""
    environment = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        program = native.build(Path(folder) / "self_test", program=SELF_TEST, machine=os.uname().machine)
        print("self-test:", _run([str(program)]).strip().splitlines()[-1])
        venv = Path(folder) / "venv"
        _run([sys.executable, "-m", "venv", str(venv)])
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
        expertd, expertctl = str(venv / "bin" / "expertd"), str(venv / "bin" / "expertctl")
        _run([*pip, str(wheel.resolve())], environment)
        _run([expertctl, "forward", "--help"], environment)
        told = _run([expertd, "explain", "--synthetic", "tiny:bf16"], environment, code=1)
        print("base alone:", told.strip())
        _run([*pip, "torch"], environment)
        _run([*pip, f"{wheel.resolve()}[server]"], environment)
        explained = json.loads(_run([expertd, "explain", "--json", "--checkpoint", str(FIXTURE)], environment))
        if (chosen := explained["layers"][0]["chosen"]) != "cpu":
            raise WheelError(
                f"{wheel.name}: the oracle chose {chosen}, want cpu: {explained['layers'][0]['verdicts'][0]}"
            )
        _serve(expertd, expertctl, {**os.environ, **environment})


def _serve(expertd: str, expertctl: str, environment: dict[str, str]) -> None:
    command = [expertd, "serve", "--checkpoint", str(FIXTURE), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            address = next((m[1] for line in server.stdout if (m := re.search(r"serving on (\S+)", line))), "")
            if not address:
                raise WheelError("the server did not get as far as serving")
            print(_run([expertctl, "load", address, "--m", "8", "--requests", "50"], environment).strip())
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)  # it still writes: its pipe stays open
    if server.returncode:
        raise WheelError(f"the server ended with {server.returncode}")


def _run(command: list[str], environment: dict[str, str] | None = None, code: int = 0) -> str:
    """Its output, both streams; WheelError where it ends with another code."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT.parent, env={**os.environ, **(environment or {})}
    )
    if done.returncode != code:
        raise WheelError(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description="Wheels to give away.", allow_abbrev=False)
    parts = parser.add_subparsers(dest="part", required=True)
    builder = parts.add_parser("build", help="build and check", allow_abbrev=False)
    builder.add_argument("--machine", default="x86_64", metavar="LIST", help="x86_64, aarch64")
    builder.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR")
    parts.add_parser("try", help="install it in a clean environment and use it").add_argument("wheel", type=Path)
    args = parser.parse_args()
    try:
        if args.part == "try":
            attempt(args.wheel)
        else:
            for machine in args.machine.split(","):
                print(check(build(machine, args.out)))
    except (WheelError, native.BuildError) as e:
        print(f"wheel: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
