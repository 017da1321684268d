"""StepVersion: the first answer of a step chooses the version that all its calls have."""

import subprocess
import sys

import pytest

from expertd_client import StepVersion


def test_the_first_answer_of_a_step_chooses_its_version():
    step = StepVersion()
    assert step.number == 0
    assert step.answered(7)
    assert step.number == 7
    assert not step.answered(8), "it was sent before the first answer, and is of another version"
    assert step.number == 7
    step.begin()
    assert step.number == 0
    assert step.answered(8)
    assert step.number == 8


def test_a_call_without_routes_chooses_nothing():
    step = StepVersion()
    assert step.answered(None)
    assert step.number == 0
    assert step.answered(3)
    assert step.answered(None)
    assert step.number == 3


def test_a_server_that_says_no_version_has_the_first_one():
    step = StepVersion()
    assert step.answered(0)
    assert step.number == 1
    assert step.answered(1)


def test_no_step_is_older_than_the_one_before():
    step = StepVersion()
    assert step.answered(2)
    step.begin()
    assert not step.answered(1)
    assert (step.number, step.least) == (2, 2)
    step.least = 0  # after a rollback
    step.begin()
    assert step.answered(1)
    assert (step.number, step.least) == (1, 1)


def test_the_oldest_version_may_be_named():
    step = StepVersion(least=5)
    assert not step.answered(4)
    assert step.number == 5


@pytest.mark.parametrize(
    ("answers", "taken", "fit"),
    [([3, 4], 3, [True, False]), ([4, 3], 3, [False, True]), ([None, 4], 4, [True, True])],
)
def test_ranks_take_the_same_version(answers, taken, fit):
    def agree_on(mine):
        asked.append(mine)
        return taken

    for version, fits in zip(answers, fit, strict=True):
        asked = []
        step = StepVersion(agree=agree_on)
        assert step.answered(version) == fits
        assert step.answered(taken), "asked again"
        assert asked == [version or 0], "once in a step"
        assert step.number == step.least == taken


def test_ranks_that_sent_nothing_are_asked_again_after_the_next_call():
    asked, takes = [], iter([0, 6])
    step = StepVersion(agree=lambda mine: (asked.append(mine), next(takes))[1])
    assert step.answered(None)
    assert step.number == 0
    assert step.answered(6)
    assert asked == [0, 6]


def test_it_needs_no_torch():
    code = "from expertd_client import StepVersion; StepVersion(); import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
