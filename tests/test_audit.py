"""`eyas audit`: what is shown of conversations under each mask option, and what stops it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.chat import Chat
from eyas.chat.picture import counts, paint, pieces, visible
from eyas.chat.supervision import MEANING, OPTIONS, token_kinds
from eyas.chat.turn import TokenizedText
from eyas.cli.audit import Audit, ConversationRow, add_row, examples, read
from eyas.cli.main import build
from eyas.errors import CorruptError, MissingInputError
from tests.chat_folders import like_granite, like_qwen
from tests.tiny import tiny_tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return like_qwen(tmp_path_factory.mktemp("qwen"))


def run_audit(*arguments: str | Path) -> Any:
    """The command in this process, as wide as it needs."""
    words = ["audit", *map(str, arguments)]
    return CliRunner().invoke(build(words), words, prog_name="eyas")


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def row(*contents: str, **more: Any) -> dict[str, Any]:
    turns = [
        {"role": ("user", "assistant")[at % 2], "content": content}
        for at, content in enumerate(contents)
    ]
    return {"messages": turns, **more}


def audited(chat: Chat, *rows: ConversationRow) -> Audit:
    audit = Audit()
    for one in rows:
        add_row(one, chat, audit, show=10)
    return audit


def test_examples_show_turns_tools_and_reasoning(qwen: Path) -> None:
    """Every example has a mask where the template can do all of it, and what is supervised is what
    the target wrote.
    """
    chat = Chat(qwen)
    audit = audited(chat, *examples())
    assert audit.num_answers == audit.num_masked == 7
    written = {
        title: "".join(
            text
            for text, kind in zip(
                pieces(turn.encoded), token_kinds(turn.mask, "serving"), strict=True
            )
            if kind != "context"
        )
        for title, turn in audit.samples
    }
    assert written["tools: answer 1"] == (
        '<tool_call>\n{"name": "find_table", "arguments": {"city": "San Jose", "people": '
        "2}}\n</tool_call><|im_end|>"
    )
    assert written["reasoning: answer 1"] == "<think>\n17 * 3 = 51.\n</think>\n\n51.<|im_end|>"
    assert written["reasoning: answer 2"] == "<think>\n17 * 4 = 68.\n</think>\n\n68.<|im_end|>"
    assert written["a system prompt: answer 1"] == "Paris.<|im_end|>"
    assert (
        written["two turns: answer 2"]
        == "Done: tomorrow at seven, for two.\n\nAnything else?<|im_end|>"
    )


def test_answers_that_go_on_from_each_other_are_one_sample(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    audit = audited(Chat(tmp_path), ConversationRow(**row("Hi", "a", "So", "b", "Yes", "c")))
    [(title, turn)] = audit.samples
    assert title == "conversation 1: answers 1 to 3"
    assert sum(turn.mask) == 6, "three answers of a token, three end tokens"
    assert audit.tokens["serving"] == {"context": len(turn.ids) - 6, "given": 3, "drafted": 3}
    assert audit.tokens["t"]["missed"] == 3
    assert audit.tokens["t+1"]["beyond"] == 3


def test_terminal_and_page_say_the_same(qwen: Path, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    shown = run_audit(qwen, "--html", page)
    assert shown.exit_code == 0, shown.output
    for option in OPTIONS:
        assert f"two turns: answer 1 · mask {option}" in shown.stdout
    assert "both ways to the mask agree on 7" in shown.stdout
    html = page.read_text(encoding="utf-8")
    assert "both ways to the mask agree on 7" in html
    assert "prefers-color-scheme: dark" in html
    assert "http" not in html, "the page needs nothing beside it"
    assert html.count('class="card tokens"') == 4
    for view in range(len(OPTIONS)):
        assert f'id="view-{view}"' in html
        assert f"v{view}-drafted" in html


def test_one_option_and_no_samples(qwen: Path) -> None:
    shown = run_audit(qwen, "--mask", "t+1", "--show", "0")
    assert shown.exit_code == 0, shown.output
    assert "· mask" not in shown.stdout
    assert "│ t+1" in shown.stdout
    assert "serving │" not in shown.stdout
    assert run_audit(qwen, "--mask", "all").exit_code == 2


def test_the_template_is_given_options_and_a_day(tmp_path: Path, qwen: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", row("Hi", "Hello"))
    shown = run_audit(qwen, rows, "--set", "enable_thinking=false", "--mask", "serving")
    assert shown.exit_code == 0, shown.output
    shown = run_audit(
        like_granite(tmp_path / "granite"),
        rows,
        "--date",
        "2026-05-04",
        "--whole",
        "--mask",
        "serving",
    )
    assert "Today is May 04, 2026." in shown.stdout
    assert run_audit(qwen, rows, "--date", "tomorrow").exit_code == 2


def test_conversations_are_read_as_they_come(tmp_path: Path) -> None:
    plain = write(
        tmp_path / "rows.jsonl",
        row("Hi", "Hello", id="[red]one", turn=3, licence="MIT"),
        row("Yes", "No"),
    )
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read(packed)) == list(read(plain))
    assert [one.id for one in read(plain)] == ["[red]one", None]


def test_a_name_is_text(qwen: Path, tmp_path: Path) -> None:
    shown = run_audit(
        qwen, write(tmp_path / "rows.jsonl", row("[bold]Hi", "[/nothing]", id="[red]one\x1b"))
    )
    assert shown.exit_code == 0, shown.output
    assert "[red]one⟨U+001B⟩: answer 1" in shown.stdout
    assert "[/nothing]" in shown.stdout


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"messages": 3}', '{"messages": [{"content": "secret words"}]}', "secret words"],
)
def test_a_line_that_is_no_conversation_is_named_and_not_shown(
    tmp_path: Path, qwen: Path, line: str
) -> None:
    path = write(tmp_path / "rows.jsonl", row("Hi", "Hello"))
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(CorruptError, match=r"rows\.jsonl:2"):
        list(read(path))
    shown = run_audit(qwen, path)
    assert shown.exit_code == 2
    assert shown.stderr.count("error: ") == 1
    assert "secret" not in shown.output
    with pytest.raises(MissingInputError):
        list(read(tmp_path / "absent.jsonl"))


def test_refused_answers_are_counted_with_their_reason(tmp_path: Path) -> None:
    folder = like_granite(tmp_path / "granite")
    shown = run_audit(folder)
    assert shown.exit_code == 0, shown.output
    assert (
        "refused 3: the template leaves out reasoning or a tool call of an answer" in shown.stdout
    )
    only = write(tmp_path / "rows.jsonl", row("Hi"))
    assert "no assistant turn" in run_audit(folder, only).stderr


def test_masks_that_differ_stop_it_with_one_error_and_two_pictures(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write(tmp_path / "rows.jsonl", row("Hi", "the table"), row("Hi", "Never seen"))
    by_spans = Chat._turn.__globals__["mask_by_spans"]

    def one_more(prompt: Any, whole: Any, *rest: Any) -> list[bool]:
        mask = by_spans(prompt, whole, *rest)
        return [True, *mask[1:]] if "the table" in whole.text else mask

    monkeypatch.setattr("eyas.chat.chat.mask_by_spans", one_more)
    monkeypatch.chdir(tmp_path)
    shown = run_audit(qwen, rows)
    assert shown.exit_code == 2
    assert shown.stderr.count("error: ") == 1
    assert "two ways to the loss mask differ" in shown.stderr
    assert "by character spans only" in shown.stderr, "the picture in the terminal"
    assert "> table</span>" in (tmp_path / "mask-disagreement.html").read_text(encoding="utf-8")
    assert "Never seen" not in shown.output


def test_a_tokenizer_without_a_template_says_how_to_give_one(tmp_path: Path) -> None:
    shown = run_audit(like_qwen(tmp_path, None))
    assert shown.exit_code == 2
    assert "has no chat template" in shown.stderr
    assert "chat_template.jinja" in shown.stderr


@pytest.mark.parametrize("name", ["builtin", "granite-3.1", "qwen3"])
def test_real_tokenizers_and_conversations(name: str, tmp_path: Path) -> None:
    folder, rows = DATA / "tokenizers" / name, DATA / "sgd_dev.jsonl.gz"
    if not rows.exists() or (name != "builtin" and not folder.is_dir()):
        pytest.skip(f"no real conversations or tokenizer in {DATA}")
    few = tmp_path / "rows.jsonl"
    with gzip.open(rows, "rt", encoding="utf-8") as lines:
        few.write_text(
            "".join(line for line, _ in zip(lines, range(40), strict=False)), encoding="utf-8"
        )
    shown = run_audit(
        name if name == "builtin" else folder, few, "--show", "1", "--mask", "serving"
    )
    assert shown.exit_code == 0, shown.output
    assert "0 have none" in shown.stdout


# The picture


def test_pieces_are_the_whole_text() -> None:
    """Of tokens that share a character the first has it; white space that offsets leave out goes
    with the token after it.
    """
    encoded = TokenizedText("a é b\n", [1, 2, 3, 4, 5], [(0, 1), (2, 3), (2, 3), (4, 5), (5, 5)])
    assert pieces(encoded) == ["a", " é", "", " b", "\n"]
    assert pieces(TokenizedText("", [], [])) == []


def test_what_would_not_be_seen_is_kinds_by_its_code() -> None:
    assert visible("a\x1b[2J\u202e\u200b\r\tb\n") == "a⟨U+001B⟩[2J⟨U+202E⟩⟨U+200B⟩⟨U+000D⟩\tb\n"


def test_long_stretches_are_cut_and_counted() -> None:
    text = "u" * 200 + "a" * 100
    encoded = TokenizedText(text, list(range(300)), [(at, at + 1) for at in range(300)])
    kinds = token_kinds([at >= 200 for at in range(300)], "serving")
    assert counts(kinds) == {"drafted": 99, "given": 1, "context": 200}
    cut = paint(encoded, kinds, MEANING)
    assert "⟨140 tokens⟩" in cut.plain
    assert cut.plain.count("a" * 100) == 1, "answers are never cut"
    assert "u" * 200 in paint(encoded, kinds, MEANING, whole=True).plain
    assert any("green" in str(span.style) for span in cut.spans)
