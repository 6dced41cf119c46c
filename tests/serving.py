"""Servers on real sockets, with real engines on a tiny random target, and their clients."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import httpx
import openai

from eyas.chat import Chat
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams, Update
from eyas.model.target import Target
from eyas.serve.app import ModelService, create_app
from eyas.serve.server import running_app
from eyas.serve.translation import ModelInfo
from tests.tiny import tiny_target, tiny_tokenizer
from tests.tiny_head import head_folder

MODEL = "tiny"
MAX_LENGTH = 256
MESSAGES = [{"role": "user", "content": "I would like a table for two."}]
TOOL_TEMPLATE = (
    "{% if enable_thinking is defined and enable_thinking %}{{ "
    "'<|im_start|>system\nThink.<|im_end|>\n' }}{% endif %}"
    "{% if tools %}{{ '<|im_start|>system\nCall as <tool_call>JSON</tool_call>: ' }}"
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message.reasoning_content %}{{ '(' + message.reasoning_content + ')' }}{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + "
    "'</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)

_BOOK = {
    "type": "object",
    "properties": {"party": {"$ref": "#/$defs/size"}, "indoors": {"type": "boolean"}},
    "required": ["party", "indoors"],
    "additionalProperties": False,
    "$defs": {"size": {"type": "integer", "minimum": 1, "maximum": 9}},
}
_FUNCTIONS = (
    {"name": "book", "description": "Book a table.", "parameters": _BOOK},
    {"name": "cancel", "parameters": {"type": "object", "additionalProperties": False}},
)
TOOLS = [{"type": "function", "function": one} for one in _FUNCTIONS]
CALL = '<tool_call>\n{"name": "book", "arguments": {"party": 2, "indoors": true}}\n</tool_call>'


@dataclass
class World:
    """A tiny target, its chat, and what the engine says without a server."""

    folder: Path

    @classmethod
    def make(cls, folder, **overrides):
        """Answers end at max_tokens or a stop string, unless there is an eos_token_id."""
        return cls(tiny_target(folder, **{"eos_token_id": None, **overrides}))

    @classmethod
    def tooled(cls, folder):
        world = cls.make(folder, eos_token_id=2, max_position_embeddings=1024)
        tiny_tokenizer(folder, chat_template=TOOL_TEMPLATE)
        return world

    @cached_property
    def target(self):
        return Target.load(self.folder)

    @cached_property
    def chat(self):
        return Chat(self.folder)

    def engine(self, kind=Engine, **config):
        config = {"max_batch": 4, "max_length": MAX_LENGTH, **config}
        return kind(self.target, config=EngineConfig(**config), tokenizer=self.chat.tokenizer)

    def drafting(self, head, speculation):
        """With a random head, written to the folder `head`."""
        return Engine.load(
            self.folder,
            head_folder(self.folder, head),
            config=EngineConfig(max_batch=4, max_length=MAX_LENGTH, speculation=speculation),
            tokenizer=self.chat.tokenizer,
        )

    def results(self, prompt_ids, **params):
        """The engine's answers to a prompt, sample by sample."""
        request = Request("truth", tuple(prompt_ids), SamplingParams(**params))
        return sorted(self.engine(max_batch=8).run([request]), key=lambda result: result.index)

    def truth(self, messages=MESSAGES, **params):
        (result,) = self.results(self.chat.prompt_ids(messages), **params)
        return self.chat.decode(result.token_ids), result.token_ids

    @contextmanager
    def served(self, engine=None, limits=None, has_head=False, vertex=None):
        engine = engine or self.engine()
        info = ModelInfo(MODEL, "float32", has_head, engine.max_length)
        service = ModelService.of(engine, self.chat, info)
        with (
            running_app(create_app(MODEL, limits, vertex), service) as url,
            connected(url) as client,
        ):
            yield client


@contextmanager
def connected(url, key="none"):
    """The official client; `client.url` is the server's address."""
    http = openai.DefaultHttpxClient(verify=False)  # certificates of authorities take 28 ms
    options = {"max_retries": 0, "timeout": 300, "http_client": http}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, **options) as client:
        client.url = url
        yield client


def ask(client, messages=MESSAGES, **params):
    params = {"temperature": 0, "max_tokens": 24, **params}
    return client.chat.completions.create(model=MODEL, messages=messages, **params)


def complete(client, prompt="I would like", **params):
    params = {"temperature": 0, "max_tokens": 12, **params}
    return client.completions.create(model=MODEL, prompt=prompt, **params)


def post(client, body, path="/v1/chat/completions", **options):
    return httpx.post(client.url + path, json=body, timeout=300, **options)


def text_of(reply):
    """Of an answer, whole or in chunks."""
    if hasattr(reply, "choices"):
        return reply.choices[0].message.content
    return "".join(one.choices[0].delta.content or "" for one in reply if one.choices)


def events(reply):
    *lines, done = [line for line in reply.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def health(client):
    return httpx.get(f"{client.url}/health")


def wait_for_requests(client, holds):
    """Until the number of requests that run or wait is such."""
    while not holds(health(client).json()["requests"]):
        time.sleep(0.01)


class GatedEngine(Engine):
    """Works when the test lets it, and fails with `error`."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.gate = threading.Semaphore(0)
        self.error = None
        self.is_empty = threading.Event()
        self._turn, self.step = self.step, self._gated

    def _gated(self):
        self.gate.acquire()
        if self.error is not None:
            raise self.error
        return self._turn()

    def cancel(self, request_id):
        super().cancel(request_id)
        if not self.has_work:
            self.is_empty.set()


class ScriptedEngine(Engine):
    """Says `script`, `per_step` tokens a step, whatever it is asked."""

    script: tuple[int, ...] = ()
    per_step = 1
    ending = "stop"

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.asked = []
        self._left = deque()
        self.step = self._say

    @property
    def has_work(self):
        return bool(self._left)

    def add(self, request, grammar=None):
        self.asked.append(request)
        self._left += [(request.id, index, list(self.script)) for index in range(request.params.n)]

    def cancel(self, request_id):
        self._left = deque(one for one in self._left if one[0] != request_id)

    def _say(self):
        updates = []
        for _ in range(len(self._left)):
            request_id, index, tokens = self._left.popleft()
            now, rest = tokens[: self.per_step], tokens[self.per_step :]
            updates.append(Update(request_id, now, None if rest else self.ending, None, index))
            if rest:
                self._left.append((request_id, index, rest))
        return updates


@contextmanager
def saying(world, text, per_step=1):
    """A client of a server that says a text; and its engine, which keeps requests."""
    engine = world.engine(ScriptedEngine, max_length=1024)
    tokenizer = world.chat.tokenizer
    said = tokenizer.encode(text, add_special_tokens=False).ids
    engine.script, engine.per_step = (*said, world.chat.eos_token_ids[0]), per_step
    with world.served(engine) as client:
        yield client, engine
