"""The scheduler alone, with a device of tuples: whatever comes, goes and runs late, a page holds
what its reader expects.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.entries import Entries
from eyas.engine.pages import PagePool
from eyas.engine.request import Request, SamplingParams, Update
from eyas.engine.scheduler import BatchLimits, Job, Outcome, RunningSample, Scheduler
from eyas.model.rows import Roots

PAGE = 4
NO_END: frozenset[int] = frozenset()


def sample(
    name: str, prompt: list[int], max_tokens: int = 5, n: int = 1, salt: str | None = None
) -> list[RunningSample]:
    request = Request(
        name, tuple(prompt), SamplingParams(max_tokens=max_tokens, n=n), cache_salt=salt
    )
    return [RunningSample(request, index, None, None, max_tokens) for index in range(n)]  # type: ignore[arg-type]


def known_at(running: RunningSample, column: int) -> tuple[object, ...]:
    """What a column is made from: its own token and those before it; and under which salt it may be
    found.
    """
    return (running.request.cache_salt, *running.tokens[: column + 1])


class FakeDraft:
    """Entries that are what they were made from: a feature and a token. Features and entries are
    dictionaries by slot.
    """

    def new_cache(self, num_pages: int, page_size: int) -> dict[int, object]:
        return {}

    def enter(
        self, roots: Roots, cache: dict[int, object], features: dict[int, tuple[object, ...]]
    ) -> None:
        tokens = iter(roots.tokens)
        for pages, start, last in zip(roots.page_table, roots.starts, roots.lens, strict=True):
            for column in range(start, last + 1):
                feature = features[int(pages[(column - 1) // PAGE]) * PAGE + (column - 1) % PAGE]
                cache[int(pages[column // PAGE]) * PAGE + column % PAGE] = (*feature, next(tokens))
        assert next(tokens, None) is None

    catch_up = enter


class FakeDevice:
    """Caches whose entries are what they were made from: the tokens up to their own column. Does
    what a round does to columns and lengths, with the real `Entries`; draws at random."""

    def __init__(self, num_pages: int, limits: BatchLimits, rng: random.Random) -> None:
        self.limits, self.rng = limits, rng
        self.target: dict[int, object] = {}
        self.entries = Entries(FakeDraft(), num_pages, PAGE, {})  # type: ignore[arg-type]
        self.rows_of_jobs: list[int] = []
        self.num_drafting = 0

    def run(self, job: Job) -> list[Outcome]:
        before = {id(running): running.num_emitted for running in job.samples}
        for b, running in enumerate(job.samples):
            if job.chunks is not None:
                self._prefill(job, b, job.chunks[b])
            elif running.finish_reason is None:
                self._round(job, b)
        rows = sum(map(len, job.chunks)) if job.chunks is not None else 0
        self.rows_of_jobs.append(rows)
        return [
            self._outcome(running, running.num_emitted - before[id(running)])
            for running in job.samples
        ]

    def _prefill(self, job: Job, b: int, chunk: range) -> None:
        running = job.samples[b]
        self._reads(job, b, chunk.start)
        self._writes(job, b, chunk.start, chunk.stop)
        running.num_cached = chunk.stop
        self.entries.begin_pages(job, {b: len(chunk)})
        if chunk.stop == running.prefill_end == len(running.tokens):
            self._take(running, 1)
        if self.rng.random() < 0.5:
            self.entries.enter(job, [b])

    def _round(self, job: Job, b: int) -> None:
        running = job.samples[b]
        n = running.num_cached
        assert len(running.tokens) == n + 1, "the root is the only token that is not cached"
        self._reads(job, b, n)
        if self.rng.random() < 0.5:
            self.entries.extend(job, [b])
            self.num_drafting += 1
            for column in range(1, n + 1):
                found = self.entries.cache[self._slot(job, b, column)]  # type: ignore[index]
                assert found == known_at(running, column), (
                    f"column {column} of the draft holds {found}"
                )
        for column in range(n, n + self.limits.tree_columns):
            self.target[self._slot(job, b, column)] = "a tree"
            if column > n:  # the draft's tree stands behind the root's entry
                self.entries.cache[self._slot(job, b, column)] = "a tree"  # type: ignore[index]
        taken = self._take(running, self.rng.randint(1, self.limits.max_emitted))
        self._writes(job, b, n, n + taken)
        running.num_cached = n + taken
        self.entries.begin_pages(job, {b: taken})

    def _take(self, running: RunningSample, count: int) -> int:
        return len(running.take([self.rng.randrange(2) for _ in range(count)], NO_END))

    def _slot(self, job: Job, b: int, column: int) -> int:
        return int(job.page_table[b, column // PAGE]) * PAGE + column % PAGE

    def _reads(self, job: Job, b: int, end: int) -> None:
        for column in range(end):
            known = known_at(job.samples[b], column)
            slot = self._slot(job, b, column)
            assert self.target[slot] == known, f"column {column} holds {self.target[slot]}"
            assert self.entries.features[slot] == known, (
                f"column {column} has the feature of something else"
            )  # type: ignore[index]

    def _writes(self, job: Job, b: int, start: int, end: int) -> None:
        for column in range(start, end):
            slot, known = self._slot(job, b, column), known_at(job.samples[b], column)
            self.target[slot] = self.entries.features[slot] = known  # type: ignore[index, assignment]

    def _outcome(self, running: RunningSample, emitted: int) -> Outcome:
        tokens = running.tokens[len(running.tokens) - emitted :] if emitted else []
        ended = running.finish_reason if tokens else None
        return Outcome(running, running.num_cached, Update(running.request.id, tokens, ended, None))


class World:
    """A scheduler and its device. Under overlap a job runs some time between its launch and its
    outcome's being looked at.
    """

    def __init__(
        self, seed: int, num_pages: int, overlap: bool = False, keeps: bool = True, **limits: int
    ) -> None:
        sizes = {"max_batch": 3, "prefill_chunk": 8, "max_emitted": 3, "tree_columns": 4, **limits}
        self.limits = BatchLimits(**sizes)
        self.rng, self.overlap = random.Random(seed), overlap
        self.pool = PagePool(num_pages, PAGE)
        self.scheduler = Scheduler(self.pool, self.limits, keeps)
        self.device = FakeDevice(num_pages, self.limits, self.rng)
        self.in_flight: tuple[Job, list[Outcome] | None] | None = None
        self.jobs: list[Job] = []
        self.finished: list[RunningSample] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.in_flight is not None

    def fits(self, running: RunningSample) -> bool:
        return (
            self.scheduler.most_pages(len(running.tokens) + running.max_tokens)
            <= self.pool.num_pages
        )

    def step(self) -> Job | None:
        """One turn of the engine's loop: the job planned in it."""
        ahead = self.in_flight
        job = self.scheduler.schedule(nothing_in_flight=ahead is None)
        if job is not None:
            self.jobs.append(job)
            self._only_owners_write(job)
        if not self.overlap:
            self._settle(self.device.run(job) if job is not None else [])
            return job
        outcomes = ahead[1] or self.device.run(ahead[0]) if ahead is not None else []
        # In order, one after the other: this job may run now, or as late as when its outcome is
        # wanted.
        runs_now = job is not None and self.rng.random() < 0.5
        self.in_flight = (
            (job, self.device.run(job) if runs_now else None) if job is not None else None
        )
        self._settle(outcomes)
        return job

    def _settle(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if self.scheduler.settle(outcome) and outcome.update.finish_reason is not None:
                self.finished.append(outcome.sample)
        self.scheduler.check()

    def _only_owners_write(self, job: Job) -> None:
        """No page that a job may write is kept for others or held by another; a round has room for
        its trees, however much those in flight before it emit."""
        for b, running in enumerate(job.samples):
            start = job.chunks[b].start if job.chunks is not None else running.length
            end = job.chunks[b].stop if job.chunks is not None else self._most_columns(running)
            assert end <= len(running.pages) * PAGE
            for place in range(start // PAGE, -(-end // PAGE)):
                page = running.pages[place]
                assert job.page_table[b, place] == page
                assert self.pool._holders[page] == 1
                assert page not in self.pool._key_of

    def _most_columns(self, running: RunningSample) -> int:
        before = (running.num_in_flight - 1) * self.limits.max_emitted
        return max(running.length, running.prefill_end) + before + self.limits.tree_columns

    def drain(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not self.has_work:
                break
            self.step()
        assert not self.has_work, "somebody waits for ever"
        assert self.pool.num_available == self.pool.num_pages, "a page is lost"


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 2**32),
    st.integers(4, 40),
    st.booleans(),
    st.booleans(),
    st.integers(1, 5),
    st.sampled_from([4, 7, 16]),
)
def test_whatever_comes_and_goes(
    seed: int, num_pages: int, overlap: bool, keeps: bool, max_batch: int, prefill_chunk: int
) -> None:
    """Prompts over two tokens, so that prefixes are shared. Everyone finishes or was cancelled; no
    entry is anybody else's.
    """
    world = World(seed, num_pages, overlap, keeps, max_batch=max_batch, prefill_chunk=prefill_chunk)
    rng, asked, cancelled = world.rng, [], set()
    for number in range(60):
        if number < 40 and rng.random() < 0.4:
            prompt = [rng.randrange(2) for _ in range(rng.choice([1, 3, 9, 20]))]
            samples = sample(
                str(number),
                prompt,
                rng.randint(1, 15),
                rng.choice([1, 1, 3]),
                rng.choice([None, None, "a"]),
            )
            if world.fits(samples[0]):
                asked += samples
                for one in samples:
                    world.scheduler.add(one)
        if asked and rng.random() < 0.1:
            name = rng.choice(asked).request.id
            cancelled.add(name)
            world.scheduler.cancel(name)
        world.step()
    world.drain()
    for one in asked:
        is_done = one in world.finished
        assert is_done or one.request.id in cancelled
        assert not is_done or one.num_emitted == one.max_tokens
    assert len(set(map(id, world.finished))) == len(world.finished), "finished twice"


def test_arrivals_are_admitted_in_their_order() -> None:
    world = World(0, 100, max_batch=2)
    samples = [sample(name, [1, 1, 0] if name == "b" else [0] * 7)[0] for name in "abcdef"]
    for one in samples:
        world.scheduler.add(one)
    world.drain()
    firsts = list(
        dict.fromkeys(one.request.id for job in world.jobs if job.chunks for one in job.samples)
    )
    assert firsts == list("abcdef")


def test_chunks_alternate_with_rounds_and_are_no_longer_than_allowed() -> None:
    world = World(0, 100)
    world.scheduler.add(sample("decodes", [1], max_tokens=60)[0])
    world.step()
    world.scheduler.add(sample("long", [0] * 50)[0])
    world.scheduler.add(sample("short", [2] * 5)[0])
    world.drain()
    kinds = ["prefill" if job.chunks is not None else "round" for job in world.jobs]
    assert kinds[:14] == ["prefill", "round"] * 7, "50 tokens in chunks of 8, a round after each"
    assert max(world.device.rows_of_jobs) == 8
    shared = world.jobs[14].chunks  # the long prompt's last tokens, and the short one behind it
    assert [len(chunk) for chunk in shared or []] == [2, 5]


def test_a_round_has_room_for_its_trees_and_for_those_in_flight() -> None:
    for overlap in (False, True):
        world = World(1, 60, overlap, tree_columns=11)
        for name in "abc":
            world.scheduler.add(sample(name, [0] * 6, max_tokens=30)[0])
        world.drain()  # every job is checked for it
        assert len(world.finished) == 3


def test_when_pages_run_out_the_youngest_waits_again_first_in_line() -> None:
    """7 pages: two samples of 4 columns and a tree are admitted; when the older grows, the younger
    gives its pages up.
    """
    world = World(0, 7, keeps=False, max_emitted=1)
    older, younger, third = (
        sample(name, [1] * 4, max_tokens=12)[0] for name in ("older", "younger", "third")
    )
    for one in (older, younger, third):
        world.scheduler.add(one)
    while not world.scheduler.num_preempted:
        world.step()
    assert world.scheduler._running == [older]
    assert world.scheduler._waiting[0] is younger
    kept = list(younger.tokens)
    assert len(kept) > 4
    world.drain()
    assert younger.tokens[: len(kept)] == kept
    assert [one.request.id for one in world.finished] == ["older", "younger", "third"]


def test_a_preempted_sample_does_not_draw_again() -> None:
    world = World(0, 7, keeps=True, max_emitted=1)
    samples = [sample(name, [1] * 4, max_tokens=12)[0] for name in "ab"]
    for one in samples:
        world.scheduler.add(one)
    world.drain()
    assert world.scheduler.num_preempted > 0
    assert [one.num_emitted for one in samples] == [12, 12]


def test_nothing_is_preempted_whose_outcome_is_not_known() -> None:
    world = World(0, 8, overlap=True, max_emitted=1)
    for name in "abc":
        world.scheduler.add(sample(name, [1] * 4, max_tokens=12)[0])
    before = 0
    while world.has_work:
        was_in_flight = world.in_flight is not None
        world.step()
        assert world.scheduler.num_preempted == before or not was_in_flight
        before = world.scheduler.num_preempted
    assert before > 0


def test_cancelled_in_flight_it_disturbs_nobody() -> None:
    """Its job runs on, after its slot and pages have gone to another: into what is rewritten before
    it is read.
    """
    for seed in range(20):
        world = World(seed, 12, overlap=True, max_batch=2)
        world.scheduler.add(sample("stays", [0, 1, 0], max_tokens=15)[0])
        world.scheduler.add(sample("goes", [1] * 9, max_tokens=15)[0])
        for _ in range(2 + seed % 5):
            world.step()
        assert world.in_flight is not None
        world.scheduler.cancel("goes")
        world.scheduler.check()
        world.scheduler.add(sample("comes", [1] * 9, max_tokens=15)[0])
        world.drain()
        assert sorted(one.request.id for one in world.finished) == ["comes", "stays"]


def test_samples_of_a_request_share_the_prompt_that_the_first_computed() -> None:
    world = World(0, 60)
    for one in sample("n", [0, 1] * 8, max_tokens=3, n=3):
        world.scheduler.add(one)
    world.drain()
    assert world.scheduler.num_prompt_tokens == 3 * 16
    assert world.scheduler.num_reused_tokens == 2 * 12, "all but the page of the last token"


def test_only_the_same_salt_shares_a_prompt() -> None:
    world, reused = World(0, 60, max_batch=1), []
    for number, salt in enumerate([None, "a", None, "b", "a"]):
        world.scheduler.add(sample(str(number), [0, 1] * 8, salt=salt)[0])
        world.drain()
        reused.append(world.scheduler.num_reused_tokens - sum(reused))
    assert reused == [0, 0, 12, 0, 12], "all but the page of the last token"


def test_pages_kept_make_way_for_newcomers() -> None:
    world = World(0, 9, max_batch=1)
    for number in range(12):
        prompt = [number >> bit & 1 for bit in range(4)] * 3
        world.scheduler.add(sample(str(number), prompt)[0])
    world.drain()
    assert len(world.finished) == 12
    assert world.pool.num_evicted > 0
