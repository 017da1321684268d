"""`make vendor` and `make engines`: the Python sources of the engines' wheels that the adapters are compared with.

    python tests/engines/fetch_engines.py [--large]

They lie in build/engines, one folder for each line of wheels.txt (a few MB each) and, with --large, of
wheels-large.txt (vLLM: 0.5 GB over the line each).  pip fetches each wheel without dependencies and checks its hash;
only .py files are unpacked.  Nothing is installed and nothing of a wheel is run here.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from fetch_vendor import fetch_missing, wanted

HERE = Path(__file__).parent
PLACE = HERE.parents[1] / "build/engines"
KEPT = re.compile(r"(vllm|sglang|transformers|kt_kernel)/.*\.py|[\w.-]+\.dist-info/METADATA")
LISTS = {"small": HERE / "wheels.txt", "large": HERE / "wheels-large.txt"}


def pinned() -> dict[tuple[str, str], Path]:
    """(package as it is imported, version) -> where its sources lie once they are fetched."""
    found = {}
    for file in LISTS.values():
        for name, line in wanted(file.read_text(), KEPT).items():
            package, _, rest = line.partition("==")
            found[package.replace("-", "_"), rest.split()[0]] = PLACE / name
    return found


def main() -> int:
    """Fetches what is missing and removes what is no longer wanted."""
    PLACE.mkdir(parents=True, exist_ok=True)
    kept = {folder.name for folder in pinned().values()}
    for other in PLACE.iterdir():
        if other.name not in kept:
            shutil.rmtree(other)
    lists = LISTS.values() if "--large" in sys.argv else [LISTS["small"]]
    return max(fetch_missing(wanted(file.read_text(), KEPT), PLACE, KEPT) for file in lists)


if __name__ == "__main__":
    sys.exit(main())
