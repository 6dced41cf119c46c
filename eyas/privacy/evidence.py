"""What makes a capital a person and a number a street: the tagger's spans that the text around them
bears out.

The tagger has seen sentences. Options, logs, formulas, tables and lists have capitals and numbers
of their own, and it takes them for names. Here a name needs evidence: another name beside it, a cue
such as a title or "my name is", or a sentence around it; a street needs its kind or a cue, and a
number. What stands for nobody stays: persons of word problems, of stories, those that a question is
about, and those of small talk on films, music and sports.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence

import yaml

from eyas.privacy.lexicon import (
    CITY,
    CITY_LARGE,
    COUNTRY,
    CUES,
    DEMONYM,
    FAMILY,
    FAMILY_COMMON,
    FILES,
    GIVEN,
    GIVEN_COMMON,
    REGION,
    STREET_END,
    UPPER_CODES,
    bare_word,
    gazetteer,
)

_LISTS = yaml.safe_load((FILES / "evidence.yaml").read_text(encoding="utf-8"))
EPONYM, CALLED, PLACE, WEAK, SOFTWARE, KIN, UTTERED = (
    frozenset(_LISTS[kind].split())
    for kind in ("eponym", "thing", "place", "weak", "software", "kin", "uttered")
)
NAMED, PLACED = GIVEN | FAMILY, CITY | CITY_LARGE | COUNTRY | REGION

WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
# Before a name, on its line: somebody says whose it is.
CUE = re.compile(
    r"(?:\bnam(?:e|ed|es)\b[^.\n]{0,24}|\b(?:called|surname|nickname|alias|née|nee|signed|attn"
    r"|customer|client|patient|passenger|guest|tenant|applicant|employee|recipient|sender|contact"
    r"|author|owner|holder|reporter|assignee|manager|attendees?|participants?|students?|beneficiary"
    r"|reviewed by|regards|sincerely|cheers|greetings|grüße|saludos) ?[:,-]?\s{0,2}"
    r"|\b(?:from|to|cc|by|love|best|yours|thanks) ?[:,]\s{0,2}"
    r"|\b(?:i'?m|i am|this is|calls? me|i go by|mr|mrs|ms|miss|mx|dr|prof|professor|herr|frau"
    r"|señora?|madame|monsieur|sir|dear|hi|hello|hey|lieber?|hallo|hola|bonjour)[.,]? ?)$",
    re.I,
)
TITLE = re.compile(
    r"\b(?:mr|mrs|ms|miss|mx|dr|prof|sir|lady|lord|professor|doctor|judge)\.? ?$", re.I
)
# What people do, behind a name; another name beside it.
ACTS = re.compile(
    r" (?:said|says|told|asked|shouted|smiled|began|wrote|lives|lived|works|worked|thinks|wants"
    r"|is from|had (?:given|told)|has (?:given|told)|and I)\b|, can (?:i|you)\b",
    re.I,
)
SPEAKER = re.compile(r": (?:[\"“]|[A-Z])")
# What a word that no list has needs: a pronoun or a listed name near, somebody who speaks.
SAID_BEFORE = re.compile(r"\b(?:said|says|asked|told|replied|starring|shouted at) $")
PRONOUN = re.compile(r"\b(?:he|she|him|his|her|hers|mom|dad|mother|father|brother|sister)\b", re.I)
LISTED_BEFORE = re.compile(r"([A-Z][^\W\d_]+)(?:,|,? (?:and|or|&)) $")
LISTED_AFTER = re.compile(r"(?:,|,? (?:and|or|&)) ([A-Z][^\W\d_]+)")
ANOTHER_BEFORE = re.compile(r"\b[A-Z][^\W\d_]+,? and $")
ANOTHER_AFTER = re.compile(r",? and [A-Z][^\W\d_]+ [a-z]")
PLACE_BEFORE = re.compile(r"(?:\b(?:in|at|near|to|of|the)|,) $")
ARTICLE = re.compile(r"\b(?:the|an?|this|that|return of) $", re.I)
LAST_WORD = re.compile(r"([^\W\d_]+)[,:]? $")
INTRODUCED = re.compile(
    r"\b(?:my (?:full |first |last |maiden )?name|i am|i'?m|this is"
    r"|call me|name(?:'s| is|:))(?!\w)",
    re.I,
)

# No person: "The Adventures of ...", "..., a company of", "... is the tool", "... and the Cats".
WORK_BEFORE = re.compile(r"\b[Tt]he [A-Z][a-z]+ of $")
THINGS = (
    "(?:company|firm|agency|start-?up|tool|app|site|website|platform|service|library|language"
    "|brand|game|movie|film|band|album|song|series|city|town|village|settlement|fort|ship|river"
    "|island|region|program|project|system|product|device|festival|retailer|team|newspaper)"
)
THING = re.compile(
    rf"(?:,| is| was| are) (?:the|an?) (?:(?!of|at|in|for|the)[\w-]+ ){{0,4}}?{THINGS}"
    r"(?:[,.;:!?\n]| (?:that|which|for|of|in|by|based|with|to|and|on|from|owned|where)\b)"
    r"| and the [A-Z][a-z]+s\b"
)
# Before a word that no list has: a thing that is called so, the first word of a name of two.
COINED = re.compile(rf"\b{THINGS} (?:called|named) $|[a-z,] [A-Z][a-z]{{3,}} $")
WITHIN = re.compile(r"\b(?:in|near|on) $")
# Talk about films, music, sports and games: it names who is known to the public, or a character.
TALK = re.compile(
    r"\b(?:movie|film|song|album|band|singer|actor|actress|soundtrack|lyric|drummer|rapper|rap|music"
    r"|villain|tv show|playoff|quarterback|nfl|nba|mlb|super ?bowl|touchdown|sequel|superhero"
    r"|oscar|grammy)s?\b",
    re.I,
)
ALSO_TALK = re.compile(  # two of them
    r"\b(concert|director|starring|genre|season|coach|league|player|team|character|episode"
    r"|performance|comic|trilogy|franchise|rock|fan|novel|author|game|match|cast|scene)s?\b",
    re.I,
)
SPOKEN = re.compile(r"\b(?:I|you|we|my|your|i'm)\b", re.I)
SPOKEN_LINE = 150  # characters of a line of small talk, at most in the mean
# Somebody of the writer's own, in such talk.
ACQUAINTED = re.compile(
    r"\b(?:hi|hello|hey|dear|thanks|with|invite|meet|met|call|text|tell|ask|remind),? $", re.I
)

UTTERANCE = re.compile(r"([a-z])\1\1", re.I)  # Ohhh
MIXED = re.compile(r"\A(?!Mc|Mac|De|Di|La|Le|Van|O['’])\w*[a-z][A-Z]")

# Options: marks in order, from the first letter on, on lines of their own or on one.
MARK = re.compile(r"(?:(?<=\s)|\A)\(?([A-Ha-h])(?:[.):]|\))(?=\s)")
# A line or an inline item that is one capital.
BEFORE_ITEM = re.compile(r"(?:(?:\A|\n)\s*|\s)(?:[-*•–]|\(?(?:\d{1,2}|[A-Za-z])[.):])\s*$")
AFTER_ITEM = re.compile(r"(?:['’]s?)?\s*(?:\Z|\n|[-*•–]\s|\(?(?:\d{1,2}|[A-Za-z])[.):]\s|,\s*\n)")
# Signs that stand in identifiers, paths, formulas and logs, close to a word.
JOINING = frozenset("./\\@=<>{}[]|#$&+*~^_:-")
LOG = re.compile(
    r"\d\d:\d\d:\d\d|\b(?:INFO|WARN(?:ING)?|ERROR|DEBUG|FATAL|NOTICE|TRACE)\b|\w\[\d+\]:?"
    r"|\b0x[0-9a-f]+|(?:\w\.[a-z]\w*){2,}\.[A-Z]|Traceback|\b\w+::\w+|^\s*(?:at|File) |[{}<>|]{2}"
)

PROBLEM = re.compile(
    r"\bhow (?:many|much|long|old|far|tall|fast|often|late)\b"
    r"|\bwhat (?:is|do(?:es)?|did|was|will|are|percent\w*|fraction)\b"
    r"|\b(?:find|calculate|compute|determine|exercise)\b|\bsolves? this problem"
    r"|\bwho (?:is|has|was|won|finished)\b",
    re.I,
)
NUMBER = re.compile(
    r"\d+|\b(?:two|three|four|five|six|seven|eight|nine|ten|eighteen|twenty|thirty|hundred|third|twice|half|taller|older|younger"
    r"|shorter|dozen)\b",
    re.I,
)
FIRST_PERSON = re.compile(r"\b(?:I|my|me)\b")
STORY = re.compile(
    r"[,.!?—-][\"”’'»] ?(?:said|cried|replied|asked|exclaimed|returned|answered|whispered|murmured"
    r"|continued|observed|remarked|thought|shouted|muttered|inquired)\b"
    r"|\b(?:said|cried|replied|exclaimed|whispered|murmured) (?:he|she|I|Mrs?|the)\b"
    r"|\b(?:(?:[Ee]xtract|[Ll]ines) from|[Ee]xcerpt|[Pp]assage|[Cc]hapter|[Ss]cene|[Ff]able)s?\b",
)
# A letter, a record, a form: its people are no story's.
PRIVATE = re.compile(
    r"\w@\w|\d{3}[ .-]?\d{4}\b|\b(?:dear|regards|sincerely|invoice|customer|patient|phone|address"
    r"|order|account|my name)\b",
    re.I,
)
# A question about somebody; what follows is whom it is about.
ABOUT = re.compile(
    r"\b(?:who (?:is|was|were|are)|what (?:did|does|do)|(?:tell me|know|learn|essay|report|article"
    r"|poem|facts|paragraph) (?:more |something )?(?:about|on)"
    r"|(?:biography|life|death|works?|legacy|novels|poems|paintings|philosophy|discography) of"
    r"|influenced|compare|when (?:was|did)) $",
    re.I,
)

STREET_WORDS = frozenset(word for word, kind in CUES.items() if kind in ("street", "box", "unit"))
BOX = re.compile(
    r"\b(?:p\.? ?o\.? ?box|psc|cmr|unit|apt|apartment|suite|ste|postfach)\b.{0,3}\d"
    r"|\b[fad]po,? (?:a[ape] )?\d{5}",
    re.I,
)
POSTCODE = re.compile(r"\b(?:zip|post(?:al)?|plz|cep)[ -]?(?:code)?(?: is| ?:)? $", re.I)
SAINT = ("St", "ST", "Ste", "Unit", "Lot", "Room")  # before a name or a number
UNIT_NEXT = re.compile(r"(?:[\s,|>?-]{0,8}(?:[^\W\d_]{1,12}\.? ){0,2}[^\W\d_]{0,12}\.? ?\d{0,6})?")
# A score, a range, a day.
TIMES = re.compile(r"\d{1,2}[-–]\d{1,2}\b|\d+(?:st|nd|rd|th)\W*\Z")
CORNER = re.compile(r"\d+(?:st|nd|rd|th)? (?:and|&|at) [A-Z0-9]|\bcorner of\b")

# A line of one or two words; somebody's own name, or who is spoken to; on a ride, two streets.
ANSWER = re.compile(r"(?:\A|(?<=\n))([^\W\d_]{3,}(?: [^\W\d_]{3,})?)(?=[.!]?(?:\n|\Z))")
OWN_NAME = re.compile(
    r"\b(?:[Mm]y name(?:['’]s| is)|[Ii]['’]m|I am|[Tt]his is|[Cc]all me) ([A-Z][a-z]{2,})\b"
)
ADDRESSED = re.compile(r"[a-z], ([A-Z][a-z]{2,})!")
# Whom a family name alone tells who asks.
RECORD = re.compile(
    r"\b(?:account|bank|card|pin|dob|birth|maiden|fraud|money|surname|last name)\b", re.I
)
RIDE = re.compile(
    r"\b(?:ride|cab|taxi|uber|lyft|directions|walk|drive[rs]?|pick(?:ed)? (?:me|us) up"
    r"|drop (?:me|us)|bus|corner|intersection)\b"
)
CROSSING = re.compile(
    r"(?:\b(?:from|to|at|near|on|of) |\A|(?<=\n)(?=[^\n]{0,30}(?:\n|\Z)))"
    r"(?P<all>(?P<first>[A-Z][a-z]{2,}|\d{1,2}(?:st|nd|rd|th)) (?:and|&) "
    r"(?P<second>[A-Z][a-z]{2,}|\d{1,2}(?:st|nd|rd|th)|main))\b(?! [A-Z])"
)

NEXT_LINES = 40  # characters within which the rest of an address follows
# What the tagger's score must be: of a name that a list has, and of one that none has.
PROBABLE, CERTAIN = 0.3, 0.65


class Surroundings:
    """A text, and what of it is options, a word problem, a story, small talk."""

    def __init__(self, text: str, conversation: str = "") -> None:
        """conversation: all of its texts, one a line; "" = the text stands alone."""
        self.text, self.conversation = text, conversation or text
        self.options = option_regions(text)
        self.is_problem = (
            PROBLEM.search(text) is not None
            and len(NUMBER.findall(text)) > 1
            and not FIRST_PERSON.search(text)
        )
        self.is_lower = not any(map(str.isupper, text))
        self.is_talk = _is_talk(self.conversation)
        self.is_story = STORY.search(text) is not None and not PRIVATE.search(text)

    def is_person(self, start: int, end: int, score: float) -> bool:
        """Whether a span that looks like a name is a person's, and one that is to go."""
        value, before, after = self.text[start:end], self._before(start), self.text[end : end + 80]
        words = [word for word in WORD.findall(value) if len(word) > 1]
        if not words or self._is_option(start):
            return False
        looked = [gazetteer().look_up(word) for word in words]
        names = [word for word, (bits, _) in zip(words, looked, strict=True) if bits & NAMED]
        has_title = TITLE.search(before) is not None or CUES.get(bare_word(words[0])) == "title"
        cued = has_title or CUE.search(before) is not None or _is_kin(before)
        introduced = INTRODUCED.search(before) is not None
        if not has_title and _is_joined(self.text, start, end):
            return False
        is_log = LOG.search(self._line(start)) is not None
        is_public = self.is_story or ABOUT.search(before) or WORK_BEFORE.search(before)
        if is_public and not introduced:
            return False
        is_known = looked[0][0] & GIVEN_COMMON and len(words) == 1 and ACQUAINTED.search(before)
        if self.is_talk and not (introduced or is_known or _is_kin(before)):
            return False
        if THING.match(after) and not introduced:
            return False
        if len(words) > 1 and not has_title:
            return self._is_pair(words, names, looked, after, score, cued, is_log)
        if (self.is_problem or is_log) and not introduced:
            return False
        return self._is_lone(words[-1], looked[-1], (before, after), score, cued, introduced)

    def _is_pair(
        self,
        words: Sequence[str],
        names: Sequence[str],
        looked: Sequence[tuple[int, int]],
        after: str,
        score: float,
        cued: bool,
        is_log: bool,
    ) -> bool:
        """Two words or more: at least one is a listed name, or a cue stands before them."""
        ordinary = [
            0 < rank <= 2 and not bits & (GIVEN_COMMON | FAMILY_COMMON) for bits, rank in looked
        ]
        if all(ordinary) and not cued:
            return False
        if not cued and (
            (set(map(str.isupper, words)) == {True, False} and _is_acronym(words, looked))
            or (looked[-1][0] & CITY_LARGE and not looked[0][0] & (GIVEN | FAMILY_COMMON))
        ):
            return False
        if any(bare_word(word) in EPONYM | CALLED for word in words) or _is_eponym(after):
            return False
        if is_log:
            return len({*names}) > 1
        if not self.is_lower and not cued and any(word.islower() for word in (words[0], words[-1])):
            return False
        bits, rank = looked[0]
        if not cued and (
            bits & (DEMONYM | REGION) or (rank and looked[-1][1] and not bits & NAMED)
        ):
            return False
        if cued or any(bits & (GIVEN_COMMON | FAMILY_COMMON) for bits, _ in looked):
            return True
        return score >= PROBABLE

    def _is_lone(
        self,
        word: str,
        listed: tuple[int, int],
        around: tuple[str, str],
        score: float,
        cued: bool,
        introduced: bool,
    ) -> bool:
        bits, rank = listed
        before, after = around
        if (len(word) < 3 and not cued) or UTTERANCE.search(word) or bare_word(word) in UTTERED:
            return False
        if re.search(r"\d[ -]?\Z|\(\Z", before) or (
            word.isupper() and not self.text.isupper() and len(word) < (3 if cued else 6)
        ):
            return False
        if _is_eponym(after) or MIXED.search(word) or (bare_word(word) in SOFTWARE and not cued):
            return False
        if BEFORE_ITEM.search(before) and AFTER_ITEM.match(after):
            return False
        if word.islower() and not self.is_lower and not (cued and bits & GIVEN_COMMON):
            return introduced and score >= PROBABLE and (bits & NAMED > 0 or not rank)
        if not bits & NAMED and COINED.search(before):
            return False
        if cued:
            return bool(bits & NAMED) or score >= PROBABLE
        if SAID_BEFORE.search(before):
            return score >= PROBABLE
        if bits & (CITY_LARGE | COUNTRY | REGION) and (
            not bits & GIVEN_COMMON or score < CERTAIN or PLACE_BEFORE.search(before)
        ):
            return False
        if (bits & PLACED or not bits & GIVEN_COMMON) and (
            ARTICLE.search(before)
            or WITHIN.search(before)
            or after[1:2].isdigit()
            or (not bits & GIVEN_COMMON and before.endswith(" at "))
        ):
            return False
        if ACTS.match(after) or (
            bits & NAMED and (ANOTHER_BEFORE.search(before) or ANOTHER_AFTER.match(after))
        ):
            return True
        if bits & GIVEN_COMMON and (not 0 < rank <= 3 or score >= PROBABLE):
            return True
        if bits & NAMED and not bits & (PLACED | DEMONYM) and not 0 < rank <= 3:
            return score >= PROBABLE
        return score >= CERTAIN and (bool(bits & NAMED) or self._is_borne_out(word, before, after))

    def _is_borne_out(self, word: str, before: str, after: str) -> bool:
        """Whether something near a word that no list has says that it is a person."""
        listed = [LISTED_BEFORE.search(before), LISTED_AFTER.match(after)]
        return (
            any(one and gazetteer().look_up(one[1])[0] & NAMED for one in listed)
            or bool(SAID_BEFORE.search(before) or SPEAKER.match(after))
            or PRONOUN.search(before + after) is not None
        )

    def is_street(self, start: int, end: int) -> bool:
        """Whether a span that looks like an address has the kind of a street, a number of its own,
        or a word beside it that says that a place follows.
        """
        value, before = self.text[start:end], self._before(start)
        words = WORD.findall(value)
        if POSTCODE.search(before):
            return True
        if not words or self._is_option(start):
            return False
        has_number = any(sign.isdigit() for sign in value)
        cued = any(bare_word(word) in PLACE for word in WORD.findall(before[-48:]))
        near = value + UNIT_NEXT.match(self.text, end)[0]  # type: ignore[index]
        kinds = [word for word in WORD.findall(near) if _is_kind(word, self.is_lower)]
        has_kind = bool(kinds) and (len(kinds) > 1 or kinds[0] != words[0] or kinds[0] not in SAINT)
        if LOG.search(self._line(start)) or (self.is_talk and not cued):
            return False
        if BOX.search(near) or (CORNER.search(value) and cued):
            return True
        if TIMES.match(value.lower().removeprefix("the ")):
            return False
        if has_number:
            is_named = self.is_lower or has_kind or any(word[0].isupper() for word in words)
            return is_named and (has_kind or cued or _has_town(near))
        is_named = any(kind not in SAINT for kind in kinds) and SPOKEN.search(self._line(start))
        return bool(is_named) and len(words) > 1 + (not cued) and not self.is_story

    def _is_option(self, place: int) -> bool:
        return any(first <= place < last for first, last in self.options)

    def _line(self, place: int) -> str:
        end = self.text.find("\n", place)
        return self.text[self.text.rfind("\n", 0, place) + 1 : end if end >= 0 else None][:2000]

    def _before(self, start: int) -> str:
        """Up to 60 characters, of this line and the last one."""
        return self.text[max(0, start - 60) : start]


def answers(here: Surroundings) -> Iterator[tuple[str, int, int]]:
    """What needs no sentence: a name alone on a line of a conversation, somebody's own name, a
    crossing that somebody rides to; as (type, start, end).
    """
    if here.is_story:
        return
    text, said = here.text, here.conversation
    for crossing in CROSSING.finditer(text) if RIDE.search(said) else ():
        if not any(_is_large(crossing[word]) for word in ("first", "second")):
            yield "STREET_ADDRESS", *crossing.span("all")
    is_answer = not here.is_talk and (FIRST_PERSON.search(said) or "\n" not in said.strip())
    for name in ANSWER.finditer(text) if is_answer else ():
        if _are_names(name[1].split(), may_be_family=RECORD.search(said) is not None):
            yield "PERSON", *name.span(1)
    addressed = () if here.is_talk or here.is_problem else ADDRESSED.finditer(text)
    for name in (*OWN_NAME.finditer(text), *addressed):
        if _are_names([name[1]], may_be_family=False):
            yield "PERSON", *name.span(1)


def _is_talk(text: str) -> bool:
    """Whether a text is small talk on films, music, sports or games, in short lines."""
    return (
        len(text) <= SPOKEN_LINE * (text.count("\n") + 1)
        and bool(TALK.search(text) or len({*map(str.lower, ALSO_TALK.findall(text))}) > 1)
        and SPOKEN.search(text) is not None
        and not PRIVATE.search(text)
    )


def _is_large(word: str) -> bool:
    return bool(gazetteer().look_up(word)[0] & (CITY_LARGE | COUNTRY | REGION))


def _are_names(words: Sequence[str], may_be_family: bool) -> bool:
    """Whether words are a common name, given or a family's, and none is an ordinary word."""
    looked = [gazetteer().look_up(word) for word in words]
    first = GIVEN_COMMON | FAMILY_COMMON * (may_be_family and len(words) == 1)
    return (
        bool(looked[0][0] & first)
        and not _is_large(words[0])
        and all(
            bits & NAMED and rank != 1 and (word[0].isupper() or rank != 2 or len(words) > 1)
            for word, (bits, rank) in zip(words, looked, strict=True)
        )
    )


def option_regions(text: str) -> list[tuple[int, int]]:
    """Where options with letters in order stand, A, B and C at least or two on lines of their own,
    each to the end of its line.
    """
    found: list[tuple[int, int]] = []
    marks: list[re.Match[str]] = []
    for mark in [*MARK.finditer(text), None]:
        is_next = mark is not None and marks and ord(mark[1]) == ord(marks[-1][1]) + 1
        if not is_next:
            own = sum(text[: one.start()].rstrip(" ")[-1:] in ("", "\n") for one in marks)
            if len(marks) > 2 or own > 1:
                end = text.find("\n", marks[-1].end())
                found.append((marks[0].start(), end if end >= 0 else len(text)))
            marks = []
        if mark is not None and (is_next or mark[1] in "Aa"):
            marks.append(mark)
    return found


def _is_joined(text: str, start: int, end: int) -> bool:
    """Whether a sign of an identifier or a formula joins the span to what stands beside it."""
    before, after = text[max(0, start - 2) : start], text[end : end + 2]
    if len(before) > 1 and before[-1] in JOINING and not before[0].isspace():
        return before[-1] not in ":-/" or before[0].isalnum()
    return (
        len(after) > 1
        and after[0] in JOINING
        and after[1].isalnum()
        and not (after[0] in ".:-/" and after[1].isupper())
    )


def _is_acronym(words: Sequence[str], looked: Sequence[tuple[int, int]]) -> bool:
    """Whether capitals that no list has are one of the words: IBM Watson, Mac OS."""
    return any(
        word.isupper() and len(word) < 5 and not bits & NAMED
        for word, (bits, _) in zip(words, looked, strict=True)
    )


def _is_kin(before: str) -> bool:
    """Whether a word such as "sister" or "boss" stands before the name."""
    last = LAST_WORD.search(before)
    return last is not None and (CUES.get(word := bare_word(last[1])) == "kin" or word in KIN)


def _is_eponym(after: str) -> bool:
    """Whether something that is named after a person follows: Ohm's law, the Gibbs free energy."""
    following = re.match(r"(['’]s?)? (?:free )?([^\W\d_]+)", after)
    if following is None:
        return False
    word = bare_word(following[2])
    return word in EPONYM or (not following[1] and word in CALLED)


@functools.lru_cache(1 << 12)
def _is_kind(word: str, in_small: bool) -> bool:
    """Whether a word is a kind of street, box or flat; one that is another word too, with
    a capital.
    """
    folded = bare_word(word)
    if folded in STREET_WORDS and len(folded) > 1:
        return in_small or word[0].isupper() or folded not in WEAK
    return (
        len(folded) > 6
        and STREET_END.search(folded) is not None
        and (in_small or word[0].isupper())
    )


def _has_town(value: str) -> bool:
    """Whether a town, a country or a code of a state stands behind a comma or a line end."""
    parts = re.split(r"[,\n|]", value)[1:]
    return any(
        word in UPPER_CODES or gazetteer().look_up(word)[0] & PLACED
        for part in parts
        for word in WORD.findall(part)
        if word[0].isupper()
    ) and bool(re.search(r"\d", value) and len(WORD.findall(value)) > 1)


def borne_out(here: Surroundings, spans: Iterable[tuple[str, int, int, float]]) -> Iterator[bool]:
    """For each span (type, start, end, score), whether the text bears it out; places always."""
    last = -NEXT_LINES
    for type, start, end, score in spans:
        if type == "PERSON":
            yield here.is_person(start, end, score)
        elif type == "STREET_ADDRESS":
            is_kept = start - last < NEXT_LINES or here.is_street(start, end)
            last = end if is_kept else last
            yield is_kept
        else:
            yield True
