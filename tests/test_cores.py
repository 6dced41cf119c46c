"""How many cores a process takes: by affinity, by core and by the quota of its container; and how
much memory it still can.
"""

from __future__ import annotations

import os

import pytest

from eyas.cores import cores, free_memory
from eyas.model.threads import MOST_THREADS, num_threads, threads


@pytest.fixture
def linux(tmp_path, monkeypatch):
    """Makes the files of a Linux machine with 16 logical cores, two to a core unless it is said."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)

    def made(files: dict[str, str], siblings: bool = False):
        for cpu in range(16 if siblings else 0):
            files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = (
                f"{cpu % 8},{cpu % 8 + 8}"
            )
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        return tmp_path

    return made


def group(text: str, **files: str) -> dict[str, str]:
    return {"proc/self/cgroup": text} | {
        f"sys/fs/cgroup/{name}": value for name, value in files.items()
    }


V2, V1 = "0::/", "5:memory:/\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        (group(V2), 16),
        (group(V2, **{"cpu.max": "max 100000"}), 16),
        (group(V2, **{"cpu.max": "200000 100000"}), 2),
        (group(V2, **{"cpu.max": "250000 100000"}), 2),
        (group(V2, **{"cpu.max": "50000 100000"}), 1),
        (group(V2, **{"cpu.max": "9900000 100000"}), 16),
        (group(V2, **{"cpu.max": "nonsense"}), 16),
        (
            group("0::/a/b", **{"a/cpu.max": "300000 100000", "a/b/cpu.max": "500000 100000"}),
            3,
        ),
        (
            group(
                V1,
                **{
                    "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "400000",
                    "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
                },
            ),
            4,
        ),
        (  # the container's own group is what it has mounted
            group(
                V1,
                **{
                    "cpu,cpuacct/cpu.cfs_quota_us": "150000",
                    "cpu,cpuacct/cpu.cfs_period_us": "50000",
                },
            ),
            3,
        ),
        (
            group(
                V1,
                **{
                    "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                    "cpu,cpuacct/cpu.cfs_period_us": "100000",
                },
            ),
            16,
        ),
    ],
)
def test_the_quota_of_a_container_is_the_limit(linux, files, expected):
    assert cores(linux(files)) == expected


def test_two_threads_of_one_core_are_one(linux, monkeypatch):
    assert cores(linux(group(V2, **{"cpu.max": "1200000 100000"}), siblings=True)) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 8})
    assert cores(linux({}, siblings=True)) == 2


def test_here_there_is_one_at_least():
    assert 1 <= cores() <= (os.cpu_count() or 1)


FREE = {"proc/meminfo": "MemTotal: 64000 kB\nMemAvailable:   9000 kB"}
STAT = "anon 5\ninactive_file 1000\nactive_file 24\nunevictable 7"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (FREE, 9000 * 1024),
        (FREE | group(V2, **{"memory.max": "max", "memory.current": "5"}), 9000 * 1024),
        (FREE | group(V2, **{"memory.max": "900000", "memory.current": "500000"}), 400000),
        (  # what files take is given back
            FREE
            | group(
                V2,
                **{"memory.max": "900000", "memory.current": "500000", "memory.stat": STAT},
            ),
            401024,
        ),
        (FREE | group(V2, **{"memory.max": "900000", "memory.current": "900001"}), 0),
        (
            FREE
            | group(
                V1,
                **{
                    "memory/memory.limit_in_bytes": "800000",
                    "memory/memory.usage_in_bytes": "300000",
                    "memory/memory.stat": f"{STAT}\ntotal_inactive_file 2000",
                },
            ),
            502000,
        ),
        (
            FREE
            | {
                "proc/self/limits": "Limit  Soft  Hard\nMax address space  2048000  9  bytes",
                "proc/self/status": "VmPeak: 1900 kB\nVmSize:    1000 kB",
            },
            1024000,
        ),
        (FREE | {"proc/self/limits": "Max address space   unlimited  unlimited  bytes"}, 9216000),
    ],
)
def test_what_is_free_within_every_limit(linux, files, expected):
    assert free_memory(linux(dict(files))) == expected


def test_more_threads_than_a_pool_counts_are_none(monkeypatch):
    """1,024 of them waited for each other for ever."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1024")
    monkeypatch.setattr("eyas.model.threads._chosen", [])
    assert num_threads() == MOST_THREADS < 1024
    with threads(1500):
        assert num_threads() == MOST_THREADS
