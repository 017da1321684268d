"""The line at the end of a test run that says which levels of the CPU kernel ran; the library with emulated levels."""

from types import SimpleNamespace

import cpu_levels
import pytest

from expertd_kernels.native import library as native


def report(level, way, when="call", outcome="passed"):
    return SimpleNamespace(when=when, outcome=outcome, user_properties=[(cpu_levels.RAN, [level, way])])


def test_only_levels_whose_tests_ran_are_counted(monkeypatch):
    monkeypatch.setattr(cpu_levels, "KNOWN", ("amx", "vnni", "avx2", "portable"))
    found = cpu_levels.ran(
        [
            report("avx2", "native"),
            report("vnni", "emulated", outcome="failed"),
            report("amx", "emulated", outcome="skipped"),
            report("portable", "native", when="setup"),
            SimpleNamespace(),
        ]
    )
    assert found == {"avx2": "native", "vnni": "emulated"}
    line = cpu_levels.summary(found)
    assert line.startswith("CPU levels native: avx2; emulated: vnni; not tested: amx, portable")
    assert cpu_levels.summary({}) == ""


@pytest.mark.parametrize("level", cpu_levels.KNOWN)
def test_a_level_is_the_one_that_contexts_have(level):
    before = native.library()
    with cpu_levels.on_level(level):
        assert native.context(threads=1).level == native.level_in_use() == level
        assert (native.library() is before) == (cpu_levels.how(level) == "native")
    assert native.library() is before
