"""EAGLE-3's unroll and objective as plain loops over slots and steps, in float64; of the package
only the table of rotations is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.model.config import HeadConfig
from eyas.operators.head import Head, rotation

Weights = dict[str, Tensor]
DECAY = 0.8


@dataclass
class Example:
    """One conversation: tokens [T], mask [T], aux [T, 3H] and last [T, H] in float64."""

    tokens: list[int]
    mask: list[bool]
    aux: Tensor
    last: Tensor


def weights_of(head: Head) -> Weights:
    """A head's weights as float64 leaves that collect gradients."""
    weights = head.named_parameters()
    return {name: weight.detach().double().requires_grad_() for name, weight in weights}


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).sum() / len(x) + eps)


def turned(x: Tensor, position: int, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate channel pairs (d, d + D/2) of a vector [D]; test_rope.py proves the table."""
    half = len(x) // 2
    out = [x[0]] * (2 * half)
    for d in range(half):
        cos, sin = float(table[0][position, d]), float(table[1][position, d])
        out[d] = x[d] * cos - x[d + half] * sin
        out[d + half] = x[d + half] * cos + x[d] * sin
    return torch.stack(out)


class PlainHead:
    """The layer for one slot at a time."""

    def __init__(self, weights: Weights, config: HeadConfig) -> None:
        self.w, self.c = weights, config
        self.table = rotation(
            config.rope, config.head_dim, torch.arange(config.max_position_embeddings)
        )

    def feature(self, aux: Tensor) -> Tensor:
        eps, third = self.c.rms_norm_eps, len(aux) // 3
        if self.c.fc_norm:
            streams = aux.split(third)
            weights = [self.w[f"fc_norm.{stream}.weight"] for stream in range(3)]
            pairs = zip(streams, weights, strict=True)
            aux = torch.cat([normed(stream, weight, eps) for stream, weight in pairs])
        if self.c.norm_before_fc:
            aux = normed(aux, self.w["input_norm.weight"], eps)
        return self.w["fc.weight"] @ aux

    def layer_input(self, embedding: Tensor, h: Tensor) -> Tensor:
        eps = self.c.rms_norm_eps
        first = normed(embedding, self.w["midlayer.input_layernorm.weight"], eps)
        return torch.cat([first, normed(h, self.w["midlayer.hidden_norm.weight"], eps)])

    def key_value(self, x: Tensor, position: int) -> list[tuple[Tensor, Tensor]]:
        """One pair per key head."""
        k, v = (
            (self.w[f"midlayer.self_attn.{letter}_proj.weight"] @ x).split(self.c.head_dim)
            for letter in "kv"
        )
        return [(turned(k[i], position, self.table), v[i]) for i in range(len(k))]

    def step(
        self, x: Tensor, h: Tensor, position: int, seen: Sequence[list[tuple[Tensor, Tensor]]]
    ) -> Tensor:
        """The layer's output at one slot. seen: its keys and values, its own last."""
        seen = seen if self.c.sliding_window is None else seen[-self.c.sliding_window :]
        D, eps = self.c.head_dim, self.c.rms_norm_eps
        q = self.w["midlayer.self_attn.q_proj.weight"] @ x
        mixed = []
        for head in range(self.c.num_attention_heads):
            own = turned(q[head * D : (head + 1) * D], position, self.table)
            group = head * self.c.num_key_value_heads // self.c.num_attention_heads
            scores = torch.stack([own @ pairs[group][0] / math.sqrt(D) for pairs in seen])
            weight = torch.exp(scores - scores.max())
            weight = weight / weight.sum()
            mixed.append(sum(weight[n] * pairs[group][1] for n, pairs in enumerate(seen)))
        if self.c.norm_before_residual:
            h = normed(h, self.w["midlayer.hidden_norm.weight"], eps)
        h = h + self.w["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = normed(h, self.w["midlayer.post_attention_layernorm.weight"], eps)
        gate, up = (self.w[f"midlayer.mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
        h = h + self.w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
        return normed(h, self.w["norm.weight"], eps) if self.c.norm_output else h

    def logits(self, h: Tensor) -> Tensor:
        if self.c.norm_output:
            return self.w["lm_head.weight"] @ h
        return self.w["lm_head.weight"] @ normed(h, self.w["norm.weight"], self.c.rms_norm_eps)

    def unroll(
        self,
        example: Example,
        embed: Tensor,
        slot: int,
        num_steps: int,
        next_token: Callable[[int, Tensor], int],
    ) -> list[Tensor]:
        """Outputs of one slot's steps; next_token(step, previous output): the token it embeds."""
        features = [self.feature(example.aux[t]) for t in range(slot + 1)]
        inputs = [
            self.layer_input(embed[example.tokens[t + 1]], features[t]) for t in range(slot + 1)
        ]
        seen = [self.key_value(x, position) for position, x in enumerate(inputs)]
        outputs = [self.step(inputs[slot], features[slot], slot, seen)]
        for step in range(1, num_steps):
            x = self.layer_input(embed[next_token(step, outputs[-1])], outputs[-1])
            seen.append(self.key_value(x, slot + step))
            outputs.append(self.step(x, outputs[-1], slot + step, seen))
        return outputs


@dataclass
class PlainOutcome:
    loss: Tensor
    step_losses: list[float]
    num_judged: list[int]
    num_trained: list[int]
    num_hits: list[int]


@dataclass
class Wanted:
    """The options of EAGLE-3's objective."""

    num_steps: int = 7
    sampled: bool = False

    def continues(self, t: int, step: int) -> bool:
        """Is slot t unrolled to this step?"""
        return not self.sampled or t * (math.sqrt(5) - 1) / 2 % 1 < DECAY**step


def is_judged(mask: list[bool], at: int) -> bool:
    """Does the draft of x_{at+1}, made at step 0 by slot t = at - 1, count?"""
    t = at - 1
    return t >= 0 and t + 2 < len(mask) and mask[t + 1] and mask[t + 2]


def softmax(z: Tensor) -> Tensor:
    e = torch.exp(z - z.max())
    return e / e.sum()


def plain_loss(z: Tensor, teacher: Tensor, target_ids: list[int]) -> Tensor:
    """z: the draft's logits [W]; teacher: the target's [V]."""
    q, p = softmax(z), softmax(torch.stack([teacher[token] for token in target_ids]))
    return -sum(p[w] * torch.log(q[w]) for w in range(len(z)))  # type: ignore[return-value]


def plain_objective(
    plain: PlainHead,
    examples: Sequence[Example],
    embed: Tensor,
    lm_head: Tensor,
    target_ids: list[int],
    wanted: Wanted,
) -> PlainOutcome:
    losses: list[list[Tensor]] = [[] for _ in range(wanted.num_steps)]
    judged, hits = [0] * wanted.num_steps, [0] * wanted.num_steps
    for example in examples:
        T = len(example.tokens)
        counts = [is_judged(example.mask, at) for at in range(T)]
        for t in range(T - 2):
            if not any(counts[t + 1 : t + 1 + wanted.num_steps]):
                continue

            def true_token(step: int, _: Tensor, example: Example = example, t: int = t) -> int:
                at = t + 1 + step
                return example.tokens[at] if at < len(example.tokens) else 0

            outputs = plain.unroll(example, embed, t, wanted.num_steps, true_token)
            for step, output in enumerate(outputs):
                at = t + 1 + step  # the teacher's position: what follows x_at
                if at >= T or not counts[at] or not wanted.continues(t, step):
                    continue
                judged[step] += 1
                teacher = lm_head @ example.last[at]
                best = int(teacher.argmax())
                if best not in target_ids:
                    continue
                z = plain.logits(output)
                losses[step].append(plain_loss(z, teacher, target_ids))
                hits[step] += target_ids[int(z.argmax())] == best
    zero = torch.zeros((), dtype=torch.float64)
    means = [sum(terms, zero) / max(len(terms), 1) for terms in losses]
    total = sum((DECAY**step * mean for step, mean in enumerate(means)), zero)
    return PlainOutcome(
        total,
        [float(mean.detach()) for mean in means],
        judged,
        [len(terms) for terms in losses],
        hits,
    )
