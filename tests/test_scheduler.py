"""The scheduler and the head's entries, with a device of tuples: whatever comes and goes, a page
holds what its reader expects.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.drafters import NOTHING, HeadDrafter
from eyas.engine.pages import PagePool
from eyas.engine.prefill import LEAST_ROWS, shares
from eyas.engine.request import Request, SamplingParams
from eyas.engine.sampling import Sampler
from eyas.engine.scheduler import BatchLimits, Job, RunningSample, Scheduler
from eyas.engine.tree import Speculation
from eyas.model.rows import Proposals, Roots

PAGE = 4
NO_END: frozenset[int] = frozenset()
PLAN = SimpleNamespace(width=1, thresholds=[0.0])


def sample(
    name: str, prompt: list[int], max_tokens: int = 5, n: int = 1, salt: str | None = None
) -> list[RunningSample]:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    request = Request(name, tuple(prompt), params, cache_salt=salt)
    sampler = Sampler(params, prompt, 3, NO_END)
    return [RunningSample(request, index, sampler, None, max_tokens) for index in range(n)]


def known_at(running: RunningSample, column: int) -> tuple[object, ...]:
    """What a column is made from: its own token and those before it; and under which salt it may be
    found.
    """
    return (running.request.cache_salt, *running.tokens[: column + 1])


def slot_of(running: RunningSample, column: int) -> int:
    return running.pages[column // PAGE] * PAGE + column % PAGE


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

    def grow(self, roots: Roots, cache: dict, features: dict, *_: object) -> Proposals:
        self.enter(roots, cache, features)
        return NOTHING


class FakeDevice:
    """Caches whose entries are what they were made from: the tokens up to their own column. Does
    what a round does to columns and lengths, with the real `HeadDrafter`; draws at random."""

    def __init__(self, pool: PagePool, tree_columns: int, rng: random.Random) -> None:
        self.tree_columns, self.most_emitted, self.rng = tree_columns, 3, rng
        self.target: dict[int, object] = {}
        self.head = HeadDrafter(FakeDraft(), Speculation(), {}, pool)  # type: ignore[arg-type]
        self.rows_of_jobs: list[int] = []

    def run(self, job: Job) -> None:
        for b, running in enumerate(job.samples):
            if job.chunks is not None:
                self._prefill(running, job.chunks[b])
            else:
                self._round(running)
        self.rows_of_jobs.append(sum(map(len, job.chunks or [])))

    def _prefill(self, running: RunningSample, chunk: range) -> None:
        self._reads(running, chunk.start)
        self._writes(running, chunk.start, chunk.stop)
        if chunk.stop == running.prefill_end == len(running.tokens):
            running.take(self._drawn(1), NO_END)
        running.read(chunk.stop)
        if self.rng.random() < 0.5:
            self.head.extend([running])

    def _round(self, running: RunningSample) -> None:
        n, entries = running.num_cached, self.head.cache
        assert len(running.tokens) == n + 1, "the root is the only token that is not cached"
        self._reads(running, n)
        if self.rng.random() < 0.5:
            self.head.propose([running], PLAN)  # type: ignore[arg-type]
            for column in range(1, n + 1):
                found = entries[slot_of(running, column)]  # type: ignore[index]
                assert found == known_at(running, column), f"entry {column} holds {found}"
        for column in range(n, n + self.tree_columns):
            self.target[slot_of(running, column)] = "a tree"
            if column > n:  # the draft's tree stands behind the root's entry
                entries[slot_of(running, column)] = "a tree"  # type: ignore[index]
        running.advance(self._drawn(self.rng.randint(1, self.most_emitted)), NO_END)
        self._writes(running, n, running.num_cached)

    def _drawn(self, count: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(count)]

    def _reads(self, running: RunningSample, end: int) -> None:
        for column in range(end):
            known, slot = known_at(running, column), slot_of(running, column)
            assert self.target[slot] == known, f"column {column} holds {self.target[slot]}"
            assert self.head.features[slot] == known, f"feature {column} is of something else"  # type: ignore[index]

    def _writes(self, running: RunningSample, start: int, end: int) -> None:
        for column in range(start, end):
            slot = slot_of(running, column)
            self.target[slot] = self.head.features[slot] = known_at(running, column)  # type: ignore[index, assignment]


class World:
    def __init__(self, seed: int, num_pages: int, keeps: bool = True, **limits: float) -> None:
        sizes = {"max_batch": 3, "prefill_chunk": 8, "tree_columns": 4, **limits}
        self.limits, self.rng = BatchLimits(**sizes), random.Random(seed)
        self.pool = PagePool(num_pages, PAGE)
        self.scheduler = Scheduler(self.pool, self.limits, keeps)
        self.device = FakeDevice(self.pool, self.limits.tree_columns, self.rng)
        self.jobs: list[Job] = []
        self.finished: list[RunningSample] = []

    def fits(self, running: RunningSample) -> bool:
        num_tokens = len(running.tokens) + running.max_tokens
        return self.scheduler.most_pages(num_tokens) <= self.pool.num_pages

    def step(self) -> None:
        """One turn of the engine's loop."""
        job = self.scheduler.schedule()
        if job is not None:
            self.jobs.append(job)
            self._only_owners_write(job)
            self.device.run(job)
            self.scheduler.settle(job)
            self.finished += [one for one in job.samples if one.finish_reason is not None]
        self.scheduler.check()

    def _only_owners_write(self, job: Job) -> None:
        """No page that a job may write is kept for others or held by another; a round has room for
        its trees."""
        for b, running in enumerate(job.samples):
            start = running.num_cached
            end = start + self.limits.tree_columns if job.chunks is None else job.chunks[b].stop
            assert end <= len(running.pages) * PAGE
            for page in running.pages[start // PAGE : -(-end // PAGE)]:
                assert self.pool._holders[page] == 1
                assert page not in self.pool._key_of

    def drain(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "somebody waits for ever"
        assert self.pool.num_available == self.pool.num_pages, "a page is lost"


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 2**32),
    st.integers(4, 40),
    st.booleans(),
    st.integers(1, 5),
    st.sampled_from([4, 7, 16]),
    st.sampled_from([4, 11]),
)
def test_whatever_comes_and_goes(seed, num_pages, keeps, max_batch, prefill_chunk, tree_columns):
    limits = {"max_batch": max_batch, "prefill_chunk": prefill_chunk, "tree_columns": tree_columns}
    world = World(seed, num_pages, keeps, **limits)
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


def test_prompts_of_one_length_are_admitted_in_the_order_of_their_arrival():
    world = World(0, 100, max_batch=2)
    for name in "abcdef":
        world.scheduler.add(sample(name, [1, 1, 0] if name == "b" else [ord(name)] * 7)[0])
    world.drain()
    firsts = dict.fromkeys(
        one.request.id for job in world.jobs if job.chunks for one in job.samples
    )
    assert "".join(firsts) == "abcdef"


def test_chunks_alternate_with_rounds_and_are_no_longer_than_allowed():
    world = World(0, 100)
    world.scheduler.add(sample("decodes", [1], max_tokens=60)[0])
    world.step()
    world.scheduler.add(sample("long", [0] * 50)[0])
    world.scheduler.add(sample("short", [2] * 5)[0])
    world.drain()
    kinds = ["prefill" if job.chunks is not None else "round" for job in world.jobs]
    assert kinds[:16] == ["prefill", "round"] * 8, "55 tokens in chunks of 8, a round after each"
    chunks = [[len(chunk) for chunk in job.chunks] for job in world.jobs[2:16:2]]
    assert chunks == [[4, 4], [7, 1], *[[8]] * 4, [7]]


lengths = st.lists(st.integers(1, 300), min_size=1, max_size=8)


@given(lengths, st.integers(8, 64))
def test_what_prompts_share(left, budget):
    counts = shares(left, budget)
    ended = [count for count, own in zip(counts, left, strict=True) if count == own]
    assert all(0 <= count <= own for count, own in zip(counts, left, strict=True))
    assert sum(counts) == min(sum(left), budget) or (ended and sum(counts) <= budget)
    assert counts[0] == left[0] or counts[0] >= min(sum(counts), budget - 1) // 2
    assert counts[left.index(min(left))] >= min(*left, budget // 2, LEAST_ROWS)


@given(st.integers(1, 300), st.lists(st.integers(400, 900), min_size=1), st.integers(8, 64))
def test_a_short_prompt_is_read_within_twice_its_rows(short, longs, budget):
    left, read, number = [*longs, short], 0, len(longs)
    while left[number]:
        counts = shares(left, budget - budget % 2)
        read += sum(counts)
        left = [own - count for own, count in zip(left, counts, strict=True)]
    assert read <= 2 * short + LEAST_ROWS


@given(st.integers(1, 300), st.data())
def test_a_long_prompt_is_read_whatever_comes(long, data):
    left, read = [long], 0
    while left[0]:
        left += data.draw(st.lists(st.integers(1, 20), max_size=6))
        counts = shares(left, 16)
        read += sum(counts)
        first, *others = (own - count for own, count in zip(left, counts, strict=True))
        left = [first, *filter(None, others)]
    assert read <= 2 * long + 16


ROUND_MS = 20.0


class Clock:
    """A world whose jobs take their time: so much a row of a prompt, and a scored one."""

    def __init__(self, pause_ms: float) -> None:
        self.world = World(0, 400, prefill_chunk=64, max_batch=8, pause_ms=pause_ms)
        self.row_ms, self.scored_ms = 1.0, 2.0
        self.now = 0.0
        self.pauses: list[float] = []  # of prefills while others decode, and of the round behind
        self.world.scheduler.add(sample("decodes", [1], max_tokens=3000)[0])
        for _ in range(6):
            self.step()

    def step(self) -> Job | None:
        world = self.world
        job = world.scheduler.schedule()
        if job is None:
            return None
        ms = ROUND_MS
        if job.chunks is not None:
            ms = sum(
                len(chunk) * (self.row_ms + self.scored_ms * (one.prompt_logprobs is not None))
                for one, chunk in zip(job.samples, job.chunks, strict=True)
            )
            self.pauses.append(ms + ROUND_MS)
        self.now += ms
        world.device.run(job)
        world.scheduler.settle(job, ms)
        return job

    def pauses_of(self, prompts: list[RunningSample]) -> list[float]:
        """While the prompts are read."""
        self.pauses.clear()
        for one in prompts:
            self.world.scheduler.add(one)
        while not all(one.is_prefilled or one.finish_reason for one in prompts):
            self.step()
        return self.pauses


def prompts_of(length: int, count: int = 4, **params: int) -> list[RunningSample]:
    made, rng = [], random.Random(length)
    for number in range(count):
        sampling = SamplingParams(max_tokens=1, **params)
        prompt = tuple(rng.randrange(3) for _ in range(length))
        request = Request(f"{length}, {number}, {params}", prompt, sampling)
        made.append(RunningSample(request, 0, Sampler(sampling, prompt, 3, NO_END), None, 1))
    return made


def test_no_prompt_makes_others_pause_for_longer_than_allowed():
    clock = Clock(pause_ms=60)
    pauses = clock.pauses_of(prompts_of(150))
    assert max(pauses) <= 60
    assert max(pauses) > 35, "chunks are not shorter than they must be"
    clock.row_ms = 3.0
    pauses = clock.pauses_of(prompts_of(151))
    assert max(pauses[8:]) <= 60
    assert max(Clock(pause_ms=1e6).pauses_of(prompts_of(150))) == 64 + ROUND_MS


def test_a_short_prompt_waits_for_no_long_one():
    clock = Clock(pause_ms=1e6)
    clock.world.scheduler.cancel("decodes")
    longs, shorts = prompts_of(600, count=2), prompts_of(20, count=3)
    for one in longs:
        clock.world.scheduler.add(one)
    clock.now, waits = 0.0, []
    for number, short in enumerate(shorts):
        while clock.now < 250 * number + 100:
            clock.step()
        clock.world.scheduler.add(short)
        asked = clock.now
        while not short.num_emitted:
            clock.step()
        waits.append(clock.now - asked)
    while not all(one.num_emitted for one in longs):
        clock.step()
    assert max(waits) <= 2 * 20
    assert clock.now <= 2 * 600 + 3 * 20, "no row is read twice"


def test_a_long_beginning_of_several_prompts_is_read_once():
    world = World(0, 100)
    for name in "abc":
        world.scheduler.add(sample(name, [0, 1] * 20 + [ord(name)] * 6, max_tokens=1)[0])
    world.drain()
    assert sum(world.device.rows_of_jobs) <= 40 + 3 * (6 + PAGE)


def test_scored_prompts_make_no_others_pause_for_longer_either():
    clock = Clock(pause_ms=80)
    pauses = clock.pauses_of([*prompts_of(150, prompt_logprobs=0), *prompts_of(100)])
    assert max(pauses[4:]) <= 80


def test_a_scored_prompt_is_read_in_no_smaller_steps_beside_others():
    for follows, expected in ((False, [8, 8, 8]), (True, [16, 16, 8])):
        world = World(0, 400, prefill_chunk=64, max_batch=8, scored_chunk=16)
        (scored,) = prompts_of(300, count=1, prompt_logprobs=0)
        world.scheduler.add(scored)
        world.step()
        for number in range(3):
            if not (follows and number):
                prompt = scored.tokens[:52] if follows else [number] * 3
                world.scheduler.add(sample(str(number), prompt, max_tokens=1)[0])
            world.step()
        steps = [len(job.chunks[job.samples.index(scored)]) for job in world.jobs[1:]]
        assert steps == expected


def test_a_job_looks_at_no_more_than_the_first_in_line():
    world = World(0, 100, max_batch=1)
    samples = [sample(str(number), [0] * (400 - number))[0] for number in range(400)]
    for place, one in enumerate(samples):
        world.scheduler._wait(one, 1000 - place)
    line = world.scheduler._line({}, (1.0, 1.0))
    assert [*line] == samples[:143:-1]


def test_a_prompt_that_waits_alone_is_read_in_whole_chunks():
    world = World(0, 100, prefill_chunk=64, pause_ms=1.0)
    (one,) = prompts_of(100, count=1)
    world.scheduler.add(one)
    while world.scheduler.has_work:
        job = world.scheduler.schedule()
        world.jobs.append(job)
        world.device.run(job)
        world.scheduler.settle(job, 1000.0)
    assert [len(job.chunks[0]) for job in world.jobs if job.chunks] == [64, 36]


def test_when_pages_run_out_the_youngest_waits_again_first_in_line():
    world = World(0, 7, keeps=False)
    world.device.most_emitted = 1
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


def test_what_a_cancelled_sample_wrote_is_rewritten_before_it_is_read():
    for seed in range(20):
        world = World(seed, 12, max_batch=2)
        world.scheduler.add(sample("stays", [0, 1, 0], max_tokens=15)[0])
        world.scheduler.add(sample("goes", [1] * 9, max_tokens=15)[0])
        for _ in range(2 + seed % 5):
            world.step()
        world.scheduler.cancel("goes")
        world.scheduler.check()
        world.scheduler.add(sample("comes", [1] * 9, max_tokens=15)[0])
        world.drain()
        assert sorted(one.request.id for one in world.finished) == ["comes", "stays"]
