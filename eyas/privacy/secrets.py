"""API keys, tokens, passwords and private keys, by the patterns among detect-secrets' plugins and
ours for what these lack. None is tried out. Its entropy plugins flag every ordinary prompt, its
keyword plugin takes code for passwords.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from collections.abc import Iterable, Iterator

from eyas.privacy.patterns import BASE58, is_base58check
from eyas.privacy.spelling import LISTS, Span, joined

# Of detect-secrets. Left out: JWT (leaves the signature), private keys (only the heading), basic
# authentication (only the password; links are found whole), IP addresses, keywords and entropy.
PLUGINS = LISTS["plugins"].split()
SECRET_GROUP = 16  # characters of a pattern's group that is the secret rather than its prefix

OURS = [re.compile(rf"(?<![A-Za-z0-9])(?:{written})") for written in LISTS["keys"]]
# What every pattern above needs, a digit among them; tokens of Hugging Face may have none
RUN = re.compile(r"[\w+/=~%.:-]{12,}")
LETTERS_ALONE = "hf_"
IN_SECRET = re.compile(r"[\w+/=~-]")
# Keys of any maker: what no words spell (`is_random`), behind a short name and a sign, or behind a
# word for a key; behind "key" a UUID may name a row.
PREFIXED, BEHIND_KEY = (re.compile(written, re.I) for written in LISTS["random"])
TURN, SPELT = re.compile(r"(?<=[A-Za-z])\d|(?<=\d)[A-Za-z]"), re.compile("[A-Z]?[a-z]{3,}")

# Behind a name such as `api_key`, in a header, from a client's constructor, in a cookie
NAMED = [re.compile(written, re.I) for written in LISTS["named_keys"]]
# The words of a wallet behind their name and a sign, or without one as many as BIP 39 allows
SEED = re.compile(joined("seed"))
NO_SEED = re.compile(r"(?:^|\W+)(?:the|and|for|with|from|are|was|were|has|your|not|but)\b.*", re.S)
MORE_WORDS = re.compile(r"[ ,\n]{1,2}[a-z]{3,8}\b")
SEED_WORDS = range(12, 25, 3)
WIF = re.compile(rf"(?<!\w)[5KLc9][{BASE58}]{{50,51}}(?!\w)")
WIF_SIZES = (37, 38)  # bytes
ELSEWHERE = joined("password_elsewhere")
WORDS = f"{joined('password')}|{ELSEWHERE}"
# Between such a word and the value
IS = rf"(?:\s{{1,3}}(?:{joined('is')})\s{{1,3}}|\s{{0,3}}(?:{joined('is_sign')})\s{{0,3}})"
PASSWORD = re.compile(
    rf"(?<![A-Za-z])(?:[a-z]+[_-])?(?:{WORDS})(?:[_-][a-z]+)?[\"'\])]{{0,2}}"
    r"(?: (?:for|to|of|on|für|von|para|от|для) [^\n:=\"]{1,40})?"
    rf"{IS}"
    r"(?:(?P<quote>[\"'`])(?P<quoted>[^\s\"'`]{4,64})(?P=quote)"
    r"|(?P<bare>[^\s\"'`<>{}()\[\],;，。、；！]{4,64}))",
    re.I,
)
# In settings any value is one; in code it must look like one.
SETTINGS, QUOTED = (
    [re.compile(written, re.I | re.M) for written in LISTS[name]] for name in ("settings", "quoted")
)
# Without a sign between: "with password X"
PASSWORD_NEXT = re.compile(
    r"(?<![A-Za-z])(?:"
    r"(?:with|using|use|by|and|my|her|his|their|our|the|user\w*:? \S{1,40}|login \S{1,40}"
    r"|wi-?fi|wlan|router|root|admin)[ ,/]{1,2}"
    rf"(?:(?:my|the|this|a) )?(?:{WORDS}|pass):?\s{{1,2}}"
    r"|(?:wi-?fi|wlan|router|network)[ -]key:?\s{1,2}"
    rf"|(?:{ELSEWHERE})(?: (?:от|для|на|к|за|für) \w{{1,20}}:?)? "
    r"|(?:pass ?word|passwd|pwd|pass|p/?w)[\"']?(?:\s?(?:->|=>|[:=→])\s{0,2}| (?:- |is )?))"
    r"(?P<quote>[\"'`]?)(?P<value>[^\s\"'`<>{}()\[\],;]{6,64})(?P=quote)(?![(\[])",
    re.I,
)
# "the credentials are a / b", both of which go
CREDENTIALS = re.compile(joined("credentials"), re.I)
COMMANDS = [re.compile(written) for written in LISTS["commands"]]
ALGORITHM = re.compile(rf"(?:{joined('algorithms')})[-_]?\d.*", re.I)
# What the patterns above need, in small letters
MAYBE_PASSWORD = re.compile(rf"{WORDS}|{joined('maybe password')}")
PLACEHOLDER = re.compile(joined("no_password"), re.I)
CODE = re.compile(r"://|^[a-z_]\w*(?:\.[a-z_]\w*[a-z_])+$|\.(?:com|org|net|io)\b|\d\.\d")

KEY_BLOCK = re.compile(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----")
KEY_END = re.compile(r"-----END [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----")
# headers, Base64 with breaks
KEY_BODY = re.compile(r"(?:\s{0,2}[A-Za-z-]{1,30}: [^\n]{0,200}\n){0,5}[A-Za-z0-9+/=\s\\]*")
PUTTY_KEY = re.compile(r"Private-Lines: \d+\s+(?P<value>[A-Za-z0-9+/=\s]{40,})")
SHORTEST_KEY = 40  # characters of a block; less is talk of keys


def api_keys(text: str) -> Iterator[Span]:
    """Keys and tokens by their makers' prefixes and layouts, the words of wallets, and long values
    behind a name such as `api_key`.
    """
    is_long = LETTERS_ALONE in text or any(map(_has_digit, RUN.findall(text)))
    if is_long:
        for pattern in (*plugin_patterns(), *OURS):
            for match in pattern.finditer(text):
                start, end = _secret(match)
                if _has_digit(text[start:end]) or not _is_spelt(text[start:end]):
                    yield _whole(text, start, end)
        for pattern, group in ((PREFIXED, 0), (BEHIND_KEY, "value")):
            for match in pattern.finditer(text):
                if is_random(match["value"]):
                    yield _whole(text, *match.span(group))
    for match in SEED.finditer(text):
        value = NO_SEED.sub("", match["value"])
        num_words, start = len(re.findall("[a-z]+", value)), match.start("value")
        if value == match["value"] and MORE_WORDS.match(text, match.end()):
            num_words += 1  # there are more
        if num_words in SEED_WORDS or (match["sign"] and num_words >= SEED_WORDS[0]):
            yield start, start + len(value)
    for match in WIF.finditer(text) if is_long else ():
        if is_base58check(match[0], WIF_SIZES):
            yield match.span()
    if is_long:
        for match in _matches(NAMED, text):
            value, start = match["value"], match.start("value")
            if _has_digit(value) and re.search("[A-Za-z]", value):
                yield start, start + len(value.rstrip(".-"))


def passwords(text: str) -> Iterator[Span]:
    """What stands behind "password is", "pwd:" and the like and looks like one rather than a word
    or code.
    """
    if not MAYBE_PASSWORD.search(text.lower()):
        return
    for match in PASSWORD.finditer(text):
        group = "quoted" if match["quoted"] else "bare"
        value = match[group] if match["quoted"] else match[group].rstrip(".,:")
        if _is_password(value, bool(match["quoted"])):
            yield match.start(group), match.start(group) + len(value)
    for match in _matches(SETTINGS, text):
        if not PLACEHOLDER.fullmatch(match["value"]):
            yield match.span("value")
    for match in _matches(QUOTED, text):
        if _is_password(match["value"], quoted=True):
            yield match.span("value")
    for match in PASSWORD_NEXT.finditer(text):
        value = match["value"].rstrip(".,:?")
        if _is_mixed(value):
            yield match.start("value"), match.start("value") + len(value)
    for match in _matches(COMMANDS, text):
        if not PLACEHOLDER.fullmatch(match["value"].strip("\"'")):
            yield match.span("value")
    for match in CREDENTIALS.finditer(text):
        value = match["value"].rstrip(".,:?")
        if _is_password(value, quoted=False) and "=" not in value:
            yield match.span("user")
            yield match.start("value"), match.start("value") + len(value)


def _matches(patterns: Iterable[re.Pattern[str]], text: str) -> Iterator[re.Match[str]]:
    return itertools.chain.from_iterable(one.finditer(text) for one in patterns)


def private_keys(text: str) -> Iterator[Span]:
    """Blocks of private keys from heading to end; of a cut one all that is left."""
    for heading in KEY_BLOCK.finditer(text):
        body = KEY_BODY.match(text, heading.end())
        assert body is not None, "it may be empty"
        if len(body.group().strip()) >= SHORTEST_KEY:
            closing = KEY_END.match(text, body.end())
            end = closing.end() if closing else heading.end() + len(body.group().rstrip())
            yield heading.start(), end
    for match in PUTTY_KEY.finditer(text):
        start = match.start("value")
        yield start, start + len(match["value"].rstrip())


@functools.cache
def plugin_patterns() -> tuple[re.Pattern[str], ...]:
    """The patterns of detect-secrets' plugins, each once."""
    modules = [importlib.import_module(f"detect_secrets.plugins.{name}") for name in PLUGINS]
    plugins = (
        one
        for module in modules
        for one in vars(module).values()
        if getattr(one, "__module__", "") == module.__name__ and hasattr(one, "denylist")
    )
    return tuple(dict.fromkeys(pattern for plugin in plugins for pattern in plugin.denylist))


def _secret(match: re.Match[str]) -> tuple[int, int]:
    """The longest group of a match, unless all are short."""
    spans = [match.span(group) for group in range(1, len(match.groups()) + 1) if match.group(group)]
    longest = max(spans, key=lambda span: span[1] - span[0], default=match.span())
    return longest if longest[1] - longest[0] >= SECRET_GROUP else match.span()


def _whole(text: str, start: int, end: int) -> tuple[int, int]:
    """The span widened to the whole run: a pattern of fixed length may end within a secret."""
    while not IN_SECRET.match(text[start : start + 1]):
        start += 1
    while end > start and not IN_SECRET.match(text[end - 1]):
        end -= 1
    while end < len(text) and IN_SECRET.match(text[end]):
        end += 1
    return start, end


def is_random(value: str) -> bool:
    """Whether letters and digits take turns or hardly any letters are words: a key, no name."""
    turns = len(TURN.findall(value))
    return len(value) < 6 * turns or (turns > 1 and not _is_spelt(value))


def _is_spelt(value: str) -> bool:
    return 5 * sum(map(len, SPELT.findall(value))) >= 2 * len(value) or len({*value}) < 10


def _has_digit(value: str) -> bool:
    return re.search("[0-9]", value) is not None


def _is_mixed(value: str) -> bool:
    """Whether it is a password where no sign says so: letters with digits or signs among them, and
    no call, number with a unit, or algorithm.
    """
    return (
        _is_password(value, quoted=False)
        and re.search("[A-Za-z]", value) is not None
        and not re.fullmatch(r"\d+[-\w]{0,4}|\w+-[a-z]+|.*[=/].*", value)
        and not ALGORITHM.fullmatch(value)
    )


def _is_password(value: str, quoted: bool) -> bool:
    if PLACEHOLDER.fullmatch(value):
        return False
    mixed = _has_digit(value) or bool(re.search(r"[!@#$%^&*?+=~]", value[1:].rstrip("!?")))
    return mixed if quoted else mixed and not CODE.search(value.strip("."))
