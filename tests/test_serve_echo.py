"""Log-probabilities of prompts (`echo` with `logprobs`): against transformers, against the answers'
own, and however the prefill is cut.
"""

import json
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.engine import engine as engine_module
from eyas.engine.request import Request, SamplingParams
from eyas.serve import answers
from eyas.serve.writers import TextWriter
from tests.serving import MAX_LENGTH, MODEL, complete, post

PROMPT = "I would like a table for two."
SCORING = {"echo": True, "logprobs": 2, "max_tokens": 0}


@pytest.fixture(scope="module")
def client(world, tmp_path_factory):
    """With a head: prompts are scored beside rounds that draft."""
    engine = world.drafting(tmp_path_factory.mktemp("heads") / "head", "fixed(2,2,4)")
    with world.served(engine, has_head=True) as client:
        yield client


@pytest.fixture(scope="module")
def reference(world):
    """Log-probabilities [T, V] after each token of a prompt, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(world.folder, dtype=torch.float32).eval()

    def logprobs(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()

    return logprobs


def ids_of(world, text=PROMPT):
    return world.chat.tokenizer.encode(text, add_special_tokens=False).ids


def scores(reply, number=0):
    return reply.choices[number].logprobs.token_logprobs


# The numbers


def test_a_prompt_is_scored_as_transformers_scores_it(client, world, reference):
    ids = ids_of(world)
    reply = complete(client, PROMPT, **SCORING)
    logprobs, truth = reply.choices[0].logprobs, reference(ids)
    of_tokens = [truth[place, token] for place, token in enumerate(ids[1:])]
    assert logprobs.token_logprobs[0] is None
    np.testing.assert_allclose(logprobs.token_logprobs[1:], of_tokens, atol=2e-4)
    assert logprobs.top_logprobs[0] is None
    best = [sorted(top.values(), reverse=True) for top in logprobs.top_logprobs[1:]]
    np.testing.assert_allclose(best, np.sort(truth[:-1])[:, :-3:-1], atol=2e-4)
    assert "".join(logprobs.tokens) == reply.choices[0].text == PROMPT
    assert logprobs.text_offset == [0, *np.cumsum([len(one) for one in logprobs.tokens])[:-1]]
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), 0)


@pytest.mark.parametrize("speculation", [False, True])
def test_a_scored_answer_has_its_own_logprobs(client, world, speculation):
    """To the last bit: one forward's sums are any forward's."""
    asked = {"max_tokens": 24, "logprobs": 2, "extra_body": {"speculation": speculation}}
    answered = complete(client, PROMPT, **asked).choices[0].logprobs
    params = SamplingParams(max_tokens=24)
    (result,) = world.engine().run([Request("r", tuple(ids_of(world)), params)])
    whole = complete(client, ids_of(world) + result.token_ids, **SCORING).choices[0].logprobs
    assert whole.token_logprobs[-24:] == answered.token_logprobs
    assert whole.tokens[-24:] == answered.tokens


def test_prompt_then_answer(client, world):
    alone = complete(client, PROMPT, max_tokens=6, logprobs=1).choices[0]
    reply = complete(client, PROMPT, echo=True, logprobs=1, max_tokens=6)
    both, count = reply.choices[0], len(ids_of(world))
    assert both.text == PROMPT + alone.text
    assert both.logprobs.tokens[count:] == alone.logprobs.tokens
    assert scores(reply)[count:] == alone.logprobs.token_logprobs
    assert both.logprobs.text_offset[count:] == [
        len(PROMPT) + one for one in alone.logprobs.text_offset
    ]


def test_a_cached_prompt_is_scored_whole(client, world):
    text = PROMPT * 4
    complete(client, text)
    first, again = (complete(client, text, **SCORING) for _ in range(2))
    assert scores(first) == scores(again)
    assert len(scores(first)) == len(ids_of(world, text))


def test_special_tokens_have_no_length(client, world):
    ids = [world.chat.tokenizer.token_to_id("<|im_end|>"), *ids_of(world)]
    logprobs = complete(client, ids, **SCORING).choices[0].logprobs
    assert logprobs.tokens[0] == "<|im_end|>"
    assert logprobs.text_offset[:3] == [0, 0, len(logprobs.tokens[1])]


# However it is computed


def scored(engine, requests):
    results = {one.request_id: one for one in engine.run(requests)}
    engine.check()
    return [[each.logprob for each in results[one.id].prompt_logprobs] for one in requests]


def prompts(max_tokens=0, count=6):
    generator = np.random.default_rng(3)
    params = SamplingParams(prompt_logprobs=0, max_tokens=max_tokens)
    lengths = generator.integers(1, 60, count)
    return [
        Request(str(number), tuple(generator.integers(3, 300, length).tolist()), params)
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("max_tokens", [0, 9])
def test_logits_of_a_forward_are_bounded(world, monkeypatch, max_tokens):
    asked = prompts(max_tokens)
    whole = scored(world.engine(), asked)
    assert [len(one) for one in whole] == [len(request.prompt_ids) - 1 for request in asked]
    monkeypatch.setattr(engine_module, "SCORED_LOGITS", 5 * world.target.config.vocab_size)
    engine = world.engine()
    forward, rows = engine.rounds.target.forward, []
    monkeypatch.setattr(
        engine.rounds.target,
        "forward",
        lambda *args: rows.append(len(args[0] if args[3] is None else args[3])) or forward(*args),
    )
    parts = scored(engine, asked)
    assert max(rows) <= 5 + 4  # and the last row of each prompt of the batch, which draws
    assert len(rows) >= sum(len(one) for one in whole) / 5
    assert whole == parts


def test_a_preempted_prompt_is_scored_once(world, monkeypatch):
    asked = prompts(max_tokens=40)
    whole = scored(world.engine(), asked)
    monkeypatch.setattr(engine_module, "SCORED_LOGITS", 7 * world.target.config.vocab_size)
    engine = world.engine(num_pages=9)
    parts = scored(engine, asked)
    assert engine.metrics()["preemptions"] > 0
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


# Text without scores


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_echoes_its_own_prompt(client, world, stream):
    params = {"prompt": ["I would", "well", ids_of(world, "you")], "n": 2, "max_tokens": 3}
    plain = complete(client, **params)
    reply, texts = complete(client, **params, echo=True, stream=stream), [""] * 6
    for choice in [one for chunk in reply for one in chunk.choices] if stream else reply.choices:
        texts[choice.index] += choice.text
    before = [text for text in ("I would", "well", "you") for _ in range(2)]
    assert texts == [text + choice.text for text, choice in zip(before, plain.choices, strict=True)]
    assert plain.usage.completion_tokens == 18


# As clients ask


def harness(client, rows, context_lengths):
    """(sum of log-probabilities, whether all are the best) of each continuation, as
    lm-evaluation-harness 0.4 reads them; rows: contexts with their continuations.
    """
    body = {"model": MODEL, "prompt": rows, "temperature": 0, "max_tokens": 1, "seed": 1234}
    reply = post(client, body | {"logprobs": 1, "echo": True}, "/v1/completions")
    assert reply.status_code == 200, reply.text
    choices = sorted(reply.json()["choices"], key=lambda one: one["index"])
    for choice, start in zip(choices, context_lengths, strict=True):
        numbers = choice["logprobs"]["token_logprobs"][start:-1]
        best = [max(one.values()) for one in choice["logprobs"]["top_logprobs"][start:-1]]
        yield sum(numbers), numbers == best


@pytest.mark.parametrize("as_tokens", [True, False])
def test_the_harness_reads_likelihoods(client, world, reference, as_tokens):
    context = ids_of(world)
    greedy = world.results(context, max_tokens=4)[0].token_ids
    endings = [ids_of(world, " At noon."), ids_of(world, " In San Jose."), greedy]
    endings = endings if as_tokens else endings[:2]
    rows = [context + ending for ending in endings]
    sent = rows if as_tokens else [world.chat.decode(row) for row in rows]
    found = harness(client, sent, [len(context)] * len(rows))
    for row, (total, is_greedy) in zip(rows, found, strict=True):
        truth = reference(row)
        places = range(len(context) - 1, len(row) - 1)
        assert total == pytest.approx(sum(truth[at, row[at + 1]] for at in places), abs=1e-3)
        assert is_greedy == all(truth[at].argmax() == row[at + 1] for at in places)


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_scores_of_samples_and_streams(client, max_tokens):
    params = {"model": MODEL, "prompt": ["I would", "The address is"], "n": 2, "seed": 1}
    params |= {**SCORING, "max_tokens": max_tokens}
    whole = client.completions.create(**params)
    streamed = {}
    for chunk in client.completions.create(stream=True, **params):
        for choice in chunk.choices:
            text, tokens, numbers = streamed.get(choice.index, ("", [], []))
            numbers = numbers + choice.logprobs.token_logprobs
            streamed[choice.index] = (text + choice.text, tokens + choice.logprobs.tokens, numbers)
    assert streamed == {
        one.index: (one.text, one.logprobs.tokens, one.logprobs.token_logprobs)
        for one in whole.choices
    }
    assert scores(whole, 0)[:2] == scores(whole, 1)[:2]
    assert whole.usage.completion_tokens == 4 * max_tokens


SHOWN = {"stream": True, "stream_options": {"include_rounds": True, "include_usage": True}}
WAYS = [{}, {"stream": True}, SHOWN, {"stop": ["x"], "temperature": 1}, {"n": 3}]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_max_tokens_zero(client, options):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 0, **options}
    reply = post(client, body, "/v1/completions").text
    choice = json.loads(reply.removeprefix("data: ").split("\n\n")[0])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("", "length", None)


def test_a_scored_prompt_may_fill_the_context(client):
    ids = [7] * MAX_LENGTH
    assert len(scores(complete(client, ids, **SCORING))) == MAX_LENGTH
    body = {"model": MODEL, "prompt": ids, "max_tokens": 1}
    assert post(client, body, "/v1/completions").json()["error"]["param"] == "prompt"


def test_cancelling_a_scored_prompt(world):
    asked = prompts()
    alone = scored(world.engine(), asked)
    engine = world.engine(prefill_chunk=16)
    for request in asked:
        engine.add(request)
    gone = max(asked, key=lambda request: len(request.prompt_ids))
    updates = engine.step()
    engine.cancel(gone.id)
    while engine.has_work:
        updates += engine.step()
    found = {one.request_id: [part.logprob for part in one.prompt_logprobs] for one in updates}
    engine.check()
    assert found == {
        request.id: pytest.approx(numbers, abs=1e-5)
        for request, numbers in zip(asked, alone, strict=True)
        if request is not gone
    }


def test_many_scores_are_written_in_a_thread(client, monkeypatch):
    written, chunk = [], TextWriter.chunk
    monkeypatch.setattr(answers, "LONG_ECHO", 8)

    def noted(writer, update):
        written.append((len(update.prompt_logprobs or ()), threading.get_ident()))
        return chunk(writer, update)

    monkeypatch.setattr(TextWriter, "chunk", noted)
    list(complete(client, PROMPT, stream=True))
    (loop,) = {thread for _, thread in written}
    written.clear()
    list(complete(client, PROMPT, stream=True, echo=True, logprobs=2))
    num_scored, thread = written[0]
    assert num_scored > 8
    assert thread != loop
