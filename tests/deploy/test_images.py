"""deploy/Dockerfile, the compose file and the systemd unit: what they name is there, and what they start is understood.

`python deploy/image_steps.py cpu` runs the steps themselves; it takes minutes and a network.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_kit import ROOT, read
from image_steps import StepError, chain, environment, last
from image_steps import read as stages_of

from expertd_server.boot.assignment import BootError, WrongOptionError
from expertd_server.commands.serve import LOST
from expertd_server.config.options import OPTIONS

TEXT = (ROOT / "deploy" / "Dockerfile").read_text()
STAGES = stages_of(TEXT)
TARGETS = ("cpu", "cuda", "rocm", "xpu")
BIN = Path(sys.executable).parent


@pytest.fixture(params=TARGETS)
def steps(request):
    return chain(STAGES, request.param)


def test_all_stages_are_read():
    assert list(STAGES) == ["wheel", "base", *TARGETS]
    assert sum(len(s.steps) for s in STAGES.values()) > 30
    with pytest.raises(StepError, match="got 'gpu', want one of wheel, base, cpu"):
        chain(STAGES, "gpu")


def test_what_is_copied_is_there_and_reaches_the_builder(steps):
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied = [w for word, text in steps if word == "COPY" and "--from" not in text for w in text.split()[:-1]]
    assert "pyproject.toml" in copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(Path(name).match(a) or name.startswith(f"{a}/") for a in allowed), f"{name} is not in .dockerignore"


def test_the_wheel_is_made_of_all_that_the_project_says():
    copied = {w for word, text in chain(STAGES, "wheel") if word == "COPY" for w in text.split()[:-1]}
    packages = set(re.findall(r'"((?:proto|kernels|server|client)/expertd\w*)"', (ROOT / "pyproject.toml").read_text()))
    assert len(packages) == 5
    assert all(any(f"{p}/".startswith(f"{c}/") for c in copied) for p in packages)


def test_extras_are_those_of_the_project(steps):
    declared = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (named,) = re.findall(r"expertd\[([\w,]+)\]", " ".join(text for _, text in steps))
    extras = named.split(",")
    assert set(extras) <= set(declared)
    assert ("nvml" in extras) == ("cuda" in extras), "expertd_gpu_* is there where it can be"


def test_the_server_understands_its_start(steps, monkeypatch):
    assert last(steps, "USER") == "10001:10001"
    assert steps[-1] == ("USER", "10001:10001"), "no step runs as root after it"
    variables = {k: v for k, v in environment(steps).items() if k.startswith("EXPERTD_")}
    assert len(variables) == 3
    config = read([*json.loads(last(steps, "ENTRYPOINT")), "--synthetic", "tiny:bf16"], monkeypatch, variables)
    assert {str(config.listen.port), str(config.metrics_listen.port)} == set(last(steps, "EXPOSE").split())
    assert variables.keys() <= {o.variable for o in OPTIONS}, "a server leaves unknown variables alone"
    check = json.loads(last(steps, "HEALTHCHECK").partition("CMD ")[2])
    assert check == ["expertctl", "health", f"127.0.0.1:{config.listen.port}"]
    read(check, monkeypatch)


def test_hadolint_has_nothing_to_say():
    path = shutil.which("hadolint", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip("hadolint is not installed: `make test` installs the extra `deploy`")
    done = subprocess.run(
        [path, str(ROOT / "deploy/Dockerfile")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


# ---- compose ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: `make test` installs the extra `deploy`")
    return yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())["services"]


def test_docker_compose_reads_it():
    path = shutil.which("docker-compose", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip("docker-compose is not installed: `make test` installs the extra `deploy`")
    file = str(ROOT / "deploy/compose/compose.yaml")
    command = [path, "-f", file, "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "obsolete" not in done.stderr
    services = json.loads(done.stdout)["services"]
    assert services.keys() == {"half-0", "half-1", "client"}
    assert services["half-1"]["environment"]["EXPERTD_SYNTHETIC"] == "qwen3-30b-a3b:int4_g128"
    assert all(s["read_only"] and s["cap_drop"] == ["ALL"] for s in services.values())
    assert Path(services["half-0"]["build"]["context"]) == ROOT
    assert services["half-0"]["build"]["target"] in STAGES


@pytest.mark.timeout(300)  # servers and a client start one after another
def test_two_halves_and_their_client(compose, monkeypatch):
    """The servers of the compose file on this host, with a small model, and its client against them."""
    servers = {name: s for name, s in compose.items() if name.startswith("half-")}
    image = environment(chain(STAGES, "cpu"))
    started, addresses = [], {}
    try:
        for service in servers.values():
            own = {**service["environment"], "EXPERTD_SYNTHETIC": "tiny:int4_g128"}
            assert {v for v in own if v.startswith("EXPERTD_")} <= {o.variable for o in OPTIONS}
            read(["expertd", "serve"], monkeypatch, {k: v for k, v in {**image, **own}.items() if "EXPERTD" in k})
            del own["EXPERTD_CACHE"]
            env = {**os.environ, **own, "EXPERTD_LISTEN": "127.0.0.1:0", "EXPERTD_THREADS": "1"}
            process = subprocess.Popen(
                [sys.executable, "-m", "expertd_server.commands.cli", "serve"],
                env=env,
                stdout=subprocess.PIPE,
                text=True,
            )
            started.append(process)
        for name, process in zip(servers, started, strict=True):
            lines = iter(process.stdout.readline, "")
            addresses[name] = next(m[1] for line in lines if (m := re.search(r"serving on (\S+)", line)))
        program = ROOT / "deploy/compose" / Path(compose["client"]["entrypoint"][1]).name
        asked = [addresses[w.partition(":")[0]] for w in compose["client"]["command"]]
        command = [sys.executable, "-W", "error", str(program)]
        done = subprocess.run([*command, *asked], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith("complete\n")
        alone = subprocess.run([*command, asked[0]], capture_output=True, text=True, timeout=60, check=False)
        assert alone.returncode == 1, "one half alone is not complete"
        assert "NOT complete" in alone.stdout
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


# ---- systemd ---------------------------------------------------------------------------------------------------------

UNIT = (ROOT / "deploy/systemd/expertd.service").read_text()


def setting(name):
    return re.search(rf"^{name}=(.*)$", UNIT, re.MULTILINE)[1]


def test_the_unit_starts_a_server_that_understands_its_file(monkeypatch):
    words = setting("ExecStart").replace("/etc/expertd", str(ROOT / "deploy/systemd")).split()
    config = read(words, monkeypatch)
    assert float(setting("TimeoutStopSec")) > config.grace_s + 5
    assert f"health {config.listen} " in setting("ExecStartPost")
    assert str(config.cache).startswith("/var/cache/" + setting("CacheDirectory"))
    read(shlex.split(re.search(r"\S+expertctl [^;&]*", setting("ExecStartPost"))[0]), monkeypatch)


def uncommented(text, pattern):
    """The text with the lines that an operator would take out of comments."""
    return re.sub(rf"^# (?=(?:{pattern}))", "", text, flags=re.MULTILINE)


def test_the_commented_lines_name_what_the_units_own_user_can_read_and_keep(tmp_path, monkeypatch):
    """DynamicUser: no file of mode 0600 of root, and only folders that systemd makes for it."""
    written = (ROOT / "deploy/systemd/expertd.toml").read_text()
    file = tmp_path / "expertd.toml"
    file.write_text(uncommented(written, "tls-|callers|admin-listen|held"))
    assert setting("DynamicUser") == "yes"
    config = read(setting("ExecStart").replace("/etc/expertd", str(tmp_path)).split(), monkeypatch)
    lent = dict(
        re.findall(r"^LoadCredential=(\S+):(/etc/expertd/\S+)$", uncommented(UNIT, "LoadCredential"), re.MULTILINE)
    )
    assert {Path(path).name for path in lent.values()} == set(lent)
    asked = {config.tls_cert, config.tls_key, config.callers}
    assert {str(path) for path in asked} == {f"/run/credentials/expertd.service/{name}" for name in lent}
    assert str(config.held.parent) == "/var/lib/" + setting("StateDirectory")


def test_systemd_starts_again_what_may_succeed_alone():
    """A lost GPU and a port that is taken, not a wrong option."""
    prevented = setting("RestartPreventExitStatus").split()
    assert setting("Restart") == "on-failure"
    assert prevented == [str(WrongOptionError.exit_code)] == ["2"]
    assert {str(LOST), str(BootError.exit_code)}.isdisjoint(prevented)


def test_the_unit_waits_for_the_server_and_not_for_a_dead_one(tmp_path):
    """ExecStartPost with a program that says what the health check would."""
    words = shlex.split(setting("ExecStartPost").replace("/opt/expertd/bin", str(tmp_path)))
    answers = tmp_path / "expertctl"
    answers.touch(mode=0o755)

    def ends_with(code, pid):
        answers.write_text(f"#!/bin/sh\nexit {code}\n")
        done = subprocess.run(words, env={**os.environ, "MAINPID": str(pid)}, timeout=20, check=False, stderr=-1)
        return done.returncode

    assert ends_with(0, os.getpid()) == 0
    dead = subprocess.Popen(["true"])
    dead.wait()
    assert ends_with(1, dead.pid) == 1


def test_systemd_reads_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine")
    unit = tmp_path / "expertd.service"
    unit.write_text(uncommented(UNIT, "LoadCredential").replace("/opt/expertd/bin/expertd", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
