"""Train a small Llama-architecture chat model on conversation JSONL: the recipe of the built-in
target.

Knows transformers' Llama, byte-level BPE and the ChatML-style template. Knows nothing of eyas: what
it writes is an ordinary Hugging Face folder (config, tokenizer, chat template, bf16 safetensors).

    python recipes/target.py tokenizer --data a.jsonl.gz b.jsonl.gz --out OUT
    python recipes/target.py train     --data a.jsonl.gz b.jsonl.gz --held-out dev.jsonl.gz \\
                                       --out OUT --steps 3000
    python recipes/target.py export    --out OUT --to eyas/builtin/target

Data: gzip or plain JSON lines, {"messages": [{"role", "content"}, ...]}, as written by anyone.
Letters: B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 8000
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Words with their leading space, runs of punctuation, single digits, line breaks apart.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=320,
    intermediate_size=864,
    num_hidden_layers=12,
    num_attention_heads=5,
    num_key_value_heads=5,
    head_dim=64,
    max_position_embeddings=1024,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
)


def conversations(paths: list[Path]) -> Iterator[list[dict[str, str]]]:
    """The messages of every row of the files, in file order."""
    for path in paths:
        with fsspec.open(str(path), "rt", encoding="utf-8", compression="infer") as lines:
            for line in lines:
                yield json.loads(line)["messages"]


def train_tokenizer(data: list[Path], out: Path) -> None:
    """Byte-level BPE with split digits; specials 0, 1, 2 = end of text, turn start, turn end."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        f"{message['role']}\n{message['content']}"
        for messages in conversations(data)
        for message in messages
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=CONFIG.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    assert fast.convert_tokens_to_ids(TURN_END) == CONFIG.eos_token_id


def encode(tokenizer: Any, data: list[Path]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Token ids (int32) and assistant mask (bool) of each conversation; the mask covers the answer
    and its <|im_end|>.

    The pieces are encoded apart: specials cut the text at the same places, so the ids equal those
    of the whole.
    """
    turn_start, turn_end = tokenizer.convert_tokens_to_ids([TURN_START, TURN_END])
    newline = tokenizer.encode("\n", add_special_tokens=False)
    ids_of, mask_of = [], []
    for messages in conversations(data):
        ids: list[int] = []
        mask: list[bool] = []
        heads = tokenizer([f"{m['role']}\n" for m in messages], add_special_tokens=False)[
            "input_ids"
        ]
        whole = tokenizer(
            [f"{m['role']}\n{m['content']}" for m in messages], add_special_tokens=False
        )["input_ids"]
        for message, head, body in zip(messages, heads, whole, strict=True):
            answer = message["role"] == "assistant"
            ids += [turn_start, *body, turn_end, *newline]
            mask += (
                [False] * (1 + len(head))
                + [answer] * (len(body) - len(head) + 1)
                + [False] * len(newline)
            )
        ids_of.append(np.array(ids, dtype=np.int32))
        mask_of.append(np.array(mask, dtype=bool))
    return ids_of, mask_of


def batches(ids_of: list[np.ndarray], batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless [B, T + 1] int64 batches: conversations shuffled anew each pass, joined, cut to rows
    of T + 1.
    """
    rng = random.Random(seed)
    order = list(range(len(ids_of)))
    need = batch * (length + 1)
    pending: list[np.ndarray] = []
    held = 0
    while True:
        rng.shuffle(order)
        for index in order:
            pending.append(ids_of[index])
            held += len(ids_of[index])
            if held >= need:
                flat = np.concatenate(pending)
                yield torch.from_numpy(flat[:need].astype(np.int64)).view(batch, length + 1)
                pending, held = [flat[need:]], held - need


def schedule(step: int, steps: int, warmup: int = 50, decay: float = 0.4) -> float:
    """Warm-up, stable, then linear decay to zero over the last `decay` of the steps: a run can be
    lengthened.
    """
    if step < warmup:
        return (step + 1) / warmup
    return min(1.0, (steps - step) / max(1.0, decay * steps))


def perplexity(
    model: Any, ids_of: list[np.ndarray], mask_of: list[np.ndarray], limit: int
) -> float:
    """exp of the mean negative log-likelihood over assistant tokens of the first `limit`
    conversations.
    """
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids, mask in list(zip(ids_of, mask_of, strict=True))[:limit]:
            ids, mask = (
                ids[: CONFIG.max_position_embeddings],
                mask[: CONFIG.max_position_embeddings],
            )
            tokens_T = torch.from_numpy(ids.astype(np.int64))
            logits_TV = model(tokens_T[None]).logits[0, :-1].float()
            losses_T = F.cross_entropy(logits_TV, tokens_T[1:], reduction="none")
            keep_T = torch.from_numpy(mask[1:])
            total += float(losses_T[keep_T].sum())
            count += int(keep_T.sum())
    return math.exp(total / count)


def train(args: argparse.Namespace) -> None:
    """Muon on the matrices, AdamW on embeddings and norms, bf16 autocast; resumes from
    OUT/checkpoint.pt.
    """
    torch.manual_seed(args.seed)
    command = " ".join(["python", *sys.argv])
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    ids_of, _ = encode(tokenizer, args.data)
    dev_ids, dev_mask = encode(tokenizer, args.held_out)
    print(f"{sum(map(len, ids_of)):,} training tokens in {len(ids_of):,} conversations", flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(CONFIG).to(device)
    for name, weight in model.named_parameters():  # residual branches start small: 1 / sqrt(2 n)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.mul_((2 * CONFIG.num_hidden_layers) ** -0.5)
    matrices = [w for n, w in model.named_parameters() if w.ndim == 2 and "embed" not in n]
    others = [w for n, w in model.named_parameters() if w.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(
            matrices, lr=args.lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    checkpoint = args.out / "checkpoint.pt"
    first, curve = 0, []
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, curve = state["step"], state["curve"]
        print(f"resumed at step {first}", flush=True)
    source = batches(ids_of, args.batch, args.length, args.seed)
    for _ in range(first):
        next(source)
    started, loss_mean = time.time(), 0.0
    for step in range(first, args.steps):
        tokens_BT = next(source).to(device)
        rate = args.lr * schedule(step, args.steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        with torch.autocast(device, torch.bfloat16):
            logits_BTV = model(tokens_BT[:, :-1]).logits
        loss = F.cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BT[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss_mean = loss.item() if step == first else 0.95 * loss_mean + 0.05 * loss.item()
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            speed = (step + 1 - first) * args.batch * args.length / (time.time() - started)
            curve.append(
                {
                    "step": step + 1,
                    "tokens": (step + 1) * args.batch * args.length,
                    "loss": loss_mean,
                }
            )
            print(
                f"step {step + 1} loss {loss_mean:.4f} lr {rate:.2e} {speed:.0f} tokens/s",
                flush=True,
            )
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            model.eval()
            curve[-1]["held_out_perplexity"] = perplexity(model, dev_ids, dev_mask, 100)
            model.train()
            print(
                f"held-out perplexity on assistant tokens {curve[-1]['held_out_perplexity']:.3f}",
                flush=True,
            )
            saved = [optimizer.state_dict() for optimizer in optimizers]
            state = {
                "model": model.state_dict(),
                "optimizers": saved,
                "step": step + 1,
                "curve": curve,
                "command": command,
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").rename(checkpoint)


def export(args: argparse.Namespace) -> None:
    """Write the checkpoint as a bf16 Hugging Face folder with its loss curve and full held-out
    perplexity.
    """
    state = torch.load(args.out / "checkpoint.pt", map_location="cpu", weights_only=True)
    model = LlamaForCausalLM(CONFIG)
    model.load_state_dict(state["model"])
    model = model.to(torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    model.save_pretrained(args.to)
    tokenizer.save_pretrained(args.to)
    training: dict[str, Any] = {
        "training_command": args.training_command or state["command"],
        "step": state["step"],
        "curve": state["curve"],
    }
    if args.held_out:
        ids_of, mask_of = encode(tokenizer, args.held_out)
        training["held_out_perplexity"] = perplexity(model, ids_of, mask_of, len(ids_of))
        print(f"held-out perplexity on assistant tokens {training['held_out_perplexity']:.3f}")
    (args.to / "training.json").write_text(json.dumps(training, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["tokenizer", "train", "export"])
    parser.add_argument("--data", type=Path, nargs="+", default=[])
    parser.add_argument("--held-out", type=Path, nargs="+", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--to", type=Path)
    parser.add_argument(
        "--training-command",
        help="what to write into training.json, without the paths of one machine",
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=200)
    args = parser.parse_args()
    if args.what == "tokenizer":
        train_tokenizer(args.data, args.out)
    else:
        {"train": train, "export": export}[args.what](args)


if __name__ == "__main__":
    main()
