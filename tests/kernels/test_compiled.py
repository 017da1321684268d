"""compiled.py: a case is skipped where all that it asks for is as it was recorded, and compiled otherwise."""

from types import SimpleNamespace

import compiled
import pytest

pytest.importorskip("triton")

TEST = "tests/kernels/test_compiled.py::test_a"


def source(text):
    return SimpleNamespace(name="k", hash=lambda: text)


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Sources that were compiled; nothing is, and the record is another."""
    found = []

    def compile(given, target, options):
        found.append(given.hash())
        return SimpleNamespace(asm=given.hash())

    monkeypatch.setattr(compiled, "_triton_compile", lambda: compile)
    (tmp_path / "tests/kernels").mkdir(parents=True)
    (tmp_path / "tests/kernels/test_compiled.py").touch()
    monkeypatch.setattr(compiled, "RECORD", tmp_path / "tests/kernels/compiled.txt")
    compiled.recorded.cache_clear()
    yield found
    compiled.recorded.cache_clear()


def run(own, *sources, recording=False, options=()):
    """A test that asks for these kernels, and then looks at them; its text is in the file `own`."""
    compiled.recorded.cache_clear()
    with compiled.case(TEST, [own], recording):
        kernels = [compiled.compile(source(text), "sm_90", dict(options)) for text in sources]
        assert [kernel.asm for kernel in kernels] == list(sources)


def test_what_is_recorded_is_skipped_and_what_changed_is_compiled(made, tmp_path):
    (own := tmp_path / "test.py").write_text("assert 1")
    run(own, "a", "b", recording=True)
    assert made == ["a", "b"]
    with pytest.raises(pytest.skip.Exception):
        run(own, "a", "b")
    assert made == ["a", "b"]
    run(own, "a", "c")  # a kernel, or what it calls
    run(own, "a")  # a part of it
    run(own, "a", "b", options={"num_warps": 8}.items())
    assert made[2:] == ["a", "c", "a", "a", "b"]
    own.write_text("assert 2")  # the test asks for more
    run(own, "a", "b")
    assert made[-2:] == ["a", "b"]


def test_one_that_looks_before_it_has_asked_for_all_compiles_until_then(made, tmp_path):
    (own := tmp_path / "test.py").touch()

    def looks(recording):
        compiled.recorded.cache_clear()
        with compiled.case(TEST, [own], recording):
            assert compiled.compile(source("a"), "sm_90", {}).asm == "a"
            assert compiled.compile(source("b"), "sm_90", {}).asm == "b"

    looks(True)
    with pytest.raises(pytest.skip.Exception):
        looks(False)
    assert made == ["a", "b", "a"]


def test_one_that_fails_is_not_recorded_and_files_that_are_no_more_leave(made, tmp_path):
    (own := tmp_path / "test.py").touch()
    compiled.RECORD.write_text("3.0.0 0123 tests/kernels/test_gone.py::test_b\n3.0.0 4567 " + TEST + "\n")

    def fails():
        with compiled.case(TEST, [own], True):
            assert compiled.compile(source("a"), "sm_90", {}).asm == "b"

    with pytest.raises(AssertionError):
        fails()
    assert len(compiled.read(compiled.RECORD)) == 2
    run(own, "a", recording=True)
    assert {key for key in compiled.read(compiled.RECORD) if key[0] == "3.0.0"} == {("3.0.0", TEST)}
    assert len(compiled.read(compiled.RECORD)) == 2
