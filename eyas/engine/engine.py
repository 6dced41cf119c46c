"""The engine: prefill, then rounds of propose -> verify -> extend over all running requests at once.

Knows requests, rows of the caches and lengths. Does not know text, HTTP or threads: one thread owns an engine.

    row r of the target's cache      [ x_0 ........ x_{len-1} ]        root = x_len, emitted but not yet in the cache
    row r of the draft's cache       [ e_0 ........ e_{len-1} ]        e_i = feature i with the embedding of x_{i+1}
    verify writes                                 [ root n_1 .. n_{N-1} ]        then accepted nodes are moved together
    extend writes                                 [ e_len .. e_{len+accepted} ]  from the target's own features

Running requests hold rows 0 .. B-1 without a gap, so that a round is one contiguous batch. A request without speculation
is a tree of its root alone: plain decoding is the same round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from pydantic import Field

from eyas.engine.draft import Draft, Growth
from eyas.engine.request import FinishReason, Request, Result, Update
from eyas.engine.sampling import adjusted_probs, draw
from eyas.engine.tree import Candidates, Tree
from eyas.engine.verify import accept
from eyas.errors import InputError
from eyas.log import Track, quiet
from eyas.model.attention import ancestor_matrix, prefix_mask
from eyas.model.cache import KVCache
from eyas.model.checkpoint import read_head
from eyas.model.target import Target


class EngineConfig(Growth):
    """Sizes of the engine. num_verify_tokens counts the root."""

    max_batch: int = Field(8, ge=1)
    max_length: int = Field(1024, ge=2)
    num_verify_tokens: int = Field(12, ge=2, le=48)


class _Running:
    """A request in a row: what it has emitted, and what its next round starts from."""

    def __init__(self, request: Request, columns: int) -> None:
        self.request = request
        self.cached_len = 0  # tokens whose keys and values are in the target's cache
        self.emitted: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.max_tokens = min(request.params.max_tokens, columns - len(request.prompt_ids))
        self.h: torch.Tensor | None = None  # [H], the draft's output at its last entry
        self.first: tuple[list[int], list[float]] | None = None  # its k best proposals from there
        self._generator = torch.Generator()
        if request.params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(request.params.seed)

    @property
    def speculates(self) -> bool:
        return self.first is not None

    @property
    def root(self) -> int:
        return self.emitted[-1]

    def uniform(self) -> float:
        """One number a token, so that a seed gives the same tokens however they are grouped into rounds."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def take(self, tokens: list[int], end_tokens: frozenset[int]) -> list[int]:
        """Append the tokens up to an end token or the limit, set finish_reason; returns those appended."""
        for count, token in enumerate(tokens, start=1):
            self.emitted.append(token)
            if token in end_tokens and not self.request.params.ignore_eos:
                self.finish_reason = "stop"
            elif len(self.emitted) >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return tokens[:count]
        return tokens


class Engine:
    """Decodes requests on a target, with the head's proposals where there is a head."""

    def __init__(self, target: Target, draft: Draft | None = None, config: EngineConfig | None = None) -> None:
        self.target, self.draft, self.config = target, draft, config or EngineConfig()
        self.max_length = min(self.config.max_length, target.config.max_position_embeddings)
        self._end_tokens = frozenset(target.config.eos_token_ids)
        self._waiting: deque[Request] = deque()
        self._running: list[_Running] = []
        N, K, k = self.config.num_verify_tokens, self.config.num_draft_steps, self.config.tree_topk
        self._cache = target.new_cache(self.config.max_batch, self.max_length + N)
        self._draft_cache: KVCache | None = None
        target.prepare({1, N} if draft is not None else {1})
        if draft is not None:
            self._draft_cache = draft.new_cache(self.config.max_batch, self.max_length + K * (k + 1) + 1)
            draft.prepare({k, K + 1}, {1, k})

    @classmethod
    def load(
        cls, target: str | Path, head: str | Path | None = None, dtype: str = "float32", config: EngineConfig | None = None
    ) -> Engine:
        """Load a target folder and, optionally, a head folder in any form that `read_head` knows."""
        loaded = Target.load(target, dtype)
        return cls(loaded, Draft(*read_head(head), loaded) if head is not None else None, config)

    # Requests

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InputError for an empty prompt or one that leaves no room for an answer."""
        length = len(request.prompt_ids)
        if length == 0:
            raise InputError("the prompt has no tokens", "give at least one token")
        if length >= self.max_length:
            raise InputError(f"the prompt has {length} tokens, the limit is {self.max_length - 1}", "shorten the prompt")
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self.target.config.vocab_size:
            raise InputError("the prompt holds token ids outside the vocabulary", "use the target's own tokenizer")
        self._waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """Forget a request, waiting or running; unknown ids are none of ours and fine."""
        self._waiting = deque(request for request in self._waiting if request.id != request_id)
        for row, running in enumerate(self._running):
            if running.request.id == request_id:
                self._release(row)
                return

    def run(self, requests: Iterable[Request], track: Track = quiet) -> Iterator[Result]:
        """Decode all requests, yielding each as it finishes."""
        tokens: dict[str, list[int]] = {}
        hists: dict[str, list[int]] = {}
        for request in requests:
            self.add(request)
            tokens[request.id], hists[request.id] = [], [0] * (self.config.num_draft_steps + 1)
        done, total = 0, len(tokens)
        while self.has_work:
            for update in self.step():
                tokens[update.request_id] += update.token_ids
                if update.num_accepted_drafts is not None:
                    hists[update.request_id][update.num_accepted_drafts] += 1
                if update.finish_reason is not None:
                    done += 1
                    track(done, total)
                    request_id = update.request_id
                    yield Result(request_id, tokens.pop(request_id), update.finish_reason, hists.pop(request_id))

    def step(self) -> list[Update]:
        """Admit what fits, then one round for all that run. Empty when idle."""
        return self.prefill() + self.round()

    @torch.inference_mode()
    def prefill(self) -> list[Update]:
        """Admit waiting requests while there are free rows: the first token of each."""
        updates = []
        while self._waiting and len(self._running) < self.config.max_batch:
            updates.append(self._prefill(self._waiting.popleft()))
        return updates

    def _release(self, row: int) -> None:
        """Free a row and close the gap: the last running request moves into it."""
        last = self._running.pop()
        if row < len(self._running):
            self._cache.move_row(len(self._running), row, last.cached_len)
            if self._draft_cache is not None and last.speculates:
                self._draft_cache.move_row(len(self._running), row, last.cached_len)
            self._running[row] = last

    # Prefill

    def _prefill(self, request: Request) -> Update:
        """The prompt through the target, its first token, and the prompt's entries in the draft's cache."""
        running, row, T = _Running(request, self.max_length), len(self._running), len(request.prompt_ids)
        taps = self.draft.config.taps if self.draft is not None and request.speculation else None
        tokens_T = torch.tensor(request.prompt_ids)
        mask = prefix_mask(np.tri(T, dtype=bool)[None], [0], T)
        positions = np.arange(T)[None]
        at = self.target.rope.place(row, T, positions, positions + row * self._cache.columns, mask)
        hidden_TH, aux_hidden = self.target.forward(tokens_T.to(self.target.device), at, self._cache, taps)
        logits = self.target.head(hidden_TH[-1:])
        running.cached_len = T
        self._running.append(running)
        token = self._draw(running, logits, 0, 0)
        taken = running.take([token], self._end_tokens)
        if running.finish_reason is not None:
            self._release(row)
        elif aux_hidden is not None and self.draft is not None and self._draft_cache is not None:
            shifted_T = torch.tensor([*request.prompt_ids[1:], token], device=self.target.device)
            slots = positions + row * self._draft_cache.columns
            at = self.draft.rope.place(row, T, positions, slots, mask)
            h = self.draft.forward(shifted_T, self.draft.fuse(aux_hidden), at, self._draft_cache)[-1:]
            ids, log_probs = self.draft.proposals(h, self.config.tree_topk)
            running.h, running.first = h[0], (ids[0], log_probs[0])
        return Update(request.id, taken, running.finish_reason)

    # Rounds

    @torch.inference_mode()
    def round(self) -> list[Update]:
        """propose -> verify -> extend for all running requests."""
        if not self._running:
            return []
        trees = self._propose()
        paths, emitted, aux_hidden = self._verify(trees)
        updates = []
        for running, tokens in zip(self._running, emitted, strict=True):
            taken = running.take(tokens, self._end_tokens)
            num_accepted_drafts = len(taken) - 1 if running.speculates else None
            updates.append(Update(running.request.id, taken, running.finish_reason, num_accepted_drafts))
        if aux_hidden is not None and any(running.speculates and not running.finish_reason for running in self._running):
            self._extend(paths, emitted, aux_hidden)
        for running, path in zip(self._running, paths, strict=True):
            running.cached_len += len(path) + 1
        for row in reversed(range(len(self._running))):
            if self._running[row].finish_reason is not None:
                self._release(row)
        return updates

    def _propose(self) -> list[Tree]:
        """A tree for every running request; of the root alone where it does not speculate."""
        if self.draft is None or self._draft_cache is None or not any(running.speculates for running in self._running):
            return [Tree.of_root(running.root) for running in self._running]
        nothing = [0] * self.config.tree_topk, [-math.inf] * self.config.tree_topk
        no_h = next(running.h for running in self._running if running.h is not None)
        candidates, lens, h = [], [], []
        for running in self._running:  # rows that do not speculate ride along, and their tree is dropped
            row = Candidates()
            row.expand(-1, *(running.first or nothing))
            candidates.append(row)
            lens.append(running.cached_len if running.speculates else 0)
            h.append(running.h if running.h is not None else no_h)
        self.draft.propose(torch.stack(h), candidates, lens, self.config, self._draft_cache)
        return [
            row.tree(running.root, self.config.num_verify_tokens) if running.speculates else Tree.of_root(running.root)
            for running, row in zip(self._running, candidates, strict=True)
        ]

    def _verify(self, trees: list[Tree]) -> tuple[list[list[int]], list[list[int]], torch.Tensor | None]:
        """One target forward over all trees: accepted nodes and emitted tokens of each, and aux_hidden [B, N, 3 * Ht]."""
        B, N = len(trees), max(map(len, trees))
        lens = [running.cached_len for running in self._running]
        tokens, depths = np.zeros((B, N), dtype=np.int64), np.zeros((B, N), dtype=np.int64)
        seen_BNN = np.broadcast_to(np.eye(N, dtype=bool), (B, N, N)).copy()  # padding sees the prefix and itself
        for b, tree in enumerate(trees):
            n = len(tree)
            tokens[b, :n], depths[b, :n] = tree.tokens, tree.depths
            seen_BNN[b, :n, :n] = ancestor_matrix(tree.parents)
        columns = max(lens) + N
        starts = np.asarray(lens, dtype=np.int64)[:, None]
        slots = np.arange(B, dtype=np.int64)[:, None] * self._cache.columns + starts + np.arange(N)
        whole = N == 1 and B == 1  # a lone token sees every column: no mask to read
        mask = None if whole else prefix_mask(seen_BNN, lens, columns)
        at = self.target.rope.place(0, columns, starts + depths, slots, mask)
        taps = self.draft.config.taps if self.draft is not None and N > 1 else None
        tokens_M = torch.from_numpy(tokens.ravel()).to(self.target.device)
        hidden, aux_hidden = self.target.forward(tokens_M, at, self._cache, taps)
        logits = self.target.head(hidden)
        paths, emitted, sources, destinations = [], [], [], []
        for b, (running, tree) in enumerate(zip(self._running, trees, strict=True)):
            path, tokens_b = accept(tree.tokens, tree.parents, partial(self._draw, running, logits, b * N))
            paths.append(path)
            emitted.append(tokens_b)
            for place, node in enumerate(path, start=1):
                if place != node:
                    sources.append(int(slots[b, node]))
                    destinations.append(int(slots[b, place]))
        if sources:
            self._cache.move(torch.tensor(sources), torch.tensor(destinations))
        return paths, emitted, None if aux_hidden is None else aux_hidden.view(B, N, -1)

    def _extend(self, paths: list[list[int]], emitted: list[list[int]], aux_hidden: torch.Tensor) -> None:
        """The draft's catch-up: entries for root and accepted nodes from the target's features, then the next proposals."""
        assert self.draft is not None
        assert self._draft_cache is not None
        B, E = len(paths), self.config.num_draft_steps + 1
        nodes, tokens = np.zeros((B, E), dtype=np.int64), np.zeros((B, E), dtype=np.int64)
        for b, (path, tokens_b) in enumerate(zip(paths, emitted, strict=True)):
            nodes[b, 1 : len(path) + 1] = path
            tokens[b, : len(tokens_b)] = tokens_b
        lens = [running.cached_len if running.speculates else 0 for running in self._running]
        starts = np.asarray(lens, dtype=np.int64)[:, None]
        rows = np.arange(B, dtype=np.int64)[:, None]
        columns = max(lens) + E
        seen_BEE = np.broadcast_to(np.tri(E, dtype=bool), (B, E, E))
        positions = starts + np.arange(E)
        slots = rows * self._draft_cache.columns + positions
        at = self.draft.rope.place(0, columns, positions, slots, prefix_mask(seen_BEE, lens, columns))
        features = aux_hidden[torch.from_numpy(rows), torch.from_numpy(nodes)].flatten(0, 1)
        tokens_M = torch.from_numpy(tokens.ravel()).to(self.target.device)
        h = self.draft.forward(tokens_M, self.draft.fuse(features), at, self._draft_cache)
        last = h[torch.tensor([b * E + len(path) for b, path in enumerate(paths)])]
        ids, log_probs = self.draft.proposals(last, self.config.tree_topk)
        for b, running in enumerate(self._running):
            if running.speculates:
                running.h, running.first = last[b], (ids[b], log_probs[b])

    def _draw(self, running: _Running, logits: torch.Tensor, start: int, node: int) -> int:
        """The target's next token at a node of a request whose nodes start at row `start` of logits [M, V].

        Asked for the nodes on the accepted path only: the argmax of all would cost more than a layer.
        """
        params = running.request.params
        if params.temperature == 0:
            return int(logits[start + node].argmax())
        return draw(adjusted_probs(logits[start + node], params), running.uniform())
