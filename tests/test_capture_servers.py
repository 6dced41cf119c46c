"""Features from servers are our decoder's within the precision's noise, or nothing is stored.

The live test needs a vLLM: EYAS_VLLM_PYTHON names its interpreter.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.artifact import Artifact
from eyas.builtin import target_folder
from eyas.client import RequestFailure
from eyas.errors import EyasError, MismatchError, MissingInputError
from eyas.features import capture as stage
from eyas.features import fleet
from eyas.features.capture import CaptureConfig, capture
from eyas.features.fleet import FleetConfig
from eyas.features.generate import GenerateConfig, generate
from eyas.features.online import OnlineTarget
from eyas.features.state_proof import stream_layers
from eyas.features.states import StateServer
from eyas.model.architecture import TargetConfig
from eyas.operators.decoder import HookedDecoder
from eyas.shards import Features, FeatureSource
from eyas.train.trainer import TrainConfig, train
from tests.stages import all_samples, ending_target, patched, prompts_of, write_prompts
from tests.state_servers import Behaviour, serving_states, vllm_server
from tests.tiny import tiny_target

# of float32: each is up to 2e-4 from float64 on this target, whose states reach 40
TWO_DECODERS = 4e-4
LIVE = os.environ.get("EYAS_VLLM_PYTHON")


# several shards of few samples; a server that is gone is given up soon
small_and_quick = patched((stage, "SAMPLES_PER_SHARD", 4), (fleet, "PATIENCE_S", 1))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return ending_target(tmp_path_factory.mktemp("target"))


def answers_of(target: str, root: Path, count: int = 30, max_tokens: int = 12) -> Artifact:
    output = Artifact(str(root / "answers"))
    prompts = write_prompts(root / "prompts", prompts_of(count))
    generate(GenerateConfig(target=target, max_tokens=max_tokens), prompts, output)
    return output


@pytest.fixture(scope="module")
def answers(target, tmp_path_factory) -> Artifact:
    return answers_of(str(target), tmp_path_factory.mktemp("answers"))


def config_of(target: Path | str, *urls: str, **settings: Any) -> CaptureConfig:
    defaults = {
        "target": str(target),
        "dtype": "float32",
        "store_dtype": "float32",
        "codec": "lossless",
        "held_out_share": 0.3,
        "servers": urls,
        "client": {"concurrency": 3, "timeout_s": 300},
    }
    return CaptureConfig.model_validate({**defaults, **settings})


def right(target: Path, root: Path) -> Behaviour:
    """A server as our command starts it."""
    layers = stream_layers(TargetConfig.from_folder(target))
    return Behaviour(target, layers, root / "states")


def assert_near(one: torch.Tensor, other: torch.Tensor, within: float = TWO_DECODERS) -> None:
    torch.testing.assert_close(one, other, rtol=within, atol=within)


def assert_alike(served: Artifact, own: Artifact, within: float = TWO_DECODERS) -> None:
    ours, theirs = all_samples(own), all_samples(served)
    assert list(ours) == list(theirs)
    for one, other in zip(ours.values(), theirs.values(), strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.loss_mask, other.loss_mask)
        assert_near(other.aux_hidden, one.aux_hidden, within)
        assert_near(other.last_hidden, one.last_hidden, within)


@pytest.fixture(scope="module")
def own(target, answers, tmp_path_factory) -> Artifact:
    output = Artifact(str(tmp_path_factory.mktemp("own") / "features"))
    capture(config_of(target), answers, output)
    return output


def losses(
    target: Path | str, features: FeatureSource, held_out: FeatureSource, root: Path
) -> list[float]:
    settings = {"head": {"draft_vocab_size": 320}, "batches": {"tokens": 64}, "dtype": "float32"}
    settings["stop"] = {"max_steps": 6, "measurements": 1}
    output = Artifact(str(root))
    train(TrainConfig.model_validate(settings), str(target), features, output, held_out=held_out)
    return [row["loss"] for row in output.read_jsonl("metrics.jsonl")]


def test_servers_give_the_features_of_our_decoder(target, answers, own, tmp_path):
    behaviour, output = right(target, tmp_path), Artifact(str(tmp_path / "features"))
    with serving_states(behaviour) as one, serving_states(behaviour) as other:
        manifest = capture(config_of(target, one.url, other.url), answers, output)
        assert len(one.asked) > 5
        assert len(other.asked) > 5
    assert_alike(output, own)
    assert {server["engine"] for server in manifest.facts["servers"]} == {"vllm 0.0.1"}
    assert manifest.config["decoder"] == "servers"
    assert "servers" not in manifest.config
    assert not [*behaviour.folder.glob("*")]


@pytest.mark.parametrize(
    ("faults", "match"),
    [
        ({"shift": -1}, r"output of layer 0 .* where layer 1 is wanted: shift its layer id by \+1"),
        ({"shift": 1}, r"output of layer 2 .* where layer 1 is wanted: shift its layer id by -1"),
        ({"layers": (1, 2)}, "gives 2 layers of 32 numbers a token, and 4 of 32 are wanted"),
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"has_states": False}, "without hidden states"),
        ({"length": 30}, "holds 30 tokens a request; the longest sample"),
        ({"mixes": True}, "gives other states than the target from token 0 .* second time"),
        ({"loses_cached": True}, "cached ones are missing"),
        ({"engine": "sglang"}, "is sglang, and only vLLM gives hidden states"),
    ],
)
def test_a_server_that_differs_is_named_before_anything_is_stored(
    faults, match, target, answers, tmp_path
):
    behaviour = right(target, tmp_path)
    if "shift" in faults:
        first, *others = behaviour.layers
        faults = {"layers": (first + faults["shift"], *others)}
    output = Artifact(str(tmp_path / "features"))
    with (
        serving_states(replace(behaviour, **faults)) as server,
        pytest.raises(MismatchError, match=match) as error,
    ):
        capture(config_of(target, server.url), answers, output)
    assert "vllm serve" in error.value.hint
    assert not output.is_done()
    assert not any("train" in name or "held_out" in name for name in output.all_names())
    assert not [*behaviour.folder.glob("*")]


def test_other_weights_are_named(target, answers, tmp_path):
    other = tiny_target(tmp_path / "other", seed=7)
    behaviour = replace(right(target, tmp_path), target=other)
    with (
        serving_states(behaviour) as server,
        pytest.raises(MismatchError, match="states of no layer of the target"),
    ):
        capture(config_of(target, server.url), answers, Artifact(str(tmp_path / "features")))


def test_without_a_server_the_command_to_start_one_is_shown(target, answers, tmp_path):
    with pytest.raises(MissingInputError, match="no server answers") as error:
        capture(config_of(target, "http://127.0.0.1:1"), answers, Artifact(str(tmp_path / "f")))
    assert "extract_hidden_states" in error.value.hint


def test_a_killed_server_costs_nothing(target, answers, own, tmp_path):
    output, behaviour = Artifact(str(tmp_path / "features")), right(target, tmp_path)
    with (
        serving_states(replace(behaviour, dies_after=12)) as server,
        pytest.raises(EyasError, match=r"no server answers|no states of"),
    ):
        capture(config_of(target, server.url), answers, output)
    with serving_states(behaviour) as server:
        capture(config_of(target, server.url), answers, output)
        assert len(server.asked) < len(all_samples(own)) + 5  # five are the proof's
    assert_alike(output, own)


def test_what_dead_clients_left_is_deleted_and_nothing_else(tmp_path):
    """Other runs, and other ranks of this one, may share the folder."""
    server, other = (
        StateServer("http://127.0.0.1:1", FleetConfig(), None, (), run)
        for run in ("1234567890abcd", "other")
    )
    dead = subprocess.Popen(["true"])
    dead.wait()
    of_machine = server._run.removesuffix(str(os.getpid()))
    names = [server._run, f"{of_machine}{dead.pid}", f"{of_machine}{os.getppid()}", other._run]
    paths = [
        tmp_path / f"cmpl-{name}-3-0-9256bd1b.safetensors{end}"
        for name in names
        for end in ("", ".lock")
    ]
    for path in paths:
        path.touch()
    server.sweep()  # it knows no folder yet
    server._folder = tmp_path
    server.sweep()
    assert [path.exists() for path in paths] == [False] * 4 + [True] * 4


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/nowhere/{}-0.safetensors", "which is no folder here"),
        ("{folder}/cmpl-{}-0.safetensors", "wrote no file"),
        ("{folder}/cmpl-{}-0\0.safetensors", "not of the request"),
        ("{folder}/other.safetensors", "not of the request"),
        ("{folder}/../{}.txt", "not of the request"),
        (None, "without hidden states"),
        (7, "without hidden states"),
    ],
)
def test_a_file_that_a_server_names_is_deleted_only_if_it_is_the_request_s(tmp_path, name, says):
    server, kept = served_file(tmp_path, name), tmp_path / "other.safetensors"
    kept.touch()
    with pytest.raises(RequestFailure, match=says):
        asyncio.run(server._read([1, 2]))
    assert kept.exists()


def test_a_file_that_stays_locked_is_said_to(tmp_path):
    server = served_file(tmp_path, "{folder}/cmpl-{}-0.safetensors")
    lock = tmp_path / f"cmpl-{server._run}-0-0.safetensors.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RequestFailure, match=r"does not finish .* within 0\.2 s"):
            asyncio.run(server._read([1, 2]))


def served_file(folder: Path, name: object) -> StateServer:
    """A server that answers with this file: {} stands for the request."""
    config = FleetConfig(timeout_s=0.2)
    server = StateServer("http://127.0.0.1:1", config, None, (), "run")

    async def answer(path: str, body: dict[str, Any]) -> Any:
        named = name
        if isinstance(name, str):
            named = name.replace("{folder}", str(folder)).replace("{}", body["request_id"])
        return {"kv_transfer_params": {"hidden_states_path": named}}

    server.post = answer
    return server


def test_what_a_server_leaves_is_finished(target):
    ids, decoder = list(range(40, 75)), HookedDecoder.load(target, "float32")
    layers, states = decoder.layers(ids), decoder.states([ids])
    taps = torch.cat([layers[tap] for tap in decoder.shape.default_taps], dim=-1)
    assert_near(taps, states.aux_hidden[0])
    assert_near(decoder.final_norm()(layers[-1]), states.last_hidden[0])


def test_training_reads_servers_without_a_store(target, answers, own, tmp_path):
    behaviour = right(target, tmp_path)
    with serving_states(behaviour) as server:
        online = OnlineTarget(config_of(target, server.url), answers)
        source = online.features("train")
        stored = [*Features(own, "train")]
        assert source.lengths == [len(one.token_ids) for one in stored]
        batches = [*source.batches([[2, 0], [1]])]
        for number, sample in zip((2, 0, 1), [*batches[0], *batches[1]], strict=True):
            assert sample.key == stored[number].key
            assert_near(sample.aux_hidden, stored[number].aux_hidden)
        served = losses(target, source, online.features("held_out"), tmp_path / "served")
        online.source.close()
    assert not [*behaviour.folder.glob("*")]
    # and the same comes of it
    assert len(served) > 5
    stored = losses(target, Features(own, "train"), Features(own, "held_out"), tmp_path / "stored")
    # rounding of two implementations of a forward, after as many updates
    assert served == pytest.approx(stored, rel=1e-3)


@pytest.mark.skipif(LIVE is None, reason="EYAS_VLLM_PYTHON names no interpreter with vLLM")
def test_a_live_vllm_gives_the_features_of_our_decoder(tmp_path):
    """Its prefill is cut into chunks and its prefix cache is used."""
    target = str(target_folder())
    answers = answers_of(target, tmp_path, count=12, max_tokens=60)
    own, served = Artifact(str(tmp_path / "own")), Artifact(str(tmp_path / "served"))
    capture(config_of(target), answers, own)
    assert LIVE is not None
    with vllm_server(LIVE, target, "float32", 511, "--max-num-batched-tokens=64") as url:
        capture(config_of(target, url), answers, served)
    assert_alike(served, own, 2e-3)
