"""The playground in a real browser: it draws what the server said, and asks no other server."""

import json
import re
from itertools import pairwise

import httpx
import pytest

from eyas.serve.limits import LimitsConfig
from eyas.serve.page import FILES, FOLDER
from eyas.serve.vertex import VertexConfig
from eyas.tau import LEAST_TURNS
from tests import playground
from tests.browser import needs_chromium
from tests.page_tags import Tags
from tests.playground import (
    DRAFTED,
    NODE,
    PROMPT,
    answer_with,
    chat,
    events,
    opened,
    over,
    race,
    settle,
    streamed,
    texts,
)

server, browser, page = playground.server, playground.browser, playground.page


def asked(url, speculation=True, **fields):
    said = [{"role": "user", "content": PROMPT}]
    body = {"model": "eyas", "messages": said, "temperature": 0, "max_tokens": 40}
    body |= {"speculation": speculation, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()


# The files


def test_files_and_their_headers(world):
    with world.served() as client:
        for path, (file, kind) in FILES.items():
            reply = httpx.get(client.url + path)
            assert (reply.status_code, reply.content) == (200, file.read_bytes())
            assert reply.headers["content-type"].startswith(kind)
            parts = reply.headers["content-security-policy"].split(";")
            policy = dict(part.strip().partition(" ")[::2] for part in parts)
            assert policy["default-src"] == "'none'"
            for name in ("script-src", "style-src", "connect-src"):
                assert policy[name] == "'self'"
            assert reply.headers["x-content-type-options"] == "nosniff"
        assert httpx.get(f"{client.url}/page/__init__.py").status_code == 404
        assert httpx.post(f"{client.url}/", json={}).status_code == 405


def test_strict_html_without_inline_or_foreign_parts():
    tags = Tags((FOLDER / "index.html").read_text(encoding="utf-8"))
    assert tags.count("style") == 0
    assert tags.count("script") == 1
    for tag, attributes in tags.all:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        for name in ("src", "href"):
            assert ":" not in attributes.get(name, "")
            # a proxy may put the server under a path
            assert not attributes.get(name, "").startswith("/")
    ids = [attributes["id"] for _, attributes in tags.all if "id" in attributes]
    assert len(ids) == len(set(ids))
    written = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|sessionStorage|cookie"
    for file in FOLDER.glob("*.js"):
        script = file.read_text(encoding="utf-8")
        assert not re.findall(written, script), file.name
        assert ("localStorage" in script) == (file.name == "store.js"), file.name


def test_vertex_routes_beside_the_page(world):
    vertex = VertexConfig(predict_route="/", health_route="/ping")
    with world.served(vertex=vertex) as client:
        assert httpx.post(f"{client.url}/", json={"instances": []}).status_code == 400
        assert httpx.get(f"{client.url}/").headers["content-type"].startswith("text/html")


# In a browser


@needs_chromium
def test_a_chat_shows_where_its_tokens_come_from(page, server):
    page.uncheck("#markdown")
    chat(page)
    answer = asked(server)
    usage = answer["usage"]
    assert "".join(texts(page, ".turn .said .token")) == answer["choices"][0]["message"]["content"]
    names = ("drafted", "bonus", "plain")
    drafted, bonus, plain = (int(page.text_content(f"#num-{name}")) for name in names)
    assert drafted + bonus + plain == usage["completion_tokens"]
    assert plain == 1
    ended = answer["choices"][0]["finish_reason"] == "stop"  # by a token without text
    shown = [len(page.query_selector_all(f".said .token.{one}")) for one in names]
    assert sum(shown) == usage["completion_tokens"] - ended
    for seen, count in zip(shown, (drafted, bonus, plain), strict=True):
        assert max(1, count - ended) <= seen <= count
    assert page.text_content("#per-round") == f"{usage['eyas']['tau']:.2f}"
    note = page.text_content("#per-round-note")
    rounds = usage["eyas"]["rounds"]
    assert note == f"over {rounds} rounds, and the head drafted in all: this is tau"
    for _ in range(5):  # no speed is shown where the answer came in fewer than four pieces
        if page.text_content("#speed") != "–":
            break
        chat(page)
    assert float(page.text_content("#speed")) > 0
    assert page.text_content("#problem") == ""


@needs_chromium
def test_the_tree_of_the_picked_round(page):
    chat(page)
    numbers = "all => new Set(all.map(one => one.dataset.round)).size"
    last = page.eval_on_selector_all(".said .token", numbers)
    assert page.text_content("#tree-title") == f"Round {last} of {last}"
    token = page.query_selector(".said .token.drafted")
    token.click()
    number = int(token.get_attribute("data-round"))
    assert page.text_content("#tree-title") == f"Round {number + 1} of {last}"
    of_round = page.query_selector_all(f'.said .token[data-round="{number}"]')
    assert len(page.query_selector_all(".said .token.now")) == len(of_round)
    accepted = len([one for one in of_round if "drafted" in one.get_attribute("class")])
    assert len(page.query_selector_all("#drawing .node.accepted")) == accepted > 0
    assert len(page.query_selector_all("#drawing .node.bonus")) == len(of_round) - accepted
    drafted = len(page.query_selector_all("#drawing .node:not(.root):not(.bonus)"))
    summary = f"The head drafted {drafted} tokens; the target kept {accepted}"
    assert summary in page.text_content("#told")
    edges, nodes = (len(page.query_selector_all(f"#drawing .{one}")) for one in ("edge", "node"))
    assert edges == nodes - 1
    assert page.get_attribute("#drawing svg", "aria-label") == page.text_content("#told")
    page.press("#which", "Home")
    assert page.text_content("#tree-title") == f"Round 1 of {last}"
    assert "without drafts" in page.text_content("#told")
    page.click("#on")
    assert page.text_content("#tree-title") == f"Round 2 of {last}"


@needs_chromium
def test_a_race_and_its_replay(page, server):
    page.uncheck("#markdown")
    settle(page, longest=160, temperature=0.7)
    page.fill("#prompt", PROMPT)
    page.evaluate(CLOCK)  # an answer may be short, and a busy browser may get it in few pieces
    page.evaluate("window.paces = [5, 5]")
    with page.expect_request("**/completions") as first:
        page.click("#race")
    page.wait_for_selector(".lanes")
    over(page)
    plain, speculative = lanes(page)
    assert plain == speculative != ""
    of_plain = page.query_selector_all(".lane:nth-child(1) .token")
    assert {one.get_attribute("class") for one in of_plain} == {"token plain"}
    assert page.query_selector_all(".lane:nth-child(2) .token.drafted")
    verdict = page.text_content(".verdict")
    assert re.fullmatch(
        r"Identical outputs: all \d+ tokens are the same\. "
        r"With drafts \d\.\d\d tokens a round, over all \d+ rounds\. "
        r"No speed is claimed yet: 1 of 8 races, and fewer may agree by chance\.",
        verdict,
    )
    body = first.value.post_data_json
    again = asked(server, False, temperature=0.7, seed=body["seed"], max_tokens=160)
    assert again["choices"][0]["message"]["content"] == plain
    page.evaluate("delete performance.now")
    page.click("button:text('Replay')")
    over(page)
    assert lanes(page) == [plain, plain]


def lanes(page):
    return ["".join(texts(page, f".lane:nth-child({place}) .token")) for place in (1, 2)]


@needs_chromium
def test_a_race_without_drafts_claims_no_speed(page):
    """`auto` may stop drafting: then both answers are plain, and a ratio would be noise."""

    def without_drafts(route):
        body = route.request.post_data_json | {"speculation": False}
        route.continue_(post_data=json.dumps(body))

    page.route("**/completions", without_drafts)
    settle(page, longest=160)
    verdict, notes, figures = race(page)
    assert "Nothing was drafted in the second answer either" in verdict
    assert "times as many" not in verdict
    assert not [note for note in notes if "a round" in note]
    # a busy machine may hand an answer over at once: then there is no pace
    timed = r"\d+ tokens(, too soon over to time$| in \d+\.\d\d s)"
    assert all(re.match(timed, note) for note in notes), notes
    assert all(re.match(r"(–|\d+(\.\d)?) tokens/s", figure) for figure in figures), figures


@needs_chromium
def test_an_answer_at_once_has_no_pace(page):
    """A proxy may hand chunks over together: their times say nothing of the server."""
    answer_with(page, events(["word "] * 17))
    verdict, notes, figures = race(page)
    assert verdict == (
        "Identical outputs: all 17 tokens are the same. With drafts 1.00 tokens a round, over "
        "all 17 rounds. Too soon over to time: ask for a longer answer."
    )
    assert notes == ["17 tokens, too soon over to time, 1.00 tokens a round"] * 2
    assert figures == ["– tokens/s"] * 2
    page.click("button:text('Replay')")
    over(page)
    assert texts(page, ".lane .opener") == notes
    chat(page)
    assert texts(page, ".opener")[-1] == "17 tokens, 1.00 tokens a round"
    assert page.text_content("#speed") == "–"


# A clock of the page's own: a race takes the time that the test gives it.
CLOCK = """() => {
  window.now = 0;
  performance.now = () => window.now;
  const fetched = window.fetch;
  window.fetch = async (path, options) => {
    const response = await fetched(path, options);
    if (options?.method !== "POST") return response;
    const { speculation } = JSON.parse(options.body);
    const text = await response.text();
    const parts = text.split("\\n\\n").filter(Boolean).map(part => part + "\\n\\n");
    const took = window.paces.shift();
    const reader = { read: async () => {
      await new Promise(done => setTimeout(done));
      if (!parts.length) return { done: true };
      window.now += took;
      return { done: false, value: new TextEncoder().encode(parts.shift()) };
    } };
    return { ok: true, body: { getReader: () => reader } };
  };
}"""


def raced(page, paces, head):
    """The verdicts after one race and after eight, at these paces in ms a chunk, of an answer of
    plain tokens and of `head`.
    """

    def answer(route):
        body = route.request.post_data_json
        route.fulfill(**(head if body["speculation"] else events(["w "] * 12, "plain", None)))

    page.route("**/completions", answer)
    page.evaluate(CLOCK)
    page.evaluate("paces => { window.paces = paces }", paces)
    first = race(page)[0]
    page.click("button.more:has-text('Race 7 more times')")
    page.wait_for_selector("#stop:enabled")
    over(page)
    assert page.is_hidden("button.more")
    return first, page.text_content(".verdict")


@needs_chromium
@pytest.mark.parametrize(
    ("paces", "said"),
    [
        # of the head, ms a token; plain 10 every time, and another one first each time
        ([5] * 8, "2.00 times as many tokens a second over 8 races (2.00 to 2.00)"),
        ([20] * 8, "0.50 times as many tokens a second over 8 races (0.50 to 0.50)"),
        ([5] * 7 + [11], "No certain difference in tokens a second over 8 races (0.91 to 2.00)"),
        ([2] * 8, "No speed is claimed: 5.00 over 8 races (5.00 to 5.00) is more than 2.20 tokens"),
    ],
)
def test_a_ratio_takes_eight_races_an_interval_and_tau(page, paces, said):
    """As the report's: 11 tokens in 5 rounds are 2.20 a round."""
    rounds = [["w "], ["w "] * 4, ["w "] * 4, ["w "], ["w "], ["w "]]
    drafted = [(one, *(("bonus", DRAFTED) if len(one) > 1 else ("plain", None))) for one in rounds]
    head = streamed(drafted)
    turns = [[10, pace * 11 / 5] for pace in paces]  # ms a chunk; the first chunk has no pace
    order = [one for place, both in enumerate(turns) for one in both[:: -1 if place % 2 else 1]]
    first, last = raced(page, order, head)
    assert "No speed is claimed yet: 1 of 8 races" in first
    assert "times as many" not in first
    assert "With drafts 2.20 tokens a round, over all 5 rounds." in last
    assert said in last


@needs_chromium
def test_tokens_a_round_count_plain_rounds(page):
    """13 of 19 tokens are plain: tau is 3.00 over two rounds, and hardly anything was gained."""
    rounds = [(["w "], "plain", None)] * 5 + [(["w "] * 3, "bonus", DRAFTED)] * 2
    rounds += [(["w "], "plain", None)] * 8
    answer_with(page, streamed(rounds))
    chat(page)
    assert page.text_content("#per-round") == "1.29"  # 18 tokens in 14 rounds after the prefill
    note = page.text_content("#per-round-note")
    assert note == "over all 14 rounds; tau 3.00 over the 2 that the head drafted in"
    assert texts(page, ".opener")[-1].startswith("19 tokens, 1.29 tokens a round")
    assert page.text_content("#tree-title") == "Round 7 of 15"


@needs_chromium
def test_rounds_of_text_alone_are_not_in_tau(page):
    tree = [NODE | {"text": "w ", "probability": None, "source": "text", "accepted": True}]
    tree.append(tree[0] | {"parent": 0, "text": "z", "accepted": False})
    said = [{"text": "w ", "origin": "text"}, {"text": "v ", "origin": "bonus"}]
    reply = streamed([(["w "], "plain", None)] + [(["w ", "w "], "bonus", tree)] * 3, by_head=False)
    bonus = json.dumps([one | {"text": "w ", "origin": "bonus"} for one in said])
    assert reply["body"].count(bonus) == 3
    reply["body"] = reply["body"].replace(bonus, json.dumps(said))
    answer_with(page, reply)
    chat(page)
    assert page.text_content("#per-round") == "2.00"
    assert page.text_content("#per-round-note") == "the head drafted in no round so far"
    assert page.text_content("#accepted") == "–"  # it is of the head
    assert page.text_content("#num-drafted") == "0"
    assert page.text_content("#num-text") + page.text_content("#of-text") == "3 of 6"
    assert texts(page, ".said .token.text") == ["w "] * 3
    assert page.text_content("#told") == (
        "Text drafted 2 tokens; the target kept 1: “w ”, and added “v ”."
    )
    assert texts(page, "#drawing .probability") == ["root", "text", "target", "text"]
    assert texts(page, "#drawing .node.accepted.text title") == ["“w ”, found in text"]
    assert "%" not in page.text_content("#drawing")


@needs_chromium
def test_the_tree_is_never_cut_at_its_right_edge(browser, server):
    chain = [
        NODE | {"parent": n - 1, "text": f"long word {n}", "accepted": n < 5} for n in range(9)
    ]
    wide = [NODE | {"text": f"long word {n}"} for n in range(10)]
    for width in (1280, 390):
        with opened(browser, server, viewport={"width": width, "height": 844}) as page:
            for tree in (chain, wide):
                answer_with(page, streamed([(["w "], "plain", None), (["w "] * 6, "bonus", tree)]))
                chat(page)
                if width == 390:
                    page.click("#view-rounds")
                assert len(page.query_selector_all("#drawing .node")) == len(tree) + 2
                assert page.evaluate(INSIDE) == []
                page.click("#clear")


# The drawing's boxes that cannot be seen whole.
INSIDE = """() => {
    const room = document.querySelector("#drawing").getBoundingClientRect();
    return [...document.querySelectorAll("#drawing rect")].map(one => one.getBoundingClientRect())
        .filter(box => box.left < room.left || box.right > Math.min(room.right, innerWidth));
}"""


@needs_chromium
def test_a_race_ends_with_its_result_on_the_screen(browser, server):
    for width in (1280, 390):
        with opened(browser, server, viewport={"width": width, "height": 844}) as page:
            answer_with(page, events(["line \n\n"] * 40))
            for _ in range(2):
                race(page)
                seen = page.evaluate("""() => {
                    const log = document.querySelector("#log").getBoundingClientRect();
                    const last = [...document.querySelectorAll(".race")].at(-1);
                    const bottom = Math.min(log.bottom, innerHeight);
                    return [".verdict", ".figure", ".more"].map(name => {
                        const box = last.querySelector(name).getBoundingClientRect();
                        return box.top >= log.top && box.bottom <= bottom;
                    });
                }""")
                assert seen == [True, True, True]


@needs_chromium
def test_the_sides_of_a_race_have_salts(page):
    salts = []
    page.on("request", lambda one: salts.append((one.post_data_json or {}).get("cache_salt")))
    answer_with(page, events(["a", "b"]))
    chat(page)
    race(page)
    asked = [one for one in salts if one]
    assert len(asked) == len(set(asked)) == 2


@needs_chromium
def test_the_welcome(page):
    assert len(texts(page, ".example")) == 3
    lines = page.evaluate("""[...document.querySelectorAll("#numbers .card > .note")].map(
        one => [one.textContent.split(":")[0], one.getClientRects().length, one.offsetHeight])""")
    assert [name for name, _, _ in lines] == ["tau", "plain"]
    assert all(height < 30 for _, _, height in lines)  # a line each
    settle(page, longest=12)
    said = texts(page, ".example")[1]
    page.click(".example >> nth=1")
    over(page)
    assert page.text_content(".asked") == said
    assert page.query_selector_all(".said .token")
    page.click("#clear")
    assert texts(page, ".example")[1] == said  # a new chat begins as the first did


def test_the_least_races_are_benchs():
    script = (FOLDER / "race.js").read_text(encoding="utf-8")
    assert f"const LEAST_TURNS = {LEAST_TURNS};" in script


@needs_chromium
def test_different_outputs_are_reported(page):
    answers = iter(["alpha beta", "alpha gamma"])
    page.route("**/completions", lambda route: route.fulfill(**events(next(answers).split())))
    assert race(page)[0].startswith("The outputs differ from token 2 on.")


@needs_chromium
def test_everything_by_keyboard(page):
    """Prompt, stop, next turn, options, rounds; the focus can be seen everywhere."""
    sent = []
    page.on("request", lambda one: one.method == "POST" and sent.append(one.post_data_json))
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.uncheck("#markdown")
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    for key in ("Tab", "Tab"):
        page.keyboard.press(key)
    page.keyboard.type("200")
    assert page.input_value("#longest") == "200"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-settings"
    page.focus("#prompt")
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("I need a hotel in Seattle.")
    seen = []
    for _ in range(16):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline not in ("none", "") or seen[-1] == "BODY", seen
        if seen[-1] == "slow":
            page.keyboard.press("Space")
    order = ["send", "race", "speculation", "slow", "colours", "markdown", "drawing"]
    order += ["open-chats", "clear", "open-settings"]
    assert [one for one in seen if one in order] == order
    page.focus("#prompt")
    page.keyboard.press("Enter")
    page.wait_for_selector(".said .token.drafted")
    page.keyboard.press("Escape")
    over(page)
    said = "".join(texts(page, ".said .token"))
    assert "stopped" in page.text_content("#status")
    page.uncheck("#slow")
    settle(page, longest=8)
    page.focus("#prompt")
    page.keyboard.type("Thanks")
    page.keyboard.press("Enter")
    over(page)
    first, second = ([(one["role"], one["content"]) for one in body["messages"]] for body in sent)
    page.focus(".opener >> nth=0")  # of the first answer
    page.keyboard.press("Enter")
    numbers = "all => Math.max(...all.map(one => one.dataset.round))"
    rounds = 1 + page.eval_on_selector_all(".said >> nth=0 >> .token", numbers)
    assert page.text_content("#tree-title") == f"Round {rounds} of {rounds}"
    page.focus("#which")
    page.keyboard.press("ArrowLeft")
    assert page.text_content("#tree-title") == f"Round {rounds - 1} of {rounds}"
    assert first == [("user", "Hello\nI need a hotel in Seattle.")]
    assert second == [*first, ("assistant", said), ("user", "Thanks")]


@needs_chromium
def test_model_text_is_never_html(page):
    evil = "<img src=x onerror=\"document.title='x'\"><script>document.title='x'</script>"
    answer_with(page, events([evil, "</div>&amp;"]))
    chat(page, prompt=evil)
    assert texts(page, ".said .token") == [evil, "</div>&amp;"]
    page.uncheck("#markdown")
    assert texts(page, ".said .token") == [evil, "</div>&amp;"]
    assert page.text_content(".asked") == evil
    assert page.query_selector_all("#log img, #log script, #drawing img") == []
    assert page.title() == "eyas playground"


@needs_chromium
def test_a_long_answer_leaves_the_page_its_frames(page):
    page.uncheck("#markdown")
    count = 3000
    words = events([f"word{one}\n" for one in range(count)])
    answer_with(page, words)
    page.evaluate("""() => {
        window.counts = [];
        const look = () => {
            counts.push(document.querySelectorAll(".said .token").length);
            requestAnimationFrame(look);
        };
        look();
    }""")
    chat(page)
    counts = page.evaluate("counts")
    assert max(counts) == count
    steps = [after - before for before, after in pairwise(counts)]
    assert 0 < max(steps) <= 2 * 200
    assert sum(step > 0 for step in steps) >= count / 400
    # it follows the end
    assert page.evaluate("log.scrollHeight - log.scrollTop - log.clientHeight") < 20


ERROR = {"message": "too long: lower max_tokens", "code": "context_length_exceeded"}
LONG = {"status": 400, "content_type": "application/json", "body": json.dumps({"error": ERROR})}


@needs_chromium
def test_errors_keep_the_prompt(browser, server):
    with opened(browser, server, faults=["400 (Bad Request)", "ERR_FAILED", "401"]) as page:
        answer_with(page, LONG)
        chat(page, longest=5000)
        assert page.text_content("#problem") == (
            "This server holds 512 tokens of chat and answer together, and this asks for more: "
            "lower “Longest answer” in Settings (now 5000), or shorten the message, edit an "
            "earlier one, or begin a new chat."
        )
        chat(page, longest="")
        assert "Longest answer" not in page.text_content("#problem")
        page.unroute("**/completions")
        chat(page, prompt=PROMPT * 200)
        assert page.text_content("#problem").startswith("This server holds 512 tokens of chat")
        assert page.query_selector_all(".turn") == []
        settle(page, temperature=5)
        page.fill("#prompt", PROMPT)
        page.click("#send")
        assert page.text_content("#problem").startswith("“Temperature” in Settings: ")
        settle(page, temperature=0)
        assert page.input_value("#prompt") == PROMPT
        assert page.query_selector_all(".turn") == []
        page.route("**/completions", lambda route: route.abort())
        chat(page)
        assert page.text_content("#problem") == "The server cannot be reached."
        broken = events(["one"])
        failed = 'data: {"error": {"message": "the engine failed"}}\n\n'
        broken["body"] = broken["body"].partition("data: [DONE]")[0] + failed
        answer_with(page, broken)
        chat(page)
        assert page.text_content("#problem") == "The engine failed."
        page.unroute("**/completions")
        chat(page)
        assert page.text_content("#problem") == ""


@needs_chromium
def test_keys_are_kept_nowhere(browser, world, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-this-test-0123456789\n")
    with (
        world.served(limits=LimitsConfig(api_keys=keys)) as client,
        opened(browser, client.url, ["401 (Unauthorized)"], "#key-form") as page,
    ):
        # not wait_for_function: the page's policy forbids to evaluate strings
        page.wait_for_selector("#key:focus")
        assert page.is_disabled("#send")
        page.keyboard.type("not-the-key")
        page.keyboard.press("Enter")
        page.wait_for_selector("#problem:not(:empty)")
        page.wait_for_selector("#stop:disabled")
        assert page.is_visible("#key-form")
        page.fill("#key", "a-key-of-this-test-0123456789")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-form", state="hidden")
        chat(page, longest=8)
        assert page.text_content("#num-plain") == "8"
        assert page.query_selector_all(".said .token")
        assert "without a head" in page.text_content("#served")  # which this server has not
        assert page.is_disabled("#race")
        assert "without drafts" in page.text_content("#told")
        kept = page.evaluate(
            "[sessionStorage.length, document.cookie, JSON.stringify(localStorage), "
            "document.documentElement.outerHTML]"
        )
        assert kept[:2] == [0, ""]
        assert PROMPT in kept[2]  # the chat is kept
        assert "a-key-of-this-test" not in kept[2] + kept[3]
        assert page.input_value("#key") == ""
        page.reload()
        page.wait_for_selector("#key-form", state="visible")


# As WCAG 2 has it, of the drawing, which axe leaves out; a canvas turns colours into bytes.
CONTRASTS = """() => {
  const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = one => {
    pixel.fillStyle = getComputedStyle(one).fill;
    pixel.fillRect(0, 0, 1, 1);
    return [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3).map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
      .reduce((sum, c, place) => sum + c * [0.2126, 0.7152, 0.0722][place], 0);
  };
  return [...document.querySelectorAll("#drawing rect")].flatMap(box =>
    [...box.parentElement.querySelectorAll("text")].map(text => {
      const [low, high] = [box, text].map(luminance).sort((a, b) => a - b);
      return [(high + 0.05) / (low + 0.05), text.textContent];
    }));
}"""


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_the_drawing(browser, server, scheme):
    """4.5 to 1; and a screenshot has more than a background."""
    with opened(browser, server, color_scheme=scheme) as page:
        text = NODE | {"source": "text", "probability": None}
        tree = [NODE, NODE | {"accepted": True}, text, text | {"accepted": True}]
        answer_with(page, streamed([(["w ", "v "], "bonus", tree)]))
        chat(page)
        found = page.evaluate(CONTRASTS)
        assert len(found) >= 2 * len(tree)
        assert [one for one in found if one[0] < 4.5] == []
        assert len(page.screenshot()) > 40_000  # ten times a blank sheet
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(250, 249, 246)", "dark": "rgb(20, 23, 28)"}[scheme]


@needs_chromium
def test_a_phone_needs_no_sideways_scrolling(browser, server):
    with opened(browser, server, viewport={"width": 360, "height": 740}, has_touch=True) as page:
        # the chat comes first: examples, prompt and Send are on the first screen
        assert page.evaluate("document.querySelector('#send').getBoundingClientRect().bottom < 740")
        chat(page, longest=30)
        race(page, "https://" + "long" * 60)
        for step in (None, "#view-rounds", "#open-settings", "#open-chats"):
            if step:
                page.click(step)
            wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert wide == [360, 360]
            assert page.evaluate(SMALL) == []
            if "open" in str(step):
                fits = "all => all.every(one => one.scrollWidth <= one.clientWidth)"
                assert page.eval_on_selector_all("dialog[open]", fits)
                page.keyboard.press("Escape")
        page.click("#view-chat")
        page.tap(".turn.answer .token >> nth=3")
        assert page.is_visible("#drawing")
        assert page.is_hidden("#log")
        page.click("#view-chat")
        assert page.is_visible("#log")


# What is too small for a finger.
SMALL = """[...document.querySelectorAll("button")].filter(one => one.checkVisibility())
    .map(one => [one.textContent, one.getBoundingClientRect()])
    .filter(([_, box]) => box.height < 36 || box.width < 36).map(([text]) => text)"""
