"""What computes the samples of forwards: a decoder in this process, or one in each of several
workers.

    this process   plan -> blocks of forwards ->                           -> shards, in order
    each worker                                  samples -> encoded bytes

Workers, here or on Ray (eyas/executor.py), need eyas and the target: the process that asks reads
the answers and writes the shards. It writes in order, so the files are those of one process, and
a block that is lost with its worker is computed again.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import zstandard

from eyas.artifact import VERSION
from eyas.cores import cores
from eyas.errors import EyasError, MismatchError
from eyas.executor import Executor
from eyas.features.samples import ForwardBatch, SamplePlan
from eyas.model.library import CHOICE, build
from eyas.model.threads import set_num_threads
from eyas.operators.decoder import (
    FeatureDecoder,
    HiddenStates,
    OwnDecoder,
    SharedPrefix,
    default_device,
)
from eyas.shards import (
    Codec,
    EncodedSample,
    FeatureMeta,
    Sample,
    ShardWriter,
    decode_sample,
    encoded,
)

BLOCK_TOKENS = 4096  # of a block, or one forward; two blocks of each worker are held
Work = Iterable[tuple[ShardWriter, ForwardBatch]]


def sample_of(plan: SamplePlan, states: HiddenStates) -> Sample:
    """A sample with its states."""
    ids, mask = torch.from_numpy(plan.token_ids), torch.from_numpy(plan.loss_mask)
    return Sample(plan.key, ids, mask, states.aux_hidden, states.last_hidden, plan.source)


class FeatureForward:
    """Computes batches one after the other, in the decoder's dtype; a prefix that several batches
    in a row share is computed once.
    """

    def __init__(self, decoder: FeatureDecoder) -> None:
        self._decoder = decoder
        self._prefix: tuple[bytes, SharedPrefix] | None = None
        self.reuses, self.lm_head_sha256 = decoder.reuses, decoder.lm_head_sha256
        self.computed_by = {"here": implementation(decoder)}

    def samples(self, batches: Iterable[ForwardBatch]) -> Iterator[list[Sample]]:
        """The samples of each batch, in order; nothing is computed ahead."""
        return (list(self._samples(batch)) for batch in batches)

    def status(self) -> str:
        """For the line of progress."""
        return ""

    def facts(self) -> dict[str, Any]:
        """For the manifest, which has the settings already."""
        return {}

    def close(self) -> None:
        """Nothing is held that Python does not release."""

    def _samples(self, batch: ForwardBatch) -> Iterator[Sample]:
        name, prefix = batch.prefix.tobytes(), None
        if name:
            if self._prefix is None or self._prefix[0] != name:
                self._prefix = name, self._decoder.begin(batch.prefix.tolist())
            prefix = self._prefix[1]
        rows = [one.token_ids[batch.num_shared :].tolist() for one in batch.samples]
        states = self._decoder.states(rows, prefix)
        for row, one in enumerate(batch.samples):
            end = len(one) - batch.num_shared
            aux_hidden, last_hidden = states.aux_hidden[row, :end], states.last_hidden[row, :end]
            if prefix is not None:
                aux_hidden = torch.cat([prefix.states.aux_hidden, aux_hidden])
                last_hidden = torch.cat([prefix.states.last_hidden, last_hidden])
            yield sample_of(one, HiddenStates(aux_hidden, last_hidden))


@dataclass(frozen=True, slots=True)
class ForwardBlock:
    """Forwards in a row, of one split. codec: of `meta`."""

    batches: tuple[ForwardBatch, ...]
    meta: FeatureMeta
    codec: Codec


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The samples of each forward of a block. computed_by: what their bits depend on, in words."""

    host: str
    computed_by: str
    reuses: bool
    lm_head_sha256: str
    samples: list[list[EncodedSample]]


@dataclass(frozen=True, slots=True)
class ForwardTask:
    """What a worker does. load: the decoder. per_host: workers of a host share its cores."""

    load: Callable[[], FeatureDecoder]
    per_host: int

    def ready(self) -> Callable[[ForwardBlock | None], ForwardResult]:
        """Load the target. Raises what `load` raises, with the name of the host."""
        host, count = socket.gethostname(), max(1, cores() // self.per_host)
        set_num_threads(count)
        torch.set_num_threads(count)
        try:
            decoder = self.load()
        except EyasError as error:
            raise type(error)(f"a worker on {host}: {error.what}", error.hint) from error
        forward = FeatureForward(decoder)
        by = forward.computed_by["here"]

        def compute(block: ForwardBlock | None) -> ForwardResult:
            samples = [
                [encoded(one, block.meta, block.codec) for one in batch]
                for batch in (forward.samples(block.batches) if block else ())
                if block is not None
            ]
            return ForwardResult(host, by, forward.reuses, forward.lm_head_sha256, samples)

        return compute


def implementation(decoder: FeatureDecoder) -> str:
    """What the bits of features depend on beside target and settings."""
    computing = f"decoder {build()}"
    if not isinstance(decoder, OwnDecoder):
        device = torch.backends.cpu.get_cpu_capability()
        if default_device() != "cpu":
            device = torch.cuda.get_device_name()
        computing = (
            f"torch {torch.__version__} on {device}, transformers {transformers.__version__}"
        )
    return f"eyas {VERSION}, {computing}, zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}"


class WorkerForward:
    """Computes samples by an executor of a ForwardTask, in blocks."""

    def __init__(self, executor: Executor, workers: int) -> None:
        """Let all workers load the target. Raises MismatchError for two whose features would
        differ, and what loading raises.
        """
        self._executor, self._workers = executor, workers
        with ExitStack() as stack:
            stack.enter_context(executor)
            self._first, *others = executor.map([None] * workers)
            for one in others:
                self._refuse_another(one)
            self.reuses, self.lm_head_sha256 = self._first.reuses, self._first.lm_head_sha256
            self.computed_by = {"here": self._first.computed_by}
            self.close = stack.pop_all().close

    def samples(self, work: Work) -> Iterator[list[Sample] | list[EncodedSample]]:
        """The samples of each forward, in order, for its writer: encoded from the moment on at
        which its codec is known.
        """
        asked: deque[tuple[ShardWriter, ForwardBlock]] = deque()

        def blocks() -> Iterator[ForwardBlock]:
            for writer, batches in in_blocks(work):
                meta = writer.meta
                if writer.codec is None:
                    meta = meta.model_copy(update={"codec": "raw"})
                block = ForwardBlock(tuple(batches), meta, writer.codec or meta.coder())
                asked.append((writer, block))
                yield block

        with closing(self._executor.map(blocks())) as results:
            for result in results:
                self._refuse_another(result)
                writer, block = asked.popleft()
                for samples in result.samples:
                    if block.meta == writer.meta:
                        yield samples
                    else:
                        yield [decode_sample(one.data, one.entry, block.meta) for one in samples]

    def _refuse_another(self, result: ForwardResult) -> None:
        one = self._first
        if (one.computed_by, one.reuses, one.lm_head_sha256) != (
            result.computed_by,
            result.reuses,
            result.lm_head_sha256,
        ):
            raise MismatchError(
                f"workers that do not compute alike: {one.host} with {one.computed_by}, "
                f"{result.host} with {result.computed_by}: last bits of features would differ",
                "give hosts of one kind with the same packages; where processors differ, "
                f"{CHOICE}=avx2 on all of them holds our own decoder to one variant",
            )

    def status(self) -> str:
        """For the line of progress."""
        return f"{self._workers} workers"

    def facts(self) -> dict[str, Any]:
        """For the manifest: as of one process."""
        return {}


def in_blocks(work: Work) -> Iterator[tuple[ShardWriter, list[ForwardBatch]]]:
    """Forwards in a row of one writer, BLOCK_TOKENS together, or one that is larger."""
    block: list[ForwardBatch] = []
    of: ShardWriter | None = None
    size = 0
    for writer, batch in work:
        tokens = sum(map(len, batch.samples))
        if of is not None and (of is not writer or size + tokens > BLOCK_TOKENS):
            yield of, block
            block, size = [], 0
        of = writer
        block.append(batch)
        size += tokens
    if of is not None:
        yield of, block
