"""An answer's sampler: the state of the path, end tokens, and where stop strings end. The
distribution with every option is in test_distribution.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eyas.builtin import target_folder
from eyas.chat import Chat
from eyas.engine.request import SamplingParams
from eyas.engine.sampling import Sampler, derived_seed
from eyas.engine.stop import StopChecker
from tests.oracle.sampling import draw_key, sample

V = 24
ENDS = frozenset({2, 5})
LOGITS = (torch.randn(V, generator=torch.Generator().manual_seed(3)) * 1.5).numpy()


class Allowing:
    failure = None

    def __init__(self, *allowed):
        self.allowed = list(allowed)
        self.heard = []

    def mask(self):
        mask_V = np.zeros(V, dtype=bool)
        mask_V[self.allowed] = True
        return mask_V

    def advance(self, token):
        self.heard.append(token)


def sampler(matcher=None, index=0, prompt=(1, 1, 8), **options):
    return Sampler(SamplingParams(**options), prompt, V, ENDS, matcher, index)


def test_penalties_follow_the_answer():
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.5}
    params = SamplingParams(temperature=0.9, seed=11, logit_bias={7: 3.0}, **penalties)
    drawer, prompt, output = Sampler(params, (1, 1, 8), 80, frozenset()), (1, 1, 8), []
    torch.manual_seed(0)
    for at in range(120):  # more distinct tokens than the sampler has room for at first
        raw_V = (torch.randn(80) * 2).numpy()
        adjusted_V = raw_V.astype(np.float64)
        for token in {*prompt, *output}:
            adjusted_V[token] *= 1 / 1.4 if adjusted_V[token] > 0 else 1.4
            adjusted_V[token] -= 0.6 * output.count(token) + 0.5 * (token in output)
        adjusted_V[7] += 3.0
        expected = sample(adjusted_V, params, draw_key(11, at))
        output.append(drawer.draw(raw_V))
        assert output[-1] == expected
    assert len(set(output)) > 64


def test_greedy_honours_every_option():
    best = int(LOGITS.argmax())
    second = int(LOGITS.argsort()[-2])
    assert sampler().draw(LOGITS) == best
    assert sampler(logit_bias={best: -100.0}).draw(LOGITS) == second
    assert sampler(repetition_penalty=50.0, prompt=(best,)).draw(LOGITS) == second
    assert sampler(Allowing(second, 3), regex="x").draw(LOGITS) == second
    drawer = sampler(presence_penalty=2.0)
    assert drawer.draw(LOGITS) == best
    assert drawer.draw(np.eye(V, dtype=np.float32)[best]) == (0 if best else 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_end_and_stop_tokens_until_reached(temperature, ignore_eos):
    towering_V = np.zeros(V, np.float32)
    towering_V[[2, 9]] = 60.0, 50.0
    drawer = sampler(
        temperature=temperature, min_tokens=2, stop_token_ids=(9,), ignore_eos=ignore_eos, seed=1
    )
    for _ in range(2):
        assert not drawer.is_plain_greedy
        # an end token that ends nothing is a token like others
        assert (drawer.draw(towering_V) == 2) == ignore_eos
    assert drawer.is_plain_greedy == (temperature == 0)
    assert drawer.draw(towering_V) == 2


def test_after_the_end_the_end_comes_again():
    drawer = sampler(temperature=1.0, seed=0, logprobs=1)
    towering_V = np.zeros(V, np.float32)
    towering_V[5] = 99.0
    assert [drawer.draw(one) for one in (towering_V, LOGITS, LOGITS)] == [5, 5, 5]
    assert drawer.num_drawn == len(drawer.logprobs) == 1


def test_the_grammar_hears_every_token():
    heard = Allowing(3, 4, 9)
    drawer = sampler(heard, regex="x", temperature=1.0, seed=4)
    assert [drawer.draw(LOGITS) for _ in range(6)] == heard.heard


def test_a_seed_gives_the_same_tokens_and_each_sample_its_own():
    def answer(**options):
        drawer = sampler(temperature=1.5, ignore_eos=True, **options)
        return [drawer.draw(LOGITS) for _ in range(20)]

    assert answer(seed=9) == answer(seed=9)
    assert answer(seed=9, index=1) == answer(seed=9, index=1)
    answers = [answer(seed=9, index=index, n=3) for index in range(3)]
    answers += [answer(), answer(), answer(seed=10)]
    assert answers[0] == answer(seed=9)
    assert len({tuple(one) for one in answers}) == len(answers)
    assert sampler(seed=9, index=2).seed == derived_seed(9, 2)


@pytest.mark.parametrize(
    ("options", "is_plain"),
    [
        ({}, True),
        # greedy takes the best of any cut
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 1}, True),
        ({"temperature": 1.0, "top_k": 3}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"min_tokens": 1}, False),
        ({"logprobs": 0}, False),
        ({"regex": "x", "matcher": Allowing(1)}, False),
    ],
)
def test_the_argmax_is_taken_where_nothing_adjusts_the_logits(options, is_plain):
    assert sampler(**options).is_plain_greedy == is_plain


def test_logits_are_left_as_they_are():
    before_V = LOGITS.copy()
    adjusted = {"repetition_penalty": 1.2, "logit_bias": {3: 1.0}, "min_tokens": 3}
    sampler(temperature=1.0, logprobs=2, **adjusted).draw(LOGITS)
    assert np.array_equal(LOGITS, before_V)


# Stop strings


@pytest.fixture(scope="module")
def chat():
    return Chat(target_folder())


def completing(chat, text, stops):
    """The place of the token that completes a stop string, and the place by decoding every
    beginning anew.
    """
    ids = chat.tokenizer.encode(text, add_special_tokens=False).ids
    checker = StopChecker(stops, chat.decode)
    texts = [chat.decode(ids[: at + 1]) for at in range(len(ids))]
    got = [at for at, token in enumerate(ids) if checker.push(token)]
    plain = [at for at, one in enumerate(texts) if any(stop in one for stop in stops)]
    return got[:1], plain[:1]


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("one two three four", ("three",)),
        ("one two three four", ("e fo", "r")),
        ("one two three four", ("o three fou",)),
        ("grüße 🦅🦅 eyas ελληνικά", ("🦅🦅 e",)),
        ("grüße 🦅 eyas ελληνικά", ("ελλ",)),
        ("aaaaaaaaaaaaab", ("aab",)),
        ("a line\nanother line\n\nlast", ("\n\n",)),
        ("no stop at all", ("§", "stop at all!")),
        ("x" * 40 + "yz", ("x" * 41 + "y", "xyz")),
    ],
)
def test_a_stop_string_ends_where_it_is_complete(chat, text, stops):
    got, plain = completing(chat, text, stops)
    assert got == plain
    assert bool(plain) == any(stop in text for stop in stops)


def test_no_stop_string_ends_an_answer_before_its_least_tokens(chat):
    ids = chat.tokenizer.encode("one, two, three, four", add_special_tokens=False).ids
    commas = [at for at, token in enumerate(ids) if "," in chat.decode([token])]
    for least, ends_at in ((0, commas[0]), (commas[0] + 1, commas[1])):
        checker = StopChecker((",",), chat.decode, least)
        assert [checker.push(token) for token in ids].index(True) == ends_at
        assert checker.take_text() == chat.decode(ids[:ends_at])


def test_a_stop_string_costs_no_more_in_a_long_answer(chat):
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return chat.decode(ids)

    checker = StopChecker(("§§",), decode)
    text = "a few words more, and more. " * 40
    ids = chat.tokenizer.encode(text, add_special_tokens=False).ids
    assert not any(checker.push(token) for token in ids)
    assert longest < 12
