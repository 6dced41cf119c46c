"""A head replayed in every reading on answers: given ones, or the target's greedy ones from our
engine or transformers. `operators.chain` counts what each reading accepts.

Of an ambiguous checkpoint's meanings the best counts as the declared reading.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, product
from pathlib import Path
from typing import Any

import torch

from eyas.builtin import demo_prompts
from eyas.chat import Chat
from eyas.chat.tokenizer import TargetTokenizer
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.errors import (
    CorruptError,
    EmptyInputError,
    MismatchError,
    MissingInputError,
    TemplateError,
)
from eyas.export.readings import DECLARED, HeadReading, misreadings, other_files
from eyas.export.verdict import LEAST_TAU, MEANINGS, NUM_DRAFT_STEPS, ReadingScore
from eyas.hub import resolve_head, resolve_target
from eyas.log import Track, quiet, size_text
from eyas.model.architecture import TargetConfig
from eyas.model.checkpoint import judged_head, open_checkpoint
from eyas.model.config import Taps, TargetShape, refuse, shape_faults
from eyas.model.dialects import LM_HEAD, ambiguities
from eyas.model.target import Target, stored_dtype
from eyas.operators.batch import Batch
from eyas.operators.chain import matched_spans
from eyas.operators.decoder import HookedDecoder, OwnDecoder
from eyas.operators.head import head_of
from eyas.operators.tensors import tensors_of
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import Sample

log = logging.getLogger(__name__)
ReplayTarget = Target | HookedDecoder
NUM_CONVERSATIONS = 32  # about 800 tokens of the built-in target's answers
ANSWER_TOKENS = 48
PROMPT_TOKENS = 160  # longer prompts would take most of the time
MOST_TOKENS = 2048  # of a conversation: hidden states of many layers must fit
BATCH = 8
ROLES = {role: role for role in ("system", "user", "assistant")}
ROLES |= {"human": "user", "gpt": "assistant"}
ANSWERS_AT_ONCE = 8  # in one forward


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Tokens of a conversation [T], and which are the target's [T]."""

    token_ids: list[int]
    mask: list[bool]


def continued(
    target: ReplayTarget, folder: str | Path, text: Path, track: Track = quiet
) -> list[AnswerTokens]:
    """For a target without a chat template: its greedy continuations of a file's conversations as
    plain text, end tokens ignored. Raises MissingInputError, EmptyInputError, CorruptError.
    """
    tokenizer = TargetTokenizer(str(folder)).backend
    texts = ("\n".join(turn["content"] for turn in turns) for turns in conversations(text))
    prompts = [tokenizer.encode(one).ids for one in islice(texts, NUM_CONVERSATIONS)]
    short = [prompt for prompt in prompts if 0 < len(prompt) <= PROMPT_TOKENS]
    return usable(decoded(target, short, True, track), text, "give other text")


def answered(
    target: ReplayTarget,
    folder: str | Path,
    text: Path,
    num_conversations: int = NUM_CONVERSATIONS,
    track: Track = quiet,
) -> list[AnswerTokens]:
    """The first usable conversations of a file: with the assistant's last turn, or answered here.

    text: JSON lines with `messages` or `conversations`, or one prompt a line; may be gzipped.
    Raises MissingInputError, EmptyInputError, CorruptError, and TemplateError without a template.
    """
    chat = Chat(folder)
    kept: list[AnswerTokens] = []
    prompts: list[list[int]] = []
    refused: Counter[str] = Counter()
    for messages in islice(conversations(text), 4 * num_conversations):
        if len(kept) + len(prompts) == num_conversations:
            break
        try:
            if messages[-1]["role"] == "assistant":
                prompt_ids, answer_ids = chat.answered(messages)
                mask = [False] * len(prompt_ids) + [True] * len(answer_ids)
                token_ids = (prompt_ids + answer_ids)[:MOST_TOKENS]
                kept.append(AnswerTokens(token_ids, mask[:MOST_TOKENS]))
            elif len(prompt_ids := chat.prompt_ids(messages)) <= PROMPT_TOKENS:
                prompts.append(prompt_ids)
        except TemplateError as error:
            refused[error.what] += 1
    if refused:
        data = {"text": str(text), "reasons": dict(refused)}
        log.warning("conversations are left out", extra={"data": data})
    kept += decoded(target, prompts, track=track) if prompts else []
    return usable(kept, text, "give prompts that fit its chat template")


def usable(found: Sequence[AnswerTokens], text: Path, hint: str) -> list[AnswerTokens]:
    """Those from which a draft could be accepted. Raises EmptyInputError for none."""
    kept = [one for one in found if any(map(all, pairwise(one.mask[1:])))]
    if not kept:
        raise EmptyInputError(f"{text} holds no conversation that the target can answer", hint)
    return kept


def decoded(
    target: ReplayTarget, prompts: list[list[int]], ignore_eos: bool = False, track: Track = quiet
) -> list[AnswerTokens]:
    """The target's greedy answers, in the order of the prompts."""
    answers: dict[int, list[int]] = {}
    if isinstance(target, HookedDecoder):
        for number, ids in enumerate(prompts):
            answers[number] = target.answer(ids, ANSWER_TOKENS, ignore_eos=ignore_eos)
            track(number + 1, len(prompts))
    else:
        longest = max(map(len, prompts), default=0) + ANSWER_TOKENS + 1
        config = EngineConfig(max_batch=BATCH, max_length=longest, speculation="off")
        params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=ignore_eos)
        requests = [Request(str(number), tuple(ids), params) for number, ids in enumerate(prompts)]
        for result in Engine(target, None, config).run(requests, track):
            answers[int(result.request_id)] = list(result.token_ids)
    return [
        AnswerTokens(ids + answers[number], [False] * len(ids) + [True] * len(answers[number]))
        for number, ids in enumerate(prompts)
    ]


def conversations(text: Path) -> Iterator[list[dict[str, str]]]:
    """The messages of each conversation. Raises MissingInputError, CorruptError."""
    if not text.is_file():
        raise MissingInputError(
            f"no text at {text}", "give JSON lines with messages, or a file of one prompt a line"
        )
    opened: Any = gzip.open if text.suffix == ".gz" else open
    try:
        with opened(text, "rt", encoding="utf-8-sig") as lines:
            for line in filter(str.strip, lines):
                if not {".jsonl", ".json"} & {*text.suffixes}:
                    yield [{"role": "user", "content": line.strip()}]
                    continue
                try:
                    row = json.loads(line)
                    turns = row.get("messages") or row.get("conversations") or []
                    said = [(turn, turn.get("content", turn.get("value"))) for turn in turns]
                    messages = [
                        {"role": ROLES[turn.get("role", turn.get("from"))], "content": content}
                        for turn, content in said
                        if isinstance(content, str) and content.strip()
                    ]
                except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
                    continue
                if messages:
                    yield messages
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorruptError(
            f"{text} is no text: {type(error).__name__}",
            "give UTF-8 text, gzipped if it ends in .gz",
        ) from error


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """Answers of similar length, and the target's hidden states after `layers`, in float32."""

    answers: Sequence[AnswerTokens]
    layers: Sequence[int]
    batch: Batch

    @classmethod
    def of(
        cls, target: ReplayTarget, answers: Sequence[AnswerTokens], layers: Sequence[int]
    ) -> AnswerBatch:
        decoder = target if isinstance(target, HookedDecoder) else OwnDecoder(target)
        rows = [torch.tensor(one.token_ids) for one in answers]
        found = decoder.states([one.token_ids for one in answers], layers)
        hidden, last_hidden = (one.float().cpu() for one in (found.aux_hidden, found.last_hidden))
        samples = [
            Sample("", ids, torch.tensor(one.mask), *(of[: len(ids)] for of in states))
            for ids, one, *states in zip(rows, answers, hidden, last_hidden, strict=True)
        ]
        return cls(answers, layers, Batch.of(samples))

    def features(self, taps: Taps) -> Batch:
        """The inputs of a head with these taps."""
        streams = self.batch.aux_hidden_BTA.chunk(len(self.layers), dim=-1)
        own = [streams[self.layers.index(tap)] for tap in taps]
        return replace(self.batch, aux_hidden_BTA=torch.cat(own, dim=-1))


def replay(
    meanings: Sequence[HeadReading],
    target: ReplayTarget,
    vocabulary: TargetVocabulary,
    answers: Sequence[AnswerTokens],
    track: Track = quiet,
) -> list[ReadingScore]:
    """Every reading's acceptance: the best meaning, the other meanings, the best one's misreadings;
    if none drafts, also `other_files`, which take long with a large vocabulary.

    meanings: the declared reading, or each meaning of an ambiguous checkpoint; with an lm_head.
    """
    others_of = [list(misreadings(one.config, one.tensors, vocabulary)) for one in meanings]
    ways = [*meanings, *chain.from_iterable(others_of)]
    layers = sorted({tap for way in ways for tap in way.config.taps})
    batches = batched(target, answers, layers)
    measured = [(one, acceptance(one, batches, vocabulary)) for one in meanings]
    meant, declared = max(measured, key=lambda pair: pair[1].accepted_drafts)
    scores = [declared, *(one for _, one in measured if one is not declared)]
    others = next(of for one, of in zip(meanings, others_of, strict=True) if one is meant)
    for number, reading in enumerate(others):
        track(number, len(others), f"read with {reading.name}")
        is_meaning = reading.config in [one.config for one in meanings]
        if not is_meaning or reading.tensors is not meant.tensors:
            scores.append(acceptance(reading, batches, vocabulary))
    if max(one.tau for one in scores) < LEAST_TAU:
        more = other_files(meant.config, meant.tensors, vocabulary)
        scores += [acceptance(one, batches, vocabulary) for one in more]
    return scores


def batched(
    target: ReplayTarget, answers: Sequence[AnswerTokens], layers: Sequence[int]
) -> list[AnswerBatch]:
    """Answers of similar length together."""
    by_length = sorted(answers, key=lambda one: len(one.token_ids))
    parts = range(0, len(by_length), ANSWERS_AT_ONCE)
    return [AnswerBatch.of(target, by_length[at : at + ANSWERS_AT_ONCE], layers) for at in parts]


def acceptance(
    reading: HeadReading, batches: Sequence[AnswerBatch], vocabulary: TargetVocabulary
) -> ReadingScore:
    """A reading's score on the answers."""
    head = head_of(reading.config, reading.tensors)
    score = ReadingScore(reading.name, [], reading.hint)
    for batch in batches:
        spans_of_row = defaultdict[int, list[list[int]]](list)
        features = batch.features(reading.config.taps)
        for row, matches in matched_spans(head, vocabulary.embed_tokens, features, NUM_DRAFT_STEPS):
            spans_of_row[row].append(matches)
        score.answers.extend(spans_of_row.values())
    return score


def replay_head(
    head: str | Path,
    target: str | Path,
    text: Path | None = None,
    track: Track = quiet,
) -> tuple[list[ReadingScore], str]:
    """Scores of a head's readings, the declared one first; or none, and the reason.

    text: as in `answered`; None is the packaged prompts, which need a chat template. Raises what
    loading the target raises, and MissingInputError.
    """
    folder = resolve_target(str(target))
    vocabulary = TargetVocabulary.load(folder)
    try:
        ways = meanings(resolve_head(str(head)), vocabulary.config)
    except MismatchError as fault:
        return [], f"it cannot be read: {fault.what}"
    loaded: ReplayTarget
    if isinstance(vocabulary.config, TargetConfig):
        loaded = Target.load(folder)
    else:
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory
        if size >= memory:
            sizes = f"{size_text(size)} are more than the {size_text(memory)}"
            return [], f"the target's {sizes} of memory"
        try:
            loaded = HookedDecoder.load(folder, stored_dtype(vocabulary.config))
        except MismatchError as fault:
            return [], fault.what
    for way in ways:
        way.tensors.setdefault(LM_HEAD, vocabulary.lm_head)
    try:
        answers = answered(loaded, folder, text or demo_prompts(), track=track)
    except (EmptyInputError, MismatchError) as fault:
        return [], fault.what
    except TemplateError as fault:
        if TargetTokenizer(folder).templates:
            return [], fault.what
        if text is None:
            return [], f"{fault.what}; text given by --text is replayed all the same"
        try:
            answers = continued(loaded, folder, text, track=track)
        except EmptyInputError as empty:
            return [], empty.what
    return replay(ways, loaded, vocabulary, answers, track), ""


def meanings(folder: str | Path, target: TargetShape) -> list[HeadReading]:
    """A head as its config declares it, or in each meaning that fits this target. Raises what
    `read_head` raises, and MismatchError if no meaning fits.
    """
    checkpoint = open_checkpoint(folder)
    ways: list[HeadReading] = []
    misfits: list[MismatchError] = []
    for chosen in product(*(one.meanings.items() for one in ambiguities(checkpoint))):
        settings = checkpoint.settings | {
            key: value for _, keys in chosen for key, value in keys.items()
        }
        try:
            config, tensors = judged_head(folder, replace(checkpoint, settings=settings), target)
            refuse(folder, shape_faults(config, target))
        except MismatchError as fault:
            misfits.append(fault)
        else:
            name = MEANINGS.join(name for name, _ in chosen) or DECLARED
            ways.append(HeadReading(name, config, tensors_of(tensors)))
    if not ways:
        raise misfits[0]
    return ways
