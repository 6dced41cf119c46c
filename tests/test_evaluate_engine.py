"""Eval through the engine: tau of prompts by tree."""

from __future__ import annotations

import pytest

from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.cli.stage import StageFolder
from eyas.errors import EmptyInputError
from eyas.evaluate import trees
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.evaluate.trees import PromptSet, prompts_digest
from eyas.log import quiet
from eyas.tau import tau_of
from tests.tiny import tiny_target
from tests.tiny_prompts import SOURCES, eval_prompts, learned_head, learned_models, prompt_set

COUNT = 12
TREES = ("fixed(4,2,6)", "fixed(3,1,4)")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)
    return folder, learned_head(folder, COUNT, tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def models(folders):
    return learned_models(*folders)


@pytest.fixture(scope="module")
def evaluated(folders, tmp_path_factory):
    """eval.json of two trees at two temperatures, its manifest, and the reported progress."""
    folder, head = folders
    models = {"max_batch": 4, "max_length": 200}
    config = EvalConfig(trees=TREES, max_tokens=24, models=models)
    root, told = str(tmp_path_factory.mktemp("run")), []

    def run(track):
        output = StageFolder(root, "eval")
        manifest = evaluate(
            config, str(folder), head.url, output, prompts=eval_prompts(COUNT), track=track
        )
        return output.read_json("eval.json"), manifest, output.was_done

    result, manifest, _ = run(lambda done, total=None, note="": told.append((done, total)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees.Target, "load", lambda *_: pytest.fail("a finished eval loads models"))
        assert run(quiet) == (result, manifest, True)
    return result, manifest, told


def test_says_of_each_tree_and_temperature_what_the_engine_does(evaluated, models, folders):
    result, manifest, told = evaluated
    assert told == [(done, 4 * COUNT) for done in range(1, 4 * COUNT + 1)]
    measured = [(one["speculation"], one["temperature"]) for one in result["trees"]]
    assert measured == [(tree, temperature) for temperature in (0.0, 1.0) for tree in TREES]
    for one in result["trees"]:
        requests = prompt_set(folders[0], COUNT).requests(24, one["temperature"], 0)
        results = list(models.engine(one["speculation"]).run(requests))
        hist = [sum(counts) for counts in zip(*(one.accept_hist for one in results), strict=True)]
        assert one["accept_hist"] == hist
        assert one["tokens"] == sum(len(served.token_ids) for served in results)
        assert one["tau"] == pytest.approx(tau_of(hist))
        low, high = one["tau_interval"]
        assert 1 <= low <= one["tau"] <= high
        assert one["tau"] <= one["tau_ceiling"] <= one["tau_ceiling_full_vocabulary"]
        assert one["tau_ceiling_full_vocabulary"] <= one["num_draft_steps"] + 1
        sources, languages = one["by_source"], one["by_language"]
        assert set(sources) == set(SOURCES)
        assert sum(part["rounds"] for part in sources.values()) == one["rounds"] == sum(hist)
        assert sum(part["answers"] for part in languages.values()) == one["answers"] == COUNT
        assert one["by_language"]["de"]["answers"] == COUNT // 3
    first = result["trees"][0]
    assert sum(first["accept_hist"][1:]) > 10, "a head that accepts nothing would prove nothing"
    assert all(result[name] == first[name] for name in ("tau", "accept_hist", "rounds"))
    assert manifest.facts["tau"] == result["tau"]
    assert "temperature 0" in result["assumes"]


def test_prompts_that_cannot_be_asked_are_left_out(folders, tmp_path):
    chat, some = Chat(folders[0]), eval_prompts(4)
    lengths = [len(chat.prompt_ids(one.messages)) for one in some]
    kept = PromptSet.of(some, chat, min(lengths))
    assert kept.num_left_out == sum(length > min(lengths) for length in lengths) > 0
    with pytest.raises(EmptyInputError, match="none of the 4"):
        PromptSet.of(some, chat, 3)
    assert prompts_digest(some) != prompts_digest(some[::-1])
    output = Artifact(str(tmp_path / "out"))
    with pytest.raises(EmptyInputError, match="nothing held out"):
        evaluate(EvalConfig(), str(folders[0]), folders[1].url, output)
    assert not (tmp_path / "out").exists()
