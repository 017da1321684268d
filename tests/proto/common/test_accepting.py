"""A listening socket rests where the process has no descriptor left."""

import errno
import logging
import select
import socket

import pytest

from expertd.common import accepting


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(accepting, "time", made)
    monkeypatch.setattr(accepting, "_told_s", {})
    return made


class Listening(socket.socket):
    """failing: the error of accept()."""

    failing = 0

    def accept(self):
        if self.failing:
            raise OSError(self.failing, "there are none")
        return super().accept()


@pytest.fixture
def listening():
    with Listening(socket.AF_UNIX) as made:
        made.bind("")
        made.listen(4)
        made.setblocking(False)
        yield made


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_it_rests_and_the_connection_that_waited_is_let_in(clock, listening, error, caplog):
    poll = select.poll()
    there = accepting.Accepting(listening, poll, "those who come")
    assert there.timeout_ms() is None
    assert there.timeout_ms(50) == 50
    with socket.socket(socket.AF_UNIX) as client, caplog.at_level(logging.WARNING):
        client.connect(listening.getsockname())
        assert poll.poll(0)
        listening.failing = error
        assert there.accept() is None
        assert there.timeout_ms() == pytest.approx(accepting.REST_S * 1000)
        assert there.timeout_ms(1) == 1
        assert not poll.poll(0), "nobody is asked again at once"
        listening.failing = 0
        clock.now += 1.001 * accepting.REST_S
        assert there.timeout_ms() is None
        assert poll.poll(0)
        let_in = there.accept()
        assert let_in is not None
        let_in.close()
    assert "those who come wait to be let in: there are none (ulimit -n)" in caplog.text


def test_one_that_has_gone_is_no_reason_to_rest(clock, listening):
    poll = select.poll()
    there = accepting.Accepting(listening, poll, "those who come")
    listening.failing = errno.ECONNABORTED
    assert there.accept() is None
    assert there.timeout_ms() is None


def test_it_is_told_once_a_minute(clock, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            accepting.tell_shortage("these", OSError(errno.EMFILE, "none"))
        accepting.tell_shortage("those", OSError(errno.EMFILE, "none"))
        assert len(caplog.records) == 2
        clock.now += 61
        accepting.tell_shortage("these", OSError(errno.EMFILE, "none"))
        assert len(caplog.records) == 3
