"""eyas as Python programs use it: light to import, typed names, and the answers and heads that the
commands give, to the token and to the byte.
"""

from __future__ import annotations

import ast
import gc
import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import eyas
from eyas.artifact import VERSION, Artifact
from eyas.errors import ConfigError, MismatchError, MissingInputError
from eyas.llm import LLM, ChatOptions, CompletionOptions
from eyas.model.target import Target
from eyas.serve.app import ModelService
from eyas.serve.protocol import ChatRequest, TextRequest
from eyas.serve.translation import ModelInfo
from tests.serving import MESSAGES, MODEL, TOOLS, GatedEngine, post
from tests.stages import ROOT
from tests.test_cli import run_eyas
from tests.tiny import tiny_target
from tests.tiny_features import greedy_answers, samples_of, write_features
from tests.tiny_head import head_folder

PROMPTS = ["I would like a table for two.", "The address is", "0123", "user"]
# fields of a request without a meaning here, or with another name
WITHOUT_MEANING = {
    *("model", "messages", "prompt", "stream", "stream_options", "n", "request_id"),
    *("return_token_ids", "return_tokens_as_token_ids", "add_generation_prompt"),
    # other servers' names of what has one here
    *("max_completion_tokens", "repeat_penalty", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "ebnf", "structured_outputs"),
}


def llm_of(engine, chat):
    info = ModelInfo(MODEL, "float32", engine.draft is not None, engine.max_length)
    return LLM(ModelService.of(engine, chat, info))


@pytest.fixture(scope="module")
def llm(world):
    with llm_of(world.engine(), world.chat) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(world, tmp_path_factory):
    """With a head that drafts in every round."""
    head = tmp_path_factory.mktemp("drafting") / "head"
    with llm_of(world.drafting(head, "fixed(3,2,6)"), world.chat) as llm:
        yield llm


def said(prompt):
    return [{"role": "user", "content": prompt}]


class TestNames:
    def test_importing_it_imports_nothing(self):
        heavy = "torch", "numpy", "pydantic", "fsspec", "eyas.errors", "asyncio"
        code = f"import sys, eyas; sys.exit(sum(one in sys.modules for one in {heavy}))"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_the_stub_says_what_there_is(self):
        tree = ast.parse(Path(ROOT / "eyas" / "__init__.pyi").read_text())
        stated = {
            alias.asname: f"{node.module}:{alias.name}"
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module.startswith("eyas.")
            for alias in node.names
        }
        assert stated == eyas._HOMES
        (listed,) = (node for node in tree.body if isinstance(node, ast.Assign))
        assert sorted(ast.literal_eval(listed.value)) == sorted(eyas.__all__)
        assert set(eyas.__all__) <= set(dir(eyas))
        assert eyas.__version__ == VERSION
        for name in set(eyas.__all__) - {"__version__"}:
            assert getattr(eyas, name).__doc__, name

    def test_another_name_is_no_attribute(self):
        with pytest.raises(AttributeError, match="no attribute 'chat_with'"):
            _ = eyas.chat_with

    def test_stages_are_functions_before_and_after_their_modules_are_imported(self):
        code = """
import eyas, sys
for imported in (False, True):
    if imported:
        import eyas.train.trainer, eyas.evaluate.evaluate
    assert ("eyas.train" in sys.modules) is imported
    for stage, words in ((eyas.train, {"target": "none"}), (eyas.evaluate, {})):
        try:
            stage("nowhere", **words)
        except eyas.InputError as error:
            print(error.what)
print(eyas.train.trainer.TrainConfig.__name__)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("nowhere") == 4
        assert done.stdout.endswith("TrainConfig\n")

    def test_without_pytorch_it_says_what_to_install(self):
        code = "import sys; sys.modules['torch'] = None; import eyas; eyas.train"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "eyas.train needs torch: pip install 'eyas[train]'" in done.stderr

    @pytest.mark.parametrize(
        ("options", "body"), [(ChatOptions, ChatRequest), (CompletionOptions, TextRequest)]
    )
    def test_options_are_a_requests_fields(self, options, body):
        assert set(options.__annotations__) == set(body.model_fields) - WITHOUT_MEANING


class TestAnswers:
    @pytest.mark.parametrize("which", ["llm", "drafting"])
    def test_they_are_the_servers_to_the_token(self, which, world, request):
        llm = request.getfixturevalue(which)
        options = {"temperature": 0, "max_tokens": 24}
        answers = llm.chat([MESSAGES, *map(said, PROMPTS)], **options, logprobs=True)
        with world.served() as client:
            for messages, answer in zip([MESSAGES, *map(said, PROMPTS)], answers, strict=True):
                body = {"model": MODEL, "messages": messages, "logprobs": True, **options}
                served = post(client, body | {"return_token_ids": True}).json()
                (choice,) = served["choices"]
                assert answer.token_ids == choice["token_ids"]
                assert answer.prompt_ids == served["prompt_token_ids"]
                assert answer.text == str(answer) == choice["message"]["content"]
                assert answer.finish_reason == choice["finish_reason"] == "length"
                scored = [one["logprob"] for one in choice["logprobs"]["content"]]
                assert [one.logprob for one in answer.logprobs] == scored
                assert [one.token_id for one in answer.logprobs] == answer.token_ids
                texts = [one["token"] for one in choice["logprobs"]["content"]]
                assert [one.text for one in answer.logprobs] == texts
                assert llm.tokenizer.decode(answer.token_ids) == answer.text
                assert (answer.text, answer.token_ids) == world.truth(messages, max_tokens=24)

    def test_rounds_are_those_that_the_head_drafted_in(self, llm, drafting):
        plain, drafted = (one.chat("user", max_tokens=20, temperature=0) for one in (llm, drafting))
        assert (plain.rounds, plain.tau, plain.accept_hist) == (0, None, [])
        assert plain.token_ids == drafted.token_ids
        # the prefill draws the first token
        emitted = sum((1 + drafts) * count for drafts, count in enumerate(drafted.accept_hist))
        assert drafted.rounds == sum(drafted.accept_hist) > 0
        assert drafted.tau == emitted / drafted.rounds
        without = drafting.chat("user", max_tokens=20, temperature=0, speculation=False)
        assert (without.rounds, without.token_ids) == (0, plain.token_ids)

    def test_a_batch_is_its_prompts_one_by_one(self, llm):
        options = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
        prompts = list(itertools.islice(itertools.cycle(PROMPTS), 19))  # of which 4 run at a time
        together = llm.chat(prompts, **options)
        alone = {prompt: llm.chat(prompt, **options) for prompt in PROMPTS}
        assert together == [alone[prompt] for prompt in prompts]
        assert llm.chat([]) == []

    def test_a_batch_has_a_bar_that_can_be_left_out(self, llm, capsys, monkeypatch):
        monkeypatch.setattr("eyas.log.LINE_EVERY_S", 0.0)
        llm.chat(PROMPTS, max_tokens=30)
        assert "answers" in capsys.readouterr().err
        llm.chat(PROMPTS, max_tokens=30, progress=False)
        llm.chat(PROMPTS[0], max_tokens=3)
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("which", ["llm", "drafting"])
    def test_pieces_joined_are_the_answer(self, which, request):
        llm = request.getfixturevalue(which)
        options = {"temperature": 0.8, "seed": 3, "max_tokens": 30, "logprobs": True}
        pieces = list(llm.chat(MESSAGES, stream=True, **options))
        answer = llm.chat(MESSAGES, **options)
        assert len(pieces) > 3
        assert "".join(piece.text for piece in pieces) == answer.text
        assert [one for piece in pieces for one in piece.token_ids] == answer.token_ids
        assert [one for piece in pieces for one in piece.logprobs] == answer.logprobs
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        drafted = [piece for piece in pieces if piece.num_accepted_drafts is not None]
        assert len(drafted) == answer.rounds
        assert all(len(piece.token_ids) == 1 + piece.num_accepted_drafts for piece in drafted[:-1])

    def test_texts_and_token_ids_go_on_without_a_template(self, llm, world):
        ids = world.chat.tokenizer.encode("I would like", add_special_tokens=False).ids
        text, tokens = llm.complete(["I would like", "0123"], temperature=0), llm.complete(ids)
        assert text[0].prompt_ids == tokens.prompt_ids == ids
        assert text[0] == llm.complete(ids, temperature=0)
        assert llm.complete([ids, ids[:2]], temperature=0)[0] == text[0]
        assert len(text[0].token_ids) == 16  # OpenAI's default
        (result,) = world.results(ids, max_tokens=16)
        assert text[0].token_ids == result.token_ids
        scored = llm.complete(ids, echo=True, logprobs=0, max_tokens=1)
        assert [one.token_id for one in scored.prompt_logprobs] == ids[1:]
        pieces = llm.complete(ids, stream=True, temperature=0)
        assert "".join(piece.text for piece in pieces) == text[0].text

    def test_tools_and_schemas(self, tooled):
        with llm_of(tooled.engine(max_length=1024), tooled.chat) as llm:
            options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
            asked = llm.chat("A table for two.", **options, temperature=0, max_tokens=200)
            assert asked.finish_reason in ("tool_calls", "length")
            if asked.finish_reason == "tool_calls":
                assert asked.tool_calls[0]["function"]["name"] in ("book", "cancel")
                json.loads(asked.tool_calls[0]["function"]["arguments"])
            answer = llm.chat("Yes or no?", regex="(yes|no)")
            assert answer.text in ("yes", "no")


class TestLife:
    def test_closing_a_stream_ends_its_request(self, llm):
        for piece in llm.chat(MESSAGES, stream=True, max_tokens=200):
            assert piece.finish_reason is None
            break
        gc.collect()
        assert llm._worker.num_requests == 0
        assert len(llm.chat("user", max_tokens=5).token_ids) == 5

    def test_threads_share_the_engine(self, llm):
        expected = [llm.chat(one, temperature=0, max_tokens=20) for one in PROMPTS]
        found = {}

        def work(number):
            found[number] = llm.chat(PROMPTS[number], temperature=0, max_tokens=20)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[number] for number in range(len(PROMPTS))] == expected

    def test_after_its_end_it_says_so(self, world):
        engine = world.engine(GatedEngine)
        over = threading.Event()

        def let_rounds_end():  # the end waits for the one under way
            while not over.wait(0.05):
                engine.gate.release()

        rounds = threading.Thread(target=let_rounds_end)
        with llm_of(engine, world.chat) as llm:
            stream = llm.chat(MESSAGES, stream=True, max_tokens=100)
            engine.gate.release(2)
            next(stream)
            rounds.start()
        over.set()
        rounds.join()
        with pytest.raises(eyas.EyasError, match=r"closed\n  -> load it again"):
            list(stream)
        with pytest.raises(eyas.EyasError, match="closed"):
            llm.chat("user")
        llm.close()
        assert not llm._thread.is_alive()

    def test_without_a_reference_its_threads_end(self, world):
        llm = llm_of(world.engine(), world.chat)
        thread = llm._thread
        assert len(llm.chat("user", max_tokens=2).token_ids) == 2
        del llm
        gc.collect()
        thread.join(300)
        assert not thread.is_alive()

    def test_an_interrupt_ends_what_it_waits_for(self, world, monkeypatch):
        engine = world.engine(GatedEngine)
        llm = llm_of(engine, world.chat)
        with monkeypatch.context() as patched:
            patched.setattr("concurrent.futures.Future.result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.chat("user", max_tokens=50)
        for _ in range(100):
            engine.gate.release()
        until = time.monotonic() + 300
        while llm._worker.num_requests and time.monotonic() < until:
            time.sleep(0.01)
        assert llm._worker.num_requests == 0
        llm.close()

    def test_an_engine_that_fails_fails_the_answer(self, world):
        engine = world.engine(GatedEngine)
        engine.error = RuntimeError("no memory")
        llm = llm_of(engine, world.chat)
        engine.gate.release()
        with pytest.raises(eyas.EyasError, match="the engine failed"):
            llm.chat("user")
        llm.close()


def interrupted(*_):
    time.sleep(0.2)
    raise KeyboardInterrupt


class TestErrors:
    @pytest.mark.parametrize(
        ("prompt", "options", "words"),
        [
            ("x", {"temperatur": 1}, ("unknown field temperatur", "options: temperature, top_p")),
            ("x", {"temperature": 9}, ("temperature", "less than or equal to 2")),
            ("x", {"n": 2}, ("n: a prompt", "[prompt] * 3")),
            ("x", {"max_tokens": 0}, ("max_tokens", "leave it out")),
            ("x", {"stop": {"a"}}, ("no JSON", "give strings")),
            ("x", {"top_logprobs": 3}, ("logprobs=true",)),
            ("user " * 300, {}, ("tokens", "max_length=")),
            (["user", "user " * 300], {}, ("prompts[1]: ", "max_length=")),
            ([MESSAGES, [{"role": "poet", "content": "x"}]], {}, ("prompts[1]: ", "role")),
            (["x"], {"stream": True}, ("stream=True is for one prompt", "one by one")),
            ([{"role": "user"}], {}, ("no content",)),
            ({"role": "user", "content": "x"}, {}, ("the prompt is a dict",)),
        ],
    )
    def test_one_clear_error(self, llm, prompt, options, words):
        with pytest.raises(eyas.InputError) as caught:
            llm.chat(prompt, **options)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert caught.value.hint

    def test_of_loading(self, world, tmp_path):
        for given, kind, words in (
            ({"target": tmp_path / "none"}, MissingInputError, "no target folder"),
            ({"target": world.folder, "max_length": 1}, ConfigError, "max_length"),
            ({"target": world.folder, "max_length": 9999}, ConfigError, "context of 256 tokens"),
            ({"target": world.folder, "dtype": "int7"}, ConfigError, "dtype"),
        ):
            with pytest.raises(kind, match=words):
                eyas.load(**given)
        other = tiny_target(tmp_path / "other", hidden_size=48, head_dim=12)
        head = head_folder(other, tmp_path / "head")
        with pytest.raises(MismatchError):
            eyas.load(world.folder, head)


def test_loading_is_the_servers(world, tmp_path):
    head = head_folder(world.folder, tmp_path / "head")
    sizes = {"max_length": 128, "max_batch": 3, "speculation": "fixed(3,2,6)", "threads": 1}
    with eyas.load(world.folder, head, **sizes) as llm:
        answer = llm.chat(MESSAGES, temperature=0, max_tokens=24)
        assert llm.max_length == 128
    assert answer.rounds > 0
    assert (answer.text, answer.token_ids) == world.truth(max_tokens=24)
    assert torch.get_num_threads() == 1


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    target = tiny_target(folder / "target", num_hidden_layers=8)
    samples = samples_of(Target.load(target), greedy_answers(target, 12), "one")
    write_features(folder / "features", Target.load(target), samples[:9], samples[9:])
    return folder


TRAIN = {"head": {"draft_vocab_size": 64}, "objective": {"num_ttt_steps": 3}, "epochs": 1}


class TestStages:
    def test_train_is_the_commands(self, features, capsys):
        target = features / "target"
        head = eyas.train(features / "features", target=target, **TRAIN)
        assert "train     done: " in capsys.readouterr().err
        assert Path(head).parent == features
        assert head.rpartition("/")[2].startswith("train-")
        settings = "-s head.draft_vocab_size=64 -s objective.num_ttt_steps=3 -s epochs=1"
        command = f"train {features}/features -t {target} -o {features}/by-command {settings}"
        assert run_eyas(command).exit_code == 0
        ours, theirs = Artifact(head), Artifact(str(features / "by-command"))
        assert ours.manifest("train").identity == theirs.manifest("train").identity
        assert ours.read("model.safetensors") == theirs.read("model.safetensors")
        again = eyas.train(features / "features", target=target, progress=False, **TRAIN)
        assert again == head  # done already
        assert capsys.readouterr().err == ""

    def test_evaluate_is_the_commands(self, features, tmp_path):
        target = features / "target"
        head = str(head_folder(target, tmp_path / "head"))
        small = {"trees": ["fixed(2,2,4)"], "temperatures": [0], "max_tokens": 12}
        small["models"] = {"max_length": 200}
        found = eyas.evaluate(head, PROMPTS, target=target, progress=False, **small)
        rows = [{"id": n, "messages": said(one)} for n, one in enumerate(PROMPTS)]
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["eval", head, "-t", target, "-o", tmp_path / "out", "--prompts", file]
        words += ["--trees", "fixed(2,2,4)", "--temperatures", "0"]
        shown = run_eyas(*words, "-s", "max_tokens=12", "-s", "models.max_length=200")
        told = json.loads(shown.stdout.splitlines()[-1])
        assert (found.tau, found.accept_hist) == (told["tau"], told["accept_hist"])
        assert found.result["answers"] == len(PROMPTS)
        kept = eyas.evaluate(head, file, target=target, output=tmp_path / "out", **small)
        assert kept.tau == found.tau  # done already, by the command

    def test_a_head_says_its_target(self, features):
        with pytest.raises(MissingInputError, match=r"which target.*\n  -> give target=NAME"):
            eyas.evaluate(str(head_folder(features / "target", features / "plain")), ["user"])
        found = eyas.evaluate(
            "builtin", ["A table for two, please.", MESSAGES], trees=["fixed(4,1,5)"],
            temperatures=[0], max_tokens=24, progress=False,
        )  # fmt: skip
        assert found.result["answers"] == 2
        assert found.tau > 1

    def test_settings_that_do_not_fit(self, features):
        with pytest.raises(ConfigError, match=r"output.*Field required"):
            eyas.run({"target": "builtin"})
