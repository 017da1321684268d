"""What ptxas makes of a kernel that Triton compiled for sm_90 under the fixture kept_triton_cache, no GPU needed."""

import re
from pathlib import Path

from kept_triton import output, ptxas_log
from triton.backends.nvidia.compiler import get_ptxas


def assembled(kernel) -> str:
    """What ptxas said about it."""
    return ptxas_log(kernel.asm["ptx"])


def disassembled(kernel, tmp_path) -> list[str]:
    """Its lines."""
    tool = Path(get_ptxas(90).path).parent / "nvdisasm"
    return output(tool, ["-c"], kernel.asm["cubin"], tmp_path).splitlines()


def resources(kernel) -> tuple[int, int, bool]:
    """(registers a thread, bytes of spill stores, whether ptxas serialized wgmma: its message C7512 and kin)."""
    text = assembled(kernel)
    used, spilled = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
    assert used, text
    assert spilled, text
    return int(used[1]), int(spilled[1]), "wgmma.mma_async instructions are serialized" in text


def predicated_sums(kernel, tmp_path) -> list[str]:
    """Warp-wide sums under a predicate: ptxas 12.8 turned a branch around one into another predicate than the branch's,
    so kernels have none."""
    return [line.strip() for line in disassembled(kernel, tmp_path) if re.search(r"@!?U?P\d\s+REDUX", line)]
