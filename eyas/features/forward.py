"""SampleSource computes samples: a decoder here, or one in each of several workers
(eyas/executor.py); `states` has servers. Workers encode; this process writes in order, so the files
are those of one process. A lost worker's forward is computed again.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
import zstandard
from torch import Tensor

from eyas.artifact import VERSION
from eyas.cores import cores
from eyas.errors import EyasError, MismatchError
from eyas.executor import Executor
from eyas.features.samples import SamplePlan
from eyas.model.library import CHOICE, build
from eyas.model.threads import set_num_threads
from eyas.operators.decoder import FeatureDecoder, OwnDecoder, default_device
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import (
    Codec,
    EncodedSample,
    FeatureMeta,
    Sample,
    ShardWriter,
    decode_sample,
    encoded,
    teacher_mask,
)

# the samples of each forward, and their writer; None: they are not stored
Work = Iterable[tuple[ShardWriter | None, list[SamplePlan]]]


class SampleSource:
    """A decoder, workers or servers. lm_head_sha256: of the target."""

    lm_head_sha256: str

    def samples(self, work: Work) -> Generator[Sequence[Sample | EncodedSample]]:
        """The samples of each forward, in order, encoded where the writer has a codec."""
        raise NotImplementedError

    def computed_by(self) -> dict[str, str]:
        """What the bits depend on beside target and settings: here, at servers."""
        raise NotImplementedError

    def status(self) -> str:
        return ""

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {}

    def close(self) -> None: ...


def sample_of(plan: SamplePlan, aux_hidden: Tensor, last_hidden: Tensor) -> Sample:
    """A plan with its states."""
    ids, mask = torch.from_numpy(plan.token_ids), torch.from_numpy(plan.loss_mask)
    return Sample(plan.key, ids, mask, aux_hidden, last_hidden, plan.source)


class FeatureForward(SampleSource):
    def __init__(
        self,
        decoder: FeatureDecoder,
        dtype: torch.dtype = torch.bfloat16,
        vocabulary: TargetVocabulary | None = None,
    ) -> None:
        """vocabulary: if samples are to be stored: they have this dtype, on the CPU, and the
        target's best tokens.
        """
        self._decoder, self._dtype, self._vocabulary = decoder, dtype, vocabulary
        self.lm_head_sha256 = decoder.lm_head_sha256

    def computed_by(self) -> dict[str, str]:
        return {"here": implementation(self._decoder)}

    def samples(self, work: Work) -> Generator[list[Sample]]:
        for _, plans in work:
            states = self._decoder.states([one.token_ids.tolist() for one in plans])
            rows = zip(plans, states.aux_hidden, states.last_hidden, strict=True)
            yield [
                self._as_stored(sample_of(one, aux_hidden[: len(one)], last_hidden[: len(one)]))
                for one, aux_hidden, last_hidden in rows
            ]

    def _as_stored(self, sample: Sample) -> Sample:
        """Best tokens are those of the hidden states in the stored dtype."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            return sample
        states = sample.aux_hidden, sample.last_hidden
        aux_hidden, last_hidden = (one.to(self._dtype) for one in states)
        asked_T = teacher_mask(sample.loss_mask)
        rows = last_hidden[asked_T.to(last_hidden.device)]
        argmax_T = torch.full_like(sample.token_ids, -1)
        argmax_T[asked_T] = vocabulary.best(rows.to(vocabulary.lm_head.device)).int().cpu()
        aux_hidden, last_hidden = aux_hidden.cpu(), last_hidden.cpu()
        return replace(sample, aux_hidden=aux_hidden, last_hidden=last_hidden, argmax=argmax_T)


@dataclass(frozen=True, slots=True)
class ForwardJob:
    plans: list[SamplePlan]
    meta: FeatureMeta
    codec: Codec


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """computed_by: what the bits depend on."""

    host: str
    computed_by: str
    lm_head_sha256: str
    samples: list[EncodedSample]


@dataclass(frozen=True, slots=True)
class ForwardTask:
    """per_host: workers that share a host's cores."""

    load: Callable[[], FeatureForward]
    per_host: int

    def ready(self) -> Callable[[ForwardJob | None], ForwardResult]:
        """Load the target. Errors name the host."""
        host, count = socket.gethostname(), max(1, cores() // self.per_host)
        set_num_threads(count)
        torch.set_num_threads(count)
        try:
            forward = self.load()
        except EyasError as error:
            raise type(error)(f"a worker on {host}: {error.what}", error.hint) from error
        by = forward.computed_by()["here"]
        coders = ThreadPoolExecutor(count, "encode")

        def compute(job: ForwardJob | None) -> ForwardResult:
            samples: list[Any] = []
            if job is not None:
                (computed,) = forward.samples([(None, job.plans)])
                samples = [*coders.map(partial(encoded, meta=job.meta, codec=job.codec), computed)]
            return ForwardResult(host, by, forward.lm_head_sha256, samples)

        return compute


def implementation(decoder: FeatureDecoder) -> str:
    """What the bits of features depend on beside target and settings."""
    computing = f"decoder {build()}"
    if not isinstance(decoder, OwnDecoder):
        on_gpu, versions = default_device() != "cpu", transformers.__version__
        device = torch.cuda.get_device_name() if on_gpu else torch.backends.cpu.get_cpu_capability()
        computing = f"torch {torch.__version__} on {device}, transformers {versions}"
    return f"eyas {VERSION}, {computing}, zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}"


class WorkerForward(SampleSource):
    def __init__(self, executor: Executor, workers: int) -> None:
        """Raises MismatchError for workers whose features would differ."""
        self._executor, self._workers = executor, workers
        with ExitStack() as stack:
            stack.enter_context(executor)
            self._first, *others = executor.map([None] * workers)
            for one in others:
                self._refuse_another(one)
            self.lm_head_sha256 = self._first.lm_head_sha256
            self._opened = stack.pop_all()

    def computed_by(self) -> dict[str, str]:
        return {"here": self._first.computed_by}

    def samples(self, work: Work) -> Generator[Sequence[Sample | EncodedSample]]:
        """Encoded once the writer's codec is known."""
        asked: deque[tuple[ShardWriter, ForwardJob]] = deque()

        def jobs() -> Iterator[ForwardJob]:
            for writer, plans in work:
                assert writer is not None, "workers give bytes for a store"
                codec, meta = writer.codec, writer.meta
                if codec is None:
                    meta = meta.model_copy(update={"codec": "raw"})
                asked.append((writer, ForwardJob(plans, meta, codec or meta.coder())))
                yield asked[-1][1]

        with closing(self._executor.map(jobs())) as results:
            for result in results:
                self._refuse_another(result)
                writer, job = asked.popleft()
                if job.meta == writer.meta:
                    yield result.samples
                else:
                    yield [decode_sample(one.data, one.entry, job.meta) for one in result.samples]

    def _refuse_another(self, result: ForwardResult) -> None:
        one = self._first
        if replace(one, host="", samples=[]) != replace(result, host="", samples=[]):
            raise MismatchError(
                f"workers that do not compute alike: {one.host} with {one.computed_by}, "
                f"{result.host} with {result.computed_by}: last bits of features would differ",
                "give hosts of one kind with the same packages; where processors differ, "
                f"{CHOICE}=avx2 on all of them holds our own decoder to one variant",
            )

    def status(self) -> str:
        return f"{self._workers} workers"

    def close(self) -> None:
        self._opened.close()
