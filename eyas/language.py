"""The words of a text, and its language by py3langid, code left out (`eyas.code`)."""

from __future__ import annotations

import functools
import re

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from eyas.code import prose_of

# Scripts without spaces between words: one character counts as a word.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
TOKEN = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")

UNKNOWN = "und"  # ISO 639-2: undetermined
CODE_ONLY = "zxx"  # ISO 639-2: no linguistic content, the code of py3langid for source code
LOOKED_AT = 300  # characters; more hardly make it more certain
LEAST_BYTES = 15  # in UTF-8, where a Chinese character counts more than a letter
# Of 35,658 short English prompts one gets another language, 1.6 % are UNKNOWN.
LEAST_CONFIDENCE = 0.55

# Short prompts of a large language are taken for these: they get its code.
COUNTED_AS = {"pcm": "en", "wuu": "zh", "yue": "zh"}


def tokens(text: str) -> list[str]:
    """The words of a text (an underscore is a letter), and its other signs one by one."""
    return TOKEN.findall(text)


def words(text: str) -> list[str]:
    """The words of letters and digits."""
    return [token for token in tokens(text.replace("_", " ")) if token[0].isalnum()]


@functools.cache
def codes() -> frozenset[str]:
    """All codes that `language` returns, except UNKNOWN."""
    return frozenset(_identifier().labels) - {*COUNTED_AS, CODE_ONLY}


@functools.lru_cache(maxsize=1 << 10)
def language(text: str) -> str:
    """The ISO 639-1 (or 639-3) code of a text's language; UNKNOWN for a short text, code, or an
    uncertain one.
    """
    return spoken_language(prose_of(text[: 4 * LOOKED_AT]))


def spoken_language(prose: str) -> str:
    """The same of a text without code."""
    prose = " ".join(prose[: 4 * LOOKED_AT].split())[:LOOKED_AT]
    if len(prose.encode("utf-8", "replace")) < LEAST_BYTES:
        return UNKNOWN
    found, confidence = _identifier().classify(prose)
    if confidence < LEAST_CONFIDENCE or found == CODE_ONLY:
        return UNKNOWN
    return str(COUNTED_AS.get(found, found))


@functools.cache
def _identifier() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
