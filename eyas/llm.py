"""A model in this process: `eyas serve` without HTTP, by the server's own code.

    llm.chat ── a request's fields, as a client sends them ──▶ Translator ──▶ EngineWorker
       ◀── Completion, or Chunks ◀── CompletionWriter ◀── updates ─────────────────────┘

A thread holds the event loop that the worker reports to; any thread may ask.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack, get_type_hints, overload

from eyas.chat.chat import Messages
from eyas.engine.request import TokenLogprob, Update
from eyas.errors import EyasError, InputError
from eyas.log import Track, progress_bar, quiet
from eyas.model.target import Dtype
from eyas.serve.app import ModelService
from eyas.serve.fields import Effort, parse_body
from eyas.serve.limits import ApiError
from eyas.serve.protocol import ChatRequest, TextRequest
from eyas.serve.server import ServeConfig
from eyas.serve.server import load as load_service
from eyas.serve.tokenizer import Tokenizer
from eyas.serve.worker import EngineWorker
from eyas.serve.writers import CompletionWriter, Delta, Ending
from eyas.settings import validated
from eyas.tau import tau_of

T = TypeVar("T")


class SamplingOptions(TypedDict, total=False):
    """Fields of a request, with the server's names, bounds and defaults (docs/clients.md).
    temperature is 1 unless given; 0 is greedy. max_tokens: of a chat up to max_length, of a text 16
    unless given. speculation: False decodes plainly, to the same tokens.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: str | list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    response_format: Mapping[str, Any]
    json_schema: str
    regex: str
    grammar: str
    skip_special_tokens: bool
    cache_salt: str
    speculation: bool
    text_drafts: bool


class ChatOptions(SamplingOptions, total=False):
    """Options of a chat. logprobs: of the answer's tokens; top_logprobs: and of so many of the best
    at each place. tools: in OpenAI's form.
    """

    logprobs: bool
    top_logprobs: int
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, bool]
    reasoning_effort: Effort
    continue_final_message: bool


class CompletionOptions(SamplingOptions, total=False):
    """Options of a text. logprobs: of the answer's tokens and so many of the best at each place;
    with echo also the prompt's. add_special_tokens: the tokenizer's, around a text.
    """

    logprobs: int
    echo: bool
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt; `str(answer)` is its text.

    token_ids: of the answer, its end token included. finish_reason: "stop", "length" (max_tokens,
    or no more room) or "tool_calls". logprobs: an entry for each token, if asked for. tool_calls:
    in OpenAI's form. accept_hist[a] counts the head's rounds with a accepted drafts.
    """

    text: str
    token_ids: list[int]
    finish_reason: Ending
    prompt_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob] | None
    tool_calls: list[dict[str, Any]]
    accept_hist: list[int]

    @classmethod
    def of(cls, writer: CompletionWriter) -> Completion:
        (choice,) = writer.choices
        whole = choice.whole()
        assert whole.ending is not None, "the answer has not ended"
        return cls(
            whole.text,
            whole.update.token_ids,
            whole.ending,
            list(choice.request.prompt_ids),
            _with_texts(whole.update.logprobs, writer.tokenizer),
            _with_texts(whole.update.prompt_logprobs, writer.tokenizer),
            [call.to_json() for call in whole.calls],
            writer.accept_hist,
        )

    @property
    def rounds(self) -> int:
        """Rounds in which the head drafted."""
        return sum(self.accept_hist)

    @property
    def tau(self) -> float | None:
        """Tokens per round of the head; None without one."""
        return tau_of(self.accept_hist)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added to a streamed answer. tool_calls: a call begins with its id and name;
    later pieces add to its arguments. finish_reason: None before the last chunk.
    num_accepted_drafts: None where the head did not draft.
    """

    text: str
    token_ids: list[int]
    finish_reason: Ending | None
    logprobs: list[TokenLogprob] | None
    tool_calls: list[dict[str, Any]]
    num_accepted_drafts: int | None

    @classmethod
    def of(cls, delta: Delta, tokenizer: Tokenizer) -> Chunk:
        update, calls = delta.update, [call.to_json() for call in delta.calls]
        counted, logprobs = update.num_accepted_drafts, _with_texts(update.logprobs, tokenizer)
        return cls(delta.text, update.token_ids, delta.ending, logprobs, calls, counted)


def load(
    target: str | os.PathLike[str],
    head: str | os.PathLike[str] | None = None,
    *,
    dtype: Dtype = "auto",
    threads: int | None = None,
    speculation: str = "auto",
    max_length: int | None = None,
    max_batch: int = 8,
) -> LLM:
    """Load a model, and a head that drafts for it, into this process.

    target: a folder in Hugging Face's form, a GGUF file, an id of the hub, a URL, or "smollm2".
    head: the same in any form; None decodes plainly, to the same answers. dtype: of the weights;
    auto: the checkpoint's. threads: of the engine; None: all that this process has. speculation:
    off, auto, or fixed(steps,branches,nodes). max_length: tokens of prompt and answer; None: the
    model's context, as far as half of the free memory holds it. max_batch: answers at a time.

    Raises MissingInputError, CorruptError, MismatchError (a head of another target), ConfigError.
    """
    sizes = {"speculation": speculation, "max_length": max_length, "max_batch": max_batch}
    given = {"target": os.fspath(target), "dtype": dtype, "threads": threads, "engine": sizes}
    given["head"] = None if head is None else os.fspath(head)
    return LLM(load_service(validated(ServeConfig, given, "eyas.load")))


class LLM:
    """A loaded model. One thread runs the engine, and prompts of all threads share its batches.
    `with eyas.load(...) as llm:` ends the thread and frees the model, as `close` does.
    """

    def __init__(self, service: ModelService) -> None:
        self.max_length = service.info.max_length  # tokens of prompt and answer together
        self._model, self._translator = service.info.model, service.translator
        self._worker = service.worker
        self.tokenizer = service.translator.tokenizer  # encode(text), decode(ids)
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        run = _run(service.worker, started)
        self._thread = threading.Thread(target=asyncio.run, args=(run,), name="llm", daemon=True)
        self._thread.start()
        self._loop, over = started.result()
        # does not wait: the last reference may go in the thread that is to end
        self._end = weakref.finalize(self, self._loop.call_soon_threadsafe, over.set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine's thread; answers that are not whole fail. Again: nothing happens."""
        self._end()
        self._thread.join()

    @overload
    def chat(
        self,
        messages: str | Messages,
        *,
        stream: Literal[False] = False,
        progress: bool = True,
        **options: Unpack[ChatOptions],
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: list[str] | Sequence[Messages],
        *,
        stream: Literal[False] = False,
        progress: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]: ...

    @overload
    def chat(
        self, messages: str | Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Iterator[Chunk]: ...

    def chat(
        self,
        messages: str | Messages | list[str] | Sequence[Messages],
        *,
        stream: bool = False,
        progress: bool = True,
        **options: Unpack[ChatOptions],
    ) -> Completion | list[Completion] | Iterator[Chunk]:
        """Let the model answer, through its chat template.

        messages: what a user says; a conversation in OpenAI's form; or a list of either, answered
        together in order, under a bar on stderr (progress). stream: yield the answer's chunks;
        closing the iterator ends the answer.

        Raises InputError for a prompt or an option that does not fit, before any prompt is
        answered; EyasError when the engine fails.
        """
        is_one = _is_one(messages, Mapping)
        turns = [
            [{"role": "user", "content": one}] if isinstance(one, str) else one
            for one in ([messages] if is_one else messages)
        ]
        bodies = [{"messages": one, **options} for one in turns]
        return self._ask(ChatRequest, bodies, is_one, stream, progress)

    @overload
    def complete(
        self,
        prompts: str | list[int],
        *,
        stream: Literal[False] = False,
        progress: bool = True,
        **options: Unpack[CompletionOptions],
    ) -> Completion: ...

    @overload
    def complete(
        self,
        prompts: list[str] | list[list[int]],
        *,
        stream: Literal[False] = False,
        progress: bool = True,
        **options: Unpack[CompletionOptions],
    ) -> list[Completion]: ...

    @overload
    def complete(
        self,
        prompts: str | list[int],
        *,
        stream: Literal[True],
        **options: Unpack[CompletionOptions],
    ) -> Iterator[Chunk]: ...

    def complete(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        *,
        stream: bool = False,
        progress: bool = True,
        **options: Unpack[CompletionOptions],
    ) -> Completion | list[Completion] | Iterator[Chunk]:
        """As `chat`, without the chat template: the model continues a text or token ids. The
        answer's text is what it adds.
        """
        is_one = _is_one(prompts, int)
        bodies = [{"prompt": one, **options} for one in ([prompts] if is_one else prompts)]
        return self._ask(TextRequest, bodies, is_one, stream, progress)

    def _ask(
        self,
        kind: type[ChatRequest | TextRequest],
        bodies: list[dict[str, Any]],
        is_one: bool,
        stream: bool,
        progress: bool,
    ) -> Completion | list[Completion] | Iterator[Chunk]:
        if stream and not is_one:
            raise InputError(
                "stream=True is for one prompt, and this is a list",
                "leave stream out, or stream them one by one, each from a thread of its own",
            )
        writers = [
            self._writer(kind, body, "" if is_one else f"prompts[{number}]: ")
            for number, body in enumerate(bodies)
        ]
        if stream:
            return self._chunks(writers[0])
        with progress_bar("answers") if progress and not is_one else nullcontext(quiet) as track:
            self._call(_answer(self._worker, writers, track))
        answers = [Completion.of(writer) for writer in writers]
        return answers[0] if is_one else answers

    def _writer(
        self, kind: type[ChatRequest | TextRequest], body: dict[str, Any], where: str
    ) -> CompletionWriter:
        try:
            text = json.dumps({"model": self._model, **body})
        except (TypeError, ValueError, RecursionError) as error:
            what = f"{where}a message or an option is no JSON: {error}"
            raise InputError(what, "give strings, numbers, lists and dicts") from error
        try:
            writer = self._translator.completion(parse_body(kind, text.encode()))
        except ApiError as error:
            options = ChatOptions if kind is ChatRequest else CompletionOptions
            hint = "change it, or leave it out"
            if error.code == "unknown_parameter":
                hint = f"options: {', '.join(get_type_hints(options))}"
            elif error.code == "context_length_exceeded":
                hint = "shorten the prompt, or eyas.load(..., max_length=TOKENS)"
            raise InputError(f"{where}{error.message}", hint) from None
        if len(writer.choices) != 1:
            raise InputError(
                "n: a prompt has one answer here",
                "give it as often as answers are wanted: llm.chat([prompt] * 3)",
            )
        return writer

    def _chunks(self, writer: CompletionWriter) -> Iterator[Chunk]:
        updates = _updates(self._worker, [writer])
        try:
            while not writer.is_over:
                for update in self._call(_next(updates)):
                    if (delta := writer.push(update)[1]) is not None:
                        yield Chunk.of(delta, self.tokenizer)
        finally:
            if self._end.alive:
                self._call(updates.aclose())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._end.alive:
            work.close()
            raise EyasError("the model is closed", "load it again: eyas.load(...)")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _is_one(given: Any, part: type) -> bool:
    """Whether this is one prompt: a text, or a list of `part`s. Raises InputError for no list."""
    if not isinstance(given, Sequence):
        raise InputError(f"the prompt is a {type(given).__name__}", "give a text or a list")
    return isinstance(given, str) or (bool(given) and isinstance(given[0], part))


def _with_texts(
    logprobs: list[TokenLogprob] | None, tokenizer: Tokenizer
) -> list[TokenLogprob] | None:
    if logprobs is None:
        return None
    pieces = (tokenizer.piece(one.token_id).decode(errors="replace") for one in logprobs)
    return [replace(one, text=text) for one, text in zip(logprobs, pieces, strict=True)]


# These run on the event loop and hold no LLM: its end would wait for them.


async def _run(
    worker: EngineWorker, started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
) -> None:
    over = asyncio.Event()
    worker.start()
    started.set_result((asyncio.get_running_loop(), over))
    await over.wait()
    await worker.stop()


def _updates(
    worker: EngineWorker, writers: Sequence[CompletionWriter]
) -> AsyncGenerator[list[Update]]:
    requests = [request for writer in writers for request in writer.requests]
    return worker.updates(requests, math.inf, sys.maxsize)


async def _next(updates: AsyncGenerator[list[Update]]) -> list[Update]:
    return await anext(updates)


async def _answer(worker: EngineWorker, writers: Sequence[CompletionWriter], track: Track) -> None:
    by_request = {request.id: writer for writer in writers for request in writer.requests}
    started, num_tokens = time.monotonic(), 0
    async with aclosing(_updates(worker, writers)) as batches:
        async for batch in batches:
            for update in batch:
                by_request[update.request_id].keep(update)
                num_tokens += len(update.token_ids)
            rate = num_tokens / max(time.monotonic() - started, 1e-9)
            num_done = sum(writer.is_over for writer in writers)
            track(num_done, len(writers), f"{rate:.0f} tokens/s")
            if num_done == len(writers):
                break
