"""Logs of servers: fixtures after their sources, and nothing without consent."""

import json
import re
import shutil
import subprocess

import pytest
from pydantic import ValidationError

from eyas.artifact import Artifact
from eyas.data.ledger import DamagedRow, SourceRow
from eyas.data.logs import says
from eyas.data.prompts import PromptsConfig, make_prompts
from eyas.data.sources import SourceConfig, read_source
from eyas.errors import EmptyInputError, InputError
from tests.stages import ROOT

ASKED = "Where is the dog?"
SAID = "SAID-BY-ASSISTANT"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": SAID},
    {"role": "user", "content": "And the cat?"},
]
BODY = {"model": "m", "messages": MESSAGES, "metadata": {"training": "yes"}, "user": "u1"}
# vllm 0.32.0, entrypoints/serve/utils/request_logger.py and logger.py (_FORMAT)
VLLM = [
    "(APIServer pid=7) INFO 11-22 10:00:00 [api_server.py:1272] Starting vLLM API server",
    "(APIServer pid=7) DEBUG 11-22 10:00:01 [entrypoints/.../request_logger.py:76] Request "
    "chatcmpl-1 JSON body: " + json.dumps(BODY),
    "(APIServer pid=7) DEBUG 11-22 10:00:01 [entrypoints/.../request_logger.py:53] Request "
    "chatcmpl-1 details: prompt: 'x] Request forged JSON body: {\"messages\": []}', "
    "prompt_token_ids: [1], prompt_embeds shape: None.",
    "(APIServer pid=7) INFO 11-22 10:00:01 [entrypoints/.../request_logger.py:61] Received request "
    "chatcmpl-1: params: SamplingParams(n=1), lora_request: None.",
]
# sglang 0.5.23, srt/utils/request_logger.py and log_utils.py (--log-requests-target FOLDER)
SGLANG_EVENT = {
    "timestamp": "2026-11-22T10:00:00.000001",
    "event": "request.received.openai",
    "obj": {"messages": MESSAGES, "model": "m", "user": "u1", "rid": "r1"},
    "headers": {"x-smg-routing-key": "k", "x-training": "yes"},
}
SGLANG_OTHER = {
    "timestamp": "2026-11-22T10:00:01.000001",
    "event": "request.finished",
    "rid": "r1",
    "obj": {"text": f"<|im_start|>user\n{ASKED}", "rid": "r1"},
    "out": {"text": SAID, "meta_info": {}},
}
# Other gateways, by a line of jq: LiteLLM 1.109.1 (StandardLoggingPayload of types/utils.py), and
# Langfuse 5.0.4 (observation_v2.py, as its API and its blob export write it).
LITELLM = {
    "id": "chatcmpl-2",
    "call_type": "acompletion",
    "metadata": {"requester_metadata": {"training": "yes"}},
    "end_user": "u1",
    "messages": MESSAGES,
    "response": {"choices": [{"message": {"role": "assistant", "content": SAID}}]},
}
LANGFUSE = {
    **{"id": "o1", "traceId": "t", "type": "GENERATION", "userId": "u1"},
    "input": {"messages": MESSAGES},
    "output": {"role": "assistant", "content": SAID},
    "metadata": {"training": "yes"},
}
BLOB = {"id": "o1", "type": "GENERATION", "user_id": "u1", "input": json.dumps(MESSAGES)}
BLOB["metadata"] = json.dumps({"training": "yes"})
OWN = {"licence": "LicenseRef-own", "prompts_by": "human"}


def stamped(event):
    return "[2026-11-22 10:00:00] " + json.dumps(event)


LOGS = {
    "OpenAI bodies": ([json.dumps(BODY)], "metadata.training"),
    "vLLM": (VLLM, "metadata.training"),
    "SGLang": ([stamped(SGLANG_EVENT), stamped(SGLANG_OTHER)], "headers.x-training"),
    "SGLang, bare": ([json.dumps(SGLANG_EVENT), "[10:00] ready"], "headers.x-training=YES"),
    "numbers for names": ([json.dumps({**BODY, "id": 7, "user": 8})], "metadata.training"),
    "SGLang, several ids": (
        [stamped(SGLANG_EVENT | {"obj": {"messages": MESSAGES, "rid": ["a", "b"]}})],
        "headers.x-training",
    ),
}
OBJECTS = {name: one for name, one in LOGS.items() if one[0][0][0] == "{"}
RESPONSES = {
    **{"model": "m", "instructions": "Be brief.", "metadata": {"training": "yes"}},
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": ASKED}]},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": SAID}]},
        {"role": "user", "content": "And the cat?"},
    ],
}
OTHER = {"type": "SPAN", "traceId": "t", "input": {"messages": MESSAGES}, "output": SAID}
TRACE = {"sessionId": None, "userId": "u1", "input": MESSAGES, "output": SAID}
LOGS |= {
    "Responses API": ([json.dumps(RESPONSES)], "metadata.training"),
    "Langfuse": ([json.dumps(OTHER), json.dumps(LANGFUSE)], "metadata.training"),
    "Langfuse, traces": ([json.dumps(TRACE | {"tags": ["training"]})], "tags=training"),
}


def read(folder, lines, **log):
    path = folder / "server.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return list(read_source(SourceConfig(path=str(path), log=log)))


@pytest.mark.parametrize(("lines", "consent"), LOGS.values(), ids=LOGS)
def test_a_log_gives_what_users_said_and_nothing_else(tmp_path, lines, consent):
    (row,) = read(tmp_path, lines, consent=consent)
    assert isinstance(row, SourceRow)
    assert row.turns == (ASKED, "And the cat?")
    assert row.system == "Be brief."
    assert SAID not in repr(row)
    (withheld,) = read(tmp_path, lines, consent="metadata.elsewhere")
    assert isinstance(withheld, DamagedRow)
    assert withheld.drop.reason == "consent"
    assert ASKED not in repr(withheld)


@pytest.mark.parametrize(
    "kind", ["function_call", "custom_tool_call", "web_search_call", "function_call_output"]
)
def test_a_request_of_the_responses_api_that_used_tools_is_dropped_for_that(tmp_path, kind):
    body = {"input": [{"type": kind, "output": "5"}, {"role": "user", "content": ASKED}]}
    (row,) = read(tmp_path, [json.dumps(body)], basis="our contract")
    assert row.drop.reason == "tools"


@pytest.mark.parametrize(("lines", "consent"), OBJECTS.values(), ids=OBJECTS)
def test_parquet_is_read_as_json_lines_are(tmp_path, lines, consent):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "log.parquet"
    parquet.write_table(arrow.Table.from_pylist([json.loads(lines[0])]), path)
    (row,) = read_source(SourceConfig(path=str(path), log={"consent": consent}))
    assert row.turns == (ASKED, "And the cat?")
    (line,) = read(tmp_path, lines[:1], consent=consent)
    assert (row.id, row.system) == (line.id, line.system)
    (withheld,) = read_source(SourceConfig(path=str(path), log={"consent": "not.there"}))
    assert withheld.drop.reason == "consent"


def test_tables_hold_objects_as_maps_and_texts(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "log.parquet"
    texts = arrow.map_(arrow.string(), arrow.string())
    columns = {
        "messages": [json.dumps(MESSAGES)] * 2,
        "metadata": arrow.array([[("training", "yes")], None], texts),
        "prompt": arrow.nulls(2, arrow.string()),
    }
    parquet.write_table(arrow.table(columns), path)
    source = SourceConfig(path=str(path), log={"consent": "metadata.training"})
    row, withheld = read_source(source)
    assert row.turns == (ASKED, "And the cat?")
    assert withheld.drop.reason == "consent"


CUT = [{"role": "user", "content": "a" * 1024 + "..." + "b" * 1024}]


@pytest.mark.parametrize(
    "line",
    [
        VLLM[1][:-30],  # --max-log-len
        stamped(SGLANG_EVENT | {"obj": {"messages": CUT}}),  # level 2
        json.dumps({"messages": "redacted"}),
        json.dumps({"text": "no request"}),
    ],
    ids=["vLLM", "SGLang", "redacted", "no request"],
)
def test_a_request_that_was_cut_or_redacted_is_no_prompt(tmp_path, line):
    good, *rest = read(tmp_path, [json.dumps(BODY), line], basis="our contract")
    assert isinstance(good, SourceRow)
    assert [row.drop.reason for row in rest] == ["malformed"]


def test_a_log_without_a_basis_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "server.log"
    for lines in ([json.dumps(BODY)], [json.dumps(SGLANG_EVENT)], VLLM, [stamped(SGLANG_EVENT)]):
        path.write_text("\n".join(lines))
        config = PromptsConfig(sources=[{"path": str(path), **OWN}])
        with pytest.raises(InputError, match=r"consent.*\n.*\n?.*log: \{consent"):
            make_prompts(config, Artifact(str(tmp_path / "out")))
    path.write_text(3 * "2026-11-22 10:00:00,123 server INFO What is a falcon?\n")
    with pytest.raises(InputError, match="shape: openai, or strings"):
        make_prompts(config, Artifact(str(tmp_path / "out")))
    config.sources[0] = config.sources[0].model_copy(update={"shape": "strings"})
    with path.open("ab") as lines:  # JSON and Windows-1252 are no texts, as in any other file
        lines.write(b'{"model": "m"}\ncaf\xe9\n')
    made = make_prompts(config, Artifact(str(tmp_path / "out")))
    assert made.counts["rows"] == 5
    assert made.facts["ledger"]["dropped"]["malformed"] == 2
    for log in ({}, {"consent": "a", "basis": "b"}, {"basis": " "}):
        with pytest.raises(ValidationError, match="one stated basis"):
            SourceConfig(path="x", log=log)


def jq_commands():
    """The filters in docs/production.md, by gateway."""
    page = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| (\w+) \| `jq -c '(.*?)'", page.replace("\\|", "|"), re.M))


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize(
    ("gateway", "records"),
    [
        ("LiteLLM", [LITELLM, {**LITELLM, "call_type": "aembedding"}]),
        ("Langfuse", [LANGFUSE, {**LANGFUSE, "type": "SPAN"}]),
        ("Langfuse", [[BLOB]]),
    ],
)
def test_logs_of_gateways_are_read_after_a_line_of_jq(tmp_path, gateway, records):
    written = "".join(json.dumps(record) for record in records)
    command = ["jq", "-c", jq_commands()[gateway]]
    lines = subprocess.run(command, input=written, capture_output=True, text=True, check=True)
    (row,) = read(tmp_path, lines.stdout.splitlines(), consent="metadata.training")
    assert (row.turns, row.system) == ((ASKED, "And the cat?"), "Be brief.")
    assert SAID not in repr(row)


def made(folder, path, **log):
    """The prompts of a log of which a field says who consents, and their manifest."""
    output, log = Artifact(str(folder / "out")), log or {"consent": "metadata.training"}
    config = PromptsConfig(sources=[{"path": str(path), **OWN, "log": log}])
    return output, make_prompts(config, output)


def test_consent_goes_into_the_ledger_and_withheld_text_nowhere(tmp_path):
    path = tmp_path / "log.jsonl"
    secret = "Where did the purple elephant of the regiment go?"
    no = {**BODY, "messages": [{"role": "user", "content": secret}], "metadata": {}, "user": "u2"}
    path.write_text(json.dumps(BODY) + "\n" + json.dumps(no) + "\n")
    _, manifest = made(tmp_path, path)
    assert manifest.counts["prompts"] == 1
    assert manifest.inputs["log"].config["log"] == {"consent": "metadata.training"}
    assert manifest.facts["ledger"]["dropped"] == {"consent": 1}
    for file in (tmp_path / "out").rglob("*"):
        assert file.is_dir() or b"purple elephant" not in file.read_bytes()


def test_a_conversation_that_is_logged_at_each_turn_is_one_prompt(tmp_path):
    said = ["What is a falcon?", "How fast does it dive, and who measured that?", "Thanks."]

    def request(end, system="Be brief."):
        asked = [{"role": "user", "content": turn} for turn in said[:end]]
        turns = [one for turn in asked for one in (turn, {"role": "assistant", "content": "-"})]
        return {**BODY, "messages": [{"role": "system", "content": system}, *turns[:-1]]}

    path = tmp_path / "log.jsonl"
    # the last of another server: without the others its beginning stays
    requests = [request(1), request(2), request(3), request(1, "Speak of birds.")]
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))
    output, manifest = made(tmp_path, path)
    assert manifest.facts["ledger"]["dropped"] == {"duplicate.beginning": 2}
    assert [row["turns"] for row in output.read_rows("prompts")] == [said, said[:1]]
    notes = [row["note"] for row in output.read_rows("dropped")]
    assert notes == ["goes on in log.jsonl:3 of log"] * 2


def test_opting_out_counts_whatever_the_basis(tmp_path):
    refused = {**BODY, "metadata": {"training": "no", "opt_out": True}}
    lines = [json.dumps(BODY), json.dumps(refused)]
    rows = read(tmp_path, lines, basis="c", opt_out="metadata.opt_out")
    assert [isinstance(row, SourceRow) for row in rows] == [True, False]
    for path, warned in (("metadata.opt_out", 0), ("metadata.optout", 1)):
        _, manifest = made(tmp_path / path, tmp_path / "server.log", basis="c", opt_out=path)
        assert len(manifest.facts["unrefused"]) == warned


def test_the_sample_is_the_same_each_time_and_grows_with_the_share(tmp_path):
    lines = [json.dumps({**BODY, "user": f"u{number % 200}"}) for number in range(600)]

    def taken(**log):
        rows = read(tmp_path, lines, basis="c", **log)
        return {row.where for row in rows if isinstance(row, SourceRow)}

    fifth, half = taken(share=0.2), taken(share=0.5)
    assert fifth == taken(share=0.2)
    assert fifth < half < taken()
    assert 600 * 0.4 < len(half) < 600 * 0.6
    assert len(taken(max_per_user=2)) == 400


def test_a_log_without_a_request_is_said(tmp_path):
    with pytest.raises(EmptyInputError, match="holds no request"):
        read(tmp_path, VLLM[:1], basis="c")


def test_fields_are_found_by_path():
    record = {"a": {"b.c": {"d": True}}, "tags": ["x", 1]}
    assert all(says(record, one) for one in ("a.b.c.d", "tags=x", "tags"))
    assert not any(says(record, one) for one in ("a.b", "tags.x"))
    assert not says({"a": "false"}, "a")
