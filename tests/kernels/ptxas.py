"""What ptxas makes of a kernel that Triton compiled for sm_90, no GPU needed."""

import re
import subprocess
from pathlib import Path

from triton.backends.nvidia.compiler import get_ptxas


def assembled(kernel, tmp_path) -> str:
    """What ptxas says about it."""
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(kernel.asm["ptx"])
    command = [get_ptxas(90).path, "-arch=sm_90a", "-v", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def disassembled(tmp_path) -> list[str]:
    """The lines of what was assembled last."""
    tool = Path(get_ptxas(90).path).parent / "nvdisasm"
    command = [str(tool), "-c", str(tmp_path / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def resources(kernel, tmp_path) -> tuple[int, int, bool]:
    """(registers a thread, bytes of spill stores, whether ptxas serialized wgmma: its message C7512 and kin)."""
    text = assembled(kernel, tmp_path)
    used, spilled = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
    assert used, text
    assert spilled, text
    return int(used[1]), int(spilled[1]), "wgmma.mma_async instructions are serialized" in text


def predicated_sums(tmp_path) -> list[str]:
    """Warp-wide sums under a predicate in what was assembled last: ptxas 12.8 turned a branch around one into another
    predicate than the branch's, so kernels have none."""
    return [line.strip() for line in disassembled(tmp_path) if re.search(r"@!?U?P\d\s+REDUX", line)]
