"""The CPU kernel under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: the self-test program on
ragged sizes, 1 to 8 threads, in `make soak`.  Each sanitizer has to notice a mistake that the program makes on
purpose."""

from __future__ import annotations

import pytest
import self_test

pytestmark = pytest.mark.soak  # test_levels.py has the same program without sanitizers

SENTENCES = {
    "overflow": "heap-buffer-overflow",
    "misaligned": "misaligned address",
    "race": "data race",
}


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def sanitized(request, tmp_path_factory):
    """(sanitizer, program)."""
    try:
        program = self_test.make(tmp_path_factory.mktemp("sanitized"), sanitize=request.param)
    except self_test.build.BuildError as e:
        if "cannot find" in str(e) and "san" in str(e):
            pytest.skip(f"the compiler comes without the run time of -fsanitize={request.param}")
        raise
    return request.param, program


def test_memory_arithmetic_and_threads_are_clean(sanitized):
    code, output = self_test.run(sanitized[1])
    assert code == 0, output[-3000:]
    assert output.rstrip().endswith(" passed, 0 failed")


def test_mistakes_are_noticed(sanitized):
    sanitizer, program = sanitized
    for mistake in ("race",) if sanitizer == "thread" else ("overflow", "misaligned"):
        code, output = self_test.run(program, mistake)
        assert code != 0, mistake
        assert SENTENCES[mistake] in output, output[:2000]
