"""The machine that a measurement ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from eyas.cores import cores, processor


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory (GiB), system, and the load averages (1, 5, 15 min)."""
    return {
        "processor": processor() or platform.machine(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def has_gpu() -> bool:
    """Whether Linux has a device of NVIDIA's or AMD's drivers."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
