"""Memory of this machine, as far as this process may use it: a container's limit counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["CGROUP", "PROC", "available_bytes", "cgroup_limit_bytes"]

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """What can be allocated without swapping: the kernel's MemAvailable, or what is left of a control group's limit
    where that is less (file pages that the kernel can drop count as left).  0 where it cannot be told."""
    found = [b for b in (_mem_available(proc), *(left for _, left in _groups(proc, cgroup))) if b is not None]
    return max(0, min(found, default=0))


def cgroup_limit_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """The lowest limit of the control groups that this process is in; 0 without one."""
    return min((limit for limit, _ in _groups(proc, cgroup)), default=0)


def _mem_available(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _groups(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """(limit, what is left of it) of each control group with a limit, from the process's own up to the root.  A
    container sees its own group as the root, or under the path that the host gives it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    seen: set[Path] = set()
    for line in lines or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroup / "memory" if controllers else cgroup
        at = root / path.lstrip("/")
        for folder in (*(p for p in (at, *at.parents) if p.is_relative_to(root)), root):
            if folder not in seen:
                seen.add(folder)
                found = _group_v1(folder) if controllers else _group_v2(folder)
                if found is not None:
                    yield found


def _group_v2(folder: Path) -> tuple[int, int] | None:
    try:
        limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else (int(limit), int(limit) - used + _field(stat, "inactive_file"))


def _group_v1(folder: Path) -> tuple[int, int] | None:
    try:
        limit = int((folder / "memory.limit_in_bytes").read_text())
        used = int((folder / "memory.usage_in_bytes").read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    if limit >= 1 << 62:  # how that version says "none"
        return None
    return limit, limit - used + _field(stat, "total_inactive_file")


def _field(stat: str, name: str) -> int:
    return next((int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{name} ")), 0)
