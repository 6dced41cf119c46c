"""The user's side of a row, in any of the shapes in which sets are published. Nothing that an
assistant said leaves this file.

Recognises the shapes below by their keys. A row that does not say who speaks is Unreadable. Knows
no file format.

    openai    {"messages": [{"role": "user", "content": ...}, ...]}; LMSYS, WildChat: the same
              under `conversation`
    sharegpt  {"conversations": [{"from": "human", "value": ...}, ...]}
    alpaca    {"instruction": ..., "input": ...}; Dolly: `context`
    prompt    {"prompt": ...}, or `question`, `text`, `query`; Spec-Bench: {"turns": [..., ...]}
    oasst     {"message_tree_id": ..., "prompt": {"text": ..., "role": "prompter",
              "replies": [...]}}, or a table of messages
    strings   "..."
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from eyas.data.streams import LIMIT, Flagged, Unreadable

RowShape = Literal[
    "openai", "sharegpt", "alpaca", "prompt", "oasst", "strings", "lines", "paragraphs"
]
UserSide = tuple[tuple[str, ...], str | None]  # turns, system prompt

LIST_KEYS = ("messages", "conversations", "conversation", "conversation_a")
TEXT_KEYS = ("prompt", "question", "text", "query")
SYSTEM_KEYS = ("system", "system_prompt")
ID_KEYS = (
    "id",
    "conversation_id",
    "question_id",
    "prompt_id",
    "conversation_hash",
    "message_tree_id",
)
MESSAGE_KEYS = ("role", "from", "message_id", "parent_id", "rank", "deleted", "synthetic")
KEYS = frozenset(
    (
        *LIST_KEYS,
        *TEXT_KEYS,
        *SYSTEM_KEYS,
        *ID_KEYS,
        *MESSAGE_KEYS,
        "turns",
        "instruction",
        "input",
        "context",
    )
)
SHAPES = (
    f"a list under {', '.join(LIST_KEYS)} or turns, an instruction (and input), or a text "
    f"under {', '.join(TEXT_KEYS)}"
)

USER_ROLES = frozenset({"user", "human", "prompter"})
SYSTEM_ROLES = frozenset({"system", "developer"})
ASSISTANT_ROLES = frozenset({"assistant", "gpt", "chatgpt", "bot", "model", "ai", "bard", "bing"})
TOOL_ROLES = frozenset(
    {"tool", "tool_call", "tool_response", "function", "function_call", "observation", "ipython"}
)
ROLES = USER_ROLES | SYSTEM_ROLES | ASSISTANT_ROLES | TOOL_ROLES
# A text that holds both sides: a reserved token of some template, or a line of the assistant after
# one of the user.
RESERVED = re.compile(r"<\|\w+\|>|\[/INST\]")
BY_USER = re.compile(r"^[#*> \t]*(?:human|user|prompter|instruction)[* \t]*:", re.I | re.M)
BY_ASSISTANT = re.compile(r"^[#*> \t]*(?:assistant|bot|response|chatgpt|gpt)[* \t]*:", re.I | re.M)
# An id is kept only if it looks like one: e-mail addresses as ids are replaced.
PLAIN_ID = re.compile(r"[\w.:/-]{1,100}")
TREE_MESSAGES = 10_000  # of one tree in a table


def user_side(value: Any, shape: RowShape | None = None) -> UserSide:
    """The user side of a row, by the given shape or a recognised one. Raises Unreadable."""
    if shape is not None:
        turns, system = _BY_SHAPE[shape](value)
    elif isinstance(value, str):
        turns, system = _string(value)
    elif isinstance(value, list):
        turns, system = _messages(value, "the row")
    elif isinstance(value, dict):
        turns, system = _looked(value)
    else:
        raise Unreadable("not an object")
    try:
        "".join((*turns, system or "")).encode()
    except UnicodeEncodeError as error:
        raise Unreadable("half a character (a lone surrogate)") from error
    spoken = tuple(turn.strip() for turn in turns if turn.strip())
    return spoken, system.strip() or None if system else None


def row_id(value: Any) -> str | None:
    """The id in a row, if it looks like one."""
    for key in ID_KEYS if isinstance(value, dict) else ():
        if isinstance(value.get(key), str | int) and PLAIN_ID.fullmatch(str(value[key])):
            return str(value[key])
    return None


def is_transcript(text: str) -> bool:
    """Whether a text holds both sides of a conversation. Linear in its length."""
    if RESERVED.search(text):
        return True
    by_user = BY_USER.search(text)
    return by_user is not None and BY_ASSISTANT.search(text, by_user.end()) is not None


def _looked(value: dict[str, Any]) -> UserSide:
    for key in LIST_KEYS:
        if isinstance(value.get(key), list) or _is_list_as_text(value.get(key)):
            return _conversation(value, (key,))
    if isinstance(value.get("turns"), list):
        return _prompt(value)
    if value.get("instruction") is not None:
        return _alpaca(value)
    if isinstance(value.get("prompt"), dict):
        return _tree(value)
    return _prompt(value)


# The shapes. Each function takes a whole row and raises Unreadable where it does not fit.


def _openai(value: Any) -> UserSide:
    return (
        _messages(value, "the row")
        if isinstance(value, list)
        else _conversation(_object(value), LIST_KEYS)
    )


def _sharegpt(value: Any) -> UserSide:
    return _conversation(_object(value), ("conversations", *LIST_KEYS))


def _conversation(value: dict[str, Any], keys: tuple[str, ...]) -> UserSide:
    for key in keys:
        items = value.get(key)
        if _is_list_as_text(items):
            items = _list_in(items, key)
        if isinstance(items, list):
            turns, system = _messages(items, key)
            return turns, "\n\n".join(text for text in (_system(value), system) if text)
    raise Unreadable(f"no list of messages under {', '.join(keys)}")


def _is_list_as_text(value: Any) -> TypeGuard[str]:
    # tables hold lists as JSON in a cell
    return isinstance(value, str) and value.lstrip().startswith("[")


def _list_in(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{key} is a text, not a list of messages") from error


def _messages(items: list[Any], key: str) -> UserSide:
    """The user and system turns of a list of messages, OpenAI's or ShareGPT's."""
    turns: list[str] = []
    systems: list[str] = []
    for item in items:
        if not isinstance(item, dict):
            if all(isinstance(other, str) for other in items):
                raise Unreadable(f"{key} is a list of texts, which does not say who speaks")
            raise Unreadable("a message is not an object")
        role = _role(item)
        if role in USER_ROLES:
            turns.append(_text(_first(item, "content", "value", "text")))
        elif role in SYSTEM_ROLES:
            systems.append(_text(_first(item, "content", "value", "text")))
    return tuple(turns), "\n\n".join(text for text in systems if text)


def _alpaca(value: Any) -> UserSide:
    value = _object(value)
    if value.get("instruction") is None:
        raise Unreadable("no instruction")
    _by_user(value)
    parts = (_text(value["instruction"]), _text(_first(value, "input", "context")))
    return (
        _one_side("\n\n".join(part for part in parts if part.strip()), "instruction"),
    ), _system(value)


def _prompt(value: Any) -> UserSide:
    """Texts of the user only: one text, a list under `turns`, or a list of messages under the key
    of a text.
    """
    value = _object(value)
    turns = value.get("turns")
    if isinstance(turns, list):
        if all(isinstance(turn, str) for turn in turns):
            return tuple(_one_side(turn, "turns") for turn in turns), _system(value)
        return _conversation(value, ("turns",))
    for key in TEXT_KEYS:
        if isinstance(value.get(key), list):
            return _conversation(value, (key,))
        if value.get(key) is not None:
            _by_user(value)
            return (_one_side(_text(value[key]), key),), _system(value)
    raise Unreadable(
        "no shape known here: none of "
        f"{', '.join((*LIST_KEYS, 'turns', 'instruction', *TEXT_KEYS))}"
    )


def _tree(value: Any) -> UserSide:
    """The user's turns along the best replies of an Open Assistant tree: a tree is one row.

    The reply with the lowest rank is followed, those without a rank last, never a deleted or
    machine-written one; a root that is either is Flagged. Other branches repeat the beginning, or
    say the same in other words: `num_untaken` counts them.
    """
    message = _object(value).get("prompt", value)
    _not_flagged(_object(message))
    turns: list[str] = []
    while message is not None:
        role = _role(_object(message))
        if role in USER_ROLES:
            turns.append(_text(_first(message, "text", "content")))
        message = min(filter(_is_followed, _replies(message)), key=_rank, default=None)
    return tuple(turns), _system(value)


def num_untaken(value: Any) -> int:
    """The user's messages of an Open Assistant tree that are not on the path of its best replies;
    0 for any other row.
    """
    root = value.get("prompt", value) if isinstance(value, dict) else None
    if not isinstance(root, dict) or "replies" not in root:
        return 0
    count, waiting = 0, [root]
    while waiting:
        message = waiting.pop()
        count += _is_by_user(message)
        waiting += [reply for reply in _replies(message) if isinstance(reply, dict)]
    path: dict[str, Any] | None = root
    while path is not None:
        count -= _is_by_user(path)
        path = min(filter(_is_followed, _replies(path)), key=_rank, default=None)
    return count


def _replies(message: dict[str, Any]) -> list[Any]:
    replies = message.get("replies")
    return replies if isinstance(replies, list) else []


def _is_followed(reply: Any) -> bool:
    return isinstance(reply, dict) and not _flags(reply)


def _flags(message: dict[str, Any]) -> list[str]:
    return [flag for flag in ("deleted", "synthetic") if _is_true(message.get(flag))]


def _not_flagged(message: dict[str, Any]) -> None:
    """Raise Flagged for a message that its publisher does not count as a person's."""
    if flags := _flags(message):
        raise Flagged(f"its publisher flags it as {' and '.join(flags)}")


def _is_true(flag: Any) -> bool:
    # CSV has no truth values
    return flag.strip().lower() in ("true", "1") if isinstance(flag, str) else bool(flag)


def _rank(reply: dict[str, Any]) -> float:
    try:
        rank = float(_first(reply, "rank"))
    except (TypeError, ValueError, OverflowError):
        return float("inf")
    return rank if rank == rank else float("inf")  # pandas writes a missing rank as NaN


def _string(value: Any) -> UserSide:
    if not isinstance(value, str):
        raise Unreadable("not a text")
    if BY_ASSISTANT.match(value.lstrip()):
        raise Unreadable("the text is said by an assistant")
    return (_one_side(value, "the text"),), None


_BY_SHAPE: dict[RowShape, Callable[[Any], UserSide]] = {
    "openai": _openai,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt": _prompt,
    "oasst": _tree,
    "strings": _string,
    "lines": _string,
    "paragraphs": _string,
}


# Parts of rows and messages.


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unreadable("not an object")
    return value


def _first(value: dict[str, Any], *keys: str) -> Any:
    """The value of the first key that has one; in tables every row has all keys."""
    return next((value[key] for key in keys if value.get(key) is not None), None)


def _role(message: dict[str, Any]) -> str:
    role = _first(message, "role", "from")
    known = role.lower() if isinstance(role, str) else ""
    if known not in ROLES:
        raise Unreadable("a message has no role known here")
    return known


def _by_user(value: dict[str, Any]) -> None:
    """Raise Unreadable for a row with the role of another side, and for a flagged one: a table of
    messages has rows of both.
    """
    if _first(value, "role", "from") is None:
        return
    if _role(value) not in USER_ROLES:
        raise Unreadable("the row is a single message, and not the user's")
    _not_flagged(value)


def _one_side(text: str, key: str) -> str:
    if is_transcript(text):
        raise Unreadable(f"{key} holds a whole conversation, assistant included")
    return text


def _system(value: dict[str, Any]) -> str:
    return _text(_first(value, *SYSTEM_KEYS))


def _text(content: Any) -> str:
    """The text of a message: a string, None, or OpenAI's list of parts, if all are text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "\n".join(part["text"] for part in content)
    raise Unreadable("a message is not text")


# Open Assistant trees as a table of messages: consecutive rows of a tree become one value.


@dataclass
class MessageTree:
    """The messages of one tree: at most TREE_MESSAGES, of LIMIT characters together."""

    id: str
    line: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    characters: int = 0
    too_large: bool = False

    def add(self, message: dict[str, Any]) -> None:
        # Of the assistant's messages only their place in the tree is kept, not the text.
        kept = {key: message.get(key) for key in MESSAGE_KEYS}
        if _is_by_user(message):
            kept["text"] = message["text"]
            self.characters += len(message["text"])
        self.too_large = (
            self.too_large or len(self.messages) == TREE_MESSAGES or self.characters > LIMIT
        )
        if not self.too_large:
            self.messages.append(kept)

    def value(self) -> Any:
        """The tree in Open Assistant's nested form, or Unreadable."""
        if self.too_large:
            return Unreadable(
                f"a tree of more than {TREE_MESSAGES} messages, or of more than {LIMIT >> 20} MiB"
            )
        by_id: dict[Any, dict[str, Any]] = {}
        for message in self.messages:
            by_id.setdefault(_hashable(message["message_id"]), {**message, "replies": []})
        roots = [message for message in by_id.values() if message["parent_id"] in (None, "")]
        if len(roots) != 1:
            return Unreadable(
                f"a tree with {len(roots)} roots: give the rows of a tree one after the other"
            )
        for message in by_id.values():
            parent = by_id.get(_hashable(message["parent_id"]))
            if parent is not None and message is not roots[0]:
                parent["replies"].append(message)
        return {"message_tree_id": self.id, "prompt": roots[0]}


def join_trees(values: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """The values, with consecutive messages of a tree (`message_tree_id`) joined into one on the
    line of the first.
    """
    tree: MessageTree | None = None
    for line, value in values:
        is_message = (
            isinstance(value, dict)
            and isinstance(value.get("message_tree_id"), str)
            and "parent_id" in value
        )
        if tree is not None and not (is_message and value["message_tree_id"] == tree.id):
            yield tree.line, tree.value()
            tree = None
        if is_message:
            tree = tree or MessageTree(value["message_tree_id"], line)
            tree.add(value)
        else:
            yield line, value
    if tree is not None:
        yield tree.line, tree.value()


def _is_by_user(message: dict[str, Any]) -> bool:
    role = _first(message, "role", "from")
    return (
        isinstance(message.get("text"), str)
        and isinstance(role, str)
        and role.lower() in USER_ROLES
    )


def _hashable(id: Any) -> Any:
    return id if isinstance(id, str | int) else repr(id)
