"""The cores and the memory that this process may use, within the limits of its container."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS = "sys/fs/cgroup"
ROOT = Path("/")


def cores(root: Path = ROOT) -> int:
    """Physical cores, at least 1; without Linux' files (below root) all logical ones."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    topology = root / "sys/devices/system/cpu"
    siblings = {one: topology / f"cpu{one}/topology/thread_siblings_list" for one in allowed}
    physical = len({_text(path) or str(one) for one, path in siblings.items()})
    return max(1, min(physical, *(int(quota) for quota in _quotas(root)), len(allowed)))


def _quotas(root: Path) -> Iterator[float]:
    for folder, is_old in _groups(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if is_old:
            quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        with suppress(ValueError, ZeroDivisionError):  # "max", or no such file
            limit = int(quota) / int(period)
            if limit > 0:  # version 1 has -1 for none
                yield limit


def processor() -> str:
    """The processor's name, or ""."""
    named = re.search(r"^model name\s*:[ \t]*(.*\S)", _text(ROOT / "proc/cpuinfo"), re.MULTILINE)
    return named[1] if named else platform.processor()


def free_memory(root: Path = ROOT) -> int | None:
    """Bytes that this process can still take: free memory, within its control groups and `ulimit
    -v`. None without Linux' files.
    """
    free = [*_rooms(root)]
    return max(0, min(free)) if free else None


def _rooms(root: Path) -> Iterator[int]:
    process, limits = root / "proc/self/status", _text(root / "proc/self/limits")
    for kib in re.findall(r"MemAvailable:\s+(\d+)", _text(root / "proc/meminfo")):
        yield int(kib) * 1024
    for most in re.findall(r"Max address space\s+(\d+)", limits):
        yield int(most) - 1024 * sum(map(int, re.findall(r"VmSize:\s+(\d+)", _text(process))))
    for folder, is_old in _groups(root, "memory"):
        names = ("limit_in_bytes", "usage_in_bytes") if is_old else ("max", "current")
        with suppress(ValueError):  # "max", or no such file
            limit, used = (int(_text(folder / f"memory.{name}")) for name in names)
            total = "total_" if is_old else ""  # with the groups below
            # cached files, which the kernel gives back
            files = rf"^{total}(?:in)?active_file (\d+)"
            given_back = re.findall(files, _text(folder / "memory.stat"), re.MULTILINE)
            yield limit - used + sum(map(int, given_back))


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's control groups, from its own up; whether of version 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / GROUPS / controllers
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            yield folder, bool(controllers)


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
