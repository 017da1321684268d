"""`make vendor`: the Python sources of vendors' wheels, in build/vendor, one folder for each line of vendor.txt.

pip fetches each wheel without its dependencies and checks its hash.  Only what tests read is unpacked (KEPT), and the
wheel is removed: 300 MB come over the line, 20 MB stay.  A folder is named after the wheel's hash and after KEPT, so
that what is there is not fetched again, and another pin, or another choice of files, is.  Nothing of a wheel is
installed, and nothing of it is run here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

AT_ONCE = 4
"""Wheels that are fetched at a time: pip begins with a second of a core, and then waits for the line."""
LIST = Path(__file__).with_name("vendor.txt")
PLACE = Path(__file__).resolve().parents[2] / "build/vendor"
KEPT = re.compile(
    r"(aiter|deep_gemm|vllm_xpu_kernels)/.*\.py"
    r"|flashinfer/(utils|fused_moe/.*)\.py|flashinfer/data/csrc/nv_internal/.*/moe_gemm_mixed_utils\.cu"
    r"|flashinfer/data/csrc/(trtllm_fused_moe_kernel_launcher|fused_moe/cutlass_backend/.*_binding)\.cu"
    r"|sglang/(srt/layers/.*|kernels/ops/moe/.*|test/test_marlin_utils)\.py|sglang/kernels/jit/csrc/gemm/marlin_moe/.*"
)
PLATFORMS = ("manylinux_2_35_x86_64", "manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64")
SAME = ("--python-version", "3.11", *(word for p in PLATFORMS for word in ("--platform", p)))
"""Wheels for one Python and one machine, whichever they are fetched on: their sources are the same."""


def wanted(text: str, keep: re.Pattern[str] | None = None) -> dict[str, str]:
    """{folder: pip's line with the hash}.  keep: the files of a wheel that stay, None = KEPT."""
    found, kept = {}, sha256((keep or KEPT).pattern.encode()).hexdigest()[:8]
    for line in text.splitlines():
        if pin := re.fullmatch(r"([\w.-]+)==(\S+) --hash=sha256:([0-9a-f]{64})", line):
            found[f"{pin[1]}-{pin[2]}-{pin[3][:16]}-{kept}"] = line
        elif line.strip() and not line.startswith("#"):
            raise ValueError(f"{LIST.name}: want NAME==VERSION --hash=sha256:HASH, this is {line}")
    return found


def unpack(wheel: Path, folder: Path, keep: re.Pattern[str] | None = None) -> None:
    """The files of `keep`, None = KEPT; all or nothing."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:  # extract() leaves no way out of the folder
        names = [name for name in archive.namelist() if (keep or KEPT).fullmatch(name)]
        if not names:
            raise ValueError(f"{wheel.name} has none of the files that tests read")
        archive.extractall(part, names)
    part.rename(folder)


def fetch(line: str, folder: Path, keep: re.Pattern[str] | None = None) -> None:
    """Raises CalledProcessError where pip cannot fetch it."""
    with tempfile.TemporaryDirectory() as downloads:
        (asks := Path(downloads) / "wanted.txt").write_text(line + "\n")
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        subprocess.run([*pip, *SAME, "-d", downloads, "-r", str(asks)], check=True)
        unpack(next(Path(downloads).glob("*.whl")), folder, keep)


def main() -> int:
    """Fetches what is missing and removes what is no longer wanted."""
    folders = wanted(LIST.read_text())
    PLACE.mkdir(parents=True, exist_ok=True)
    for other in PLACE.iterdir():
        if other.name not in folders:
            shutil.rmtree(other)
    return fetch_missing(folders, PLACE)


def fetch_missing(folders: dict[str, str], place: Path, keep: re.Pattern[str] | None = None) -> int:
    """folders: of wanted().  The exit code: 1 = one could not be fetched."""

    def attempt(name: str) -> int:
        try:
            fetch(folders[name], place / name, keep)
            print(f"fetched {name}", flush=True)
        except (subprocess.CalledProcessError, ValueError) as e:
            print(f"{name}: {e}", file=sys.stderr)
            return 1
        return 0

    missing = [name for name in folders if not (place / name).is_dir()]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return max(pool.map(attempt, missing), default=0)


if __name__ == "__main__":
    sys.exit(main())
