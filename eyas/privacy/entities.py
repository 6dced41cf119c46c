"""Names of people, street addresses and places in texts: runs of tokens of one type, by the
tagger's probabilities. Street, postcode and town are one address.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from eyas.privacy.findings import Finding, join_overlaps
from eyas.privacy.spelling import joined
from eyas.privacy.tagger import IS_SINGLE, LABELS, TYPES, Floats, Token, tagger, tokenize

# The least probability of a token's type. An organisation is no personal data, and is not found.
THRESHOLDS = {"PERSON": 0.25, "STREET_ADDRESS": 0.5, "LOCATION": 0.5}
GROWS = 0.12  # of the tokens beside one that reaches it: a family name behind a given name
PIECE = 1500  # characters that are tagged as one text, as long as those of training
BOTH = 40  # characters that two pieces share, a name and a little more
TOGETHER = 1 << 14  # tokens whose probabilities are computed at a time
# Between the parts of an address, a postcode among it; and the postcode at its end
WITHIN_ADDRESS = re.compile(
    r"[^\W\d_]?[\s,;.\-–|>(#]{0,12}(?:(?:[A-Z]{1,2}[ -]?)?\d{3,6}(?: [A-Z]{2})?[\s,]{1,3})?"
)
POSTCODE = re.compile(r"[ ,\n]{1,3}(?:[A-Z]{1,2}-)?\d{4,6}(?=\s*(?:[\n.,;]|$))")
# A word of an address; a formula (Fe2O3) and a place of a machine (R17-M1-N9) have none. Hashes.
ADDRESS_WORD = re.compile(
    r"(?<![A-Za-z\d])[A-Za-z]{2,}(?!\d)|[A-Z]?[a-z]{3,}|[^\W\d_A-Za-z]{2,}"
    r"|[A-Z]\d[A-Z\d]? \d[A-Z]"  # or a British or Canadian postcode
)
HASH = re.compile(r"(?<!\w)(?=\w*\d)(?=\w*[a-f])[\da-f]{8,}(?!\w)")
NO_NAME = frozenset("[]{}=`_|\\<>@#")  # signs that stand in code
IN_ADDRESS = frozenset("#|")  # of them those of a flat's number and of a table's row
# Behind these words a name stands, whatever the tagger thinks: where somebody is introduced, a
# field of a form, one of the writer's people.
INTRODUCES = re.compile(
    rf"(?<!\w)(?:{joined('introduces')})\s+"
    r"(?P<name>(?:[^\W\d_]\.|[^\W\d_][\w'’-]*)(?: (?:[^\W\d_]\.|[^\W\d_][\w'’-]*)){0,3})",
    re.I,
)
# Between the capitals of a name
PARTICLES = re.compile(r"d[aeio]|dos|del(?:la)?|l[ae]|van|von|de[rn]|ter|bin|al")
UNCASED = re.compile(joined("introduces uncased"))  # a group for each script without capitals
# A postcode behind its word
POSTCODES = re.compile(joined("postcodes"), re.I)


def version() -> str:
    """Of the weights and of what is taken for a name by them."""
    rules = repr((sorted(THRESHOLDS.items()), GROWS, PIECE, BOTH))
    for pattern in (INTRODUCES, UNCASED, POSTCODES, ADDRESS_WORD, HASH):
        rules += pattern.pattern
    return f"{tagger().version}-{zlib.crc32(rules.encode()):08x}"


def find_entities(texts: Sequence[str]) -> list[list[Finding]]:
    """Names, street addresses and places of each text by place, without overlaps. An address takes
    in the town, postcode and country that follow it.
    """
    found: list[list[Finding]] = [[] for _ in texts]
    for number, offset, tokens, probabilities_TL in tagged(texts):
        for type, first, last in runs(probabilities_TL):
            words = [word for word, _, _ in tokens[first : last + 1]]
            for begin, end in parts(type, words):
                _, start, _ = tokens[first + begin]
                _, _, stop = tokens[first + end - 1]
                found[number].append(Finding(type, offset + start, offset + stop))
    for text, one in zip(texts, found, strict=True):
        codes = (Finding("STREET_ADDRESS", *code.span("code")) for code in POSTCODES.finditer(text))
        names = join_overlaps([*one, *introduced(text)])
        one[:] = join_overlaps([*join_addresses(text, names), *codes])
    return found


def introduced(text: str) -> Iterator[Finding]:
    """Names behind words that announce one: words with capitals, where a script has these."""
    for match in INTRODUCES.finditer(text):
        words = match["name"].split(" ")
        name = [
            *itertools.takewhile(lambda word: word[0].isupper() or PARTICLES.fullmatch(word), words)
        ]
        while name and not name[-1][0].isupper():
            name.pop()
        if name:
            yield Finding("PERSON", match.start("name"), match.start("name") + len(" ".join(name)))
    for match in () if text.isascii() else UNCASED.finditer(text):
        yield Finding("PERSON", *match.span(match.lastindex or 0))


def tagged(texts: Sequence[str]) -> Iterator[tuple[int, int, list[Token], Floats]]:
    """Each piece of the texts: the text's number, where the piece begins, its tokens and their
    probabilities. Some TOGETHER tokens are computed at a time, which bounds the memory.
    """
    group, size = list[tuple[int, int, list[Token]]](), 0
    places = [(number, *piece) for number, text in enumerate(texts) for piece in pieces(text)]
    for place, (number, start, end) in enumerate(places, start=1):
        tokens = tokenize(texts[number][start:end])
        group.append((number, start, tokens))
        size += len(tokens)
        if size >= TOGETHER or place == len(places):
            words = [[word for word, _, _ in tokens] for _, _, tokens in group]
            for one, probabilities_TL in zip(group, tagger().probabilities(words), strict=True):
                yield *one, probabilities_TL
            group, size = [], 0


def pieces(text: str) -> Iterator[tuple[int, int]]:
    """A text cut into pieces [start, end) of at most PIECE characters at line ends, else at spaces,
    else anywhere. But for line ends BOTH or more characters are in two pieces, so that what is cut
    in one is whole in the other.
    """
    start = 0
    while start < len(text):
        end = following = min(start + PIECE, len(text))
        if end < len(text):
            half = start + PIECE // 2
            end = following = text.rfind("\n", half, end) + 1 or end
            if text[end - 1] != "\n":
                end = text.rfind(" ", half + BOTH, end) + 1 or end
                following = text.rfind(" ", half, end - BOTH) + 1 or end - BOTH
        if not text[start:end].isspace():
            yield start, end
        start = following


def runs(probabilities_TL: Floats) -> Iterator[tuple[str, int, int]]:
    """Runs of tokens of one type: type, first token, last token. A token is of its likeliest type,
    if that reaches GROWS; one that rather begins than continues a run begins one. One token of a
    run must reach the type's threshold.
    """
    of_type = probabilities_TL[:, 1::2] + probabilities_TL[:, 2::2]
    best = of_type.argmax(axis=1)
    least = np.array([THRESHOLDS.get(type, 0.5) for type in TYPES])
    found: list[tuple[int, int, int, bool]] = []
    for index in np.flatnonzero(of_type.max(axis=1) >= GROWS).tolist():
        type = int(best[index])
        label = LABELS.index(f"B-{TYPES[type]}")
        begins = probabilities_TL[index, label] > probabilities_TL[index, label + 1]
        is_sure = bool(of_type[index, type] >= least[type])
        if found and found[-1][0] == type and found[-1][2] == index - 1 and not begins:
            _, first, _, was_sure = found.pop()
            found.append((type, first, index, was_sure or is_sure))
        else:
            found.append((type, index, index, is_sure))
    for type, first, last, is_sure in found:
        if is_sure:
            yield TYPES[type], first, last


def parts(type: str, words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """What of a run can be what it was taken for, as words [first, end): two letters, or one of a
    script without spaces. Signs of code part names; nothing else is on both sides of one, but for
    the lines of a quoted mail.
    """
    if type not in THRESHOLDS:
        return
    code = NO_NAME - IN_ADDRESS if type == "STREET_ADDRESS" else NO_NAME
    signs = [-1, *(place for place, word in enumerate(words) if word in code), len(words)]
    is_quoted = all(words[sign] == ">" and words[sign - 1] == "\n" for sign in signs[1:-1])
    sides = []
    for before, end in itertools.pairwise(signs):
        first = before + 1
        while first < end and not words[first][0].isalnum():
            first += 1
        while first < end and not words[end - 1][0].isalnum() and words[end - 1] != ".":
            end -= 1
        if first < end:
            sides.append((first, end))
    for one in sides if type == "PERSON" or len(sides) == 1 or is_quoted else ():
        letters = [sign for word in words[slice(*one)] for sign in word if sign.isalpha()]
        if len(letters) > 1 or any(map(IS_SINGLE.match, letters)):
            yield one


def join_addresses(text: str, spans: Sequence[Finding]) -> list[Finding]:
    """The spans, a street address being one with the parts of addresses and places behind it."""
    joined: list[Finding] = []
    for span in spans:
        last = joined[-1] if joined else None
        if (
            last
            and last.type == "STREET_ADDRESS"
            and span.type in ("STREET_ADDRESS", "LOCATION")
            and WITHIN_ADDRESS.fullmatch(text, last.end, span.start)
        ):
            joined[-1] = Finding("STREET_ADDRESS", last.start, span.end)
        else:
            joined.append(span)
    for place, span in enumerate(joined):
        follows = POSTCODE.match(text, span.end) if span.type == "STREET_ADDRESS" else None
        if follows:
            joined[place] = Finding(span.type, span.start, follows.end())
    return [
        one
        for one in joined
        if one.type != "STREET_ADDRESS" or is_address(text[one.start : one.end])
    ]


def is_address(text: str) -> bool:
    """Whether it has a word of an address and a second word or a number, no hash, and at most twice
    as many digits as letters; "54362315K" has not.
    """
    words = [word for word, _, _ in tokenize(text) if word[0].isalnum()]
    num_letters, num_digits = sum(map(str.isalpha, text)), sum(map(str.isdigit, text))
    is_worded = ADDRESS_WORD.search(text) is not None and HASH.search(text) is None
    return is_worded and len(words) > 1 and num_digits <= 2 * num_letters
