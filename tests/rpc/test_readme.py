"""Every command and every example in README.md runs as it stands there, with the address of a test server."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ADDRESS = "127.0.0.1:50051"
BOOT_TIMEOUT_S = 240


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def commands() -> list[str]:
    """Each command of the sh blocks as one line, without comments."""
    lines: list[str] = []
    for block in blocks("sh"):
        joined = re.sub(r"\\?\n +", " ", block)
        lines += [re.sub(r"\s+#.*", "", line) for line in joined.splitlines() if line.strip()]
    return lines


ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join(
        [str(Path(sys.executable).parent), str(ROOT / "node_modules" / ".bin"), os.environ.get("PATH", "")]
    ),
}


def start(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server started with `command`, and its address once it serves."""
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    log = []
    for line in process.stdout:
        log.append(line)
        if found := re.search(r"serving on (\S+)", line):
            return process, found[1]
    pytest.fail(f"{shlex.join(command)} exited with {process.wait()}:\n{''.join(log)}")


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    process.stdout.close()


def as_buf(words: list[str]) -> list[str]:
    """The same call by buf curl, which `make test` installs where npm is; skips where it is not."""
    if shutil.which("buf", path=ENVIRONMENT["PATH"]) is None:
        pytest.skip("neither grpcurl nor buf is installed: make test installs buf where npm is")
    grpcurl, plaintext, flag, data, where, method = words
    assert (grpcurl, plaintext, flag) == ("grpcurl", "-plaintext", "-d")
    return ["buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", data, f"http://{where}/{method}"]


SERVES = [re.sub(" +", " ", c) for c in commands() if c.startswith("expertd serve")]
FIRST, CHECKPOINT, SIZES, MEASURED = SERVES
CALLS = [c for c in commands() if ADDRESS in c and not c.startswith("expertd serve")]
LOCAL = [c for c in commands() if c.startswith(("expertd explain", "expertd verify", "expertd quantize"))]


@pytest.fixture(scope="module", params=[CHECKPOINT])
def address(request):
    process, where = start(shlex.split(request.param))
    yield where
    stop(process)


def test_the_readme_has_what_these_tests_run():
    assert [c.split()[0] for c in CALLS] == ["expertctl", "grpcurl", "expertctl"]
    assert len(LOCAL) == 3
    assert len(blocks("python")) == 2
    known = ("git clone ", "make setup", "python", "expertd ", "expertctl ", "grpcurl ", ". .venv")
    assert all(c.startswith(known) for c in commands()), commands()


@pytest.mark.parametrize("command", LOCAL + CALLS)
def test_command(command, address, tmp_path):
    command = command.replace(ADDRESS, address).replace("build/int4", str(tmp_path / "int4"))
    words = shlex.split(command)
    if words[0] == "grpcurl" and shutil.which("grpcurl", path=ENVIRONMENT["PATH"]) is None:
        words = as_buf(words)
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
def test_the_synthetic_server_serves_real_sizes():
    words = shlex.split(SIZES)
    words[words.index("0-3")] = "0-0"  # one layer: the same code, a quarter of the memory
    process, _ = start(words)
    stop(process)


@pytest.mark.slow
def test_a_server_measures_and_the_next_one_maps(tmp_path):
    words = shlex.split(MEASURED.replace("build/cache", str(tmp_path)))
    words[words.index("qwen3-30b-a3b:int4_g128")] = "tiny:int4_g128"  # the same code, in a second
    process, _ = start(words)
    stop(process)
    written = {p.name: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert written
    process, _ = start(words)
    stop(process)
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == written


def run(block: str, address: str = "") -> dict[str, object]:
    """What a block of README.md has named once it ran, with nothing named before."""
    names: dict[str, object] = {}
    exec(block.replace(ADDRESS, address), names)
    return names


@pytest.mark.parametrize("address", [FIRST, CHECKPOINT], indirect=True)
def test_the_first_example_calls_the_server_above_it(address, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    answer = run(blocks("python")[0], address)["answer"]
    assert float(abs(answer.output).max()) > 0
    assert capsys.readouterr().out.splitlines() == ["(5, 256)", "10"]


def test_the_example_without_grpc(monkeypatch):
    monkeypatch.chdir(ROOT)
    out = run(blocks("python")[1])["out"]
    assert out.shape == (5, 256)
    assert torch.isfinite(out.float()).all()
    assert float(out.float().abs().max()) > 0
