"""The replay: the right reading of a head that really drafts is the best."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from eyas import builtin
from eyas.errors import CorruptError, EmptyInputError, MissingInputError
from eyas.export.check import check, exit_code
from eyas.export.readings import DECLARED, HeadReading, misreadings
from eyas.export.replay import AnswerBatch, answered, conversations, decoded, replay, replay_head
from eyas.export.verdict import ReadingScore, reading_findings, verdict
from eyas.model.config import RopeConfig
from eyas.model.target import Target
from eyas.operators.decoder import HookedDecoder
from eyas.operators.head import Head
from eyas.operators.tensors import read_head, tensor_of, write_head
from eyas.operators.ttt import Slots, unroll
from eyas.operators.vocab import TargetVocabulary
from tests.architectures import saved_architecture
from tests.oracle.target import logits_of
from tests.test_cli import run_eyas
from tests.tiny import tiny_target
from tests.tiny_head import edit_config, head_folder, tiny_head, write_folder

NUM_CONVERSATIONS = 8
STEPS_BY_HEART = 120
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def world():
    folder = builtin.target_folder()
    target = Target.load(folder, "bfloat16")
    return (
        target,
        *read_head(builtin.head_folder(), target.config),
        answered(target, folder, builtin.demo_prompts(), NUM_CONVERSATIONS),
    )


def replayed(config, tensors, target, answers):
    matrices = (tensor_of(one).float() for one in (target.embed_tokens, target.lm_head))
    vocabulary = TargetVocabulary(target.config, *matrices, target.lm_head_sha256)
    return replay([HeadReading(DECLARED, config, tensors)], target, vocabulary, answers)


def changed(config, **changes):
    return config.model_copy(update=changes)


@pytest.fixture
def only(monkeypatch):
    """Leave these misreadings only, by name: each costs a second."""

    def leave(*names):
        def some(*args):
            return (one for one in misreadings(*args) if one.name in names)

        monkeypatch.setattr("eyas.export.replay.misreadings", some)

    return leave


def test_the_right_reading_of_a_sound_head_is_the_best(world):
    target, config, tensors, answers = world
    declared, *others = replayed(config, tensors, target, answers)
    assert declared.reading == DECLARED
    assert declared.tau > 1.8
    assert len(others) >= 4
    assert all(one.gain(declared)[0] < 0 for one in others)
    assert sum(declared.places) > 100
    assert list(reading_findings([declared, *others])) == []


@pytest.mark.parametrize(
    ("changes", "better"),
    [
        ({"norm_before_residual": True}, "norm_before_residual off"),
        ({"taps": (2, 6, 9)}, "layers one earlier (outputs taken for inputs)"),
        ({"rope": RopeConfig(theta=100.0)}, "the target's rotary embedding"),
    ],
)
def test_a_misread_head_says_how_it_would_be_right(world, changes, better):
    target, config, tensors, answers = world
    declared, *others = replayed(changed(config, **changes), tensors, target, answers)
    assert max(others, key=lambda one: one.accepted_drafts).reading == better
    (finding,) = reading_findings([declared, *others])
    assert better in finding.what
    assert finding.hint


def test_random_weights_draft_next_to_nothing_and_that_is_said(world, only):
    only()
    target, config, tensors, answers = world
    tensors = tensors | {"fc.weight": tensors["fc.weight"].roll(1, 0)}
    (finding,) = reading_findings(replayed(config, tensors, target, answers))
    assert finding.level == "warning"
    assert "next to nothing" in finding.what


LM_HEAD, ATTENTION = "lm_head.weight", "midlayer.self_attn."


@pytest.mark.parametrize(
    ("planted", "right"),
    [
        (
            lambda of: {
                name: one.roll(one.shape[1] // 2, 1)
                for name, one in of.items()
                if name.removeprefix(ATTENTION)[:6] in ("q_proj", "k_proj", "v_proj")
            },
            "the feature before the embedding",
        ),
        (lambda of: {"d2t": torch.zeros_like(of["d2t"])}, "d2t by the rows of lm_head"),
        (lambda of: {LM_HEAD: of[LM_HEAD].roll(1, 1)}, "the target's lm_head"),
    ],
    ids=["inputs", "map", "lm_head"],
)
def test_a_head_that_drafts_nothing_is_read_as_if_its_file_were_written_otherwise(
    world, only, planted, right
):
    only()
    target, config, tensors, answers = world
    found = replayed(config, tensors | planted(tensors), target, answers)
    (finding,) = reading_findings(found)
    assert finding.level == "error"
    assert f"read as {right!r}" in finding.what
    assert "convert the tensors" in finding.hint


def test_without_a_chat_template_text_that_is_given_is_replayed(tmp_path):
    folder = tiny_target(tmp_path / "target", eos_token_id=2)
    (folder / "chat_template.jinja").unlink()
    head = head_folder(folder, tmp_path / "head")
    none, why_not = replay_head(head, folder)
    assert none == []
    assert "--text is replayed all the same" in why_not
    rows = [
        [{"role": "user", "content": "A table in San Jose."}],
        [{"role": "user", "content": "71 North"}, {"role": "assistant", "content": "Street."}],
    ]
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    scores, why_not = replay_head(head, folder, text)
    assert why_not == ""
    assert scores[0].reading == DECLARED
    assert len(scores[0].places) == 2
    (tmp_path / "empty.txt").write_text("")
    assert "holds no conversation" in replay_head(head, folder, tmp_path / "empty.txt")[1]
    (folder / "chat_template.jinja").write_text("nothing of the messages")
    scores, why_not = replay_head(head, folder, text)
    assert scores == []
    assert "leaves out a message" in why_not


@pytest.mark.parametrize(
    ("form", "changes", "meant", "keys"),
    [
        (
            "sglang",
            {"norm_output": True},
            "norm_output before lm_head",
            '{"norm_output_is_fed_back": false}',
        ),
        (
            "vllm",
            {"norm_before_residual": None},
            "as speculators reads it",
            '{"norm_before_residual": false}',
        ),
        (
            "sglang",
            {"eagle_config": {IDS: [2, 6, 9]}},
            "as vLLM reads them",
            f'{{"{IDS}": [2, 6, 9]}}',
        ),
    ],
    ids=["norm_output", "norm_before_residual", "layers"],
)
def test_what_is_open_is_replayed_in_each_way_and_the_best_is_named(
    world, tmp_path, monkeypatch, only, form, changes, meant, keys
):
    only()
    _, config, tensors, answers = world
    monkeypatch.setattr("eyas.export.replay.answered", lambda *_, **__: answers)
    folder = write_folder(write_head(config, tensors, form), tmp_path / "head")
    (open_to_two, *rest) = check(edit_config(folder, **changes), "builtin")
    assert open_to_two.level == "error"
    assert len(open_to_two.meanings) == 2
    ways, why_not = replay_head(folder, "builtin")
    assert why_not == ""
    assert meant in ways[0].reading
    assert {one.reading for one in ways[:2]} == set(open_to_two.meanings)
    assert ways[0].tau > ways[1].tau
    told, *more = verdict([open_to_two, *rest], ways)
    assert more == rest
    assert exit_code([told]) == 2
    assert all(f"{one.tau:.2f} with {one.reading!r}" in told.hint for one in ways[:2])
    assert told.hint.endswith(f"{ways[0].reading!r} is meant: write {keys}")
    # what the hint says to write settles it
    assert check(edit_config(folder, **json.loads(keys)), "builtin") == rest


def test_several_open_questions_are_replayed_together(world, tmp_path, monkeypatch, only):
    only()
    _, config, tensors, answers = world
    monkeypatch.setattr("eyas.export.replay.answered", lambda *_, **__: answers)
    folder = write_folder(write_head(config, tensors, "sglang"), tmp_path / "head")
    edit_config(folder, norm_output=True, eagle_config={IDS: [2, 6, 9]})
    ways, _ = replay_head(folder, "builtin")
    assert "before lm_head" in ways[0].reading
    assert "as inputs" in ways[0].reading
    findings = verdict(check(folder, "builtin"), ways)
    assert "is meant: write" in next(one.hint for one in findings if one.meanings)
    # as outputs beyond the target: one way is left of these
    beyond = edit_config(folder, eagle_config={IDS: [2, 6, 12]})
    ways, _ = replay_head(beyond, "builtin")
    assert sum("as outputs" in one.reading for one in ways) == 0
    assert sum("as inputs" in one.reading for one in ways) == 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), rope_theta=500000.0)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({}, {"norm_before_residual on", "norm_output on"}),
        (
            {"norm_before_residual": True, "norm_output": True},
            {"norm_before_residual off", "norm_output off"},
        ),
        ({"norm_before_fc": True}, {"norm_before_fc off"}),
        ({"fc_norm": True}, {"fc_norm off"}),
    ],
    ids=["plain", "two", "norm_before_fc", "fc_norm"],
)
def test_every_flag_is_read_the_other_way_round(tiny, flags, names):
    found = misreadings(*tiny_head(tiny, **flags), TargetVocabulary.load(tiny))
    assert {one.name for one in found} >= {*names, "rope_theta 10000"}


def test_layers_are_read_as_every_engine_might(tiny):
    config, tensors = tiny_head(tiny)
    for own, others in ((config.taps, {(0, 2, 3), (2, 4, 5)}), ((0, 3, 7), {(1, 3, 4)})):
        declared = changed(config, taps=own)
        found = misreadings(declared, tensors, TargetVocabulary.load(tiny))
        assert {one.config.taps for one in found} == {own, *others}


def test_what_a_head_has_of_its_own_is_read_without(tiny):
    vocabulary = TargetVocabulary.load(tiny)
    config, tensors = tiny_head(tiny)
    own = tensors | {"embed_tokens.weight": torch.rand(320, 32)}
    config = changed(config, rope=RopeConfig(theta=3e4))
    names = {reading.name for reading in misreadings(config, own, vocabulary)}
    assert {"the target's embeddings", "the target's rotary embedding"} <= names
    assert "d2t as ids" not in names
    ids = tensors | {"d2t": torch.arange(64) + tensors["d2t"]}
    readings = misreadings(config, ids, vocabulary)
    (as_ids,) = (reading for reading in readings if reading.name == "d2t as ids")
    assert torch.equal(as_ids.tensors["d2t"], tensors["d2t"])
    assert torch.equal(as_ids.tensors["t2d"], tensors["t2d"])


def scored(accepted, places, name=DECLARED):
    """A score with these drafts accepted, spread over the places of each answer."""
    answers = [
        [[(at + 1) * a // n - at * a // n for at in range(n)]]
        for a, n in zip(accepted, places, strict=True)
    ]
    return ReadingScore(name, answers)


def test_a_gain_is_paired_over_answers():
    one, other = (scored(accepted, [10] * 4) for accepted in ([10, 12, 8, 11], [8, 10, 6, 9]))
    drafts, share, errors = one.gain(other)
    assert (drafts, share) == (pytest.approx(0.2), pytest.approx(8 / 33))
    assert errors > 1e6  # the same gain in every answer
    assert other.gain(one)[0] == pytest.approx(-0.2)


@pytest.mark.parametrize(
    ("accepted", "level"),
    [
        ([10, 30, 50, 70], None),
        ([15, 35, 55, 76], "error"),
        ([12, 31, 51, 72], "warning"),
        ([40, 0, 20, 130], None),
    ],
    ids=["the same", "clearly more", "a little more", "more by accident"],
)
def test_another_reading_must_be_better_by_both_size_and_certainty(accepted, level):
    places = [20, 30, 40, 50]
    declared = scored([10, 30, 50, 70], places)
    findings = reading_findings([declared, scored(accepted, places, "other")])
    assert [finding.level for finding in findings] == ([level] if level else [])


@functools.cache
def trained_with(folder: Path, flag: str):
    """Target, config, tensors, answers: a tiny head with a flag that overfits its answers."""
    target = Target.load(folder)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 320, (12, 8), generator=generator).tolist()
    answers = [one for one in decoded(target, prompts) if sum(one.mask) > 20]
    config = changed(tiny_head(folder, 320)[0], **{flag: True})
    torch.manual_seed(0)
    head = Head(config)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.1) if weight.ndim > 1 else torch.nn.init.ones_(weight)
    batch = AnswerBatch.of(target, answers, config.taps).features(config.taps)
    tokens, slots = batch.tokens_BT, Slots.where(batch.loss_mask_BT)
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    embed_tokens = tensor_of(target.embed_tokens)
    for _ in range(STEPS_BY_HEART):
        embeds = F.embedding(tokens.roll(-1, 1), embed_tokens)
        steps = unroll(
            head,
            batch.aux_hidden_BTA,
            embeds,
            [slots] * 2,
            lambda step, _: slots.take(F.embedding(tokens.roll(-1 - step, 1), embed_tokens)),
        )
        loss = sum(
            F.cross_entropy(head.logits(hidden), slots.take(tokens.roll(-2 - step, 1)))
            for step, hidden in enumerate(steps)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    return target, config, tensors, answers


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_lost_flag_is_found_by_what_it_costs(tiny, flag):
    target, config, tensors, answers = trained_with(tiny, flag)
    declared, *others = replayed(config, tensors, target, answers)
    assert declared.tau > 2, declared
    assert list(reading_findings([declared, *others])) == []
    lost = changed(config, **{flag: False})
    (finding,) = reading_findings(replayed(lost, tensors, target, answers))
    assert finding.level == "error"
    assert f"{flag} on" in finding.what


def test_a_replay_through_transformers_is_our_engines(tiny):
    target, config, tensors, _ = trained_with(tiny, "norm_output")
    hooked, vocabulary = HookedDecoder.load(tiny, "float32"), TargetVocabulary.load(tiny)
    meant, scores = [HeadReading(DECLARED, config, tensors)], []
    for one in (target, hooked):
        answers = answered(one, tiny, builtin.demo_prompts(), NUM_CONVERSATIONS)
        scores.append((answers, replay(meant, one, vocabulary, answers)))
    assert scores[0] == scores[1]


@pytest.mark.parametrize("name", ["qwen3_next", "opt"])
def test_any_target_that_transformers_loads_is_replayed(name, tmp_path_factory, tmp_path):
    folder = saved_architecture(tmp_path_factory.getbasetemp(), name)
    head = head_folder(folder, tmp_path / "head", "sglang")
    text = tmp_path / "text.txt"
    text.write_text("Where is the street?\nA table for two.\nWhich number?\n")
    words = "check", head, "-t", folder, "--text", text
    shown = run_eyas(*words, "--json")
    told = json.loads(shown.stdout)
    assert told["not_replayed"] == ""
    assert told["replayed_by"] == "transformers"
    assert told["replay"][0]["answers"] == 3
    assert any("next to nothing" in finding["what"] for finding in told["findings"])
    shown = run_eyas(*words)
    assert "the target ran in transformers" in " ".join(shown.stdout.split())


def test_a_target_that_cannot_answer_here_is_not_replayed(tmp_path_factory, tmp_path, monkeypatch):
    folder = saved_architecture(tmp_path_factory.getbasetemp(), "opt")
    head = head_folder(folder, tmp_path / "head")
    for place, value, why in (
        (
            "transformers.OPTForCausalLM.generate",
            None,
            "OPTForCausalLM does not answer: 'NoneType'",
        ),
        ("eyas.export.replay.os.sysconf", lambda _: 1, "more than the 1 bytes of memory"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, value)
            scores, why_not = replay_head(head, folder)
        assert scores == []
        assert why in why_not


def test_text_is_prompts_or_answers_in_any_usual_shape(tmp_path):
    rows = [
        {
            "messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}],
            "source": "mail",
        },
        {"conversations": [{"from": "human", "value": "C?"}], "category": "chat", "source": "web"},
        {"messages": []},
        {"other": 1},
    ]
    unreadable = ["not json", "[" * 100_000, "[1]", ""]
    text = "\n".join(["\ufeff" + json.dumps(rows[0]), *map(json.dumps, rows[1:]), *unreadable])
    (tmp_path / "rows.jsonl").write_text(text)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "plain.txt").write_text("\ufeffOne?\n\nTwo?\n")
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        found = list(conversations(tmp_path / name))
        assert [[one["content"] for one in row] for row in found] == [["A?", "B."], ["C?"]]
    found = list(conversations(tmp_path / "plain.txt"))
    assert [row[0]["content"] for row in found] == ["One?", "Two?"]
    with pytest.raises(MissingInputError):
        list(conversations(tmp_path / "absent.txt"))


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.txt", b"\xff\xfe"), ("a.jsonl.gz", b"no gzip"), ("b.jsonl.gz", gzip.compress(b"{}")[:-6])],
)
def test_what_is_no_text_is_said(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorruptError, match="no text"):
        list(conversations(tmp_path / name))


def test_a_kept_answer_is_taken_as_it_is_and_a_prompt_is_answered(tiny, tmp_path, caplog):
    target = Target.load(tiny)
    prompt = {"role": "user", "content": "user"}
    answer = {"role": "assistant", "content": "The address"}
    named = {**answer, "content": "The <|im_end|> token"}
    rows = [{"messages": [prompt, one]} for one in (named, answer)] + [{"messages": [prompt]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kept, made = answered(target, tiny, tmp_path / "rows.jsonl")
    assert [*caplog.records[0].data["reasons"].values()] == [1], "left out, and counted"
    assert len(kept.token_ids) == len(kept.mask)
    assert 0 < sum(kept.mask) < len(kept.mask)
    first = made.mask.index(True)
    ids = torch.tensor([made.token_ids])
    greedy = logits_of(target, ids)[0].argmax(-1)
    assert made.token_ids[first:] == greedy[first - 1 : -1].tolist()
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(EmptyInputError):
        answered(target, tiny, tmp_path / "empty.txt")


def test_the_command_ends_with_its_verdict_and_as_json(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("I would like a table for two in San Jose.\nBook me a flight to Paris.\n")
    command = "check", "builtin", "--target", "builtin", "--text", text
    result = run_eyas(*command, "--json")
    told = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == told["exit_code"] == 0, result.output
    assert told["findings"] == []
    assert told["not_replayed"] == ""
    assert told["replay"][0]["reading"] == DECLARED
    assert told["replay"][0]["tau"] > 1.3
    keys = {"reading", "tau", "accepted_drafts", "gain", "standard_errors"}
    assert keys <= told["replay"][1].keys()
    shown = run_eyas(*command, "--no-replay")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("OK: fits SGLang, vLLM")


def test_an_error_is_json_too(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for folder, named in (
        (tmp_path / "absent", "no head folder"),
        (tmp_path / "broken", "not JSON"),
    ):
        result = run_eyas("check", folder, "--target", "builtin", "--json")
        told = json.loads(result.stdout)
        assert result.exit_code == told["exit_code"] == 2
        assert named in told["error"]
        assert told["hint"]
        assert "error: " in result.stderr


def test_a_head_that_cannot_be_read_is_not_replayed(tiny, tmp_path):
    folder = edit_config(head_folder(tiny, tmp_path / "head", "sglang"), fc_norm=True)
    replayed, why_not = replay_head(folder, tiny)
    assert replayed == []
    assert "fc_norm.0.weight is missing" in why_not
    assert exit_code(check(folder, tiny)) == 2
