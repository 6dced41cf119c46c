"""cache_salt over HTTP: only requests of the same salt share computed prefixes."""

import httpx
import pytest

from tests.serving import MODEL, ask, complete, post, text_of

PROMPT = "I would like a table for two, and one for the others of us."
LONG = [{"role": "user", "content": PROMPT * 3}]
NAME = "eyas:prefix_cache_hits_total"


def hits(client):
    lines = httpx.get(f"{client.url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(NAME))


@pytest.mark.parametrize(
    "asked",
    [
        lambda client, salt: text_of(ask(client, LONG, extra_body=salt)),
        lambda client, salt: complete(client, PROMPT, extra_body=salt).choices[0].text,
    ],
)
def test_salts_separate_prefixes(client, asked):
    texts, found = [], []
    for salt in (None, None, "a", "a", "b", None):
        before = hits(client)
        texts.append(asked(client, {} if salt is None else {"cache_salt": salt}))
        found.append(hits(client) > before)
    assert found == [False, True, False, True, False, True]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("salt", ["", "x" * 129, 3, ["a"]])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_wrong_salts_are_refused(client, path, salt):
    asked = {"messages": LONG} if "chat" in path else {"prompt": PROMPT}
    body = {"model": MODEL, "max_tokens": 1, **asked}
    answer = post(client, {**body, "cache_salt": salt}, path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
    assert post(client, {**body, "cache_salt": "x" * 128}, path).status_code == 200
