"""CPU time of code against a control that runs in turns with it, so that the load of the machine is in both."""

import math
import time
from collections.abc import Callable


def cheaper(code: Callable[[], object], control: Callable[[], object], times: float, tries: int = 12) -> bool:
    """Whether `code` takes less than `times` the CPU time of `control`, which must have run at least twice.

    Compares the least of the turns so far: other processes make a turn longer, and none shorter."""
    least = [math.inf, math.inf]
    for turn in range(tries):
        for n, each in enumerate((control, code)):
            begin_s = time.thread_time()
            each()
            least[n] = min(least[n], time.thread_time() - begin_s)
        if turn and least[1] < times * least[0]:
            return True
    return False
