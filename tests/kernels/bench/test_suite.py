"""kernels/bench/suite.py: steps in processes, their shares of the time, what is left when one is stopped."""

import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import suite
from expertd_kernels.bench.__main__ import parser as bench_parser
from expertd_kernels.bench.measurements import picked
from expertd_kernels.oracle.table import BACKENDS
from numerics import _parser as numerics_parser
from suite import main


def step(name, code, share=1.0):
    return suite.Step(name, share, lambda out, seconds, jobs: ["-c", code])


def run(tmp_path, *steps, seconds=60.0):
    return {d.step: d for d in suite.run_steps(steps, tmp_path, seconds, 2, {"PATH": "/usr/bin:/bin"})}


def test_steps_run_and_say_what_they_came_to(tmp_path):
    done = run(tmp_path, step("good", "print('all | right')"), step("bad", "import sys; print('no'); sys.exit(3)"))
    assert (done["good"].code, done["good"].last) == (0, "all | right")
    assert (done["bad"].code, done["bad"].last) == (3, "no")
    text = (tmp_path / "suite.md").read_text()
    assert "| good | right |" in text
    assert "| bad | exit code 3 |" in text
    assert "all   right" in text
    assert (tmp_path / "bad.log").read_text() == "no\n"


def test_a_step_that_takes_longer_than_its_share_is_stopped_with_what_it_started(tmp_path, monkeypatch):
    code = (
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(p.pid)); print('begun', flush=True); time.sleep(600)"
    )
    monkeypatch.setattr(suite, "GRACE_S", 0.5)
    done = run(tmp_path, step("long", code, share=0.2), step("next", "print('still')"), seconds=60.0)
    assert done["long"].code is None
    assert done["long"].last == "begun"
    child = Path("/proc") / (tmp_path / "pid").read_text() / "stat"

    def state():
        return child.read_text().rsplit(")", 1)[1].split()[0] if child.exists() else "gone"

    end = time.monotonic() + 10.0
    while state() not in ("Z", "X", "gone") and time.monotonic() < end:
        time.sleep(0.05)
    assert state() in ("Z", "X", "gone")
    assert done["next"].code == 0, "the time that is left is the next step's"


def test_without_time_nothing_is_begun(tmp_path):
    done = run(tmp_path, step("late", "print(1)"), seconds=5.0)
    assert done["late"].last == "not run: no time was left"
    assert "| late | stopped | 0 |" in (tmp_path / "suite.md").read_text()


@pytest.mark.parametrize("name", suite.STEPS)
def test_the_commands_are_ones_that_the_benches_take(name, tmp_path):
    command = suite.STEPS[name].command(tmp_path, 100.0, 12)
    if command[:2] == ["-m", "pytest"]:
        assert any(Path(word).match("tests/gpu/test_triton_gpu.py") for word in command)
    elif command[0] != "-m":
        assert Path(command[0]).samefile("kernels/bench/numerics.py")
        args = numerics_parser().parse_args(command[1:])
        assert (args.device, args.budget, args.jobs) == ("cuda", 95.0, 1 if name == "flashinfer" else 12)
        assert picked(args.backend.split(","), [b.name for b in BACKENDS])
    else:
        args = bench_parser().parse_args(command[2:])
        assert (args.device, args.budget) == ("cuda", 85.0)
        assert picked(args.backend, [b.name for b in BACKENDS])
    assert all(str(part).startswith(str(tmp_path)) for part in command if str(part).endswith((".json", ".md", ".csv")))


def test_a_step_is_asked_to_end_before_it_is_killed(tmp_path):
    code = (
        "import time\ntry:\n    print('begun', flush=True); time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('what it has')"
    )
    done = run(tmp_path, step("long", code, share=0.2), step("next", "print('still')"), seconds=60.0)
    assert (done["long"].code, done["long"].last) == (None, "what it has")


def test_a_step_has_all_the_time_that_no_later_one_wants(tmp_path):
    given = {}
    steps = [
        suite.Step(name, share, lambda out, seconds, jobs, name=name: given.update({name: seconds}) or ["-c", "1"])
        for name, share in (("first", 3), ("second", 1))
    ]
    suite.run_steps(steps, tmp_path, 4000.0, 2, {})
    assert given["first"] == pytest.approx(3000, abs=1)
    assert 3000 < given["second"] < 4000


@pytest.mark.parametrize(
    ("name", "there", "not_there"),
    [
        ("tests", ("test_triton_gpu.py", "test_graphs.py", "test_counted.py"), ("test_beside_others.py",)),
        ("alone", ("test_beside_others.py", "test_device_faults.py"), ("test_triton_gpu.py", "test_graphs.py")),
    ],
)
def test_the_gpu_tests_are_found_wherever_they_lie(name, there, not_there, tmp_path):
    command = [word for word in suite.STEPS[name].command(tmp_path, 100.0, 12) if word != "-v"]
    listed = subprocess.run(
        [sys.executable, *command, "--collect-only", "-q", "-n", "0"], capture_output=True, text=True, cwd=tmp_path
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert all(file in listed.stdout for file in there)
    assert not any(file in listed.stdout for file in not_there)


def test_unknown_steps_and_empty_folders_of_wheels_are_refused(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "o"), "--steps", "tests,nope"]) == 1
    assert "steps nope: known are tests, alone, numerics" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "o"), "--wheels", str(tmp_path)]) == 1
    assert "there are no wheels" in capsys.readouterr().err


def test_wheels_are_there_for_the_steps_and_only_for_them(tmp_path, monkeypatch, capsys):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "expertd_stand_in-1.0-py3-none-any.whl", "w") as z:
        z.writestr("expertd_stand_in.py", "WORD = 'from a wheel'\n")
        z.writestr(
            "expertd_stand_in-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: expertd-stand-in\nVersion: 1.0\n"
        )
        z.writestr(
            "expertd_stand_in-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        z.writestr("expertd_stand_in-1.0.dist-info/RECORD", "")
    (wheels / "another-1.0-cp27-none-any.whl").write_bytes(
        (wheels / "expertd_stand_in-1.0-py3-none-any.whl").read_bytes()
    )
    look = step(
        "numerics",
        "import expertd_stand_in, importlib.metadata as m; print(expertd_stand_in.WORD, m.version('expertd-stand-in'))",
    )
    monkeypatch.setitem(suite.STEPS, "numerics", look)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["--out", str(tmp_path / "o"), "--wheels", str(wheels), "--steps", "numerics"]) == 0
    assert "from a wheel 1.0" in (tmp_path / "o" / "numerics.log").read_text()
    assert "expertd_stand_in" not in sys.modules
    assert "left out: ERROR: another-1.0-cp27-none-any.whl" in capsys.readouterr().err
