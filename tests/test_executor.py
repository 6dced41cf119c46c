"""Executors: the same results in the same order wherever the work runs, and a clear end when a
worker or the parent dies.
"""

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from eyas import executor as executors
from eyas.errors import ConfigError, CorruptError, EyasError
from eyas.executor import IN_FLIGHT, LocalExecutor, RayExecutor

ROOT = Path(__file__).resolve().parents[1]
ON_RAY = ("executor", "capture_workers", "prompts_scale")


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_all_on_ray():
    """In a process of its own: Ray leaves threads, and a process with threads cannot fork. Ray's
    workers are nice by default: beside other work they would hardly run.
    """
    files = [f"tests/test_{name}.py" for name in ON_RAY]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "ray", *files]
    env = {**os.environ, "RAY_worker_niceness": "0"}
    made = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "skipped" not in made.stdout


@pytest.fixture(scope="session")
def cluster():
    """One Ray for all files, since it takes seconds: an executor starts it and ends it."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    with ExitStack() as stack:
        for tries_left in (2, 1, 0):  # Ray gives itself 30 s, too few beside much other work
            try:
                executor = stack.enter_context(RayExecutor(Times(2), 2))
                break
            except EyasError:
                if not tries_left:
                    raise
        results = [result for result, _ in executor.map([1, 2, 3])]
        for actor in executor._actors:
            ray.kill(actor)  # the other tests need their cores
        yield results
    assert not ray.is_initialized()


@pytest.fixture(autouse=True)
def _cluster_for_ray(request):
    if "-ray" in request.node.name or "[ray" in request.node.name:
        request.getfixturevalue("cluster")


KINDS = [
    pytest.param(LocalExecutor, 1, id="here"),
    pytest.param(LocalExecutor, 2, id="processes"),
    pytest.param(RayExecutor, 2, id="ray", marks=pytest.mark.ray),
]


@dataclasses.dataclass(frozen=True)
class KilledOnce:
    """Work that doubles; the first process that gets a 3 dies of it."""

    mark: str

    def ready(self):
        def doubled(job):
            if job == 3 and not Path(self.mark).exists():
                Path(self.mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return 2 * job

        return doubled


@dataclasses.dataclass(frozen=True)
class Times:
    """Work that multiplies; `None` is a job that cannot be done, and a negative one kills its
    process.
    """

    factor: int

    def ready(self):
        started = (os.getpid(), time.monotonic_ns())

        def multiplied(job):
            if job is None:
                raise CorruptError("nothing to multiply", "give a number")
            if job < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return job * self.factor, started

        return multiplied


@dataclasses.dataclass(frozen=True)
class NeverReady:
    def ready(self):
        raise ConfigError("not to be built", "give it up")


@pytest.mark.parametrize(("kind", "workers"), KINDS)
def test_results_come_in_order_and_errors_as_they_were_raised(kind, workers):
    """A worker builds its work once; a fixed number of jobs is in flight."""
    with kind(Times(1), workers) as executor:
        results = [*executor.map(range(25)), *executor.map(range(25, 40))]
        assert [result for result, _ in results] == list(range(40))
        assert 1 <= len({started for _, started in results}) <= workers
        made = itertools.count()
        results = executor.map(made)
        for number in range(30):
            assert next(results)[0] == number
        results.close()
        assert next(made) <= 30 + max(2, workers * IN_FLIGHT)
        results = executor.map([1, 2, None, 4])
        assert [next(results)[0], next(results)[0]] == [1, 2]
        with pytest.raises(CorruptError, match="nothing to multiply") as raised:
            next(results)
        assert (raised.value.what, raised.value.hint) == ("nothing to multiply", "give a number")
        assert [result for result, _ in executor.map([5, 6])] == [5, 6]
    with (
        kind(NeverReady(), workers) as executor,
        pytest.raises(ConfigError, match="not to be built"),
    ):
        list(executor.map([1, 2, 3]))


@pytest.mark.parametrize(("kind", "workers"), KINDS[1:])
def test_a_killed_worker_is_a_clear_error(kind, workers):
    with (
        kind(Times(1), workers) as executor,
        pytest.raises(EyasError, match="a worker process ended amid") as raised,
    ):
        list(executor.map([1, 2, -1, 4, 5, 6]))
    assert "run the same command again" in raised.value.hint


@pytest.mark.ray
def test_a_worker_that_ray_loses_is_replaced_and_its_jobs_are_done_again(tmp_path):
    with RayExecutor(KilledOnce(str(tmp_path / "mark")), 2) as executor:
        assert list(executor.map([1, 2, 3, 4, 5, 6])) == [2, 4, 6, 8, 10, 12]
    assert (tmp_path / "mark").exists()


def test_one_job_needs_no_process():
    with LocalExecutor(Times(1), 2) as executor:
        ((_, (process, _)),) = executor.map([1])
        assert process == os.getpid()
        assert list(executor.map([])) == []


def test_workers_end_with_their_parent_however_it_ends():
    code = """
import itertools, time
from eyas.executor import LocalExecutor
from tests.test_executor import Times
results = LocalExecutor(Times(1), 2).map(itertools.count())
print(*{next(results)[1][0] for _ in range(20)}, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        workers = [int(process) for process in parent.stdout.readline().split()]
        assert workers
        assert all(runs(process) for process in workers)
        parent.kill()
    deadline = time.monotonic() + 300
    while any(runs(process) for process in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end while it is read
        return False


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(executors, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"eyas\[ray\]"):
        RayExecutor(Times(1), 2)


def test_a_ray_that_does_not_start_is_a_clear_error(monkeypatch):
    def init(**_):
        raise Exception("The current node timed out.\nMore.")

    ray = SimpleNamespace(init=init, is_initialized=lambda: False, shutdown=lambda: None)
    monkeypatch.setattr(executors, "find_spec", lambda name: True)
    monkeypatch.setattr(executors.importlib, "import_module", lambda name: ray)
    with pytest.raises(EyasError, match=r"not start: The current node timed out\.\n") as raised:
        RayExecutor(Times(1), 2).__enter__()
    assert "ray start --head" in raised.value.hint


@pytest.mark.ray
def test_a_ray_of_its_own(cluster):
    assert cluster == [2, 4, 6]
