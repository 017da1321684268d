"""What each kind of install can do: with the base dependencies alone, and what it says of what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from expertctl.cli import COMMANDS as EXPERTCTL
from expertd_server.commands.cli import COMMANDS as EXPERTD
from expertd_server.commands.extra import SERVER

ROOT = Path(__file__).parents[3]

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from {package} import main
sys.exit(main(sys.argv[1:]))
"""
"""A command in a process that has none of the packages `absent`: as in an install without them."""


def run(package: str, *args: str, absent=(*SERVER, "triton")) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(absent=absent, package=package)
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False, timeout=240)


def test_the_table_is_that_of_the_extra():
    extra = [Requirement(r) for r in PROJECT["optional-dependencies"]["server"]]
    wanted = {r.name: str(r.specifier) for r in extra if r.marker is None or r.marker.evaluate()}
    have = [Requirement(r) for r in SERVER.values()]
    assert {r.name: str(r.specifier) for r in have} == wanted
    assert [module.replace("_", "-") for module in SERVER] == [r.name for r in have]


@pytest.mark.parametrize("command", EXPERTD)
def test_without_the_server_extra_a_command_says_what_to_install(command):
    source = {"quantize": ["src", "dst", "--scheme", "int4"]}.get(command, ["--synthetic", "tiny:bf16"])
    done = run("expertd_server.commands.cli", command, *source)
    assert (done.returncode, done.stdout) == (2, "")
    wanted = " ".join(f"'{r}'" for r in SERVER.values())
    assert done.stderr == (
        f"expertd {command}: {', '.join(SERVER)}: not installed, and a server needs them (the extra `server` has all"
        f" that it needs): pip install {wanted}\n"
    )


def test_without_the_server_extra_the_echo_server_says_what_to_install():
    done = run("expertd_echo.command")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"expertd-echo: {', '.join(SERVER)}: not installed, and a server needs them")
    done = run("expertd_echo.command", "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_one_package_that_is_missing_is_named_alone():
    done = run("expertd_server.commands.cli", "explain", "--synthetic", "tiny:bf16", absent=("prometheus_client",))
    assert done.returncode == 2
    assert done.stderr.startswith("expertd explain: prometheus_client: not installed, and a server needs it")
    assert done.stderr.endswith("pip install 'prometheus-client>=0.20'\n")


@pytest.mark.parametrize("args", [["--help"], ["--version"], *([command, "--help"] for command in EXPERTD)])
def test_help_needs_no_extra(args):
    done = run("expertd_server.commands.cli", *args)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(("usage: expertd", "expertd "))


@pytest.mark.parametrize("command", EXPERTCTL)
def test_the_client_needs_the_base_alone(command):
    done = run("expertctl.cli", command, "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_call_gets_as_far_as_the_network():
    done = run("expertctl.cli", "forward", "127.0.0.1:1", "--timeout", "5")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "127.0.0.1:1" in done.stderr


def test_a_server_on_a_cpu_needs_no_triton():
    done = run(
        "expertd_server.commands.cli", "explain", "--synthetic", "tiny:int4_g128", "--device", "cpu", absent=("triton",)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "chosen" in done.stdout


def test_the_license_is_in_the_tree():
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
