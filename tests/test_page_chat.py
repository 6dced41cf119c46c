"""The playground as a chat: Markdown, branches, settings, what is kept, accessibility."""

import json

import pytest

from tests import playground
from tests.browser import needs_chromium
from tests.playground import (
    DRAFTED,
    NODE,
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
pytestmark = needs_chromium

# Elements, without what says where tokens come from; of the last answer, and of a text in pieces
# of several sizes.
PLAIN = """said => {
    for (const one of said.querySelectorAll(".token")) one.replaceWith(...one.childNodes);
    for (const one of said.querySelectorAll("button, .code-head span")) one.remove();
    for (const one of said.querySelectorAll(".code, .scroll, .code-head"))
        one.replaceWith(...one.childNodes);
    for (const one of said.querySelectorAll("pre, a")) {
        for (const name of one.getAttributeNames()) if (name != "href") one.removeAttribute(name);
    }
    return said.innerHTML;
}"""
LAST = f"""() => ({PLAIN})(
    [...document.querySelectorAll(".answer .said")].at(-1).cloneNode(true))"""
IN_PIECES = f"""async text => {{
    const {{ Markdown }} = await import("./page/markdown.js");
    return [1, 2, 3, 5, text.length].map(size => {{
        const place = document.createElement("div");
        const markdown = new Markdown(place, (from, to) => [text.slice(from, to)]);
        for (let at = 0; at < text.length; at += size) markdown.update(text.slice(0, at + size));
        return ({PLAIN})(place);
    }});
}}"""


def drawn(page, text):
    """The elements of a text that comes in tokens of three characters."""
    answer_with(page, events([text[at : at + 3] for at in range(0, len(text), 3)]))
    chat(page, "Say it.")
    assert page.text_content("#problem") == ""
    return page.evaluate(LAST)


CASES = [
    ("# One\n## *Two*", '<h4 class="level-1">One</h4><h4 class="level-2"><em>Two</em></h4>'),
    ("a\nb\n\nc", "<p>a<br>b</p><p>c</p>"),
    (
        "**a** __b__ *c* _d_ ***e*** ~~f~~ `g *h*`",
        "<p><strong>a</strong> <strong>b</strong> <em>c</em> <em>d</em> "
        "<strong><em>e</em></strong> <del>f</del> <code>g *h*</code></p>",
    ),
    (
        "2 * 3 * 4, a_b_c, \\*d\\*, **e, <b>f</b> &amp;",
        "<p>2 * 3 * 4, a_b_c, *d*, **e, &lt;b&gt;f&lt;/b&gt; &amp;amp;</p>",
    ),
    (
        "1. a\n   - b\n\n   - c\n2. d\n\n   e\n",
        '<ol start="1"><li><p>a</p><ul><li><p>b</p></li><li><p>c</p></li></ul></li>'
        "<li><p>d</p><p>e</p></li></ol>",
    ),
    ("7) a\n* b", '<ol start="7"><li><p>a</p></li></ol><ul><li><p>b</p></li></ul>'),
    (
        "x:\n```py\nif a:\n    *b*\n```\ny",
        "<p>x:</p><pre><code>if a:\n    *b*\n</code></pre><p>y</p>",
    ),
    ("~~~\n```\n", "<pre><code>```\n</code></pre>"),
    ("> a\n> > b\n\n---", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><hr>"),
    (
        "|a|b|\n|-|-:|\n|*c*|d \\| e|\n",
        '<table><thead><tr><th>a</th><th class="right">b</th></tr></thead><tbody><tr>'
        '<td><em>c</em></td><td class="right">d | e</td></tr></tbody></table>',
    ),
    (
        "[a](https://b.c/d) <https://e.f> https://g.h/i.",
        '<p><a href="https://b.c/d">a</a> <a href="https://e.f">https://e.f</a> '
        '<a href="https://g.h/i">https://g.h/i</a>.</p>',
    ),
    (
        "[a](javascript:alert(1)) [b](data:text/html,c) ![d](https://e.f/g.png) [h](//i)",
        "<p>[a](javascript:alert(1)) [b](data:text/html,c) "
        '<a href="https://e.f/g.png">d</a> [h](//i)</p>',
    ),
    ("<think>\na\n</think>\nb", "<details><summary>Thoughts</summary><p>a</p></details><p>b</p>"),
]


def test_markdown_in_any_tokens(page):
    for number, (text, html) in enumerate(CASES):
        assert page.evaluate(IN_PIECES, text) == [html] * 5, text
        if number % 4 == 0:  # each chat takes its time
            assert drawn(page, text) == html


def test_characters_belong_to_their_tokens(page):
    pieces = ["# He", "ad\n\nsome **bo", "ld** wo", "rds and `co", "de`\n\n- it", "em"]
    rounds = [([one], "text" if n % 2 else "drafted", DRAFTED) for n, one in enumerate(pieces)]
    answer_with(page, streamed(rounds))
    chat(page, "Say it.")
    of_round = """all => all.map(one => [one.dataset.round, one.textContent, one.classList[1]])"""
    shown = {}
    for number, text, origin in page.eval_on_selector_all(".said .token", of_round):
        assert origin == rounds[int(number)][1]
        shown[number] = shown.get(number, "") + text
    assert list(shown.values()) == ["He", "adsome bo", "ld wo", "rds and co", "deit", "em"]
    page.click(".said .token:text-is('bo')")
    assert page.text_content("#tree-title") == "Round 2 of 6"
    assert texts(page, ".said .now") == ["ad", "some ", "bo"]
    page.uncheck("#markdown")
    assert texts(page, ".said .token")[0] == "# He"
    assert "".join(texts(page, ".said .token")) == "".join(pieces)
    assert texts(page, ".said .now") == ["ad\n", "\n", "some **bo"]
    page.check("#markdown")
    assert page.query_selector(".said strong")


# Texts on which a careless parser takes quadratic time, or a stack without end.
HOSTILE = ["*a ", "[", "[a](", "`", ">", "- ", "*a _a ", "a*", "|", "<http://a", "\\"]
HOSTILE += ["- a\n\n", "~~a "]


def test_hostile_markdown_is_drawn_soon(page):
    took = page.evaluate(
        """async texts => {
            const { Markdown } = await import("./page/markdown.js");
            const drawn = text => {
                const began = performance.now();
                const place = document.createElement("div");
                new Markdown(place, (from, to) => [text.slice(from, to)]).update(text);
                return performance.now() - began;
            };
            // the best of three: a busy machine may stop the browser in one of them
            return texts.map(text => Math.min(...[1, 2, 3].map(() => drawn(text))));
        }""",
        [one * (12_000 // len(one)) for one in HOSTILE],
    )
    assert max(took) < 2_000, dict(zip(HOSTILE, took, strict=True))


def test_copies_of_code_and_messages(browser, server):
    with opened(browser, server, permissions=["clipboard-read", "clipboard-write"]) as page:
        text = "Take **this**:\n\n- x\n  ```py\n  a = 1\n\n  b = 2\n  ```"
        drawn(page, text)
        for button, copied in (
            (".code button", "a = 1\n\nb = 2"),
            (".answer .actions button", text),
        ):
            page.click(button)
            page.wait_for_selector(f"{button}:text-is('Copied')")
            assert page.evaluate("navigator.clipboard.readText()") == copied


def sent(page):
    """The messages of each request from now on, role and text."""
    found = []

    def note(request):
        if request.method == "POST":
            messages = request.post_data_json["messages"]
            found.append([(one["role"], one["content"]) for one in messages])

    page.on("request", note)
    return found


def say_in_turn(page, *answers):
    left = iter(answers)
    page.route("**/completions", lambda route: route.fulfill(**events([next(left)])))


def shown(page):
    return texts(page, ".asked, .answer .said")


def test_answers_and_edits_are_branches(page):
    asked = sent(page)
    say_in_turn(page, "A1", "A2", "A3", "B1", "A4")
    chat(page, "Q")
    chat(page, "R")
    assert shown(page) == ["Q", "A1", "R", "A2"]
    page.click(".answer >> nth=0 >> text=Regenerate")
    over(page)
    assert shown(page) == ["Q", "A3"]
    page.click("text=Edit")
    assert page.evaluate("document.activeElement.value") == "Q"
    page.keyboard.press("Escape")
    assert shown(page) == ["Q", "A3"]
    page.click("text=Edit")
    page.keyboard.type("uestion")
    page.keyboard.press("Enter")
    over(page)
    assert shown(page) == ["Question", "B1"]
    chat(page, "S")
    assert asked == [
        [("user", "Q")],
        [("user", "Q"), ("assistant", "A1"), ("user", "R")],
        [("user", "Q")],
        [("user", "Question")],
        [("user", "Question"), ("assistant", "B1"), ("user", "S")],
    ]
    page.click(".user >> nth=0 >> [aria-label='Version before']")
    assert shown(page) == ["Q", "A3"]
    assert page.evaluate("document.activeElement.ariaLabel") == "Next version"
    assert "2 of 2" in page.text_content(".answer .actions")
    page.click(".answer [aria-label='Version before']")
    assert shown(page) == ["Q", "A1", "R", "A2"]
    page.reload()
    page.wait_for_selector("#send:enabled")
    assert shown(page) == ["Q", "A1", "R", "A2"]
    page.click(".user >> nth=0 >> [aria-label='Next version']")
    assert shown(page) == ["Question", "B1", "S", "A4"]


def test_the_same_answer_again_is_explained(page):
    say_in_turn(page, "A", "A", "B")
    chat(page, "Q")
    page.click("text=Regenerate")
    over(page)
    assert "at temperature 0 it always is" in page.text_content("#status")


def test_failures_keep_the_chat(browser, server):
    with opened(browser, server, faults=["ERR_FAILED"]) as page:
        say_in_turn(page, "A")
        chat(page, "Q")
        page.unroute("**/completions")
        page.route("**/completions", lambda route: route.abort())
        page.click("text=Regenerate")
        over(page)
        assert page.text_content("#problem") == "The server cannot be reached."
        assert shown(page) == ["Q", "A"]
        page.fill("#prompt", "R")
        page.click("#race")
        over(page)
        assert shown(page) == ["Q", "A"]
        assert page.input_value("#prompt") == "R"
        answer_with(page, events([]))
        page.click("#send")
        over(page)
        assert "ended its answer before it said anything" in page.text_content("#problem")
        assert page.input_value("#prompt") == "R"


def test_chats_are_kept_and_deleted(page):
    say_in_turn(page, "A", "B", "C")
    chat(page, "First question")
    page.click("#clear")
    assert page.is_visible("#welcome")
    race(page, "Second question")
    page.reload()
    page.wait_for_selector("#send:enabled")
    assert shown(page)[0] == "Second question"
    page.click("#open-chats")
    assert texts(page, "#chat-list .opener") == ["Second question", "First question"]
    assert texts(page, "#chat-list [aria-current]") == ["Second question"]
    page.click("text=First question")
    assert shown(page) == ["First question", "A"]
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#open-chats")
    page.click("[aria-label='Delete “First question”']")
    assert texts(page, "#chat-list .opener") == ["Second question"]
    page.click("#delete-all")
    assert page.evaluate("Object.keys(localStorage).filter(one => one.includes('chat.'))") == []
    page.click("#close-chats")
    assert page.is_visible("#welcome")


def test_two_tabs_and_a_foreign_entry_lose_nothing(page):
    page.evaluate("localStorage.setItem('eyas.chat.x', '{\"nodes\": 3}')")
    say_in_turn(page, "A", "B")
    chat(page, "Q")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("#send:enabled")
    assert shown(other) == ["Q", "A"]
    say_in_turn(other, "C")
    chat(other, "of the other")
    chat(page, "of this")
    page.click("#open-chats")
    assert texts(page, "#chat-list .opener") == ["Q", "Q"]
    page.click("#chat-list .opener >> nth=1")
    assert shown(page) == ["Q", "A", "of the other", "C"]
    assert page.evaluate("localStorage.getItem('eyas.chat.x')") == '{"nodes": 3}'


def test_a_browser_without_room_says_so(page):
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full') } }")
    say_in_turn(page, "A")
    chat(page, "Q", longest=None)
    assert "no room for more chats" in page.text_content("#problem")
    assert shown(page) == ["Q", "A"]


def test_settings_are_sent_and_kept(page):
    bodies = [{}]
    page.on("request", lambda one: bodies.append(one.post_data_json or bodies[-1]))
    given = {"temperature": 0.5, "top-p": 0.9, "top-k": 40, "min-p": 0.05, "seed": 7}
    given |= {"repetition": 1.1, "presence": 0.5, "frequency": -0.5, "longest": 3}
    settle(page, system="Be brief.", **given)
    chat(page, "Hello", longest=3)
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7}
    fields |= {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    body = bodies[-1]
    assert fields | {"max_tokens": 3} == {name: body.get(name) for name in (*fields, "max_tokens")}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert texts(page, ".asked") == ["Hello"]  # the server has taken all of it
    page.uncheck("#colours")
    page.reload()
    page.wait_for_selector("#send:enabled")
    assert {name: float(page.input_value(f"#{name}")) for name in given} == given
    assert not page.is_checked("#colours")
    background = "getComputedStyle(document.querySelector('.key .token.drafted')).backgroundColor"
    assert page.evaluate(background) != "rgba(0, 0, 0, 0)"
    page.click("#open-settings")
    page.click("#reset")
    assert page.input_value("#temperature") == "0"
    assert page.input_value("#system") == "Be brief."
    page.click("#close-settings")
    chat(page, "Bye", longest="")
    assert not {"top_p", "seed", "max_tokens"} & set(bodies[-1])


def test_the_gauge_of_the_context(page, server):
    assert page.text_content("#context") == "0 % of 512 tokens"
    chat(page, longest=8)
    stored = json.loads(page.evaluate("JSON.stringify(Object.values(localStorage))"))
    (used,) = [node["used"] for one in stored for node in json.loads(one).get("nodes", [])[1:]]
    assert 8 < used < 100
    assert page.get_attribute("#gauge", "value") == str(used)
    assert page.text_content("#context") == f"{100 * used / 512:.0f} % of 512 tokens"
    answer_with(page, streamed([(["w"], "plain", None)], used=480))
    chat(page, longest=8)
    assert "94 % of 512 tokens: nearly full; begin a new chat" in page.text_content("#context")
    page.click("#clear")
    assert page.text_content("#context") == "0 % of 512 tokens"


RICH = (
    "# Title\n\nSome **bold** `code` [link](https://a.b).\n\n- one\n  1. two\n\n> quote\n\n"
    "```py\nprint('a very long line that has to be scrolled' * 12)\n```\n\n|a|b|\n|-|-|\n|c|d|\n"
)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing(browser, server, scheme, width):
    from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415 - a development package

    size = {"width": width, "height": 860}
    with opened(browser, server, color_scheme=scheme, viewport=size) as page:

        def check(state):
            result = Axe().run(page).response
            assert len(result["passes"]) > 10
            found = [(one["id"], one["nodes"][0]["html"]) for one in result["violations"]]
            assert not found, state

        check("welcome")
        chain = [NODE | {"accepted": True}, NODE | {"source": "text", "probability": None}]
        answer_with(page, streamed([([RICH], "bonus", DRAFTED), (["w", "v"], "bonus", chain)]))
        chat(page)
        page.click("text=Regenerate")
        over(page)
        race(page)
        check("chat")
        if width == 390:
            page.click("#view-rounds")
            check("rounds")
            page.click("#view-chat")
        for name in ("chats", "settings"):
            page.click(f"#open-{name}")
            check(name)
            page.keyboard.press("Escape")
        page.click("text=Edit")
        check("edit")
