"""The engine: requests in, tokens out. One thread owns an engine. A step schedules a job, runs it
(`rounds.py`) and settles it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator
from tokenizers import Tokenizer

from eyas.cores import free_memory
from eyas.engine.draft import Draft, check_branches, check_place
from eyas.engine.grammar import Grammar, Grammars
from eyas.engine.pages import PagePool
from eyas.engine.request import Request, Result, SamplingParams, Update
from eyas.engine.rounds import Rounds
from eyas.engine.sampling import Sampler
from eyas.engine.scheduler import BatchLimits, RunningSample, Scheduler
from eyas.engine.stop import StopChecker
from eyas.engine.tree import Speculation
from eyas.errors import ConfigError, InputError, MismatchError
from eyas.log import Track, quiet, size_text
from eyas.model.checkpoint import read_head
from eyas.model.target import PAGE_SIZE, Dtype, Target
from eyas.settings import Flag
from eyas.tau import count_round, tau_of

log = logging.getLogger("eyas.engine")
MODEL = "Model and head"  # panel of flags in --help

LEAST_TAU, TAU_WINDOW = 1.3, 256  # a lower tau hardly helps; greedy rounds of a window
DEFAULT_SHARE = 0.5  # of the free memory, for caches without a max_length
MEMORY_FOR_CACHES = 0.9  # of the free memory, for a proposed size
SCORED_LOGITS = 1 << 22  # prompt_logprobs of one prefill: 16 MiB in fp32


class EngineConfig(BaseModel):
    """Sizes of the engine and how it speculates.

    max_batch: samples that run at a time. max_length: tokens of prompt and answer together; None
    takes the target's context, as far as half of the free memory holds it. num_pages: pages of 16
    tokens; None takes as many as max_batch requests of max_length need, or, without a max_length,
    as that half holds: then requests may wait for each other's pages. prefill_chunk: tokens of a
    prefill. max_pause_ms: of running answers, while prompts are read; more gives throughput.
    speculation: off, auto, fixed(steps,branches,nodes); auto takes sizes too; these are
    num_draft_steps, tree_topk and num_verify_tokens. prefix_reuse: keep computed prefixes for other
    requests. text_drafts: in auto, draft also what followed the same tokens before, with or without
    a head.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_batch: int = Field(8, ge=1)
    max_length: int | None = Field(None, ge=2)
    num_pages: int | None = Field(None, ge=1)
    prefill_chunk: int = Field(256, ge=16)
    max_pause_ms: float = Field(150.0, gt=0)
    speculation: Annotated[str, Flag(panel=MODEL)] = "auto"
    prefix_reuse: bool = True
    text_drafts: bool = True

    @field_validator("speculation")
    @classmethod
    def _is_speculation(cls, text: str) -> str:
        Speculation.parse(text)
        return text

    def parsed(self) -> Speculation:
        return Speculation.parse(self.speculation)


class Engine:
    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """tokenizer: the target's, for stop strings and grammars. Raises MismatchError for a head
        of another target, ConfigError for caches larger than the memory.
        """
        self.config = config = config or EngineConfig()
        self.speculation = speculation = config.parsed()
        self.target = target
        self.draft = draft if speculation.mode != "off" else None
        if self.draft:
            check_branches(self.draft.config, speculation)
        self.text_drafts = config.text_drafts and speculation.mode == "auto"
        drafts = self.draft is not None or self.text_drafts
        limits = BatchLimits(
            config.max_batch,
            config.prefill_chunk,
            # columns of a tree while it grows, and while it is verified
            max(speculation.num_verify_tokens, 1 + speculation.num_columns) if drafts else 1,
            scored_chunk=max(1, SCORED_LOGITS // target.config.vocab_size),
            pause_ms=config.max_pause_ms,
        )
        free = free_memory()
        self.max_length, most, num_pages = self._sizes(limits.tree_columns, free)
        self._check_memory(free, num_pages, most, limits.tree_columns)
        self._pool = PagePool(num_pages, PAGE_SIZE)
        self._scheduler = Scheduler(self._pool, limits, config.prefix_reuse)
        if not drafts:
            speculation = replace(speculation, mode="off")
        self.rounds = Rounds(target, self.draft, speculation, self._pool, self.text_drafts)
        self._tokenizer = tokenizer
        self._end_tokens = frozenset(target.config.eos_token_ids)
        self._grammars = (
            Grammars(tokenizer, target.config.vocab_size, self._end_tokens)
            if tokenizer is not None
            else None
        )
        self._accept_hist: list[int] = []  # greedy rounds, up to TAU_WINDOW
        self._num_windows = self._num_low = 0

    @classmethod
    def load(
        cls,
        target: str | Path,
        head: str | Path | None = None,
        dtype: Dtype = "auto",
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Engine:
        """Load a target folder and, optionally, a head folder in any form that `read_head` knows.
        Raises MissingInputError, CorruptError, MismatchError, ConfigError.
        """
        loaded = Target.load(target, dtype)
        draft = Draft(*read_head(head, loaded.config), loaded) if head is not None else None
        return cls(loaded, draft, config, tokenizer)

    def _sizes(self, tree_columns: int, free: int | None) -> tuple[int, int, int]:
        """Tokens of a request, the most pages of one, and the pages of the caches. tree_columns: of
        a request, behind its tokens; free: bytes of memory.
        """
        config, room = self.config, self.config.num_pages
        length = context = self.target.config.max_position_embeddings
        if config.max_length is not None:
            length = min(config.max_length, context)
        elif room is None and free is not None:
            room = int(free * DEFAULT_SHARE) // self._page_bytes
        if config.max_length is None and room is not None:
            length = max(2, min(context, room * PAGE_SIZE - tree_columns))
        most = PagePool(0, PAGE_SIZE).pages_for(length + tree_columns)
        needed = config.max_batch * most
        if config.max_length is None and room is not None:
            needed = max(most, min(needed, room))
        return length, most, config.num_pages or needed

    @property
    def _page_bytes(self) -> int:
        shape = self.target.config
        numbers = shape.num_hidden_layers * shape.slot_width
        if self.draft is not None:
            numbers += 3 * shape.hidden_size + self.draft.config.slot_width
        return int(numbers * PAGE_SIZE * self.target.dtype.itemsize)

    def _check_memory(
        self, free: int | None, num_pages: int, most_pages: int, tree_columns: int
    ) -> None:
        """Raise ConfigError, with what would fit, for caches that need more than is free: memory is
        taken when first written, so the server would be killed later, under load.
        """
        page_bytes = self._page_bytes
        if free is None or num_pages * page_bytes <= free:
            return
        fits = int(free * MEMORY_FOR_CACHES) // page_bytes
        ways = []
        if fits >= most_pages:
            ways.append(f"num_pages={fits}")
            if not self.config.num_pages:
                each = fits // self.config.max_batch * PAGE_SIZE - tree_columns
                ways.append(f"max_batch={fits // most_pages}")
                ways += [f"max_length={each}"] if each >= 2 else []
        elif (one := fits * PAGE_SIZE - tree_columns) >= 2:
            ways.append(f"max_length={one} with num_pages={fits}")
        raise ConfigError(
            f"the caches of {num_pages:,} pages, of {PAGE_SIZE} tokens each, need "
            f"{size_text(num_pages * page_bytes)} of memory; {size_text(free)} are free",
            f"what fits: {', or '.join(ways)}"
            if ways
            else "give the process more memory, or take a smaller model",
        )

    # The head

    def read_draft(self, head: str | Path) -> Draft:
        """A head for `swap_draft`, from any thread. Raises what reading a head raises, and
        MismatchError for one that cannot replace the served one while requests run.
        """
        served = self.rounds.head
        if served is None:
            raise MismatchError(
                "no head is served, or it was switched off",
                "restart the server with the other head",
            )
        draft = Draft(*read_head(head, self.target.config), self.target)
        check_place(draft.config, served.draft.config)
        return draft

    def swap_draft(self, draft: Draft) -> bool:
        """Draft with another head (of `read_draft`) from the next round on. False, and no change,
        where the head was switched off in the meantime.

        No answer changes: the new head makes its entries from the kept features.
        """
        if self.rounds.head is None:
            return False
        self.draft = self.rounds.head.draft = draft
        self.rounds.policy.forget()
        self._scheduler.forget_drafts()
        self._accept_hist.clear()
        self._num_windows = self._num_low = 0
        return True

    # Requests

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def prepare_grammars(self) -> None:
        if self._grammars is not None:
            self._grammars.prepare()

    def compile_grammar(self, params: SamplingParams) -> Grammar | None:
        """The grammar that the params ask for, if any; from any thread. Raises InputError."""
        if not params.has_grammar:
            return None
        if self._grammars is None:
            raise _needs_tokenizer()
        return self._grammars.compile(params)

    def add(self, request: Request, grammar: Grammar | None = None) -> None:
        """Queue all samples of a request. grammar: of `compile_grammar`; None: compiled here.
        Raises InputError for a request that this engine could not serve even alone.
        """
        length = len(request.prompt_ids)
        if length == 0:
            raise InputError("the prompt has no tokens", "give at least one token")
        most_tokens = self.max_length - min(request.params.max_tokens, 1)
        if length > most_tokens:
            raise InputError(
                f"the prompt has {length} tokens, the limit is {most_tokens}",
                "shorten the prompt",
            )
        lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
        if not 0 <= lowest <= highest < self.target.config.vocab_size:
            raise InputError(
                "the prompt holds token ids outside the vocabulary",
                "use the target's own tokenizer",
            )
        if self._scheduler.knows(request.id):
            raise InputError(
                f"a request {request.id!r} is under way", "give every request an id of its own"
            )
        max_tokens = min(request.params.max_tokens, self.max_length - length)
        pages = self._scheduler.most_pages(length + max_tokens)
        if pages > self._pool.num_pages:
            raise InputError(
                f"the request may need {pages} pages of {PAGE_SIZE} tokens, the cache has "
                f"{self._pool.num_pages}",
                "shorten the prompt, lower max_tokens, or give the engine more pages (num_pages)",
            )
        # all are made before the first is added: a refusal leaves nothing behind
        grammar = grammar or self.compile_grammar(request.params)
        samples = [
            self._sample(request, index, max_tokens, grammar) for index in range(request.params.n)
        ]
        for sample in samples:
            self._scheduler.add(sample)

    def cancel(self, request_id: str) -> None:
        """Drop a request, waiting or running; an unknown id is no error."""
        self._scheduler.cancel(request_id)

    def run(self, requests: Iterable[Request], track: Track = quiet) -> Iterator[Result]:
        """Decode all requests, yielding each sample as it finishes. Raises InputError: of `add`,
        and of a grammar that cannot be followed any further.
        """
        updates: dict[tuple[str, int], list[Update]] = {}
        done = total = 0
        for request in requests:
            self.add(request)
            total += request.params.n
        while self.has_work:
            for update in self.step():
                if update.error is not None:
                    self.cancel(update.request_id)
                    raise update.error
                key = update.request_id, update.index
                updates.setdefault(key, []).append(update)
                if update.finish_reason is not None:
                    done += 1
                    track(done, total)
                    yield Result.of(updates.pop(key), self.speculation.num_draft_steps)

    @property
    def draft_failure(self) -> str | None:
        """Why the head was switched off; else None."""
        return self.rounds.draft_failure

    def check(self) -> None:  # for tests
        self._scheduler.check()

    def metrics(self) -> dict[str, float]:
        """Counters and gauges, by name."""
        scheduler = self._scheduler
        return {
            "waiting": scheduler.num_waiting,
            "running": scheduler.num_running,
            "pages_available": self._pool.num_available,
            "pages_kept": self._pool.num_kept,
            "pages_evicted": self._pool.num_evicted,
            "prompt_tokens": scheduler.num_prompt_tokens,
            "prompt_tokens_reused": scheduler.num_reused_tokens,
            "preemptions": scheduler.num_preempted,
            "draft_failures": float(self.draft_failure is not None),
            "device_busy_s": self.rounds.trace.busy_s,
            "device_idle_s": self.rounds.trace.idle_s,
            **self.rounds.policy.metrics(),
        }

    def step(self) -> list[Update]:
        """Schedule one job, run it and settle it; returns its updates, possibly none while there is
        work.
        """
        job = self._scheduler.schedule()
        if job is None:
            return []
        started = time.perf_counter()
        updates = self.rounds.run(job)
        self._scheduler.settle(job, 1e3 * (time.perf_counter() - started))
        if not self._scheduler.has_work:
            self.rounds.trace.rest()
        for sample, update in zip(job.samples, updates, strict=True):
            if update.num_accepted_drafts is not None and sample.request.params.temperature == 0:
                self._watch_tau(update.num_accepted_drafts)
        return [one for one in updates if one.token_ids or one.finish_reason is not None]

    def _watch_tau(self, num_accepted_drafts: int) -> None:
        """Count a greedy round, and log the share of text that the head hardly helps: at the first
        such window of TAU_WINDOW rounds, and whenever there are twice as many. Prompts unlike the
        training prompts do this, so it is no sign of a bad head.
        """
        if self.draft is None:
            return
        count_round(self._accept_hist, num_accepted_drafts)
        if sum(self._accept_hist) < TAU_WINDOW:
            return
        tau = tau_of(self._accept_hist) or 1.0
        self._accept_hist.clear()
        self._num_windows += 1
        if tau >= LEAST_TAU:
            return
        self._num_low += 1
        if self._num_low & (self._num_low - 1) == 0:
            what = (
                "the head hardly helps %.0f%% of the text so far, %d of %d stretches of %d greedy "
                "rounds: tau is %.2f in the last. Prompts unlike its own do that; if prompts of "
                "its card do it too, `eyas check` tells whether it is read wrong"
            )
            counts = self._num_low, self._num_windows, TAU_WINDOW
            log.info(what, 100 * self._num_low / self._num_windows, *counts, tau)

    def _sample(
        self, request: Request, index: int, max_tokens: int, grammar: Grammar | None
    ) -> RunningSample:
        params = request.params
        if params.stop and self._tokenizer is None:
            raise _needs_tokenizer()
        sampler = Sampler(
            params,
            request.prompt_ids,
            self.target.config.vocab_size,
            self._end_tokens,
            grammar.matcher() if grammar is not None else None,
            index,
        )
        stops = StopChecker(params.stop, self._decode, params.min_tokens) if params.stop else None
        return RunningSample(request, index, sampler, stops, max_tokens)

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _needs_tokenizer() -> InputError:
    return InputError(
        "stop strings and grammars need a tokenizer", "give the engine the target's tokenizer"
    )
