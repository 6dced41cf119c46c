"""Hidden states from vLLM servers that run the target, compared with ours first (state_proof).

A server writes a file per request into a shared folder, with four streams: the three taps and the
final norm's input. For targets that vLLM runs faster than transformers, e.g. in FP8.

Letters: T tokens of a sample, S the four streams, H the target's hidden size.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shlex
import socket
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from eyas.artifact import is_another_process
from eyas.client import RequestFailure
from eyas.errors import EyasError
from eyas.features.conversation import TurnFailure
from eyas.features.fleet import Fleet, FleetConfig, FleetServer, refused_is_unfit, server_urls
from eyas.features.forward import SampleSource, Work, implementation, sample_of
from eyas.features.state_proof import (
    NUM_STREAMS,
    StateProof,
    StateRequest,
    compare,
    name_of,
    stream_layers,
    unfit,
)
from eyas.model.config import TargetShape
from eyas.operators.decoder import TOLERANCE, FinalNorm, HiddenStates, HookedDecoder
from eyas.shards import Sample

ANSWER_TOKENS = 1  # a request needs an answer
LOCK_POLL_S = 0.01
FOLDER = "/dev/shm/eyas-states"  # in memory
CONNECTOR = Path(__file__).with_name("vllm")  # goes on vLLM's PYTHONPATH


class StateReply(NamedTuple):
    id: str
    states: HiddenStates


class StateServer(FleetServer[StateRequest, StateReply]):
    """A vLLM server. final_norm: of HookedDecoder, for its last stream. run: names requests and
    files.
    """

    def __init__(
        self, url: str, config: FleetConfig, proof: StateProof, final_norm: FinalNorm, run: str
    ) -> None:
        super().__init__(url, config)
        self._proof, self._final_norm = proof, final_norm
        # several servers and processes may share a folder, e.g. the ranks of a run
        hashes = (hashlib.sha256(text.encode()).hexdigest() for text in (url, socket.gethostname()))
        machine = "-".join(["eyas", run[:12], *(one[:6] for one in hashes)])
        self._run = f"{machine}-{os.getpid()}"
        self._of_machine = re.compile(rf".*{machine}-(\d+)-.*\.safetensors(\.lock)?")
        self._numbers, self._folder = itertools.count(), Path()

    async def check(self) -> None:
        card = await self.describe()
        if self.engine.split()[0] != "vllm":
            raise unfit(f"is {self.engine}, and only vLLM gives hidden states")
        room, needed = card.get("max_model_len"), self._proof.max_length + ANSWER_TOKENS
        if isinstance(room, int) and room < needed:
            raise unfit(
                f"holds {room} tokens a request; the longest sample and a token of answer are "
                f"{needed}: start it with room for them"
            )
        with refused_is_unfit("hidden states"):
            # at the same time, so that they share steps; then the longest from its prefix cache
            asked = [request for request, _ in self._proof.samples]
            together = (self._streams(one.token_ids) for one in asked)
            # a failure is raised once all files are read and deleted
            replies = await asyncio.gather(*together, return_exceptions=True)
            for failure in replies:
                if isinstance(failure, BaseException):
                    raise failure
            streams = [one for one in replies if isinstance(one, Tensor)]
            streams.append(await self._streams(asked[-1].token_ids))
        compare(self._proof, streams, self._finished)

    async def reply(self, request: StateRequest) -> StateReply:
        streams_TSH = await self._streams(request.token_ids)
        return StateReply(request.id, await asyncio.to_thread(self._finished, streams_TSH))

    async def close(self) -> None:
        await super().close()
        self.sweep()

    def sweep(self) -> None:
        """Delete files of abandoned requests: this process's, and those of ended processes of this
        run.
        """
        if self._folder == Path():
            return
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                found = self._of_machine.fullmatch(path.name)
                if found and not is_another_process(found[1]):
                    path.unlink(missing_ok=True)

    def _finished(self, streams_TSH: Tensor) -> HiddenStates:
        last_hidden = self._final_norm(streams_TSH[:, 3]).to("cpu", streams_TSH.dtype)
        return HiddenStates(streams_TSH[:, :3].flatten(1), last_hidden)

    async def _streams(self, token_ids: Sequence[int]) -> Tensor:
        """[T, S, H] in the server's dtype."""
        streams_TSH = await self._read(token_ids)
        T, S, H = streams_TSH.shape
        if S != NUM_STREAMS or self._proof.shape.hidden_size != H:
            raise unfit(
                f"gives {S} layers of {H} numbers a token, and {NUM_STREAMS} of "
                f"{self._proof.shape.hidden_size} are wanted: see its layer ids and its model"
            )
        if len(token_ids) != T:
            raise unfit(f"gives states of {T} of {len(token_ids)} tokens: cached ones are missing")
        if streams_TSH.dtype not in TOLERANCE or not bool(streams_TSH.isfinite().all()):
            raise unfit(f"gives {name_of(streams_TSH.dtype)} or numbers that are not finite")
        return streams_TSH

    async def _read(self, token_ids: Sequence[int]) -> Tensor:
        name = f"{self._run}-{next(self._numbers)}"
        body = {
            "model": self.model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "request_id": name,
        }
        content = await self.post("/completions", body)
        try:
            path = Path(content["kv_transfer_params"]["hidden_states_path"])
        except (LookupError, TypeError) as error:
            raise unfit("answers without hidden states: it runs without our connector") from error
        # deleted below: nothing but this request's own file
        if name not in path.name or path.suffix != ".safetensors" or "\0" in str(path):
            raise unfit("names a file of hidden states that is not of the request")
        self._folder = path.parent
        lock = path.with_name(f"{path.name}.lock")
        try:
            tensors = await self._read_unlocked(path, lock)
            streams_TSH, seen = tensors["hidden_states"], tensors["token_ids"]
        except FileNotFoundError as error:
            if path.parent.is_dir():
                raise RequestFailure("lost", f"wrote no file {path}") from error
            raise unfit(
                f"writes states to {path.parent}, which is no folder here: share it at the same "
                "path with this machine"
            ) from error
        except PermissionError as error:
            raise unfit(f"writes states to {path.parent}, where this user may not read") from error
        except TimeoutError as error:  # an OSError too
            what = f"does not finish {path} within {self.config.timeout_s:g} s"
            raise RequestFailure("broken", what) from error
        except (SafetensorError, LookupError, OSError) as error:
            raise RequestFailure("broken", f"wrote {path}, which is no file of states") from error
        finally:
            for one in (path, lock):
                with contextlib.suppress(OSError):
                    one.unlink(missing_ok=True)
        if seen.tolist() != list(token_ids):
            raise unfit("saw other tokens than it was sent: its tokenizer adds some")
        if streams_TSH.dim() != 3:
            raise unfit(f"gives states of the shape {list(streams_TSH.shape)}")
        return streams_TSH

    async def _read_unlocked(self, path: Path, lock: Path) -> dict[str, Tensor]:
        """vLLM locks the file before it answers and writes it afterwards."""
        async with asyncio.timeout(self.config.timeout_s):
            descriptor = os.open(lock, os.O_RDONLY)
            try:
                while True:
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        await asyncio.sleep(LOCK_POLL_S)
            finally:
                os.close(descriptor)
        # not mapped: the file is deleted at once
        return await asyncio.to_thread(lambda: load_safetensors(path.read_bytes()))


class StateFleet(Fleet[StateRequest, StateReply], SampleSource):
    """Servers as a source of samples, each computed alone."""

    def __init__(
        self,
        urls: Sequence[str],
        config: FleetConfig,
        decoder: HookedDecoder,
        proof: StateProof,
        run: str,
        command: str,
    ) -> None:
        """Check and prove all servers. decoder: gives up its layers."""
        self.lm_head_sha256, self._here = decoder.lm_head_sha256, implementation(decoder)
        self._numbers = itertools.count()
        self._ready: dict[str, HiddenStates] = {}
        self._unwanted: set[str] = set()  # asked for by an iterator that was closed
        given = config, proof, decoder.final_norm(), run
        servers = [StateServer(url, *given) for url in server_urls(urls)]
        super().__init__(servers, config, command, command)
        for one in servers:
            one.sweep()

    def computed_by(self) -> dict[str, str]:
        return {"here": self._here, **super().computed_by()}

    def samples(self, work: Work) -> Generator[list[Sample]]:
        """Keeps twice the servers' capacity in flight, which bounds the states in memory and files.
        Several iterators may be open, e.g. while a trainer evaluates. Raises EyasError for a
        request without states.
        """
        listed, coming = itertools.tee(batch for _, batch in work)
        plans = (one for batch in coming for one in batch)
        asked: deque[str] = deque()  # not yet yielded, in order
        try:
            for batch in listed:
                samples = []
                for plan in batch:
                    for one in itertools.islice(plans, 2 * self.capacity - len(asked)):
                        # numbered: the next epoch may ask for the same sample
                        asked.append(f"{one.key} ({next(self._numbers)})")
                        self.add(StateRequest(asked[-1], tuple(one.token_ids.tolist())))
                    while asked[0] not in self._ready:
                        self._take()
                    states = self._ready.pop(asked.popleft())
                    samples.append(sample_of(plan, states.aux_hidden, states.last_hidden))
                yield samples
        finally:
            for name in asked:
                if self._ready.pop(name, None) is None:
                    self._unwanted.add(name)

    def _take(self) -> None:
        for reply in self.wait():
            if reply.id in self._unwanted:
                self._unwanted.remove(reply.id)
            elif isinstance(reply, TurnFailure):
                raise EyasError(
                    f"no states of {reply.id}: {reply.detail}",
                    "every whole shard is kept: run the same command again",
                )
            else:
                self._ready[reply.id] = reply.states


def vllm_arguments(
    target: str, shape: TargetShape, dtype: str, length: int, folder: str = FOLDER
) -> list[str]:
    """Of `vllm serve`. length: tokens of the longest sample. folder: for the states."""
    ids = [layer + 1 for layer in stream_layers(shape)]  # 0: the embeddings
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    transfer = {
        "kv_connector": "StatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": "eyas_states",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    options = {
        "dtype": dtype,
        "max-model-len": str(length + ANSWER_TOKENS),
        "speculative-config": json.dumps(speculative),
        "kv-transfer-config": json.dumps(transfer),
    }
    return [target, *itertools.chain(*((f"--{name}", value) for name, value in options.items()))]


def states_command(target: str, shape: TargetShape, dtype: str, length: int) -> list[str]:
    """Starts a server of states. length: tokens of the longest sample."""
    words = ["env", f"PYTHONPATH={CONNECTOR}", "vllm", "serve"]
    return [*words, *vllm_arguments(target, shape, dtype, length)]


def start_command(target: str, shape: TargetShape, dtype: str, length: int) -> str:
    """`states_command`, as a hint."""
    command = shlex.join(states_command(target, shape, dtype, length))
    return (
        f"start one as follows (its files of states lie in {FOLDER}, which this process must see "
        f"at the same path):\n  {command}"
    )
