"""Engines of a tiny target and a random head, their requests, and what plain decoding gives."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from eyas.engine.costs import CostTable, Curve
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, Result, SamplingParams, Update
from eyas.model.arrays import Array
from eyas.model.checkpoint import expected_shapes
from eyas.model.config import HeadConfig, HeadOptions
from eyas.model.dialects import MAPS
from eyas.model.library import unavailable
from eyas.model.target import Dtype, Target
from eyas.operators.tensors import arrays_of
from tests.oracle.target import OperatorTarget
from tests.tiny import tiny_target
from tests.tiny_head import PLAIN_NORMS

VOCAB = 24  # so small that a random head's proposals are often right
FREE = Curve([1, 64], [1.0, 1.0])
# rows cost nothing more than a round: everything is drafted and verified
EVERYTHING = CostTable(FREE, FREE, *[Curve([1, 64], [1e-6, 1e-6])] * 3)
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}


def random_head(
    target: Target, seed: int = 0, draft_vocab_size: int = 20
) -> tuple[HeadConfig, dict[str, Array]]:
    options = HeadOptions(draft_vocab_size=draft_vocab_size, **PLAIN_NORMS)
    config = HeadConfig.for_target(target.config, options)
    generator, W = torch.Generator().manual_seed(seed), config.draft_vocab_size
    shapes = {name: shape for name, shape in expected_shapes(config).items() if name not in MAPS}
    tensors = {  # matrices first
        name: torch.randn(*shape, generator=generator) * 0.3
        for name, shape in sorted(shapes.items(), key=lambda one: -len(one[1]))
    }
    used = torch.randperm(config.vocab_size, generator=generator)[:W].sort().values
    tensors["d2t"] = used - torch.arange(W)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, used, True)
    return config, arrays_of(tensors)


def load_as(kind: str, folder: Path, dtype: Dtype = "auto") -> Target:
    """A target that runs "native" or by the oracle's "torch" operators."""
    if kind == "native" and unavailable() is not None:
        pytest.skip("no native path on this machine")
    return (Target if kind == "native" else OperatorTarget).load(folder, dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_as("native", folder)


@pytest.fixture(autouse=True)
def costs_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.engine.costs.cache_folder", lambda _: tmp_path)


def engine(
    target: Target, head: bool = True, window: int | None = None, **config: object
) -> Engine:
    sizes = EngineConfig(**{"max_batch": 3, "max_length": 120, "speculation": "fixed", **config})
    if not head:
        return Engine(target, None, sizes)
    shape, tensors = random_head(target)
    shape = shape.model_copy(update={"sliding_window": window})
    return Engine(target, Draft(shape, tensors, target), sizes)


def requests(
    count: int, speculation: bool = True, shared: int = 0, **params: object
) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    prefix = torch.randint(0, VOCAB, (shared,), generator=generator).tolist()
    made = []
    for index in range(count):
        length = int(torch.randint(1, 30, (), generator=generator))
        prompt = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        sampling = SamplingParams(**{"max_tokens": 5 + 7 * (index % 4), "seed": index, **params})
        made.append(Request(str(index), tuple(prefix + prompt), sampling, speculation))
    return made


Decoded = dict[tuple[str, int], tuple[list[int], str]]
PLAIN: dict[tuple[int, str], tuple[Target, Decoded]] = {}


def decoded(results: list[Result]) -> Decoded:
    return {
        (result.request_id, result.index): (result.token_ids, result.finish_reason)
        for result in results
    }


def plainly(target: Target, asked: list[Request]) -> Decoded:
    """What plain decoding gives; decoded once for the many tests that ask for the same."""
    key = id(target), repr(asked)
    if key not in PLAIN:
        results = list(engine(target, head=False, prefix_reuse=False).run(asked))
        PLAIN[key] = target, decoded(results)  # with the target, so that its id stays its own
    return PLAIN[key][1]


def stepped(running: Engine, turn: Callable[[int], object]) -> list[Result]:
    """Run to the end. turn(step): called before each step; true while more requests will come."""
    updates: dict[tuple[str, int], list[Update]] = {}
    results, steps = [], count()
    while turn(next(steps)) or running.has_work:
        for update in running.step():
            key = update.request_id, update.index
            updates.setdefault(key, []).append(update)
            if update.finish_reason is not None:
                results.append(Result.of(updates.pop(key), running.speculation.num_draft_steps))
    return results


def idle(running: Engine) -> Engine:
    """Nothing left of what ran: the check of every page and slot, and no page held."""
    running.check()
    assert running.metrics()["running"] == running.metrics()["waiting"] == 0
    assert running.metrics()["pages_available"] == running._pool.num_pages
    return running
