"""Engines of a tiny target and a random head, their requests, and what plain decoding gives."""

from pathlib import Path

import pytest
import torch

from eyas.engine.costs import CostTable, Curve
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, Result, SamplingParams
from eyas.model.arrays import Array
from eyas.model.config import HeadConfig, HeadOptions
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
    H, inner, W = config.hidden_size, config.intermediate_size, config.draft_vocab_size
    q, kv = (
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    )
    shapes = {
        "fc.weight": (H, 3 * config.target_hidden_size),
        "midlayer.self_attn.q_proj.weight": (q, 2 * H),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, q),
        "midlayer.mlp.gate_proj.weight": (inner, H),
        "midlayer.mlp.up_proj.weight": (inner, H),
        "midlayer.mlp.down_proj.weight": (H, inner),
        "lm_head.weight": (W, H),
        **{
            f"midlayer.{name}.weight": (H,)
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
        "norm.weight": (H,),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()
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


def idle(running: Engine) -> Engine:
    """Nothing left of what ran: the check of every page and slot, and no page held."""
    running.check()
    assert running.metrics()["running"] == running.metrics()["waiting"] == 0
    assert running.metrics()["pages_available"] == running._pool.num_pages
    return running
