"""cache_salt over HTTP: computed prefixes are shared among requests of the same salt, and with
nobody else.
"""

from __future__ import annotations

import httpx
import pytest

from eyas.serve.openapi import document
from tests.serving import MODEL, ask, complete, post

LONG = [
    {"role": "user", "content": "I would like a table for two, " + "and for the others of us, " * 5}
]
PROMPT = "I would like a table for two, and one for the others of us."


def hits(client):
    """Tokens of prompts that were found among those kept."""
    lines = httpx.get(f"{client.url}/metrics").text.splitlines()
    return next(
        float(line.split()[-1]) for line in lines if line.startswith("eyas:prefix_cache_hits_total")
    )


@pytest.mark.parametrize(
    "asked",
    [
        lambda client, salt: ask(client, LONG, extra_body=salt).choices[0].message.content,
        lambda client, salt: complete(client, PROMPT, extra_body=salt).choices[0].text,
    ],
)
def test_the_same_salt_reuses_and_another_does_not(client, asked):
    texts, found = [], []
    for salt in (
        {},
        {},
        {"cache_salt": "a"},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"cache_salt": None},
    ):
        before = hits(client)
        texts.append(asked(client, salt))
        found.append(hits(client) > before)
    assert found == [False, True, False, True, False, True]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("salt", ["", "x" * 129, 3, ["a"]])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_salt_that_is_none_is_refused(client, path, salt):
    asked = {"messages": LONG} if "chat" in path else {"prompt": PROMPT}
    answer = post(client, {"model": MODEL, **asked, "cache_salt": salt}, path)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"
    assert (
        post(
            client, {"model": MODEL, "max_tokens": 1, **asked, "cache_salt": "x" * 128}, path
        ).status_code
        == 200
    )


@pytest.mark.parametrize("form", ["ChatRequest", "TextRequest"])
def test_the_document_has_it(form):
    told = document(MODEL)["components"]["schemas"][form]["properties"]["cache_salt"]
    (text,) = [one for one in told["anyOf"][0]["anyOf"] if one["type"] == "string"]
    assert (text["minLength"], text["maxLength"]) == (1, 128)
