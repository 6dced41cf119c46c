"""The cores that this process may use: what the scheduler lets it run on, within the quota of its
container. More threads than these wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS = "sys/fs/cgroup"
ROOT = Path("/")


def cores(root: Path = ROOT) -> int:
    """Physical cores, for two threads of one core share what computes; 1 at least. root: of the
    files of Linux; elsewhere all that there are.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    physical = len({_siblings(root, one) for one in allowed})
    return max(1, min(physical, *(int(quota) for quota in _quotas(root)), len(allowed)))


def _siblings(root: Path, cpu: int) -> str:
    """Names the core that a logical one belongs to."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _text(folder / "thread_siblings_list") or str(cpu)


def _quotas(root: Path) -> Iterator[float]:
    """The limits of the control groups that this process is in, in cores: version 2's cpu.max,
    version 1's cpu.cfs_quota_us, of every group up to the one that is mounted.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / GROUPS / controllers
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            quota, _, period = _text(folder / "cpu.max").partition(" ")
            if controllers:
                quota, period = (
                    _text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")
                )
            with suppress(ValueError, ZeroDivisionError):  # "max", or no such file
                limit = int(quota) / int(period)
                if limit > 0:  # version 1 has -1 for none
                    yield limit


def _text(path: Path) -> str:
    """What a file says; "" where there is none."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""
