"""tau and loss on held-out conversations. Counts are integers and batches do not depend on the
number of ranks, so tau does not either, as far as equal weights give equal drafts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from eyas.operators.batch import Batch, plan_batches
from eyas.operators.chain import matched_spans
from eyas.shards import FeatureSource
from eyas.tau import RoundCounts
from eyas.train.loss import STEP_DECAY
from eyas.train.ranks import Ranks
from eyas.train.step import LossModule

MEASURED_SAMPLES = 48  # conversations: tau is measured several times in a run
MEASURED_STEPS = 7  # of the chains: as many as the default objective unrolls


@dataclass(frozen=True)
class HeldOutSample:
    source: FeatureSource
    batch_tokens: int

    @cached_property
    def numbers(self) -> list[int]:
        """Of the conversations, the same in every run."""
        seed = int.from_bytes(hashlib.sha256(b"0/0").digest()[:16], "big")
        order = np.random.default_rng(seed).permutation(len(self.source))
        return sorted(order[:MEASURED_SAMPLES].tolist())

    @torch.no_grad()
    def measure(self, module: LossModule, ranks: Ranks) -> tuple[Tensor, float]:
        """Emitted tokens and rounds of each conversation, int64 [samples, 2], and the loss, on
        every rank. module: not sharded.
        """
        lengths = [self.source.lengths[number] for number in self.numbers]
        mine = ranks.share(plan_batches(lengths, self.batch_tokens, "held out"))
        counts = torch.zeros(len(self.numbers), 2, dtype=torch.float64)
        embed_tokens = module.vocabulary.embed_tokens
        device, dtype = embed_tokens.device, module.embed_tokens.dtype
        ones_K = torch.ones(module.config.num_ttt_steps, dtype=torch.int64)
        sums = torch.zeros(2, len(ones_K), dtype=torch.float64)  # of losses by step, their number
        with ranks.raised_on_all():
            batches = self.source.batches([[self.numbers[at] for at in places] for places in mine])
            for places, samples in zip(mine, batches, strict=True):
                planned = module.planned(Batch.of(samples), step=0)
                batch, teacher = planned.batch, module.teach(planned)
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    spans = matched_spans(module.head, embed_tokens, batch, MEASURED_STEPS)
                # without torch's sharding: ranks have different numbers of batches
                loss = module.forward(batch, teacher, ones_K)
                by_step = torch.stack([loss.step_losses.double(), loss.num_trained.double()])
                sums += by_step.cpu()
                for number, matches in spans:
                    rounds = RoundCounts(MEASURED_STEPS)
                    rounds.add_answer(matches)
                    counts[places[number]] += torch.tensor([rounds.emitted, rounds.rounds])
        loss_K, number_K = ranks.all_reduce(sums)
        decay_K = STEP_DECAY ** torch.arange(len(ones_K))
        mean = (decay_K * loss_K / number_K.clamp(min=1)).sum()
        return ranks.all_reduce(counts).long(), float(mean)
