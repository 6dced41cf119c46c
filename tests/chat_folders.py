"""Small tokenizers, byte-level and SentencePiece-like, with our own chat templates that do what
real families do: Qwen3 drops the thoughts of earlier turns, Granite prints today's date, Llama 2
has no role tokens, ...
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_target

CORPUS = [
    "I would like a table for two in San Jose.\n\nThe address is 71 North Street.\n",
    "a  b   c    d\n\n\n\nuser assistant system tool I am, you are, it's so:",
    "def f(x):\n    return x\n\n\nfor i in range(10):\n        print(i)\n" * 3,
]
LINE_BREAKS_TOGETHER = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LIKE_QWEN = """
{%- if tools %}{{ '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}
{{- messages[0].content + '\\n' }}{% endif %}
{{- 'Tools:' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set thoughts = message.reasoning_content or '' %}{% set content = message.content or '' %}
{%- if not thoughts and '</think>' in content %}
{%- set thoughts = (content.split('</think>') | first).split('<think>') | last %}
{%- set content = (content.split('</think>') | last).lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thoughts) %}
{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if content or not loop.first else '' }}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}{% endif %}"""
LIKE_GRANITE = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set rest = messages[1:] %}
{%- else %}{% set rest = messages %}
{%- set system = 'Today is ' + strftime_now('%B %d, %Y') + '.\\nYou are Kestrel.' %}{% endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- if tools %}{{ '<|start_of_role|>tools<|end_of_role|>Call with <|tool_call|>: ' }}
{{- (tools | tojson(indent=4)) + '<|end_of_text|>\\n' }}{% endif %}
{%- for message in rest %}
{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content
    + '<|end_of_text|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""
LIKE_LLAMA_2 = """
{%- for message in messages %}
{%- if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content.strip() + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + ' ' + eos_token }}
{%- else %}{{ raise_exception('no place for a system prompt') }}{% endif %}{% endfor %}"""

LIKE_LLAMA_3 = """
{{- bos_token }}
{%- if not date_string is defined %}{% if strftime_now is defined %}
{%- set date_string = strftime_now('%d %b %Y') %}
{%- else %}{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|im_start|>system\\n\\nToday: ' + date_string + '\\n\\n' + system + '<|im_end|>' }}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"""
LIKE_GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n\\n' %}
{%- set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate') }}{% endif %}
{{- '<|im_start|>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
{{- (first if loop.first else '') + message['content'] | trim + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"""
LIKE_MISTRAL = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{%- set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if message['role'] == 'user' %}
{{- '[INST] ' + (system + '\\n\\n' if loop.last and system else '') + message['content']
    + '[/INST]' }}
{%- else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"""

# Families whose rendered answers do not simply follow the generation prompt

LIKE_R1 = """
{{- bos_token }}{% for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>' }}
{%- else %}{{ '<|im_start|>assistant\\n' + (message.content.split('</think>') | last)
    + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if thinking is defined and not thinking %}{{ '</think>' }}{% endif %}{% endif %}"""
LIKE_GPT_OSS = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}{% set last = loop.last and not add_generation_prompt %}
{%- if message.thinking and last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=' + call.name + '<|channel|>commentary<|message|>' }}
{{- (call.arguments | tojson) + '<|call|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if last else '<|end|>' }}{% endif %}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
LIKE_HERMES = """
{{- '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}{% for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>tool\\n' + message.content }}
{{- '' if loop.last else '\\n' }}{{ '<|im_end|>' }}
{%- elif message.tool_calls is defined %}{{ '<|im_start|>assistant' }}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LIKE_GLM = """
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|user|>\\n' + message.content }}
{%- elif message.role == 'tool' %}{{ '<|observation|>\\n' + message.content }}
{%- elif message.role == 'system' %}{{ '<|system|>\\n' + message.content }}
{%- else %}{{ '<|assistant|>' + message.content }}{% for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def trainer_of(size: int, specials: Sequence[str], **options: Any) -> trainers.BpeTrainer:
    options |= {"vocab_size": size, "special_tokens": list(specials)}
    return trainers.BpeTrainer(show_progress=False, **options)


@cache
def _byte_level(specials: tuple[str, ...], composes: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not composes)
    words = pre_tokenizers.Split(Regex(LINE_BREAKS_TOGETHER), "isolated")
    both = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.pre_tokenizer = both if composes else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    letters = {"initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer.train_from_iterator(CORPUS, trainer_of(420, specials, **letters))
    return tokenizer


@cache
def _sentencepiece_like() -> Tokenizer:
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    specials = ["<unk>", "<s>", "</s>"]
    trained.train_from_iterator(CORPUS, trainer_of(220, specials))
    model = json.loads(trained.to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    spaces, first = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), first])
    tokenizer.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in specials]
    )
    return tokenizer


def _save(
    tokenizer: Tokenizer, folder: Path, template: str | None, bos: str | None, eos: str
) -> Path:
    options = {"bos_token": bos, "eos_token": eos, "pad_token": eos}
    options["clean_up_tokenization_spaces"] = False
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    if template is not None:
        fast.chat_template = template.lstrip("\n")
    fast.save_pretrained(folder)
    return folder


def like_qwen(folder: Path, template: str | None = LIKE_QWEN) -> Path:
    """Role tokens are special, thinking and tool tags are not; accents are composed."""
    tokenizer = Tokenizer.from_str(
        _byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), True).to_str()
    )
    tags = [f"<{end}{tag}>" for tag in ("think", "tool_call", "tool_response") for end in ("", "/")]
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in tags])
    return _save(tokenizer, folder, template, None, "<|im_end|>")


def like_qwen_target(folder: Path) -> Path:
    """A tiny target with that tokenizer and template."""
    tiny_target(folder, vocab_size=440)
    for path in folder.iterdir():
        if path.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            path.unlink()
    return like_qwen(folder)


def like_granite(folder: Path, template: str | None = LIKE_GRANITE) -> Path:
    """BOS, EOS and padding are one token; the target writes a control token before a tool call."""
    names = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
    return _save(_byte_level(names, False), folder, template, "<|end_of_text|>", "<|end_of_text|>")


def like_llama_2(folder: Path, template: str | None = LIKE_LLAMA_2) -> Path:
    """SentencePiece-like, without role tokens."""
    return _save(_sentencepiece_like(), folder, template, "<s>", "</s>")


def like_gpt_oss(folder: Path, template: str | None = LIKE_GPT_OSS) -> Path:
    """The target opens its answers with control tokens, and ends them in three ways."""
    ends = ("<|return|>", "<|call|>")
    names = ("<|end|>", "<|start|>", "<|channel|>", "<|message|>", *ends)
    return _with_ends(_save(_byte_level(names, False), folder, template, None, ends[0]), ends)


def like_glm(folder: Path, template: str | None = LIKE_GLM) -> Path:
    """What ends an answer is the role token of the next turn."""
    ends = ("<|endoftext|>", "<|user|>", "<|observation|>")
    names = (*ends, "<|system|>", "<|assistant|>")
    return _with_ends(_save(_byte_level(names, False), folder, template, None, ends[0]), ends)


def _with_ends(folder: Path, ends: tuple[str, ...]) -> Path:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    numbers = tokenizer.convert_tokens_to_ids(list(ends))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": numbers}))
    return folder
