"""A training step against a plain one (plain_step.py): tokens a second, and peak memory. Random
weights, made-up features.

    python benchmarks/train_step.py [--quick] [--tokens 2048] [--vocab 128256] [--draft-vocab 32000]
    [--hidden 1024] ... python benchmarks/train_step.py --cuda [--steps 300] [--peak-tflops 989]

On a CPU: one conversation of --tokens tokens, of whose tokens the target wrote --answer-share (two
shares by default: that of the built-in dialogues, and all). Both implementations train the same
head on the same tokens with the same loss, which is compared. Each runs in a process of its own,
whose peak memory is the operating system's figure; the two take turns step by step, one at rest
while the other works, and of each the median over --rounds counts, after a warm-up. Draft tokens
hold every argmax of the target, so that no slot drops out of ours for that.

With --cuda: ours alone at Llama-3.1-8B head shapes, some hundred steps of packed conversations:
tokens a second, peak memory, and the share of the card's dense bf16 peak that its matrix products
come to.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from plain_step import PlainStep

from eyas.bench.machine import machine
from eyas.model.batch import Batch
from eyas.model.config import HeadConfig, HeadOptions, RopeConfig, TargetConfig
from eyas.model.head import Head
from eyas.model.vocab import TargetVocabulary
from eyas.shards import Sample
from eyas.train.loss import ObjectiveConfig, judged_positions
from eyas.train.ranks import Ranks
from eyas.train.start import initialise
from eyas.train.state import TrainingState
from eyas.train.step import (
    BETAS,
    LossModule,
    optimizers_of,
    teaching_in_tf32,
    training_step,
)

DIALOGUES = 0.46  # the share of answers in the tokens of the built-in dialogues
TURN = 128  # tokens of an answer
LEARNING_RATE = 1e-4
# dense bf16 TFLOP/s, the makers' figures
PEAKS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0}


@dataclass(frozen=True, slots=True)
class World:
    """A head and a target's matrices of random numbers, and one batch."""

    head: Head
    vocabulary: TargetVocabulary
    batch: Batch


def target_config(args: argparse.Namespace) -> TargetConfig:
    """The shape that --hidden and the rest ask for; its layers are not run."""
    return TargetConfig(
        family="llama",
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=32,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        vocab_size=args.vocab,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope=RopeConfig(theta=500000.0),
        tie_word_embeddings=True,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=(),
        dtype="bfloat16",
    )


def sample(args: argparse.Namespace, length: int, answer_share: float, number: int) -> Sample:
    """A conversation of `length` tokens, in turns of which the answers have TURN tokens; features
    of bf16.
    """
    generator = torch.Generator().manual_seed(number)
    turn = max(TURN + 1, round(TURN / answer_share))
    mask_T = torch.arange(length) % turn >= (turn - TURN if answer_share < 1 else 0)
    tokens_T = torch.randint(args.vocab, (length,), generator=generator)
    aux, last = (
        torch.randn(length, width * args.hidden, generator=generator).bfloat16() for width in (3, 1)
    )
    return Sample(f"made-up-{number}", tokens_T.int(), mask_T, aux, last)


def world(args: argparse.Namespace, samples: list[Sample], device: str) -> World:
    """The target's embedding and output matrix are one, as in small Llamas; the draft vocabulary
    has all argmaxes.
    """
    target = target_config(args)
    generator = torch.Generator().manual_seed(0)
    matrix = (
        (torch.randn(args.vocab, args.hidden, generator=generator) * args.hidden**-0.5)
        .bfloat16()
        .float()
        .to(device)
    )
    vocabulary = TargetVocabulary(target, matrix, matrix, "made up")
    batch = Batch.packed(samples, args.tokens, device)
    head = Head(HeadConfig.for_target(target, HeadOptions(draft_vocab_size=args.draft_vocab)))
    last_PH = batch.last_hidden_BTH[batch.loss_mask_BT]
    argmax_P = torch.cat(
        [vocabulary.logits(rows).argmax(-1) for rows in torch.split(last_PH, 64)]
    ).cpu()
    wanted_V = torch.zeros(args.vocab).index_fill(0, argmax_P.unique(), 1.0)
    kept_W = wanted_V.sort(descending=True, stable=True).indices[: args.draft_vocab].sort().values
    t2d_mask = torch.zeros(args.vocab, dtype=torch.bool).index_fill(0, kept_W, True)
    head.set_vocabulary(kept_W - torch.arange(args.draft_vocab), t2d_mask)
    initialise(head, vocabulary.to("cpu"), 0)
    return World(head.to(device), vocabulary, batch)


def our_step(made: World, device: str) -> Any:
    """A call that makes one step of ours and returns its loss, as in `eyas train`."""
    state = TrainingState(made.head, optimizers_of(made.head))
    config = ObjectiveConfig()
    objective = LossModule(made.head, made.vocabulary, config, "bfloat16")
    ranks = Ranks(device=device)
    return lambda: training_step(state, objective, [made.batch], ranks, LEARNING_RATE)["loss"]


def plain_step(made: World) -> Any:
    """The same of the plain one."""
    optimizer = torch.optim.AdamW(
        made.head.parameters(), LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True
    )
    matrix = made.vocabulary.lm_head.bfloat16()
    step, batch = PlainStep(made.head, optimizer, matrix, matrix), made.batch
    mask_T = judged_positions(batch.loss_mask_BT, batch.starts_BT)[0]
    mask_T = torch.cat((mask_T[1:], mask_T.new_zeros(1)))  # by slot: the position after it
    return lambda: step(
        batch.tokens_BT[0], mask_T, batch.aux_hidden_BTA[0], batch.last_hidden_BTH[0]
    )


# On a CPU: two processes that take turns


def work(args: argparse.Namespace) -> None:
    """Make a step for every line of stdin and say how long it took; at the end, the peak of this
    process's memory.
    """
    samples = [sample(args, args.tokens, args.answer_share[0], 0)]
    made = world(args, samples, "cpu")
    at_rest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    step = our_step(made, "cpu") if args.worker == "ours" else plain_step(made)
    for _ in sys.stdin:
        begun = time.perf_counter(), time.process_time()
        loss = step()
        wall, cpu = time.perf_counter() - begun[0], time.process_time() - begun[1]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            json.dumps(
                {
                    "seconds": wall,
                    "cpu_seconds": cpu,
                    "loss": loss,
                    "peak_gib": peak,
                    "built_gib": at_rest,
                }
            ),
            flush=True,
        )


def compared(args: argparse.Namespace, answer_share: float) -> dict[str, Any]:
    """Both at one share of answers."""
    command = [
        sys.executable,
        __file__,
        *sys.argv[1:],
        "--answer-share",
        str(answer_share),
        "--worker",
    ]
    workers = {
        name: subprocess.Popen(
            [*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ("ours", "plain")
    }
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for _ in range(args.rounds + 1):
        for name, worker in workers.items():
            assert worker.stdin is not None
            assert worker.stdout is not None
            print("step", file=worker.stdin, flush=True)
            rows[name].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        worker.communicate()
    seconds = {
        name: statistics.median(row["seconds"] for row in of[1:]) for name, of in rows.items()
    }
    cpu_seconds = {
        name: statistics.median(row["cpu_seconds"] for row in of[1:]) for name, of in rows.items()
    }
    peak = {name: of[-1]["peak_gib"] for name, of in rows.items()}
    apart = max(
        abs(one["loss"] / two["loss"] - 1)
        for one, two in zip(rows["ours"], rows["plain"], strict=True)
    )
    return {
        "answer_share": answer_share,
        "tokens_per_s": {name: round(args.tokens / taken, 1) for name, taken in seconds.items()},
        "cpu_seconds": {name: round(taken, 2) for name, taken in cpu_seconds.items()},
        "peak_gib": {name: round(most, 2) for name, most in peak.items()},
        "speedup": round(seconds["plain"] / seconds["ours"], 2),
        "cpu_speedup": round(cpu_seconds["plain"] / cpu_seconds["ours"], 2),
        "memory": round(peak["ours"] / peak["plain"], 3),
        "losses_differ_by": round(apart, 5),
    }


# On a GPU: ours alone


def on_cuda(args: argparse.Namespace) -> dict[str, Any]:
    """Some hundred steps at the shape of an 8B target's head."""
    length = min(512, args.tokens)
    samples = [
        sample(args, length, args.answer_share[0], number)
        for number in range(args.tokens // length)
    ]
    made = world(args, samples, "cuda")
    step = our_step(made, "cuda")
    for _ in range(5):
        step()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    losses = [step() for _ in range(args.steps)]
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / args.steps
    name = torch.cuda.get_device_name()
    peak = args.peak_tflops or next((value for key, value in PEAKS.items() if key in name), 0.0)
    flops = products(made)
    return {
        "device": name,
        "tokens_per_s": round(args.tokens / seconds),
        "step_ms": round(1e3 * seconds, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "tflops": round(flops / seconds / 1e12, 1),
        "share_of_peak": round(flops / seconds / 1e12 / peak, 3) if peak else None,
        "losses": [round(loss, 3) for loss in (losses[0], losses[-1])],
    }


def products(made: World) -> float:
    """Floating-point operations of a step's matrix products, attention left out: 2 a weight
    forward, 4 backward.

    Backward is 2 for fc, whose input asks no gradient. Step 0 takes its keys and values from those
    of all tokens.
    """
    config, batch = made.head.config, made.batch
    judged_BT = judged_positions(batch.loss_mask_BT, batch.starts_BT)
    P, M, steps = int(judged_BT.sum()), batch.tokens_BT.numel(), ObjectiveConfig().num_ttt_steps
    layer = sum(weight.numel() for name, weight in made.head.named_parameters() if "proj" in name)
    keys = sum(
        weight.numel()
        for name, weight in made.head.named_parameters()
        if "k_proj" in name or "v_proj" in name
    )
    fused, logits = made.head.fc.weight.numel(), config.draft_vocab_size * config.hidden_size
    teacher = 2 * P * config.target_hidden_size * (config.vocab_size + config.draft_vocab_size)
    return 4.0 * M * fused + 6.0 * (M * keys + P * (steps * (layer + logits) - keys)) + teacher


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shapes: the figures say nothing"
    )
    parser.add_argument(
        "--cuda", action="store_true", help="ours on a GPU, at Llama-3.1-8B head shapes"
    )
    parser.add_argument("--tokens", type=int, help="of a batch; 2048, with --cuda 8192")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--hidden", type=int, help="1024, with --cuda 4096; the others go with it")
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--answer-share", type=float, nargs="+", default=[DIALOGUES, 1.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="with --cuda")
    parser.add_argument("--peak-tflops", type=float, help="of the card, dense bf16")
    parser.add_argument("--worker", choices=("ours", "plain"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    usual = (8192, 4096, 14336, 32, 128) if args.cuda else (2048, 1024, 3072, 16, 64)
    if args.quick:
        usual, args.vocab, args.draft_vocab, args.kv_heads, args.steps = (
            (512, 128, 256, 4, 32),
            4000,
            1000,
            2,
            10,
        )
    for name, value in zip(
        ("tokens", "hidden", "intermediate", "heads", "head_dim"), usual, strict=True
    ):
        setattr(args, name, getattr(args, name) or value)
    return args


def main() -> None:
    args = arguments()
    if args.worker:
        work(args)
        return
    if args.cuda and not torch.cuda.is_available():
        sys.exit(
            "error: no CUDA device\n  -> leave out --cuda to compare both implementations on the "
            "CPU"
        )
    shape = {
        name: getattr(args, name)
        for name in ("tokens", "vocab", "draft_vocab", "hidden", "intermediate", "heads")
    }
    if args.cuda:
        with teaching_in_tf32("bfloat16"):
            measured = on_cuda(args)
        print(json.dumps({"cuda": measured, "shape": shape, "torch": torch.__version__}))
        return
    rows = []
    for share in args.answer_share:
        rows.append(compared(args, share))
        print(rows[-1], flush=True)
    print(
        json.dumps(
            {
                "steps": rows,
                "shape": shape,
                "threads": torch.get_num_threads(),
                "machine": machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
