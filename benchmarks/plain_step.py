"""A training step of EAGLE-3 as the projects describe it (arXiv 2503.01840): the baseline of
train_step.py.

Every step of the unroll runs at all T slots with scores of T x (T + i), the target's logits are
made at all T slots over its whole vocabulary, p over the draft vocabulary is kept for all of them,
and autograd keeps what it needs of every step. Same weights, precision, optimizer and clipping as
ours. Written for one conversation of T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.model.head import Head


@dataclass(frozen=True, slots=True)
class PlainStep:
    """A head, the target's two matrices in bf16, and the optimizer."""

    head: Head
    optimizer: torch.optim.Optimizer
    embed_tokens: Tensor
    lm_head: Tensor
    num_steps: int = 7
    decay: float = 0.8

    def __call__(self, tokens_T: Tensor, mask_T: Tensor, aux_TA: Tensor, last_TH: Tensor) -> float:
        """One update. mask_T: the slots t whose draft of x_{t+2} counts."""
        with torch.autocast(tokens_T.device.type, torch.bfloat16):
            loss = self.loss(tokens_T, mask_T, aux_TA, last_TH)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def loss(self, tokens_T: Tensor, mask_T: Tensor, aux_TA: Tensor, last_TH: Tensor) -> Tensor:
        """The sum over steps of 0.8^i times the mean over the slots that count."""
        T, head = len(tokens_T), self.head
        target_p_TW, position_mask_T = self.teacher(last_TH)
        wanted_T = position_mask_T & mask_T
        tokens_T, target_p_TW = ahead(tokens_T), ahead(target_p_TW)
        causal_TT = torch.full((T, T), float("-inf"), device=tokens_T.device).triu(1)
        hidden_TH = head.fuse(aux_TA)
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
        logits_TV = (last_TH @ self.lm_head.T).float()
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
