"""StepVersion: one version of the weights for all calls of a model's step.

    step = StepVersion()
    layers = [RemoteExperts(client, n, weights_version=step).eval() for n in range(48)]

    step.begin()        # before each step, outside of what torch.compile compiles
    logits = model(tokens)

The first answer of a step chooses its version, and every other call of the step asks for that one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from expertd_client.requests.result import FIRST_VERSION

# Why it is so: decision 180 in DECISIONS.md.
__all__ = ["StepVersion"]


class StepVersion:
    """The version of the weights that one step of a model is computed by.  All MoE layers of the model share it.

    least    number of the oldest version that may compute a step; may be set between steps.  It rises to that of every
             step, so that no step is computed by older weights than the one before.  0 = any: after a rollback
    agree    for ranks whose outputs are added up; None = there is one.  Every rank calls it once its first call of a
             step is answered, with the version that it would take, 0 = it sent nothing.  It returns the same to all of
             them: one of the versions that ranks would take, 0 where no rank sent anything; then it is called again
             after the next call.  A collective of the ranks' group, which a rank whose call fails does not reach

    Thread-safe.  Batches that are in flight at the same time need one each: begin() is the next step of a batch.
    Without a begin() in between, steps have the same version: that of a whole sequence.
    """

    def __init__(self, *, least: int = 0, agree: Callable[[int], int] | None = None) -> None:
        self.least = least
        self.agree = agree
        self._number = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"StepVersion(number {self._number}, least {self.least})"

    @property
    def number(self) -> int:
        """What calls of this step ask for, as weights_version; 0 = none was answered yet, and whichever is served."""
        return self._number

    def begin(self) -> None:
        """The next step: its first answer chooses the version."""
        with self._lock:  # torch.compile splits its graph here: in a graph the assignment would come after the calls
            self._number = 0

    def answered(self, version: int | None) -> bool:
        """A call of the step was answered.  version: weights_version of the answer, 0 = the server does not say; None =
        the call had no routes, and was not sent.

        Whether the answer is of the step's version.  False where it came before the first one was known, where it is
        below `least`, and where ranks agreed on another one: ask again, for `number`."""
        found = None if version is None else version or FIRST_VERSION
        with self._lock:
            if not self._number:
                number = 0 if found is None else max(found, self.least)
                self._number = number if self.agree is None else self.agree(number)
                self.least = max(self.least, self._number)
            return found is None or found == self._number
