"""A GGUF file as a target against llama.cpp on the same file: token ids of texts of every kind, and
logits.

    python benchmarks/gguf_target.py [--quick] [--file FILE.gguf] [--texts 10000] [--prompts 100]

Needs xllamacpp, a prebuilt wheel of llama.cpp. Texts are generated: words of many scripts, digits,
code, emoji, white space, any code points, and names of control tokens, which a user may write and
which must stay plain text in both. Logits are compared behind a prompt with llama.cpp's: ours in
every dtype, ours packed with norms that differ by a millionth, and llama.cpp's own without flash
attention. The table has the mean KL divergence, the largest difference of a log probability among
llama.cpp's ten likeliest tokens, and how often the likeliest token is the same. A number that is
rounded to 8 bits tips over by the least difference, and tips others over in the layers behind: two
ways to the same products differ as much as 8-bit activations cost.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import numpy as np
import torch
from packaged import user_turns

from eyas.bench.machine import machine
from eyas.builtin import smollm2_file
from eyas.chat import Chat
from eyas.chat.tokenizer import RenderedText, TargetTokenizer, shield_for, shielded
from eyas.gguf.blocks import block_matrices
from eyas.gguf.folder import target_folder
from eyas.log import progress_bar
from eyas.model.config import TargetConfig
from eyas.model.rows import prompt_rows
from eyas.model.target import PAGE_SIZE, Target
from eyas.model.weights import read_tensors

# First and last letter of some alphabets and symbols.
SCRIPTS = [(0x41, 0x7A), (0xC0, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF)]
SCRIPTS += [(0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x3040, 0x30FF)]
SCRIPTS += [(0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x300, 0x36F), (0x1D400, 0x1D7FF)]
EMOJI = [(0x1F300, 0x1F64F), (0x1F680, 0x1F6FF), (0x1F900, 0x1F9FF), (0x2600, 0x27BF)]
JOINERS = "\u200d\ufe0f\U0001f3fd\u20e3"
SPACES = " \t\n\r\u00a0\u2003\u3000\u200b\x0b\x85"
DIGITS = "0123456789٣४५²½Ⅷ①"
CODE = [json, random, inspect, argparse]


def letters(rng: random.Random, ranges: list[tuple[int, int]], count: int) -> str:
    first, last = rng.choice(ranges)
    return "".join(chr(rng.randint(first, last)) for _ in range(count))


def kinds_of_text(control: list[str]) -> dict[str, Callable[[random.Random], str]]:
    """A generator of texts by kind."""
    lines = [line for module in CODE for line in inspect.getsource(module).splitlines()]
    sentences = user_turns()

    def code(rng: random.Random) -> str:
        at = rng.randrange(len(lines) - 8)
        return "\n".join(lines[at : at + rng.randint(1, 8)])

    def words(rng: random.Random) -> str:
        return " ".join(letters(rng, SCRIPTS, rng.randint(1, 9)) for _ in range(12))

    def digits(rng: random.Random) -> str:
        marks = [*DIGITS, ".", ",", "-", " ", "/", "x", "e+", "%", "$"]
        return "".join(rng.choice(marks) for _ in range(rng.randint(1, 60)))

    def emoji(rng: random.Random) -> str:
        parts = [letters(rng, EMOJI, 1) + rng.choice(["", *JOINERS]) for _ in range(15)]
        return rng.choice(["", " "]).join(parts)

    def spaces(rng: random.Random) -> str:
        parts = ["".join(rng.choices(SPACES, k=rng.randint(0, 6))) + word for word in code(rng)]
        return "".join(parts)[:200]

    def code_points(rng: random.Random) -> str:
        # Unassigned ones are words of their own in llama.cpp, and not in the model's tokenizer.
        found = (chr(rng.randrange(1, 0x110000)) for _ in range(200))
        return "".join(one for one in found if unicodedata.category(one) not in ("Cn", "Cs"))

    def control_names(rng: random.Random) -> str:
        parts = [rng.choice(control), rng.choice(sentences)[:40], rng.choice(["", " ", "\n", "<|"])]
        return "".join(rng.choices(parts, k=6))

    def sentence(rng: random.Random) -> str:
        return rng.choice(sentences)

    made = [sentence, words, digits, code, emoji, spaces, code_points, control_names]
    return {make.__name__: make for make in made}


class LlamaCpp:
    """llama.cpp's own server on a file, in this process."""

    def __init__(self, file: Path, flash_attention: bool = True) -> None:
        try:
            import xllamacpp  # noqa: PLC0415
        except ImportError:
            sys.exit("this needs llama.cpp: `pip install xllamacpp`")
        settings = xllamacpp.CommonParams()
        settings.model.path, settings.n_ctx = str(file), 2048
        settings.cpuparams.n_threads = 2
        if not flash_attention:
            disabled = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            settings.flash_attn_type = disabled
        self._server = xllamacpp.Server(settings)
        self._client = httpx.Client(base_url=self._server.listening_address, timeout=120)

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text that is all a user's: names of control tokens are plain text."""
        return self._post("/tokenize", content=text, add_special=False, parse_special=False)[
            "tokens"
        ]

    def log_probs(self, tokens: list[int], vocab_size: int) -> torch.Tensor:
        """Log probabilities of the next token, fp32 [V]."""
        answer = self._post(
            "/completion", prompt=tokens, n_predict=1, n_probs=vocab_size, temperature=0
        )
        found = answer["completion_probabilities"][0]["top_logprobs"]
        made = torch.full((vocab_size,), -torch.inf)
        for item in found:
            made[item["id"]] = item["logprob"]
        return made

    def _post(self, path: str, **body: Any) -> Any:
        return self._client.post(path, json=body).raise_for_status().json()


def user_tokens(tokenizer: TargetTokenizer, text: str) -> list[int]:
    """Token ids of a user's text, by the way that messages take."""
    if not tokenizer.control.search(text):
        return tokenizer.encode(RenderedText(text)).ids
    shield = shield_for([text])
    return tokenizer.encode(RenderedText(shielded(text, tokenizer.control, shield), shield)).ids


def texts(
    kinds: dict[str, Callable[[random.Random], str]], count: int
) -> Iterator[tuple[str, str]]:
    rng = random.Random(0)
    for number in range(count):
        kind = list(kinds)[number % len(kinds)]
        yield kind, kinds[kind](rng)


def compare_tokens(tokenizer: TargetTokenizer, other: LlamaCpp, count: int) -> dict[str, Any]:
    """How many texts of each kind have the same tokens, and the first that have not."""
    same: Counter[str] = Counter()
    total: Counter[str] = Counter()
    different: list[str] = []
    with progress_bar("texts") as track:
        for done, (kind, text) in enumerate(texts(kinds_of_text(list(tokenizer.names)), count)):
            total[kind] += 1
            if user_tokens(tokenizer, text) == other.tokens(text):
                same[kind] += 1
            else:
                different.append(f"{kind}: {text!r:.80}")
            track(done + 1, count)
    by_kind = {kind: f"{same[kind]}/{total[kind]}" for kind in total}
    return {"texts": count, "same": same.total(), "by_kind": by_kind, "different": different[:5]}


def next_log_probs(target: Target, tokens: list[int]) -> torch.Tensor:
    """Log probabilities of the next token by the way that the engine takes, fp32 [V]."""
    page_table = np.arange(-(-len(tokens) // PAGE_SIZE), dtype=np.int32)[None]
    rows = prompt_rows([tokens], [0], page_table, PAGE_SIZE, "cpu")
    last = torch.tensor([len(tokens) - 1])
    output = target.forward(rows, target.new_cache(page_table.size), logits_of=last)
    return output.logits[0].float().log_softmax(-1)


def nearly_packed(folder: str) -> Target:
    """The packed target with norms that differ by a millionth."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: tensor.float() * (1 + 1e-6 * torch.randn(tensor.shape, generator=generator))
        if tensor.ndim == 1
        else tensor
        for name, tensor in read_tensors(folder).items()
    }
    config, blocks = TargetConfig.from_folder(folder), block_matrices(folder)
    return NearlyPacked(config, tensors, "packed", blocks=blocks)


class NearlyPacked(Target):
    """A target whose norms keep the precision that they are given in."""

    def _cast(self) -> dict[str, torch.Tensor]:
        return super()._cast() | {
            name: tensor for name, tensor in self._tensors.items() if tensor.ndim == 1
        }


def compare_logits(folder: str, file: Path, other: LlamaCpp, count: int) -> dict[str, Any]:
    """Log probabilities behind `count` prompts of the package, against llama.cpp's."""
    chat, unfused = Chat(folder), LlamaCpp(file, flash_attention=False)
    targets = {name: Target.load(folder, name) for name in ("float32", "bfloat16", "packed")}
    targets["packed, norms 1e-6 off"] = nearly_packed(folder)
    vocab_size = targets["packed"].config.vocab_size
    prompts = random.Random(0).sample(user_turns(), count)
    found: dict[str, list[tuple[float, float, bool]]] = {}
    with progress_bar("prompts") as track:
        for done, text in enumerate(prompts):
            tokens = chat.prompt_ids([{"role": "user", "content": text}])
            theirs = other.log_probs(tokens, vocab_size)
            likely = theirs.topk(10).indices
            ours = {name: next_log_probs(target, tokens) for name, target in targets.items()}
            ours["llama.cpp without flash attention"] = unfused.log_probs(tokens, vocab_size)
            packed = ours["packed"]
            pairs = {name: (theirs, one) for name, one in ours.items()}
            pairs["packed, against packed with norms 1e-6 off"] = (
                packed,
                ours["packed, norms 1e-6 off"],
            )
            for name, (reference, one) in pairs.items():
                divergence = float((reference.exp() * (reference - one)).nansum())
                largest = float((one - reference)[likely].abs().max())
                same = bool(one.argmax() == reference.argmax())
                found.setdefault(name, []).append((divergence, largest, same))
            track(done + 1, len(prompts))
    return {
        name: {
            "prompts": len(prompts),
            "mean_kl": round(mean(divergence for divergence, _, _ in rows), 6),
            "largest_difference_of_ten_likeliest": round(max(one for _, one, _ in rows), 4),
            "same_argmax": sum(same for _, _, same in rows),
        }
        for name, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--file", type=Path, default=None)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--prompts", type=int, default=100)
    chosen = parser.parse_args()
    count, prompts = (1_000, 10) if chosen.quick else (chosen.texts, chosen.prompts)
    file = chosen.file or smollm2_file()
    folder, other = str(target_folder(file)), LlamaCpp(file)
    result = {
        "file": file.name,
        "tokens": compare_tokens(TargetTokenizer(folder), other, count),
        "logits": compare_logits(folder, file, other, prompts),
        **machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
