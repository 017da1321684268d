"""What the server draws: remembered within a bound, by any number of threads at once."""

from __future__ import annotations

import sys
import threading
import time
from statistics import median

import numpy as np
import pytest

from expertd_server.service.synthetic import SyntheticGenerator, generate_hidden, generate_ids, generate_weights


@pytest.fixture
def switching():
    """Threads take turns a hundred times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(usual)


def test_threads_that_draw_at_once_get_what_each_would_alone(switching):
    drawer = SyntheticGenerator(cache_bytes=1 << 14)  # about 700 tensors, so that entries come and go all the time
    faults: list[BaseException] = []
    start = threading.Barrier(4)

    def draw(first: int, tokens: int) -> None:
        try:
            start.wait()
            for n in range(1200):
                found = drawer.hidden(first + n, tokens, 8, "bf16")
                if n % 20 == 0:
                    np.testing.assert_array_equal(found.values, generate_hidden(first + n, tokens, 8, "bf16").values)
        except BaseException as e:
            faults.append(e)

    threads = [threading.Thread(target=draw, args=(100 * i, (1, 2)[i % 2])) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults


def test_a_new_seed_costs_the_same_however_many_are_kept():
    drawer, times = SyntheticGenerator(), []
    for seed in range(6000):
        start = time.thread_time()
        drawer.weights(seed, 1, 2, "f32")
        times.append(time.thread_time() - start)
    assert median(times[-500:]) < 4 * median(times[:500])


@pytest.mark.parametrize("kind", ["hidden", "ids", "weights"])
def test_what_is_asked_again_is_not_drawn_again_until_others_take_its_room(kind):
    drawer = SyntheticGenerator(cache_bytes=3 * 4 * 8 * 4)
    ask = {
        "hidden": lambda seed: drawer.hidden(seed, 4, 8, "f32"),
        "ids": lambda seed: drawer.ids(seed, 4, 8, 16, 0.0, "i32"),
        "weights": lambda seed: drawer.weights(seed, 4, 8, "f32"),
    }[kind]
    alone = {
        "hidden": lambda seed: generate_hidden(seed, 4, 8, "f32"),
        "ids": lambda seed: generate_ids(seed, 4, 8, 16, 0.0, "i32"),
        "weights": lambda seed: generate_weights(seed, 4, 8, "f32"),
    }[kind]
    first = ask(0)
    np.testing.assert_array_equal(first.values, alone(0).values)
    ask(1)
    assert ask(0) is first
    ask(2)
    ask(3)
    assert ask(0) is first, "three fit, and the one used last stays longest"
    for seed in (4, 5, 6):
        ask(seed)
    again = ask(0)
    assert again is not first
    np.testing.assert_array_equal(again.values, first.values)


def test_a_tensor_larger_than_the_room_is_drawn_each_time():
    drawer = SyntheticGenerator(cache_bytes=100)
    a, b = (drawer.hidden(1, 64, 8, "f32") for _ in range(2))
    assert a is not b
    np.testing.assert_array_equal(a.values, b.values)
