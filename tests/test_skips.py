"""kit/skips.py and kit/seconds.py: what may be skipped, and which files come first."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from seconds import Seconds, main, read, write
from skips import Allowed, Skip, by_reason, no_gpu, others, reason_of


def yes():
    return True


LIST = (Allowed("no net", "tests/a/", yes, most=2), Allowed("no GPU", "tests/", lambda: False))


def test_a_skip_is_allowed_by_reason_place_machine_and_count():
    net = [Skip(f"tests/a/test_x.py::test_{n}", "no net here") for n in range(3)]
    assert others(net[:2], LIST) == []
    assert others(net, LIST) == net[2:], "one more than may be"
    for other in (
        Skip("tests/b/test_x.py::test_a", "no net here"),
        Skip("tests/a/test_x.py::test_a", "it said no net"),
        Skip("tests/a/test_x.py::test_a", "no GPU"),
    ):
        assert others([other], LIST) == [other]


def test_reasons_are_counted_and_the_most_frequent_comes_first():
    skips = [Skip("tests/b.py::t", "rare"), *(Skip(f"tests/a{n}.py::t", "often") for n in range(3))]
    assert by_reason(skips) == ["skipped 3: often (tests/a0.py, ...)", "skipped 1: rare (tests/b.py)"]
    assert reason_of(("tests/x.py", 3, "Skipped: no net\nmore")) == "no net"


@pytest.mark.skipif(not no_gpu(), reason="there is a GPU")
def test_the_gpu_tests_may_be_skipped_where_there_is_none():
    assert others([Skip("tests/gpu/test_x.py::test_a", "runs on cuda, this is cpu:x86_64")]) == []
    assert others([Skip("tests/gpu/test_x.py::test_a", "I do not like it")]) != []


def item(nodeid, slow=False):
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: (slow and name == "slow") or None)


def test_heavy_files_come_first_and_one_that_is_not_known_by_its_marks():
    items = [item("light.py::a"), item("heavy.py::a"), item("new.py::a"), item("light.py::b"), item("heavy.py::b")]
    items.append(item("marked.py::a", slow=True))
    Seconds({"light.py": 1.0, "heavy.py": 9.0}).pytest_collection_modifyitems(items)
    files = ["marked.py", "heavy.py", "heavy.py", "light.py", "light.py", "new.py"]
    assert [i.nodeid.partition("::")[0] for i in items] == files


def test_seconds_are_added_up_by_file_and_kept(tmp_path):
    plugin = Seconds({})
    for nodeid, duration in (("a.py::t", 1.0), ("a.py::t", 0.5), ("a.py::u", 2.0), ("b.py::t", 1.0)):
        plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=duration))
    assert plugin.files() == {"a.py": 3.5, "b.py": 1.0}
    write(tmp_path / "new/seconds.json", plugin.files())
    assert read(tmp_path / "new/seconds.json") == plugin.files()
    (tmp_path / "damaged").write_text("{")
    assert read(tmp_path / "damaged") == read(tmp_path / "none") == {}


BUSY = """
import subprocess, sys, time
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "child"], check=True)
while time.process_time() < 0.5:
    pass
"""


def test_cpu_seconds_of_a_file_are_measured_and_committed_if_it_is_heavy(tmp_path, monkeypatch):
    """pytest is played by a process that computes for half a second, as does its child."""
    busy, committed, run = tmp_path / "busy.py", tmp_path / "seconds.json", subprocess.run
    busy.write_text(BUSY)

    def played(words, **_):
        if words[-1] == "busy.py":
            return run([sys.executable, busy], check=True)
        return SimpleNamespace(returncode=1 if words[-1] == "failing.py" else 0)

    monkeypatch.setattr("seconds.subprocess.run", played)
    monkeypatch.setattr("seconds.HEAVY_S", 0.9)
    write(committed, {"other.py": 12.0, "idle.py": 30.0})
    assert main(["busy.py", "idle.py"], committed) == 0
    assert set(read(committed)) == {"other.py", "busy.py"}, "who is no longer heavy is taken off"
    with pytest.raises(RuntimeError, match=r"failing.py: pytest ended with 1"):
        main(["failing.py"], committed)
