"""The engine: speculation changes no token, whatever the batch, the sampling and the moment a request comes or goes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, Result, SamplingParams
from eyas.errors import InputError, MismatchError
from eyas.model.config import HeadConfig
from eyas.model.target import Target
from tests.tiny import tiny_target

VOCAB = 24  # so small that a random head's proposals are often right


def random_head(target: Target, seed: int = 0, draft_vocab_size: int = 20) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    config = HeadConfig.for_target(target.config, draft_vocab_size)
    H, inner, W = config.hidden_size, config.intermediate_size, config.draft_vocab_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
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
        **{f"midlayer.{name}.weight": (H,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "norm.weight": (H,),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    used = torch.randperm(config.vocab_size, generator=generator)[:W].sort().values
    tensors["d2t"] = used - torch.arange(W)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, used, True)
    return config, tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(folder)


def engine(target: Target, head: bool = True, **config: float) -> Engine:
    sizes = EngineConfig(**{"max_batch": 3, "max_length": 120, **config})
    return Engine(target, Draft(*random_head(target), target) if head else None, sizes)


def requests(count: int, speculation: bool = True, **params: float) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        length = int(torch.randint(1, 30, (), generator=generator))
        prompt = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        sampling = SamplingParams(**{"max_tokens": 5 + 7 * (index % 4), "seed": index, **params})
        made.append(Request(str(index), tuple(prompt), sampling, speculation))
    return made


def decoded(results: list[Result]) -> dict[str, tuple[list[int], str]]:
    return {result.request_id: (result.token_ids, result.finish_reason) for result in results}


def test_plain_greedy_equals_transformers(folder: Path, target: Target) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    results = decoded(list(engine(target, head=False).run(requests(8))))
    for request in requests(8):
        prompt = torch.tensor([request.prompt_ids])
        generated = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=request.params.max_tokens
        )
        assert results[request.id][0] == generated[0, len(request.prompt_ids) :].tolist()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 0.6, "top_k": 5}, {"temperature": 1.5, "top_p": 0.7}]
)
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 1, 4), (4, 3, 8), (2, 4, 16), (5, 2, 6)])
def test_speculation_changes_no_token(target: Target, params: dict, shape: tuple[int, int, int]) -> None:
    """Greedy or with a seed: one draw of the target a token, so even sampled outputs are the same tokens."""
    steps, topk, nodes = shape
    plain = decoded(list(engine(target, head=False).run(requests(10, ignore_eos=True, **params))))
    sizes = {"num_draft_steps": steps, "tree_topk": topk, "num_verify_tokens": nodes, "min_path_probability": 0.0}
    results = list(engine(target, **sizes).run(requests(10, ignore_eos=True, **params)))
    assert decoded(results) == plain
    accepted = sum(count * drafts for result in results for drafts, count in enumerate(result.accept_hist))
    assert accepted > 0, "no draft was ever accepted: this test would not notice a wrong cache"
    assert all(sum(result.accept_hist) <= len(result.token_ids) for result in results)


def test_a_doubtful_path_is_not_drafted_on(target: Target) -> None:
    """The draft stops growing when its best path is improbable; the outputs stay the same."""
    plain = decoded(list(engine(target, head=False).run(requests(6, ignore_eos=True))))
    results = list(engine(target, min_path_probability=0.99, num_draft_steps=4).run(requests(6, ignore_eos=True)))
    assert decoded(results) == plain
    assert sum(count for result in results for count in result.accept_hist[2:]) == 0
    assert sum(result.accept_hist[1] for result in results) > 0


def test_outputs_do_not_depend_on_the_batch(target: Target) -> None:
    together = decoded(list(engine(target, max_batch=5).run(requests(9, temperature=1.0))))
    alone: dict[str, tuple[list[int], str]] = {}
    for request in requests(9, temperature=1.0):
        alone |= decoded(list(engine(target, max_batch=1).run([request])))
    assert together == alone


def test_speculating_and_plain_requests_share_a_batch(target: Target) -> None:
    mixed = [*requests(6)[::2], *requests(6, speculation=False)[1::2]]
    results = list(engine(target).run(mixed))
    assert decoded(results) == decoded(list(engine(target, head=False).run(requests(6))))
    assert all(sum(result.accept_hist) == 0 for result in results if int(result.request_id) % 2)


def test_requests_come_and_go_without_disturbing_others(target: Target) -> None:
    expected = decoded(list(engine(target, head=False).run(requests(12, ignore_eos=True))))
    running, found = engine(target, max_batch=2), {}
    pending = requests(12, ignore_eos=True)
    tokens: dict[str, list[int]] = {request.id: [] for request in pending}
    step = 0
    while pending or running.has_work:
        if pending and step % 2 == 0:
            running.add(pending.pop(0))
        if step == 5:
            running.cancel("1")
        for update in running.step():
            tokens[update.request_id] += update.token_ids
            if update.finish_reason:
                found[update.request_id] = (tokens[update.request_id], update.finish_reason)
        step += 1
    assert {id: result for id, result in expected.items() if id != "1"} == {id: r for id, r in found.items() if id != "1"}


def test_the_end_token_ends_a_request_and_is_the_last(target: Target) -> None:
    results = list(engine(target).run(requests(20, max_tokens=80)))
    stopped = [result for result in results if result.finish_reason == "stop"]
    assert stopped
    assert all(result.token_ids[-1] == 2 and 2 not in result.token_ids[:-1] for result in stopped)
    assert all(len(result.token_ids) <= 80 for result in results)


def test_a_full_context_ends_with_length(target: Target) -> None:
    prompt = tuple(range(3, 23))
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    (result,) = engine(target, max_length=40).run([Request("long", prompt, params)])
    assert (len(result.token_ids), result.finish_reason) == (20, "length")


def test_bad_requests_are_refused(target: Target) -> None:
    running = engine(target, max_length=40)
    with pytest.raises(InputError, match="no tokens"):
        running.add(Request("empty", ()))
    with pytest.raises(InputError, match="the limit is 39"):
        running.add(Request("long", tuple([3] * 40)))
    with pytest.raises(InputError, match="outside the vocabulary"):
        running.add(Request("foreign", (3, VOCAB)))
    for wrong in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1}, {"max_tokens": 0}):
        with pytest.raises(InputError, match="out of range"):
            SamplingParams(**wrong)
    assert not running.has_work


def test_a_head_for_another_target_is_refused(target: Target, tmp_path: Path) -> None:
    config, tensors = random_head(target)
    with pytest.raises(MismatchError, match="hidden size 16"):
        Draft(config.model_copy(update={"target_hidden_size": 16}), tensors, target)
    with pytest.raises(MismatchError, match="another hash"):
        Draft(config.model_copy(update={"target_lm_head_sha256": "0" * 64}), tensors, target)


def test_bfloat16_runs_and_accepts(target: Target, folder: Path) -> None:
    rounded = Target.load(folder, "bfloat16")
    results = list(engine(rounded).run(requests(4)))
    assert all(result.token_ids for result in results)
