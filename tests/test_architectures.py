"""Every architecture of the table through every stage, at tiny size: a server of it answers,
transformers computes its hidden states, a head is trained, evaluated, exported and checked; our own
engine serves it, or refuses in one error that says what to do.

`python -m tests.test_architectures` writes docs/architectures.md.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.artifact import Artifact
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.errors import MismatchError
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.export.check import check
from eyas.export.engines import ENGINES, EngineAbilities
from eyas.export.export import ExportConfig, export
from eyas.features.capture import CaptureConfig, capture
from eyas.features.generate import GenerateConfig, generate
from eyas.operators.foreign import auto_class, transformers_config
from eyas.records import read_answers
from eyas.shards import Features
from eyas.train.trainer import TrainConfig, train
from tests.architectures import ARCHITECTURES, saved_architecture
from tests.greedy_server import serving_greedily
from tests.stages import prompts_of, write_prompts
from tests.tiny_prompts import eval_prompts

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"
TRAIN = TrainConfig(
    objective={"num_ttt_steps": 2}, epochs=24, batches={"tokens": 256}, stop={"measurements": 1}
)
SPECULATION = "fixed(2,2,4)"
EVAL = EvalConfig(trees=(SPECULATION,), temperatures=(0.0,), max_tokens=6, num_draft_steps=2)
OPTION = "needs an option; the command on the head's card has it."
INTRODUCTION = """# Architectures

Which stages and engines run with which model. `python -m tests.test_architectures` writes this
page; a test runs every row on a small model with random weights.

**Trained for** means that these stages run: a server answers (`eyas generate --server URL`: vLLM or
SGLang), transformers computes hidden states (`eyas capture`), and the head is trained, evaluated
(by trees along the model's own answers), exported and checked. Our **own engine** also answers,
captures and serves without a server, with the same output as without a head; it refuses a model
that it has no entry for.

Other models may run too: eyas tries any language model of seven or more layers that transformers
loads, and first compares the captured states with the model's own logits. Begin with ten prompts.

The last columns list the engines that serve such a target with an EAGLE-3 head, as read in their
sources. If there is none, eyas still measures the head; `eyas export` and `eyas check` say so.

"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts", prompts_of(6))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_stage_runs_or_says_what_to_do(name, prompts, tmp_path, tmp_path_factory):
    folder = str(saved_architecture(tmp_path_factory.getbasetemp(), name))
    answers, features, head, evaluation, exported = (
        Artifact(str(tmp_path / stage))
        for stage in ("generate", "capture", "train", "eval", "export")
    )
    asked = GenerateConfig(target=folder, max_tokens=12, client={"send": "tokens"})
    config = CaptureConfig(target=folder, decoder="transformers", held_out_share=0.5)
    with refused_as(name), serving_greedily(Path(folder)) as url:
        generate(asked.model_copy(update={"servers": (url,)}), prompts, answers)
        capture(config, answers, features)
    if ARCHITECTURES[name].refused:
        return
    said = {token for row in read_answers(answers) for token in row.answer_ids}
    assert len(said) > 10, "a target that repeats itself shows nothing"
    held_out = Features(features, "held_out")
    assert_transformers_states(folder, held_out)
    trained = train(TRAIN, folder, Features(features, "train"), head, held_out=held_out)
    assert trained.facts["last_batches"]["accuracy"][0] > 0, "it repeats what it has seen"
    asked = eval_prompts(2) if ARCHITECTURES[name].own else ()
    manifest = evaluate(EVAL, folder, head.url, evaluation, held_out, asked)
    assert 1 <= manifest.facts["tau"] <= 3
    export(ExportConfig(), folder, head, exported, evaluation=evaluation)
    for form in ("sglang", "vllm"):
        findings = check(tmp_path / "export" / form, folder)
        family = ARCHITECTURES[name].config_of().model_type
        unable = {one.release for one in ENGINES if not one.serves(family)}
        of_engines = [one for one in findings if one.what.startswith("not served by")]
        assert all(any(title in one.what for one in of_engines) for title in unable)
        assert all(one.level == "note" for one in findings if one not in of_engines), findings
    serves_or_refuses(name, folder, tmp_path / "export" / "sglang", answers)


def assert_transformers_states(folder: str, features: Features) -> None:
    """What was captured is what the model itself puts out, in bfloat16."""
    kind = auto_class(transformers_config(folder))
    model, taps = kind.from_pretrained(folder).eval(), features.meta.taps
    for sample in features.stream(range(2)):
        with torch.inference_mode():
            ids = sample.token_ids[None].long()
            states = model(input_ids=ids, output_hidden_states=True).hidden_states
        tapped, kept = torch.cat([states[tap + 1][0] for tap in taps], dim=-1), sample.loss_mask
        for found, expected in (
            (sample.aux_hidden, tapped),
            (sample.last_hidden[kept], states[-1][0][kept]),
        ):
            torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-3)


def refused_as(name: str) -> AbstractContextManager[Any]:
    refused = ARCHITECTURES[name].refused
    return pytest.raises(MismatchError, match=refused[1]) if refused else nullcontext()


def serves_or_refuses(name: str, folder: str, head: Path, answers: Artifact) -> None:
    config = EngineConfig(max_batch=4, max_length=256, speculation=SPECULATION)
    if not ARCHITECTURES[name].own:
        with pytest.raises(MismatchError) as raised:
            Engine.load(folder, head, config=config)
        assert "answer prompts by a server" in raised.value.hint
        return
    engine, rows = Engine.load(folder, head, config=config), list(read_answers(answers))
    requests = [Request(row.key, row.prompt_ids, SamplingParams(max_tokens=12)) for row in rows]
    served = {one.request_id: tuple(one.token_ids) for one in engine.run(requests)}
    assert served == {row.key: row.answer_ids for row in rows}


def page() -> str:
    titles = "model", "`model_type`", "trained for", "own engine"
    rows = [(*titles, *(engine.title for engine in ENGINES))]
    rows.append(tuple("---" for _ in rows[0]))
    for entry in ARCHITECTURES.values():
        family = entry.config_of().model_type
        served = ["yes" if entry.own else "-"]
        served += ["-" if entry.refused else served_by(one, family) for one in ENGINES]
        trained = "yes" if entry.refused is None else f"no: {entry.refused[0]}"
        rows.append((entry.models, f"`{family}`", trained, *served))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    versions = ", ".join(engine.release for engine in ENGINES)
    return f"{INTRODUCTION}{table}\n(1) {OPTION}\n\nRead in {versions}.\n"


def served_by(engine: EngineAbilities, family: str) -> str:
    if not engine.serves(family):
        return "-"
    return "yes (1)" if family in engine.options else "yes"


def test_the_page_says_what_the_table_says():
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
