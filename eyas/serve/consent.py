"""Which prompts may be kept, and the way of those to the process that cleans them (collection.py).
Nothing is kept unasked.

A request consents by the header `x-eyas-consent: yes`, or by OpenAI's field `store: true`. The
field is a demand: a server that does not collect refuses it. The header is a leave: a server that
does not collect makes no use of it. Knows no cleaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector as MetricsOf
from pydantic import BaseModel, ConfigDict, Field

from eyas.errors import EyasError
from eyas.serve.chat_request import ChatRequest
from eyas.serve.generate_request import GenerateRequest
from eyas.serve.text_request import TextRequest

MOST_WAITING_BYTES = 8 << 20  # of prompts that wait to be cleaned; more are let go
LAST_WORDS_S = 10.0  # for cleaning what waits when the server ends
READY_S = 120.0
_LINE_BYTES = 1 << 16

log = logging.getLogger("eyas.serve")


class CollectConfig(BaseModel):
    """folder: where consented prompts are kept, cleaned. licence, prompts_by: what `eyas prompts`
    is told of them, by default that their writers agreed; name: what it calls them. max_bytes: of
    the folder; then nothing more is kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path
    licence: str = Field("LicenseRef-own", min_length=1)
    prompts_by: str = Field("human", min_length=1)
    name: str = Field("collected", pattern=r"^[\w.-]{1,64}$")
    max_bytes: int = Field(1 << 30, ge=1)


def prompt_rows(asked: ChatRequest | TextRequest | GenerateRequest) -> list[dict[str, object]]:
    """What there is to keep of a request: system and user of a chat, the texts of others; no prompt
    that is given as tokens.
    """
    if isinstance(asked, ChatRequest):
        roles = {"system": "system", "developer": "system", "user": "user"}
        return [
            {
                "messages": [
                    [roles[turn.role], turn.text] for turn in asked.messages if turn.role in roles
                ]
            }
        ]
    if isinstance(asked, TextRequest):
        return [{"prompt": prompt} for prompt in asked.prompts if isinstance(prompt, str)]
    texts = [asked.text] if isinstance(asked.text, str) else asked.text or []
    return [{"prompt": text} for text in texts]


class Collector(MetricsOf):
    """The process that cleans and keeps, as the server has it."""

    def __init__(self, config: CollectConfig, model: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self._config, self._model = config, model
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and wait until it can clean. Raises EyasError when it ends instead; its
        message is on stderr.
        """
        command = (sys.executable, "-m", "eyas.serve.collection", self._config.model_dump_json())
        pipe = asyncio.subprocess.PIPE
        # A session of its own: an interrupt at the terminal is the server's to pass on, by closing
        # the pipe.
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, start_new_session=True
        )
        assert self._process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                if (await self._process.stdout.readline()).strip() == b"ready":
                    self._reading = asyncio.ensure_future(self._read(self._process.stdout))
                    return
        await self._end(self._process)
        raise EyasError(
            "prompts cannot be collected: their process did not start", "its message is above"
        )

    async def stop(self) -> None:
        """Let what waits be cleaned and kept, then end the process."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await process.wait()
            await self._end(process)
        if self._reading is not None:
            await self._reading

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def keep(self, asked: ChatRequest | TextRequest | GenerateRequest) -> None:
        """Hand the prompts of a request over, which has consented; what cannot be taken now is let
        go and counted.
        """
        for row in prompt_rows(asked):
            stdin = self._process.stdin if self._process is not None else None
            if (
                stdin is None
                or stdin.is_closing()
                or (self._process is not None and self._process.returncode is not None)
            ):
                self.outcomes["gone"] += 1
            elif stdin.transport.get_write_buffer_size() > MOST_WAITING_BYTES:
                self.outcomes["queue_full"] += 1
            else:
                stdin.write(json.dumps(row).encode() + b"\n")

    async def _read(self, told: asyncio.StreamReader) -> None:
        while line := await told.readline():
            self.outcomes[line.decode("ascii", "replace").strip()[:64]] += 1
        if self._process is not None:
            log.error("the process that collects prompts has ended: nothing more is kept")

    def collect(self) -> Iterator[Metric]:
        """For Prometheus' registry."""
        about = "consented prompts by what became of them"
        family = CounterMetricFamily(
            "eyas:collected_prompts", about, labels=("model_name", "outcome")
        )
        for outcome, count in self.outcomes.items():
            family.add_metric([self._model, outcome], count)
        yield family
