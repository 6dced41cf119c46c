"""A training step against a plain one: tokens a second, and peak memory. Random weights and
features.

    python benchmarks/train_step.py [--quick] [--tokens 2048] [--vocab 128256] [--draft-vocab 32000]
    [--hidden 1024] ...

One conversation of --tokens tokens, of which the target wrote --answer-share (two shares by
default: that of the built-in dialogues, and all). Both implementations train the same head on the
same tokens with the same loss, which is compared. Each runs in a process of its own, whose peak
memory is the operating system's figure; the two take turns step by step, and of each the median
over --rounds counts, after a warm-up. The draft vocabulary holds every argmax of the target, so
that no position drops out of ours for that. The last line of stdout is one JSON object.
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
import torch.nn.functional as F
from torch import Tensor

from eyas.bench.machine import machine
from eyas.model.architecture import TargetConfig
from eyas.model.config import HeadConfig, HeadOptions, RopeConfig
from eyas.operators.batch import Batch
from eyas.operators.head import Head
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import Sample
from eyas.train.loss import ObjectiveConfig, judged_positions
from eyas.train.ranks import Ranks
from eyas.train.start import initialise
from eyas.train.state import TrainingState
from eyas.train.step import (
    BETAS,
    LossModule,
    optimizers_of,
    quickest,
    rows_of,
    training_step,
)

DIALOGUES = 0.46  # the share of answers in the tokens of the built-in dialogues
TURN = 128  # tokens of an answer
LEARNING_RATE = 1e-4
NUM_STEPS = 7  # of both unrolls


@dataclass(frozen=True, slots=True)
class World:
    """A head and a target's matrices of random numbers, and one batch."""

    head: Head
    vocabulary: TargetVocabulary
    batch: Batch


@dataclass(frozen=True, slots=True)
class PlainStep:
    """A training step as the projects describe it (arXiv 2503.01840): a head, the target's two
    matrices in the precision of the maths, and the optimizer.

    Every step of the unroll runs at all T slots with scores of T x (T + i), the target's logits are
    computed at all T slots over its whole vocabulary, p over the draft vocabulary is kept for all
    of them, and autograd keeps what it needs of every step. For one conversation of T tokens.
    """

    head: Head
    optimizer: torch.optim.Optimizer
    embed_tokens: Tensor
    lm_head: Tensor
    num_steps: int = NUM_STEPS
    decay: float = 0.8

    def __call__(self, tokens_T: Tensor, mask_T: Tensor, aux_TA: Tensor, last_TH: Tensor) -> float:
        """One update. mask_T: the slots t whose draft of x_{t+2} counts."""
        device, dtype = tokens_T.device.type, self.lm_head.dtype
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = self.loss(tokens_T, mask_T, aux_TA, last_TH)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def loss(self, tokens_T: Tensor, mask_T: Tensor, aux_TA: Tensor, last_TH: Tensor) -> Tensor:
        """The sum over steps of 0.8^i times the mean over the positions that count."""
        T, head = len(tokens_T), self.head
        target_p_TW, position_mask_T = self.teacher(last_TH)
        wanted_T = position_mask_T & mask_T
        tokens_T, target_p_TW = ahead(tokens_T), ahead(target_p_TW)
        causal_TT = torch.full((T, T), float("-inf"), device=tokens_T.device).triu(1)
        hidden_TH = head.fuse(aux_TA.to(self.lm_head.dtype))
        kept: list[tuple[Tensor, Tensor]] = []
        total = hidden_TH.new_zeros((), dtype=torch.float32)
        for step in range(self.num_steps):
            hidden_TH = self.layer(
                F.embedding(tokens_T, self.embed_tokens), hidden_TH, causal_TT, kept
            )
            log_q_TW = head.logits(hidden_TH).float().log_softmax(-1)
            losses_T = -(target_p_TW * log_q_TW).sum(-1)
            total = total + self.decay**step * (losses_T * wanted_T).sum() / wanted_T.sum()
            tokens_T, target_p_TW, wanted_T = ahead(tokens_T), ahead(target_p_TW), ahead(wanted_T)
        return total

    @torch.no_grad()
    def teacher(self, last_TH: Tensor) -> tuple[Tensor, Tensor]:
        """p over the draft vocabulary at each position, and by slot whether the argmax that it is
        judged by is draftable.
        """
        logits_TV = (last_TH.to(self.lm_head.dtype) @ self.lm_head.T).float()
        draftable_T = self.head.t2d[logits_TV.argmax(-1)]
        return logits_TV[:, self.head.target_ids_W].softmax(-1), ahead(draftable_T)

    def layer(
        self,
        embeds_TH: Tensor,
        hidden_TH: Tensor,
        causal_TT: Tensor,
        kept: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """The decoder layer at all slots; `kept` are the keys and values of the steps before."""
        head, config, step, T = self.head, self.head.config, len(kept), len(hidden_TH)
        x_TX = head.inputs(embeds_TH, hidden_TH)
        turn = head.rotation(torch.arange(T, device=hidden_TH.device) + step)
        groups = config.num_attention_heads // config.num_key_value_heads
        q = head.queries(x_TX, turn).transpose(0, 1)
        k, v = (
            one.repeat_interleave(groups, dim=1).transpose(0, 1)
            for one in (head.keys(x_TX, turn), head.values(x_TX))
        )
        kept.append((k, v))
        scores = q @ kept[0][0].transpose(1, 2) * config.head_dim**-0.5 + causal_TT
        own = [(q * k_i).sum(-1, keepdim=True) * config.head_dim**-0.5 for k_i, _ in kept[1:]]
        weights = torch.cat((scores, *own), dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
        mixed = weights[..., :T] @ kept[0][1]
        for number, (_, v_i) in enumerate(kept[1:]):
            mixed = mixed + weights[..., T + number, None] * v_i
        return head.output(hidden_TH, mixed.transpose(0, 1))


def ahead(x_T: Tensor) -> Tensor:
    """x[t + 1] at t, zeros at the end."""
    return torch.cat((x_T[1:], torch.zeros_like(x_T[:1])))


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
    batch = Batch.packed(samples, args.tokens).to(device)
    options = HeadOptions(draft_vocab_size=args.draft_vocab, fc_norm=False, norm_output=False)
    head = Head(HeadConfig.for_target(target, options))
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
    dtype = quickest(device)
    state = TrainingState(made.head, optimizers_of(made.head), dtype)
    same = ObjectiveConfig(num_ttt_steps=NUM_STEPS, later_steps="all")  # as the plain step's
    objective = LossModule(made.head, made.vocabulary, same, dtype)
    ranks = Ranks(device=device)

    def step() -> float:
        planned = objective.planned(made.batch, state.step)
        figures = training_step(state, objective, [planned], ranks, LEARNING_RATE)
        loss: float = rows_of([figures], ranks)[0]["loss"]
        return loss

    return step


def plain_step(made: World) -> Any:
    """The same of the plain one."""
    optimizer = torch.optim.AdamW(
        made.head.parameters(), LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True
    )
    matrix = made.vocabulary.lm_head
    matrix = matrix.to(getattr(torch, quickest(matrix.device.type)))
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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shapes: the figures say nothing"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--answer-share", type=float, nargs="+", default=[DIALOGUES, 1.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", choices=("ours", "plain"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.hidden, args.intermediate, args.heads, args.head_dim = (
            512,
            128,
            256,
            4,
            32,
        )
        args.vocab, args.draft_vocab, args.kv_heads = 4000, 1000, 2
    return args


def main() -> None:
    args = arguments()
    if args.worker:
        work(args)
        return
    shape = {
        name: getattr(args, name)
        for name in ("tokens", "vocab", "draft_vocab", "hidden", "intermediate", "heads")
    }
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
