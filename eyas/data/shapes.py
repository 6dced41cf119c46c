"""The user's side of a row, in any of the shapes in which sets are published. Nothing that an
assistant said leaves this file. A shape is one entry of SHAPES, recognised by its keys.

A row that does not say who speaks is Unreadable. Of a table of messages, as Open Assistant
publishes it, only those that begin a conversation are rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from eyas.data.logs import logged_request
from eyas.data.streams import Unreadable, is_encodable

UserSide = tuple[tuple[str, ...], str | None]  # turns, system prompt

SYSTEM_KEYS = ("system", "system_prompt", "system_message", "system_instruction")
TEXT_KEYS = ("content", "value", "text", "parts")  # of a message
ID_KEYS: tuple[str, ...] = ("id", "conversation_id", "question_id", "prompt_id")
ID_KEYS += ("conversation_hash", "message_tree_id", "custom_id")
# What prompts do not hold: the problem, its reason
IMAGES = ("it has images or files, which prompts do not hold",)
NOT_HELD = {
    **dict.fromkeys(("tools", "functions"), ("it offers tools", "tools")),
    "history": ("a turn without the earlier ones under history",),
    **dict.fromkeys(("image", "images"), IMAGES),
}
WITHHELD = re.compile(r"[\s\u2013\u2014-]*")  # a dash stands for it
SPEAKER_KEYS = ("sender", "author", "speaker", "sender_type")
IS_USER_KEYS = ("is_user", "isCreatedByUser")
MESSAGE_KEYS: tuple[str, ...] = ("role", "from", *SPEAKER_KEYS, *IS_USER_KEYS, "bot_id")
MESSAGE_KEYS += ("parent_id", "deleted", "synthetic", "current_node")
ANSWERED = re.compile("completions|responses|messages")  # URLs of a batch's requests

USER_ROLES = frozenset({"user", "human", "prompter"})
SYSTEM_ROLES = frozenset({"system", "developer"})
ASSISTANT_ROLES = frozenset({"assistant", "gpt", "chatgpt", "bot", "model", "ai", "bard", "bing"})
TOOL_ROLES = frozenset(
    {"tool", "tool_call", "tool_response", "function", "function_call", "observation", "ipython"}
)
ROLES = USER_ROLES | SYSTEM_ROLES | ASSISTANT_ROLES | TOOL_ROLES
# A text of both sides has a reserved token, or a line of the assistant after one of the user; or a
# table's cell is a list of messages or texts.
RESERVED = re.compile(r"<\|\w+\|>|\[/INST\]|<start_of_turn>|\[\|(?:Human|AI)\|\]|</assistant>")
JSON_TEXT = r'"(?:[^"\\]|\\.)*+"'
LISTED = re.compile(
    r"""\s*\[\s*(?:\{\s*["'](?:role|content|from|value)["'].*\}"""
    rf"|{JSON_TEXT}(?:\s*,\s*{JSON_TEXT})*+)\s*\]\s*",
    re.S,
)
SPOKEN = r"(?:^[#*<> \t]*|### ?|\b(?-i:(?=[A-Z]+:)))(?:{})[*> \t]*[:：]"  # or in one line
BY_USER = re.compile(SPOKEN.format("human|user|prompter|instruction|用户"), re.I | re.M)
BY_ASSISTANT = re.compile(
    SPOKEN.format(r"assistant|bot|response|chatgpt|gpt(?:-[\w.]+)?|ai|助手"), re.I | re.M
)
PLAIN_ID = re.compile(r"[\w.:/-]{1,100}")  # no e-mail address


def is_transcript(text: str) -> bool:
    """Whether a text holds both sides of a conversation. Linear in its length."""
    if RESERVED.search(text) or LISTED.fullmatch(text):
        return True
    by_user = BY_USER.search(text)
    return by_user is not None and BY_ASSISTANT.search(text, by_user.end()) is not None


# Readers of a row, given the shape's keys. They raise Unreadable.


def _conversation(value: Any, keys: tuple[str, ...]) -> UserSide:
    for key in keys:
        items = value.get(key)
        if _is_list_as_text(items):
            try:
                items = json.loads(items)
            except (ValueError, RecursionError) as error:
                raise Unreadable(f"{key} is a text, not a list of messages") from error
        if isinstance(items, list):
            turns, system = _messages(items, key)
            return turns, "\n\n".join(text for text in (_system(value), system) if text)
    raise Unreadable(f"no list of messages under {', '.join(keys)}")


def _is_list_as_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value.lstrip().startswith("[")


def _messages(items: list[Any], key: str) -> UserSide:
    """What the user says in several messages before an answer is one turn: half a
    question is none.
    """
    turns, systems, goes_on = list[str](), list[str](), False
    for item in items:
        if not isinstance(item, dict):
            is_text = all(isinstance(other, str) for other in items)
            problem = f"{key} is a list of texts, which does not say who speaks"
            raise Unreadable(problem if is_text else "a message is not an object")
        role = _role(item)
        if role in TOOL_ROLES or item.get("tool_calls") or item.get("function_call"):
            raise Unreadable("it calls tools", "tools")
        if role in USER_ROLES:
            _check_held(item, "attachments", "files")
            text = _spoken(_said(item))
            turns[-1:] = [f"{turns[-1]}\n\n{text}".strip()] if goes_on else [*turns[-1:], text]
            goes_on = True
        elif role in SYSTEM_ROLES:
            systems.append(_said(item))
        else:
            goes_on = False
    return tuple(turns), "\n\n".join(text for text in systems if text)


def _turns(value: Any, keys: tuple[str, ...]) -> UserSide:
    items = value.get(keys[0])
    if isinstance(items, list) and all(isinstance(turn, str) for turn in items):
        return tuple(_one_side(turn, keys[0]) for turn in items), _system(value)
    return _conversation(value, keys)


def _tree(value: Any, keys: tuple[str, ...]) -> UserSide:
    """Messages by id with their parents': those that lead to the one shown last."""
    nodes, at, path = value.get(keys[0]), value.get("current_node"), list[Any]()
    while isinstance(nodes, dict) and isinstance(node := nodes.get(at), dict):
        path.append(node.get("message"))
        at, nodes = node.get("parent"), {key: one for key, one in nodes.items() if key != at}
    if not path:
        raise Unreadable(f"no current_node in {keys[0]}")
    messages = [one for one in reversed(path) if isinstance(one, dict) and one.get("content")]
    told = [
        {
            "role": (one.get("author") or {}).get("role"),
            "content": one["content"].get("parts") or one["content"].get("text"),
            "tool_calls": one.get("recipient") not in (None, "all"),
            "files": (one.get("metadata") or {}).get("attachments"),
        }
        for one in messages
    ]
    return _messages(told, keys[0])


def _instruction(value: Any, keys: tuple[str, ...]) -> UserSide:
    if value.get(keys[0]) is None:
        raise Unreadable(f"no {keys[0]}")
    _check_user(value, keys[0])
    parts = (_text(value[keys[0]]), _text(_first(value, *keys[1:])))
    text = "\n\n".join(part for part in parts if part.strip())
    return (_one_side(text, keys[0]),), _system(value)


def _prompt(value: Any, keys: tuple[str, ...]) -> UserSide:
    if isinstance(value.get("prompt"), dict):
        raise Unreadable("a tree of messages: give the set's table of messages instead")
    for key in keys:
        if isinstance(value.get(key), list):
            return _conversation(value, (key,))
        if value.get(key) is not None:
            _check_user(value, key)
            return (_one_side(_text(value[key]), key),), _system(value)
    raise Unreadable("no shape known here")


def _request(value: Any, keys: tuple[str, ...]) -> UserSide:
    body = _first(value, *keys[1:])
    if not isinstance(body, dict):
        raise Unreadable("a batch's results hold no prompts: give its requests")
    is_answered = ANSWERED.search(str(value.get("url") or "messages"))
    request = logged_request(body) if is_answered else None
    if request is None:
        raise Unreadable("no request for text")
    return user_side(request.row)


def _string(value: Any, keys: tuple[str, ...]) -> UserSide:
    if not isinstance(value, str):
        raise Unreadable("not a text")
    if BY_ASSISTANT.match(value.lstrip()):
        raise Unreadable("the text is said by an assistant")
    return (_one_side(value, "the text"),), None


@dataclass(frozen=True, slots=True)
class RowShape:
    """How rows are written. keys: what holds the user's side; meaning: for people; has_list: in one
    of them, otherwise the first holds a text.
    """

    name: str
    keys: tuple[str, ...]
    read: Callable[[Any, tuple[str, ...]], UserSide]
    meaning: str
    has_list: bool = False

    def fits(self, value: dict[str, Any]) -> bool:
        held = [value.get(key) for key in self.keys]
        if self.has_list:
            return any(isinstance(one, list) or _is_list_as_text(one) for one in held)
        return any(one is not None for one in held[:1])


# In the order in which they are tried; a row that fits none is read as a prompt. Arena has a
# conversation of each of two models, which begin alike.
SHAPES = (
    RowShape(
        "openai",
        ("messages", "conversation", "conversation_a", "chat_messages"),
        _conversation,
        'a list of {"role": "user", "content": ...} (OpenAI, LMSYS, WildChat, Arena, Claude)',
        has_list=True,
    ),
    RowShape(
        "sharegpt",
        ("conversations",),
        _conversation,
        'a list of {"from": "human", "value": ...} (ShareGPT)',
        has_list=True,
    ),
    RowShape("tree", ("mapping",), _tree, "messages by id (an export of ChatGPT)"),
    RowShape("turns", ("turns",), _turns, "a list of user texts (Spec-Bench)", has_list=True),
    RowShape(
        "alpaca",
        ("instruction", "input", "context"),
        _instruction,
        "an instruction and what it is about (Alpaca, Dolly)",
    ),
    RowShape(
        "prompt",
        ("prompt", "question", "problem", "text", "query"),
        _prompt,
        "a text of the user",
    ),
    RowShape(
        "batch",
        ("custom_id", "body", "params"),
        _request,
        "a request of a batch (OpenAI, Anthropic)",
    ),
    RowShape("strings", (), _string, "a row that is a text itself"),
)
BY_NAME = {shape.name: shape for shape in SHAPES}
KNOWN_SHAPES = "; ".join(
    f"{shape.meaning} under {' or '.join(shape.keys)}" for shape in SHAPES if shape.keys
)
KEYS = frozenset((*SYSTEM_KEYS, *ID_KEYS, *MESSAGE_KEYS, *NOT_HELD)).union(
    *(shape.keys for shape in SHAPES)
)


def user_side(value: Any, shape: str | None = None) -> UserSide:
    """The user side of a row, by the given shape or a recognised one. Raises Unreadable."""
    if isinstance(value, list) and shape in (None, "openai"):
        turns, system = _messages(value, "the row")
    elif isinstance(value, str) and shape in (None, "strings"):
        turns, system = _string(value, ())
    elif isinstance(value, dict):
        _check_held(value)
        fitting = (one for one in SHAPES if one.fits(value))
        found = BY_NAME[shape] if shape else next(fitting, BY_NAME["prompt"])
        turns, system = found.read(value, found.keys)
    else:
        raise Unreadable("not an object")
    if not is_encodable("".join((*turns, system or ""))):
        raise Unreadable("half a character (a lone surrogate)")
    spoken = tuple(text for text in map(_spoken, turns) if text)
    return spoken, system.strip() or None if system else None


def row_id(value: Any) -> str | None:
    """The id in a row, if it looks like one."""
    for key in ID_KEYS if isinstance(value, dict) else ():
        if isinstance(value.get(key), str | int) and PLAIN_ID.fullmatch(str(value[key])):
            return str(value[key])
    return None


# Parts of rows and messages.


def _first(value: dict[str, Any], *keys: str) -> Any:
    """The value of the first key that has one; in tables every row has all keys."""
    return next((value[key] for key in keys if value.get(key) is not None), None)


def _said(message: dict[str, Any]) -> str:
    if message.keys().isdisjoint(TEXT_KEYS):
        raise Unreadable(f"a message has no {', '.join(TEXT_KEYS)}")
    return _text(_first(message, *TEXT_KEYS))


def _check_held(value: dict[str, Any], *more: str) -> None:
    keys = (*NOT_HELD, *more)
    for key in () if value.keys().isdisjoint(keys) else keys:
        if _is_given(value.get(key)):
            raise Unreadable(*NOT_HELD.get(key, IMAGES))


def _is_given(held: Any) -> bool:
    """A table's cell may hold an empty list as text, or an image without bytes and path."""
    if isinstance(held, dict | list):
        return any(held.values() if isinstance(held, dict) else held)
    return bool(held) and held not in ("[]", "null", "{}")


def _role(message: dict[str, Any]) -> str:
    role = _first(message, "role", "from", "sender", "type")
    known = role.lower() if isinstance(role, str) else ""
    if known not in ROLES:
        raise Unreadable("a message has no role known here")
    return known


def _check_user(value: dict[str, Any], key: str) -> None:
    """Raise Unreadable for a message under `key` that is not the user's first, or flagged."""
    is_user, roles = None, set[str]()
    if key == "text":  # else an author wrote the prompt
        if _is_given(value.get("bot_id")):
            raise Unreadable("a bot says it")
        is_user = _first(value, *IS_USER_KEYS)
        roles = {str(value.get(one)).lower() for one in SPEAKER_KEYS}
    if _first(value, "role", "from") is not None:
        roles.add(_role(value))  # any other is no role known here
    if roles & (ROLES - USER_ROLES) or (is_user is not None and not _is_yes(is_user)):
        raise Unreadable("the row is a single message, and not the user's")
    if not roles & USER_ROLES:
        return
    if value.get("parent_id") not in (None, ""):
        raise Unreadable("the row is a single message, without what came before it")
    flags = [name for name in ("deleted", "synthetic") if _is_yes(value.get(name))]
    if flags:
        raise Unreadable(f"its publisher flags it as {' and '.join(flags)}", "flagged")


def _is_yes(flag: Any) -> bool:
    """In a CSV file it is a text."""
    return flag.strip().lower() in ("true", "1") if isinstance(flag, str) else bool(flag)


def _one_side(text: str, key: str) -> str:
    if is_transcript(text):
        raise Unreadable(f"{key} holds a whole conversation, assistant included")
    return text


def _system(value: dict[str, Any]) -> str:
    return _text(_first(value, *SYSTEM_KEYS))


def _spoken(text: str) -> str:
    return "" if WITHHELD.fullmatch(text) else text.strip()


def _text(content: Any) -> str:
    """The text of a message: a string, None, or OpenAI's list of parts, if all are text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts = (part.get("text") if isinstance(part, dict) else part for part in content)
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) == len(content):
            return "\n".join(texts)
    raise Unreadable("a message is not text")
