"""For `make test`: a few tests that failed are run once more, alone: `python tests/again.py STATUS` (pytest's status).

Two test processes share two cores, and some tests watch a clock.  One that fails beside the others and passes alone is
named as such each time, because it is a fault of the test; one that fails alone, or more than FEW, stay failures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FEW = 3
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")  # pytest's own record of the run before


def again(status: int, last_failed: Path = LAST_FAILED) -> int:
    """The status of the whole: 0 where all that failed has passed now."""
    if status != 1 or not last_failed.is_file():  # 1: tests failed; else it was interrupted, or could not begin
        return status
    failed = list(json.loads(last_failed.read_text()))
    if not 0 < len(failed) <= FEW or not all("::" in name for name in failed):  # a bare path: it was not collected
        return status
    print(f"\n{len(failed)} failed beside other tests: once more, alone", flush=True)
    alone = subprocess.run([sys.executable, "-m", "pytest", "-q", *failed], check=False).returncode
    if alone == 0:
        for name in failed:
            print(f"FAILED BESIDE OTHERS, passed alone (mend the test): {name}", flush=True)
    return alone


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(again(int(sys.argv[1])))
