"""Every architecture of our own engine: transformers' numbers in float32, and speculation that
changes nothing.

How a backend computes each of them bit for bit, test_native.py holds.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.families import FAMILIES
from eyas.model.architecture import TargetConfig
from eyas.model.library import unavailable
from eyas.model.target import Dtype, Target
from eyas.model.weights import read_arrays
from eyas.operators.foreign import auto_class, transformers_config
from tests.architectures import ARCHITECTURES, SHAPE, saved_architecture
from tests.oracle.target import features_of, logits_of
from tests.quantised_twin import in_eight_bits
from tests.test_native import PARTS
from tests.tiny_engine import EVERYTHING, idle, load_as, random_head

OWN = [name for name, one in ARCHITECTURES.items() if one.own]
DECODERS = [name for name in OWN if ARCHITECTURES[name].text is None]
NUM_TOKENS = 150  # more than the windows of the table


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@cache
def loaded(root: Path, name: str, backend: str) -> Target:
    """backend: "torch" or "native" in float32; "bfloat16", or "packed" in blocks of eight bits, by
    the native decoder.
    """
    folder = saved_architecture(root, name)
    if backend in ("torch", "native"):
        return load_as(backend, folder)
    if unavailable() is not None:
        pytest.skip("no native path on this machine")
    config, tensors = TargetConfig.from_folder(folder), read_arrays(folder)
    blocks = in_eight_bits(tensors) if backend == "packed" else None
    return Target(config, tensors, cast(Dtype, backend), blocks=blocks)


@cache
def by_transformers(root: Path, name: str) -> Any:
    folder = saved_architecture(root, name)
    kind = auto_class(transformers_config(folder))
    return kind.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", OWN)
def test_logits_and_taps_are_those_of_transformers(root, name, backend):
    target, model = loaded(root, name, backend), by_transformers(root, name)
    tokens_BT = torch.randint(
        3, target.config.vocab_size, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        theirs = model(tokens_BT, output_hidden_states=True, use_cache=False)
    taps = [theirs.hidden_states[tap + 1] for tap in target.config.default_taps]
    aux_hidden, last_hidden = features_of(target, tokens_BT)
    assert_near(logits_of(target, tokens_BT), theirs.logits)
    assert_near(aux_hidden, torch.cat(taps, dim=-1))
    assert_near(last_hidden, theirs.hidden_states[-1])
    assert torch.equal(logits_of(target, tokens_BT).argmax(-1), theirs.logits.argmax(-1))


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Within 3e-5 of the greatest: the sums run in another order, through eight layers."""
    assert float((ours - theirs).abs().max()) < 3e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path, family):
    sizes = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    stated = {name: SHAPE[name] for name in (*sizes.split(" "), "num_key_value_heads")}
    stated |= {"model_type": family, "rope_scaling": None}
    if family == "granitemoehybrid":  # else other layers than we run
        stated |= {"layer_types": 8 * ["full_attention"], "num_local_experts": 0}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    (tmp_path / "whole").mkdir()
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "whole")
    read, whole = (TargetConfig.from_folder(folder) for folder in (tmp_path, tmp_path / "whole"))
    assert read == whole.model_copy(update={"eos_token_ids": read.eos_token_ids})


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "bfloat16") for name in DECODERS),
        *((name, backend) for name in PARTS for backend in ("native", "packed")),
    ],
)
def test_speculation_changes_nothing(root, name, backend):
    """Trees in a batch whose requests are accepted to different lengths, greedy and sampled, and a
    prefix used again: tokens and log-probabilities are those of plain decoding, to the bit.
    """
    target = loaded(root, name, backend)
    asked = prompts(target, [30, 70, 100], logprobs=2)
    asked += prompts(target, [70, 33], temperature=1.0, logprobs=2)
    plain = [run(Engine(target, None, EngineConfig(num_pages=64)), [one])[0] for one in asked]
    draft = Draft(*random_head(target), target)
    for speculation, times in (("fixed(3,3,8)", 1), ("auto(3,4,20)", 2)):
        config = EngineConfig(num_pages=24, max_batch=4, speculation=speculation)
        engine = Engine(target, draft, config)
        engine.rounds.policy.costs = EVERYTHING
        for _ in range(times):
            assert run(engine, asked) == plain
        idle(engine)


def prompts(target: Target, lengths: list[int], **params: float | None) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for number, length in enumerate(lengths):
        row = torch.randint(3, target.config.vocab_size, (length,), generator=generator).tolist()
        sampling = SamplingParams(max_tokens=24, ignore_eos=True, seed=number, **params)
        made.append(Request(f"{params} {number}", (*row, *row[:9]), sampling))
    return made


def run(engine: Engine, asked: list[Request]) -> list[tuple]:
    results = {one.request_id: one for one in engine.run([replace(one) for one in asked])}
    return [
        (tuple(found.token_ids), found.finish_reason, tuple(found.logprobs or ()))
        for found in (results[one.id] for one in asked)
    ]
