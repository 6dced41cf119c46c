"""Is a server's speculation lossless? Answers with it and without, token by token.

    greedy    plain, speculated, plain again   the third is the noise of the plain side itself
    seeded    plain, speculated                at a temperature, a seed for each prompt
    sampled   plain, speculated                where seeded tokens differ: many seeds of a few
                                               prompts, and a test of their distributions

Greedy answers are compared up to their first difference. There the plain side's logprobs judge: the
order of a sum may decide a near-tie; any other token is wrong. vLLM draws other tokens by a seed
when it drafts, which is no fault.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product, takewhile, zip_longest
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from eyas.artifact import Artifact
from eyas.bench.report import server_line, without_folders
from eyas.bench.server import (
    SETTLE_S,
    ServerFacts,
    ask_facts,
    check_comparable,
    counted_between,
    differences_of_servers,
    drafts_of,
    read_counters,
)
from eyas.bench.workload import Task, read_tasks
from eyas.builtin import BUILTIN
from eyas.client import Client, RequestFailure
from eyas.errors import ConfigError, EyasError, MismatchError
from eyas.log import Track, quiet
from eyas.records import mixed_seed
from eyas.settings import Flag, Settings
from eyas.tau import num_accepted

Token = int | str  # its id, or its text
Drafts = tuple[float, float]  # drafted rounds or tokens, accepted drafts
# Logprobs within this are a tie: two last bits of a logit between 16 and 32; in float32 the effect
# of another order of sums. An unknown precision gets the widest.
WIDTHS = {"bfloat16": 0.25, "float16": 0.03, "float32": 0.001, "all f32": 0.001}
LOGPROBS = {"logprobs": True, "top_logprobs": 20}
NAMES = {"return_tokens_as_token_ids": True}  # in logprobs; vLLM's field, and ours
PLAINLY = {"speculation": False}  # eyas' own field
LEVEL = 0.001  # false alarms of the test
NUM_SHUFFLES, NUM_SAMPLED, SAMPLED_TOKENS = 4999, 4, 8
TIMEOUT_S = 600.0
VERIFICATION = "verify.json"


class VerifyConfig(Settings):
    """Servers and requests. url: of the server that speculates. plain: a server of the same model
    that does not, eyas' own needs none. prompts: JSON lines, as for `eyas bench`. num_prompts:
    greedy and seeded. max_tokens: an answer's. temperature: of seeded and sampled answers.
    num_samples: seeds of each of four prompts. concurrency: requests at a time. seed: of prompts
    and draws. tie_width: largest difference of logprobs in a tie; null: by precision.
    """

    url: str = "http://127.0.0.1:8000"
    plain: Annotated[str | None, Flag()] = None
    prompts: Annotated[str, Flag()] = BUILTIN
    num_prompts: Annotated[int, Flag()] = Field(default=24, ge=1)
    max_tokens: int = Field(default=64, ge=2)
    temperature: float = Field(default=1.0, gt=0)
    num_samples: int = Field(default=100, ge=20)
    concurrency: int = Field(default=1, ge=1)
    seed: int = 0
    tie_width: float | None = Field(default=None, ge=0)


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """One answer. tops: logprobs of the likeliest tokens at each place, or empty."""

    tokens: tuple[Token, ...]
    tops: tuple[Mapping[Token, float], ...]
    ending: tuple[str, str]  # text and finish_reason
    num_prompt_tokens: int | None
    drafts: Drafts | None


def read_answer(content: bytes) -> ServerAnswer:
    """A chat completion. Raises RequestFailure for anything else."""
    try:
        body = json.loads(content)
        (choice,) = body["choices"]
        usage, timings, drafts = body.get("usage") or {}, body.get("timings"), None
        if (hist := (usage.get("eyas") or {}).get("accept_hist")) is not None:
            drafts = float(sum(hist)), float(num_accepted(hist))
        elif timings is not None:  # llama.cpp leaves out what is 0
            drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
            drafts = float(drafted), float(accepted)
        rows = (choice.get("logprobs") or {}).get("content") or []
        ids = choice.get("token_ids") or (body.get("__verbose") or {}).get("tokens")
        names = [_name(row) for row in rows]
        tokens = names if str in map(type, names) else ids or names
        if not all(isinstance(token, Token) for token in tokens):
            raise TypeError("a token is an id or a text")
        tops = [
            {_name(one): float(one["logprob"]) for one in (*row["top_logprobs"], row)}
            for row in rows
        ]
        return ServerAnswer(
            tuple(tokens),
            tuple(tops) if names == tokens else (),
            (choice["message"].get("content") or "", choice.get("finish_reason") or ""),
            usage.get("prompt_tokens"),
            drafts,
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RequestFailure("broken", "answers what is no chat completion") from error


def _name(entry: Mapping[str, Any]) -> Token:
    name: str = entry["token"]
    if "id" in entry or name.startswith("token_id:"):
        return int(entry.get("id", name.removeprefix("token_id:")))
    content = bytes(entry.get("bytes") or ()) or name.encode(errors="backslashreplace")
    return content.decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of two answers. place: tokens before it. plain, speculated: the tokens
    there, None after the end. gap: of their logprobs at the plain side, or a lower bound. kind:
    tie, wrong, or unknown.
    """

    prompt_id: str
    place: int
    plain: Token | None
    speculated: Token | None
    gap: float | None
    kind: str


def parting(
    prompt_id: str, plain: ServerAnswer, other: ServerAnswer, width: float
) -> Parting | None:
    """The first difference; None for equal answers. width: of logprobs that are a tie."""
    if (plain.tokens, plain.ending) == (other.tokens, other.ending):
        return None
    both = zip(plain.tokens, other.tokens, strict=False)
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    one, two = ((*side.tokens, None)[place] for side in (plain, other))
    gap, kind = None, "unknown"
    if one is None or two is None:
        # a server may hold back an end token, but neither text nor tokens up to the limit
        shorter = plain if one is None else other
        kind = "wrong" if one is two or shorter.ending[1] != "stop" else "unknown"
    elif plain.tops and len(top := plain.tops[place]) > 1:
        gap = top[one] - top.get(two, min(top.values()))
        kind = "wrong" if abs(gap) > width else "tie" if two in top else "unknown"
    return Parting(prompt_id, place, one, two, gap, kind)


@dataclass(frozen=True)
class ArmComparison:
    """Two arms' answers. num_compared: plain tokens up to the first differences."""

    num_answers: int
    num_tokens: int
    num_compared: int
    partings: Sequence[Parting]

    def count(self, kind: str) -> int:
        return sum(one.kind == kind for one in self.partings)

    @property
    def equal(self) -> str:
        return f"{self.num_answers - len(self.partings)} of {self.num_answers}"

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {self.count(kind)}" for kind in ("tie", "wrong", "unknown"))
        compared = f"{self.num_compared:,} of {self.num_tokens:,} tokens compared"
        return f"{self.equal} equal ({kinds}); {compared}"


def compare(
    tasks: Sequence[Task],
    plain: Sequence[ServerAnswer],
    others: Sequence[ServerAnswer],
    width: float,
) -> ArmComparison:
    """Two arms' answers to the same tasks."""
    found = [
        parting(task.prompt_id, one, two, width)
        for task, one, two in zip(tasks, plain, others, strict=True)
    ]
    lengths = [len(one.tokens) for one in plain]
    reached = [n if p is None else min(n, p.place + 1) for n, p in zip(lengths, found, strict=True)]
    parts = [one for one in found if one is not None]
    return ArmComparison(len(found), sum(lengths), sum(reached), parts)


def p_value(
    plain: Sequence[ServerAnswer], other: Sequence[ServerAnswer], num_samples: int, seed: int
) -> float:
    """A permutation test of two arms' distributions. Each arm has num_samples answers to each
    prompt in turn. The statistic is the sum of chi squares over prompts and places but the first,
    which is never drafted.
    """
    rng = np.random.default_rng(seed)
    labels = np.repeat([1.0, 0.0], num_samples)
    statistic_S = np.zeros(NUM_SHUFFLES + 1)
    for start in range(0, len(plain), num_samples):
        own = slice(start, start + num_samples)
        labels_SM = np.array([labels, *(rng.permutation(labels) for _ in range(NUM_SHUFFLES))])
        for column in zip_longest(*(one.tokens[1:] for one in [*plain[own], *other[own]])):
            kinds: dict[Token | None, int] = {}
            codes = [kinds.setdefault(token, len(kinds)) for token in column]
            total_K = np.bincount(codes)
            counts_SK = labels_SM @ np.eye(len(kinds))[codes]
            statistic_S += ((counts_SK - total_K / 2) ** 2 / total_K).sum(axis=1)
    return float(np.mean(statistic_S >= statistic_S[0] * (1 - 1e-9)))


@dataclass(frozen=True)
class Verification:
    """The findings. again: the plain side against itself. drafts: None if not reported. seeded:
    None where nothing was drafted. p_value: None where seeded answers are equal.
    """

    servers: Mapping[str, ServerFacts]
    differences: Sequence[str]
    width: float
    greedy: ArmComparison
    again: ArmComparison
    drafts: Drafts | None
    plain_drafts: Drafts | None
    seeded: ArmComparison | None = None
    p_value: float | None = None

    @property
    def verdict(self) -> tuple[str, str]:
        """EXACT, TIES ONLY, DIFFERENT or INCONCLUSIVE, and the reason."""
        greedy, of = self.greedy, f"of {self.greedy.num_answers} greedy answers"
        if self.drafts and not self.drafts[0]:
            return "INCONCLUSIVE", "nothing was drafted, so there is nothing to judge"
        if self.plain_drafts and self.plain_drafts[0]:
            return "INCONCLUSIVE", "the plain side drafted too"
        if noise := self.again.count("wrong"):
            return "INCONCLUSIVE", f"the plain side does not repeat {noise} {of}"
        if wrong := greedy.count("wrong"):
            return "DIFFERENT", f"{wrong} {of} have a token that plain decoding would not give"
        if self.p_value is not None and self.p_value <= LEVEL:
            return "DIFFERENT", f"sampled tokens are distributed otherwise (p {self.p_value:.4f})"
        if unknown := greedy.count("unknown"):
            return "INCONCLUSIVE", f"{unknown} {of} differ, and no logprobs say by how much"
        name, why = "EXACT", f"{greedy.equal} greedy answers are equal"
        if greedy.partings:
            name, why = "TIES ONLY", f"{why}, the others differ at near-ties"
        if self.seeded:
            why += f", and {self.seeded.equal} with a seed"
        if self.p_value is not None:
            why += f", of one distribution as far as a test tells (p {self.p_value:.2f})"
        return name, why + ("" if self.drafts else "; whether any token was drafted is not known")

    def markdown(self) -> str:
        """The report."""
        drafted = "{:,.0f}; drafts accepted {:,.0f}".format(*self.drafts or (0, 0))
        rows = {
            "greedy answers": self.greedy,
            "the plain side, asked again": self.again,
            "answers with a seed": self.seeded,
            f"p of sampled tokens (differ at {LEVEL} or less)": self.p_value,
            "drafted": drafted if self.drafts else None,
            "a tie": f"logprobs within {self.width:g}",
            **{
                side: server_line(without_folders(asdict(one)))
                for side, one in self.servers.items()
            },
        }
        name, why = self.verdict
        lines = [f"# eyas verify: {name}", "", f"{why}.", "", "| | |", "|---|---|"]
        lines += [f"| {what} | {'–' if one is None else one} |" for what, one in rows.items()]
        lines += ["", *(f"- {one}" for one in self.differences), ""]
        for one in self.greedy.partings:
            gap = "" if one.gap is None else f", {one.gap:.4f} of logprobs apart"
            lines.append(
                f"- prompt {one.prompt_id}, token {one.place + 1}: `{one.plain!r}` plainly, "
                f"`{one.speculated!r}` speculated: {one.kind}{gap}"
            )
        return "\n".join([*lines, ""])


class Arm:
    """A way to ask a server. fields: of the body; `probe` adds those for ids and logprobs."""

    def __init__(self, client: Client, facts: ServerFacts, fields: Mapping[str, Any]) -> None:
        self.client, self.facts, self.fields = client, facts, dict(fields)
        self.ids: dict[str, Any] = (
            {"return_tokens": True, "verbose": True}
            if facts.kind == "llama.cpp"
            else {"return_token_ids": True}  # vLLM, SGLang, ours
        )
        self.extra: Mapping[str, Any] = {}

    async def probe(self, task: Task) -> ServerAnswer:
        """A short answer, with ids and logprobs if the server has them. Raises RequestFailure."""
        ids, short = self.ids, {"temperature": 0, "max_tokens": 2}
        for self.extra in ({**ids, **NAMES, **LOGPROBS}, LOGPROBS):
            try:
                return await self.ask(task, short)
            except RequestFailure as failure:
                if failure.kind != "refused":
                    raise
        self.extra = ids
        return await self.ask(task, short)

    async def ask(self, task: Task, options: Mapping[str, Any]) -> ServerAnswer:
        """Raises RequestFailure."""
        body = {"model": self.facts.model, "messages": list(task.messages), **options}
        body |= {**self.fields, **self.extra}
        return read_answer(await self.client.request("/v1/chat/completions", body))

    async def answers(
        self,
        config: VerifyConfig,
        progress: Callable[[int, int], None],
        options: Mapping[str, Any],
        tasks: Sequence[Task],
        numbers: range = range(1),
    ) -> tuple[list[ServerAnswer], Drafts | None]:
        """Answers in order, to each task by a seed for each number, and their drafts: by the
        answers, else by the server's counters (with other clients'); None if neither is known.
        """
        before, slots = await read_counters(self.client), asyncio.Semaphore(config.concurrency)
        requests = list(product(tasks, numbers))

        async def answer(at: int, task: Task, number: int) -> ServerAnswer:
            async with slots:
                progress(at, len(requests))
                seed = mixed_seed(config.seed, f"{task.prompt_id} {number}")
                return await self.ask(task, {**options, "seed": seed})

        found = await asyncio.gather(*(answer(at, *one) for at, one in enumerate(requests)))
        await asyncio.sleep(SETTLE_S)
        counted = counted_between(before, await read_counters(self.client))
        reported = [answer.drafts for answer in found if answer.drafts is not None]
        drafted, accepted = sum(one[0] for one in reported), sum(one[1] for one in reported)
        if self.fields != PLAINLY:  # eyas' answers do not report drafts from text
            rounds, num, nodes = drafts_of(counted)
            drafted, accepted = max(drafted, rounds, nodes), max(accepted, num)
        # vLLM counts drafts from its start on, where it speculates
        is_known = reported or drafted or (counted and self.facts.kind == "vllm")
        return found, (drafted, accepted) if is_known else None


async def verified(config: VerifyConfig, output: Artifact, track: Track = quiet) -> tuple[str, str]:
    """Ask and compare: verdict and reason; report.md and VERIFICATION in `output`. Raises
    ConfigError (no way to ask plainly), MismatchError (another model), MissingInputError (no
    server), EyasError.
    """
    tasks = read_tasks(config.prompts, config.num_prompts, config.seed)
    async with AsyncExitStack() as stack:
        urls = [config.plain or config.url, config.url]
        clients = [await stack.enter_async_context(Client(url, TIMEOUT_S)) for url in urls]
        facts = [await ask_facts(client) for client in clients]
        if config.plain is None and facts[1].kind != "eyas":
            raise ConfigError(
                f"{config.url} ({facts[1].kind}) cannot turn speculation off for one request",
                "start the same model beside it without speculation, and give --plain URL",
            )
        ways = [PLAINLY, {"speculation": True}] if config.plain is None else [{}, {}]
        differences = differences_of_servers(*facts)
        check_comparable(config.url, "--plain", differences, compare_anyway=False)
        stack.enter_context(output.held_alone())  # before the work
        arms = [Arm(*one) for one in zip(clients, facts, ways, strict=True)]
        try:
            fields = await _asked(config, tasks, arms, track)
        except RequestFailure as failure:
            what = f"{' or '.join(dict.fromkeys(urls))} {failure.what}"
            raise EyasError(what, "look at the server's log, and run it again") from failure
    servers = dict(zip(("plain", "speculated"), facts, strict=True))
    found = Verification(servers, [f"{one.what}: {one.text}" for one in differences], **fields)
    verdict, why = found.verdict
    output.write("report.md", found.markdown().encode())
    own = {"verdict": verdict, "why": why, "config": config.model_dump(mode="json")}
    output.write_json(VERIFICATION, own | asdict(found))
    return verdict, why


async def _asked(
    config: VerifyConfig, tasks: Sequence[Task], arms: Sequence[Arm], track: Track
) -> dict[str, Any]:
    plain, arm = arms
    one, two = [await side.probe(tasks[0]) for side in arms]
    if one.num_prompt_tokens != two.num_prompt_tokens:
        what = f"a prompt has {one.num_prompt_tokens} tokens at the plain side, and here "
        raise MismatchError(f"{what}{two.num_prompt_tokens}", "serve the same model by both")
    if not one.tokens or {*map(type, one.tokens)} != {*map(type, two.tokens)}:
        raise EyasError(
            "the servers do not both give token ids, or both logprobs",
            "take a version that does: vLLM and SGLang give ids for return_token_ids",
        )
    if isinstance(one.tokens[0], int):  # as users ask: logprobs may take another path
        arm.extra = arm.ids
    precisions = [(side.facts.precision or "").partition("/")[0] for side in arms]
    width = max(WIDTHS.get(one, max(WIDTHS.values())) for one in precisions)
    width = width if config.tie_width is None else config.tie_width

    def noted(what: str) -> Callable[[int, int], None]:
        return partial(track, note=what)

    greedy = {"temperature": 0.0, "max_tokens": config.max_tokens}
    first, plain_drafts = await plain.answers(config, noted("greedy, plain"), greedy, tasks)
    others, drafts = await arm.answers(config, noted("greedy, speculated"), greedy, tasks)
    again, _ = await plain.answers(config, noted("greedy, plain again"), greedy, tasks)
    found: dict[str, Any] = {
        "width": width,
        "greedy": compare(tasks, first, others, width),
        "again": compare(tasks, first, again, width),
        "drafts": drafts,
        "plain_drafts": plain_drafts,
    }
    if drafts and not drafts[0]:
        return found
    drawn = {**greedy, "temperature": config.temperature}
    pair = [(await side.answers(config, noted("seeded"), drawn, tasks))[0] for side in arms]
    found["seeded"] = compare(tasks, pair[0], pair[1], width)
    if found["seeded"].partings:
        drawn["max_tokens"] = SAMPLED_TOKENS
        few, count = tasks[:NUM_SAMPLED], config.num_samples
        ranges = range(1, 1 + count), range(1 + count, 1 + 2 * count)
        sampled = [
            (await side.answers(config, noted("sampled"), drawn, few, numbers))[0]
            for side, numbers in zip(arms, ranges, strict=True)
        ]
        found["p_value"] = p_value(sampled[0], sampled[1], count, config.seed)
    return found
