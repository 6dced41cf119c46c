"""Marks: what is special about an answer, so that it can be counted and left out of training.

    empty       nothing but white space
    looping     repeats the same words (n-grams)
    truncated   cut at its token limit
    refused     begins with one of REFUSALS

The first that fits, in this order: a truncated loop was truncated because it is a loop.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

import numpy as np

Mark = Literal["empty", "looping", "truncated", "refused"]
VERSION = 1  # of these rules, part of an artifact's identity

# words, cut after eight letters; characters of scripts without spaces; runs of anything else: a
# table's rule of dashes is one unit and no loop
_UNIT = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]{1,8}|[^\w\s]+")
_ENUMERATOR = re.compile(r"^\s*\d+[.):]", re.MULTILINE)  # that counts the rounds of a loop
LONGEST_PERIOD = 64  # units
LEAST_REPEATS = 4
LOOP_UNITS, TRUNCATED_LOOP_UNITS = 50, 20  # anywhere; at the end of a truncated answer
# the least share of different 4-grams in a long answer: prose has .75 or more, JSON data .3
GRAM, GRAMS_UNITS, LEAST_DISTINCT = 4, 200, 0.2

_OPENING = 240  # characters that hold a refusal; later ones may quote one
_THOUGHTS = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
# At the beginning, casefolded: perhaps an apology, then "cannot", then what (in some languages the
# other way round). An apology alone is no refusal ("sorry, there is no table left").
REFUSALS: dict[str, tuple[str, str, str]] = {
    "en": (
        r"i(?:'m| am) (?:\w+ )?(?:sorry|afraid)|sorry|(?:i |my )?apolog|unfortunately|"
        r"as an ai\b|no\b",
        r"\bi (?:can't|cannot|can not|won't|will not|must decline to|have to decline to)|"
        r"\bi(?:'m| am) (?:unable|not able|not going|not allowed) to",
        r"\b(?:help(?! but)|assist|provide|fulfill?|comply|do that|do this|answer|support|"
        r"create|write|generate|share|discuss|engage|participate|produce|give you|offer|"
        r"continue)\b",
    ),
    "de": (
        r"(?:es )?tut mir (?:sehr )?leid|entschuldig|verzeih|leider|sorry",
        r"\bich (?:kann|darf|werde)\b[^.!?,]{0,50}?\bnicht|\bkann ich\b[^.!?,]{0,50}?\bnicht",
        r"helfen|beantworten|unterstützen|nachkommen|bereitstellen|erstellen|schreiben|geben",
    ),
    "fr": (
        r"(?:je suis )?(?:vraiment )?désolé|je m'excuse|malheureusement|pardon",
        r"\bje ne (?:peux|suis) pas",
        r"aider|répondre|assister|fournir|écrire|créer|en mesure",
    ),
    "es": (
        r"lo siento|lo lamento|me temo|disculp|perdón|lamentablemente",
        r"\bno (?:puedo|podré)",
        r"ayudar|responder|asistir|proporcionar|escribir|crear|cumplir|hacer eso",
    ),
    "pt": (
        r"desculp|lamento|sinto muito|infelizmente",
        r"\bnão (?:posso|consigo|poderei)",
        r"ajud|respond|fornecer|escrever|criar|atender",
    ),
    "it": (
        r"mi (?:dis)?piace|purtroppo|scus",
        r"\bnon (?:posso|sono in grado)",
        r"aiut|rispond|fornir|scriver|crear|assister",
    ),
    "nl": (
        r"het spijt me|sorry|helaas",
        r"\bik (?:kan|mag|ga)\b[^.!?,]{0,50}?\bniet|\bkan ik\b[^.!?,]{0,50}?\bniet",
        r"helpen|beantwoorden|verstrekken|schrijven|maken|geven",
    ),
    "pl": (
        r"przykro mi|przepraszam|niestety",
        r"\bnie (?:mogę|jestem w stanie)",
        r"pomóc|odpowiedzieć|udzielić|napisać|spełnić|stworzyć",
    ),
    "ru": (
        r"извин|прост(?:и|ите)\b|к сожалению|мне (?:очень )?жаль|сожалею",
        r"\bне (?:могу|смогу|буду)",
        r"помочь|помогать|ответить|предоставить|написать|выполнить|создать",
    ),
    "tr": (
        r"üzgünüm|maalesef|özür dilerim|ne yazık ki",
        r"yardımcı|yardım|yanıt|cevap|sağla|bu isteği",
        r"ola?mam|edemem|veremem|layamam|olamıyorum|yapamam",
    ),
    "ar": (
        r"عذرا|آسف|أعتذر|للأسف|المعذرة",
        r"لا أستطيع|لا يمكنني|لن أتمكن|لست قادرا",
        r"مساعد|الإجابة|تقديم|كتابة|إنشاء",
    ),
    "hi": (r"मुझे खेद है|क्षमा करें|माफ़? ?करें|खेद है", r"मदद|सहायता|उत्तर|जवाब", r"नहीं"),
    "zh": (
        r"(?:很|非常|十分|真的)?(?:抱歉|对不起|對不起|不好意思|遗憾|遺憾)",
        r"无法|無法|不能|没办法|沒辦法|不会|不會",
        r"帮|幫|协助|協助|提供|回答|满足|滿足|完成|参与|讨论|支持|生成|编写",
    ),
    "ja": (
        r"(?:大変)?申し訳|すみません|恐れ入りますが|ごめんなさい|残念ながら",
        r"お手伝い|お答え|提供|対応|お応え|協力|回答|作成|支援",
        r"できません|出来ません|できかねます|致しかねます|いたしかねます",
    ),
    "ko": (r"죄송|미안|유감|안타깝", r"도와|도움|답변|제공|지원|응할|작성", r"수 없|어렵|못"),
}
_WITHIN = "[^.!?。！？।؟\n]{0,50}?"  # of a sentence
# of a clause: "I can't recall its name, but I can help" is none
_CLAUSE = "[^.!?,;。！？，、।؟\n]{0,30}?"
_REFUSAL = re.compile(
    "|".join(
        f"(?:(?:{sorry}){_WITHIN})?(?:{first}){_CLAUSE}(?:{second})"
        for sorry, first, second in REFUSALS.values()
    )
)


def mark(text: str, finish_reason: str) -> Mark | None:
    """The mark of an answer, or None. finish_reason: "stop" or "length"."""
    is_truncated = finish_reason != "stop"
    if not text.strip():
        return "truncated" if is_truncated else "empty"
    if is_looping(text, is_truncated):
        return "looping"
    if is_truncated:
        return "truncated"
    return "refused" if is_refusal(text) else None


def is_refusal(text: str) -> bool:
    """Whether an answer begins, after thoughts, by saying that it will not help."""
    opening = _THOUGHTS.sub("", text, count=1).lstrip(" \t\r\n\"'*#>-")[:_OPENING]
    plain = unicodedata.normalize("NFC", opening).casefold().replace("\u2019", "'")
    plain = re.sub("[\u064b-\u0652]", "", plain)  # vowel signs of Arabic, written or not
    return _REFUSAL.match(plain) is not None


def is_looping(text: str, is_truncated: bool = False) -> bool:
    """Whether words repeat LEAST_REPEATS times in a row, or all over a long answer. is_truncated: a
    loop at its end would have gone on.
    """
    numbers: dict[str, int] = {}
    found = _UNIT.findall(_ENUMERATOR.sub("", text.casefold()))
    units = np.array([numbers.setdefault(unit, len(numbers)) for unit in found], dtype=np.int64)
    for period in range(1, min(LONGEST_PERIOD, len(units) // LEAST_REPEATS) + 1):
        least = max((LEAST_REPEATS - 1) * period, TRUNCATED_LOOP_UNITS - period)
        equal = units[:-period] == units[period:]
        if np.count_nonzero(equal) < least:  # nearly always
            continue
        # runs lie between unequal places; take the last of the longest
        breaks = np.flatnonzero(np.concatenate(([True], ~equal, [True])))
        lengths = np.diff(breaks) - 1
        last = len(lengths) - 1 - int(np.argmax(lengths[::-1]))
        start, length = int(breaks[last]), int(lengths[last])
        covered = length + period
        if length < least:
            continue
        if covered >= LOOP_UNITS or (
            is_truncated and covered >= TRUNCATED_LOOP_UNITS and start + covered == len(units)
        ):
            return True
    if len(units) < GRAMS_UNITS:
        return False
    grams = np.lib.stride_tricks.sliding_window_view(units, GRAM)
    return len(np.unique(grams, axis=0)) / len(grams) < LEAST_DISTINCT
