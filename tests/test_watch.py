"""The watch over production: cards, counters, false alarms, restarts, servers, exit codes."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import replace

import httpx
import numpy as np
import pytest

from eyas.artifact import Artifact, identity
from eyas.bench import watch
from eyas.bench.server import counted_between, is_restarted, parse_metrics, rounds_of
from eyas.bench.watch import WatchWindow, choose, window_of
from eyas.card import CardTau, card_of_head, of_size, read_card
from eyas.errors import CorruptError, EyasError, InputError, MismatchError, MissingInputError
from eyas.export.export import ExportConfig, export
from tests.bench_servers import JsonHandler, web_server
from tests.object_stores import free_port
from tests.serving import ask
from tests.test_cli import assert_one_clear_error, run_eyas
from tests.test_export import trained
from tests.tiny import tiny_target
from tests.watched_pages import sglang_page, vllm_pages

CHAIN = CardTau("fixed(4,1,5)", 0.0, 2.4, (2.2, 2.6), 100, 2000, (0.6, 0.6, 0.65, 0.7))
TREE = CardTau("fixed(6,3,12)", 0.0, 3.0, (2.8, 3.2), 100, 1600, (0.75,) * 6)
SAMPLED = CardTau("fixed(4,1,5)", 1.0, 1.6, (1.5, 1.7), 100, 3000, (0.4, 0.4, 0.4, 0.4))
AUTO = CardTau("auto", 0.0, 2.8, (2.6, 3.0), 100, 1700, (0.7,) * 6)


def rounds(nodes, steps):
    return {"nodes_mean": nodes, "num_draft_steps": steps}


def evaluation(**changes):
    """What `eyas eval` leaves, as far as cards and the watch read it."""
    part = {"tau": 2.4, "tau_interval": [2.2, 2.6], "rounds": 1000, "answers": 50}
    trees = [
        {
            **{"speculation": one.speculation, "temperature": one.temperature, "tau": one.tau},
            **{"num_draft_steps": one.size[0], "tau_interval": list(one.interval)},
            "accept_hist": [one.num_rounds - 7, 4, 3],
            "acceptance_by_position": list(one.acceptance_by_position),
            **{"rounds": one.num_rounds, "answers": one.num_answers},
        }
        for one in (CHAIN, SAMPLED)
    ]
    return {
        **trees[0],
        "by_source": {"a": part, "b": part},
        "assumes": "fixed(4,1,5) in float32 at temperature 0",
        "dtype": "float32",
        "trees": trees,
        **changes,
    }


# Cards


def test_an_evaluation_and_an_export_have_the_same_card(tmp_path):
    target = tiny_target(tmp_path / "target")
    head = trained(target, str(tmp_path / "train"))
    measured, inputs = Artifact(str(tmp_path / "eval")), {"head": head.manifest()}
    measured.begin(identity("eval", {}, inputs))
    measured.write_json("eval.json", evaluation())
    measured.finish("eval", {}, inputs, {})
    out = tmp_path / "export"
    export(ExportConfig(), str(target), head, Artifact(str(out)), evaluation=measured)
    figures = read_card(str(tmp_path / "eval"))
    assert figures == [CHAIN, SAMPLED]
    assert read_card(str(out)) == read_card(f"{out}/eval.json") == figures


def test_a_chain_on_features_is_a_figure_too(tmp_path):
    found = evaluation(tau_by_num_draft_steps=[1.6, 2.0, 2.2, 2.4], trees=[])
    (tmp_path / "eval.json").write_text(json.dumps(found))
    (card,) = read_card(str(tmp_path))
    assert card == CHAIN
    sampled = {**found, "answers_temperature": 1.0, "trees": [{**found, "temperature": None}]}
    (tmp_path / "eval.json").write_text(json.dumps(sampled))
    (card,) = read_card(str(tmp_path))
    assert card == replace(CHAIN, temperature=1.0)


def test_cards_without_an_interval_and_damaged_ones_are_refused(tmp_path):
    with pytest.raises(MissingInputError, match=r"no eval\.json"):
        read_card(str(tmp_path))
    few = evaluation(tau_interval=None)
    few["trees"] = [{**one, "tau_interval": None} for one in few["trees"]]
    half = '{"trees": [{"tau_interval": [1, 2], "rounds": 3}]}'
    no_interval = InputError, "no tau with its interval"
    cards = {json.dumps(few): no_interval}
    cards |= dict.fromkeys(
        ('{"trees":', "[]", '{"trees": null}', half), (CorruptError, "cannot be read")
    )
    for content, (kind, words) in cards.items():
        (tmp_path / "eval.json").write_text(content)
        with pytest.raises(kind, match=words):
            read_card(str(tmp_path))


def test_a_card_has_figures_for_the_drafts_that_are_served(tmp_path, monkeypatch):
    figures = [TREE, CHAIN, SAMPLED, AUTO]
    assert of_size(figures, "fixed(4,1,5)") == [CHAIN, SAMPLED]
    assert of_size(figures, "fixed(2,1,3)") == [CHAIN.cut(2), SAMPLED.cut(2)]
    assert of_size(figures, "fixed(6,3,12)") == [TREE]
    assert of_size(figures, "auto(6,3,12)") == [AUTO]
    assert of_size(figures, "fixed(5,1,6)") == of_size(figures, "off") == []
    (tmp_path / "eval.json").write_text(json.dumps(evaluation()))
    for form in ("sglang", "other"):
        (tmp_path / form).mkdir()
    assert card_of_head(f"{tmp_path}/sglang") == card_of_head(str(tmp_path)) == [CHAIN, SAMPLED]
    monkeypatch.chdir(tmp_path)
    assert card_of_head("sglang") == [CHAIN, SAMPLED]
    assert card_of_head(f"{tmp_path}/other") == []  # what lies above is no card of this head


def test_a_chain_cut_to_its_own_length_is_itself():
    assert CHAIN.cut(4) == CHAIN
    useless = replace(CHAIN, tau=1.0, interval=(1.0, 1.0), acceptance_by_position=(0.0,) * 4)
    assert useless.cut(2).tau == 1.0
    taus = [CHAIN.cut(steps).tau for steps in (1, 2, 3, 4)]
    assert taus == sorted(taus)
    cut = CHAIN.cut(1)
    assert cut.size == (1, 1, 2)
    # the same tokens in more rounds
    assert cut.num_rounds * cut.tau == pytest.approx(CHAIN.num_rounds * CHAIN.tau, rel=1e-3)


def test_the_card_s_figures_are_those_of_the_served_drafts():
    figures = [TREE, CHAIN, SAMPLED]
    assert choose(figures, 0.0, rounds(4.0, 4)) is CHAIN
    assert choose(figures, 0.0, rounds(4.3, 4)) is CHAIN  # rounds under way
    assert choose(figures, 0.0, rounds(11.4, 6)) is TREE
    assert choose(figures, 1.0, rounds(4.0, 4)) is SAMPLED
    assert choose(figures, 0.0, rounds(3.1, 3)).speculation == "fixed(3,1,4)"
    assert choose(figures, 0.0, rounds(4.0, 0)) is CHAIN  # a head that is never right
    assert choose([*figures, AUTO], 0.0, rounds(8.0, 6)) is AUTO
    assert choose(figures, 0.0, rounds(0.0, 0)) is TREE  # SGLang before its first round
    with pytest.raises(MismatchError, match=r"judges 8\.0 drafts a round; the card has fixed"):
        choose(figures, 0.0, rounds(8.0, 6))
    with pytest.raises(MismatchError, match=r"no figures at temperature 0\.5, only at 0, 1"):
        choose(figures, 0.5, rounds(4.0, 4))


# The test


def test_the_formula():
    window = WatchWindow(100, 2000, 2.0, (), CHAIN)
    assert window.worth == 100
    assert window.se == pytest.approx(CHAIN.se)
    least = 2.4 - 0.14 - 3.0902 * CHAIN.se * math.sqrt(2)
    assert window.least_tau == pytest.approx(least, abs=1e-4)
    assert not window.is_stale
    assert WatchWindow(100, 2000, least - 0.01, (), CHAIN).is_stale
    # short answers count by their rounds, long ones once
    assert WatchWindow(100, 200, 2.0, (), CHAIN).worth == 10
    assert WatchWindow(100, 90_000, 2.0, (), CHAIN).worth == 100


def test_false_alarms_are_as_rare_as_promised_and_shifts_are_caught():
    """Answers whose rounds are alike, as a head's are: each has an acceptance of its own."""
    rng = np.random.default_rng(0)

    def answers(share):
        """Emitted tokens of 20,000 answers in 25 rounds each."""
        of_answer = rng.beta(8 * share, 8 * (1 - share), size=(20_000, 1, 1))
        hits = rng.random((20_000, 25, 4)) < of_answer
        return 25 + hits.cumprod(-1).sum((-1, -2))

    def share_stale(card, emitted):
        taus = emitted[rng.integers(len(emitted), size=(1000, 100))].sum(1) / 2500
        return np.mean([WatchWindow(100, 2500, tau, (), card).is_stale for tau in taus])

    same, shifted, alone = answers(0.6), answers(0.4), []
    for _ in range(20):
        measured = same[rng.integers(len(same), size=200)] / 25
        tau, half = measured.mean(), watch.Z_95 * measured.std() / math.sqrt(200)
        card = CardTau("auto", 0.0, tau, (tau - half, tau + half), 200, 5000, ())
        assert share_stale(card, same) <= 1e-3
        assert share_stale(card, shifted) >= 0.95
        # traffic at the margin: its tau is what the card's may lose
        high = 1 + (tau - 1) / (1 - watch.MARGIN)
        edge = CardTau("auto", 0.0, high, (high - half, high + half), 200, 5000, ())
        alone.append(share_stale(edge, same))
    assert np.mean(alone) <= 3e-3  # promised: 1e-3


# Counters


def test_a_restarted_server_counts_from_zero():
    before = {"generation_tokens_total": 500.0, "spec_decode_num_drafts_total": 200.0}
    after = {"generation_tokens_total": 30.0, "spec_decode_num_drafts_total": 12.0}
    assert is_restarted(before, after)
    assert counted_between(before, after) == after
    assert not is_restarted(after, before)
    # a reading that failed says nothing of what was counted
    assert counted_between({}, before) == counted_between(before, {}) == {}
    # a gauge that SGLang names like a counter
    assert not is_restarted({"max_total_num_tokens": 9.0}, {"max_total_num_tokens": 8.0})


def test_what_vllm_counted_of_dialogues_and_of_summaries():
    dialogues, both = map(parse_metrics, vllm_pages())
    first = rounds_of(dialogues)
    assert (first["nodes_mean"], first["num_draft_steps"]) == (4, 4)
    assert len(first["acceptance_by_position"]) == 4
    card = CardTau("fixed(4,1,5)", 0.0, first["tau"], (2.1, 2.6), 100, 1400, (0.6,) * 4)
    same = window_of([card], 0.0, {"a": dialogues}, {"a": dialogues})
    assert (same.num_requests, same.num_rounds) == (40, 560)
    assert same.tau == pytest.approx(1 + 757 / 560)
    assert not same.is_stale
    shifted = window_of([card], 0.0, {"a": counted_between(dialogues, both)}, {"a": both})
    assert shifted.card is card
    assert shifted.tau < 1.8


def test_what_sglang_counted():
    counted = parse_metrics(sglang_page(requests=10, rounds=100, tokens=250))
    found = rounds_of(counted)
    # 250 tokens: 10 of prefills, 100 of the target, 140 drafts
    assert found["tau"] == pytest.approx(2.4)
    assert (found["num_rounds"], found["nodes_mean"], found["num_draft_steps"]) == (100, 4, 4)
    window = window_of([TREE, CHAIN], 0.0, {"a": counted}, {"a": counted})
    assert (window.card, window.num_requests) == (CHAIN, 10)
    assert window.acceptance_by_position == ()


def test_several_servers_are_added_up():
    dialogues, both = map(parse_metrics, vllm_pages())
    sglang = parse_metrics(sglang_page(requests=10, rounds=100, tokens=250))
    counted = {"a": dialogues, "b": both}
    window = window_of([CHAIN], 0.0, counted, counted)
    parts = [rounds_of(one) for one in counted.values()]
    total = sum(one["num_rounds"] for one in parts)
    assert window.num_rounds == total
    emitted = sum(one["num_rounds"] * one["tau"] for one in parts)
    assert window.tau == pytest.approx(emitted / total)
    first = sum(one["num_rounds"] * one["acceptance_by_position"][0] for one in parts)
    assert window.acceptance_by_position[0] == pytest.approx(first / total)
    mixed = {"a": dialogues, "c": sglang}
    window = window_of([CHAIN], 0.0, mixed, mixed)
    assert window.num_rounds == 660
    assert window.acceptance_by_position == ()
    other = parse_metrics(sglang_page(10, 100, 250, steps=6, num_draft_tokens=12))
    with pytest.raises(MismatchError, match="servers draft differently"):
        window_of([CHAIN, TREE], 0.0, {"a": dialogues, "c": other}, {"a": dialogues, "c": other})


def test_a_server_that_drafts_may_answer_once_without_a_round():
    a, b = (parse_metrics(sglang_page(100, 1000, 2500)) for _ in "ab")
    one_more = counted_between(b, parse_metrics(sglang_page(101, 1000, 2501)))
    window = window_of([CHAIN], 0.0, {"a": a, "b": one_more}, {"a": a, "b": b})
    assert window == window_of([CHAIN], 0.0, {"a": a}, {"a": a})
    assert window_of([CHAIN], 0.0, {"b": one_more}, {"b": b}) is None
    young = parse_metrics(sglang_page(1, 0, 1))  # it just started, and was asked for one token
    assert window_of([CHAIN], 0.0, {"a": a, "b": young}, {"a": a, "b": young}) == window
    bare = parse_metrics(sglang_page(40, 0, 400))
    with pytest.raises(EyasError, match="b ended 40 requests and counts no round"):
        window_of([CHAIN], 0.0, {"a": a, "b": bare}, {"a": a, "b": bare})


# The command


@contextmanager
def paged(*pages):
    """A server with these pages of /metrics, one a request, the last one for all others; "" is an
    answer without a page.
    """
    left = list(pages)

    class Pages(JsonHandler):
        def do_GET(self):
            page = left.pop(0) if len(left) > 1 else left[0]
            self.reply(200 if page else 503, page.encode())

    with web_server(Pages) as url:
        yield url


@pytest.fixture
def card(tmp_path, monkeypatch):
    monkeypatch.setattr("eyas.cli.watch.POLL_S", 0.01)
    (tmp_path / "eval.json").write_text(json.dumps(evaluation()))
    return str(tmp_path)


def once(card, *pages):
    """The command's result with the server's address and the last line."""
    with paged(*pages) as url:
        done = run_eyas("watch", url, "--head", card, "--requests", "100", "--once")
    done.url, last = url, done.stdout.splitlines()[-1:]
    done.facts = json.loads(last[0]) if last and last[0].startswith("{") else {}
    return done


def test_once_ends_with_a_code(card):
    start, good = sglang_page(10, 100, 250), sglang_page(110, 2100, 5150)
    done = once(card, start, good)
    assert done.exit_code == 0, done.output
    assert "ok     tau 2.40 (2.20-2.60), card 2.40 (2.20-2.60), stale below" in done.stdout
    names = ("stale", "num_requests", "num_rounds")
    assert [done.facts[name] for name in names] == [False, 100, 2000]
    assert done.facts["card"]["num_answers"] == 100
    done = once(card, start, sglang_page(110, 2100, 3750))
    assert done.exit_code == 3, done.output
    for words in ("STALE", "lost 50% of its accepted drafts", "eyas run runs/refresh.yaml"):
        assert words in done.stdout
    assert done.facts["stale"]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (sglang_page(110, 2100, 7777).replace("3888.0", "NaN"), "generation_tokens_total nan"),
        (sglang_page(110, 2100, 7777).replace("3888.0", "+Inf"), "generation_tokens_total inf"),
        (sglang_page(110, 2100, 23_000), "tau 11.32 of 4.0 drafts a round"),
    ],
)
def test_counters_that_cannot_be_are_said_to_be_so(card, page, said):
    assert_one_clear_error(
        once(card, sglang_page(10, 100, 250), page), "counts what cannot be", said
    )


def test_once_ends_where_nothing_moves(card, monkeypatch):
    monkeypatch.setattr(watch, "LOST_S", 0.05)
    done = once(card, sglang_page(10, 100, 250))
    assert_one_clear_error(done, "no request ended in 0 s; 0 of 100 so far")


def test_restarts_and_pauses_lose_nothing_but_what_was_not_read(card):
    first, second, third = (10, 100, 250), (40, 700, 1720), (70, 1300, 3190)
    from_zero = sglang_page(40, 800, 1960)
    done = once(
        card, *(sglang_page(*one) for one in (first, second)), "", sglang_page(*third), from_zero
    )
    assert done.exit_code == 0, done.output
    facts, url = done.facts, done.url
    assert (facts["num_requests"], facts["num_rounds"]) == (60 + 40, 1200 + 800)
    assert (facts["restarted"], facts["lost"]) == ([url], [url])
    assert f"{url} restarted; no answer from {url} for a while" in done.stdout


def test_a_window_waits_for_answers_with_rounds(card):
    start, single = sglang_page(10, 100, 250), sglang_page(110, 100, 350)
    done = once(card, start, single, sglang_page(210, 2100, 5250))
    assert done.exit_code == 0, done.output
    assert (done.facts["num_requests"], done.facts["num_rounds"]) == (200, 2000)


def test_what_is_no_server_or_no_card_is_one_clear_error(card, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "LOST_S", 0.05)
    with paged(sglang_page(10, 100, 250), "") as url:
        done = run_eyas("watch", url, "--head", card, "--once")
    assert_one_clear_error(done, "no answer from")
    url = f"http://127.0.0.1:{free_port()}"
    assert_one_clear_error(run_eyas("watch", url, "--head", card), f"no counters at {url}/metrics")
    hot = run_eyas("watch", url, "--head", card, "--temperature", "0.7")
    assert_one_clear_error(hot, "no figures at temperature 0.7, only at 0")
    nothing = str(tmp_path / "nothing")
    assert_one_clear_error(run_eyas("watch", url, "--head", nothing), "no eval.json")
    assert_one_clear_error(run_eyas("watch", "example", "--head", card), "has no scheme")


# Servers that run


def test_our_own_server_is_watched(world, tmp_path):
    """By a random head, as its card says."""
    engine = world.drafting(tmp_path / "head", "fixed(4,1,5)")
    with world.served(engine, has_head=True) as client:
        pages = [parse_metrics(httpx.get(f"{client.url}/metrics").text)]
        for number in range(3):
            ask(client, [{"role": "user", "content": f"Table {number}, please."}], n=2)
        pages.append(parse_metrics(httpx.get(f"{client.url}/metrics").text))
    counted = counted_between(*pages)
    found = rounds_of(counted)
    card = CardTau("fixed(4,1,5)", 0.0, found["tau"], (1.0, 1.1), 100, 2000, ())
    window = window_of([card], 0.0, {"a": counted}, {"a": pages[1]})
    assert window.card is card
    assert window.num_requests == 6
    assert window.tau == found["tau"] < 1.5
    assert not window.is_stale
