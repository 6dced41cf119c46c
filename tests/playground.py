"""The playground in a real browser: pages, what people do on them, answers in place of a server's.

    python -m tests.playground URL

takes docs/page.png and docs/page_dark.png of a server of smollm2 that has just started.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from eyas.builtin import BUILTIN
from eyas.engine.engine import EngineConfig
from eyas.serve.server import ServeConfig, running_server
from tests.browser import chromium

# some forty tokens of answer: a shorter one may come in too few pieces to time
PROMPT = "Please book a table for 4 people at Sino in San Jose, on March 8th at 6:30 pm."
WAIT_MS = 120_000  # a busy machine's
# a draft of the head that was rejected
NODE = {"parent": -1, "text": "x", "probability": 0.5, "source": "head", "accepted": False}
DRAFTED = [NODE]  # a tree of it


@pytest.fixture(scope="module")
def server():
    engine = EngineConfig(max_batch=2, max_length=512, speculation="fixed(4,2,8)")
    with running_server(
        ServeConfig(target=BUILTIN, head=BUILTIN, port=0, threads=1, engine=engine)
    ) as url:
        yield url


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@contextmanager
def opened(browser, url, faults=(), ready="#send:enabled", **options):
    """A page in a context of its own: it asks this server only, and complains of `faults` only."""
    options = {"viewport": {"width": 1280, "height": 860}} | options
    with browser.new_context(**options) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        hosts, said = set(), []
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        page.wait_for_selector(ready)
        yield page
        assert hosts == {urlsplit(url).netloc}
        assert [one for one in said if not any(fault in one for fault in faults)] == []


@pytest.fixture
def page(browser, server):
    with opened(browser, server) as page:
        yield page


def over(page):
    page.wait_for_selector("#stop:disabled")
    page.wait_for_selector("#send:enabled")


def settle(page, **values):
    """Settings, by the ids of their controls."""
    page.click("#open-settings")
    for name, value in values.items():
        page.fill(f"#{name}", str(value))
    page.click("#close-settings")


def chat(page, prompt=PROMPT, longest=40):
    if longest is not None and page.input_value("#longest") != str(longest):
        settle(page, longest=longest)
    page.fill("#prompt", prompt)
    page.click("#send")
    over(page)


def race(page, prompt=PROMPT):
    """The verdict, and what both lanes say."""
    page.fill("#prompt", prompt)
    page.click("#race")
    page.wait_for_selector(".lanes")
    over(page)
    return page.text_content(".verdict"), texts(page, ".lane .opener"), texts(page, ".lane .figure")


def texts(page, selector):
    return [one.text_content() for one in page.query_selector_all(selector)]


def answer_with(page, answer):
    page.unroute("**/completions")
    page.route("**/completions", lambda route: route.fulfill(**answer))


def events(pieces, origin="bonus", tree=DRAFTED):
    """A stream that says these tokens, one a round."""
    return streamed([([piece], origin, tree) for piece in pieces])


def streamed(rounds, by_head=True, used=100):
    """A stream of rounds: texts of tokens, their origin, the tree. used: tokens of prompt and
    answer.
    """
    chunks = []
    for said, origin, tree in rounds:
        delta = {"content": "".join(said)}
        tokens = [{"text": one, "origin": origin} for one in said]
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        shown = {"tokens": tokens, "tree": tree, "head": by_head and tree is not None}
        chunks.append({"choices": [choice], "eyas": {"round": shown}})
    ending = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    chunks.append({**ending, "usage": {"total_tokens": used}})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return {"status": 200, "content_type": "text/event-stream", "body": body}


PICTURED = "Write a Python function that counts the vowels in a text."
# The round that shows most: nodes, accepted ones, and who proposed them.
TELLING = """async () => {
    const { tree } = await import("/page/tree.js");
    const telling = ({ tree }) => tree ? tree.length + 3 * tree.filter(one => one.accepted).length
        + 4 * new Set(tree.map(one => one.source)).size : 0;
    const all = tree.rounds.map(telling);
    tree.pick(all.indexOf(Math.max(...all)));
    document.querySelector("#log").scrollTop = 0;
}"""


def take_pictures(url):
    with chromium() as browser, opened(browser, url) as page:
        chat(page, PICTURED, longest=None)
        page.evaluate(TELLING)
        docs = Path(__file__).resolve().parents[1] / "docs"
        for scheme, name in (("light", "page.png"), ("dark", "page_dark.png")):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(500)
            page.screenshot(path=docs / name)


if __name__ == "__main__":
    take_pictures(sys.argv[1])
