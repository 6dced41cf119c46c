"""The passages of a text: code, and prose by language.

Names are searched for in prose of a known language, patterns in everything. Code, commands, paths
and formulas are recognised by their form; English word by word, so that a German text below an
English request is a passage of its own. Other prose has the language that `eyas.language` detects.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

import yaml

from eyas.language import CODE_ONLY, UNKNOWN, language
from eyas.privacy.lexicon import FILES, FOREIGN, STREET_END, bare_word, gazetteer

ENGLISH = "en"

# Parts of a line that are code, whatever stands around them. No part takes more than a bounded look
# ahead, so that time grows with the length only.
_NAME = r"[A-Za-z_]\w*"
_OPERAND = (
    r"[(\[{]{0,3}-?(?<!\w)(?:\$?\d[\d.,]{0,30}%?[A-Za-z]?|[A-Za-z]\d?)(?!\w)"
    r"(?:\([\w, ]{0,20}\))?[)\]}]{0,3}"
)
_FLAG = r"-{1,2}[A-Za-z][\w-]*(?:=\S+)?"
_COMMANDS = (
    r"(?:apt|apt-get|awk|bash|brew|cargo|cat|cd|chmod|chown|cp|curl|cut|dd|df|diff|dig|docker|du"
    r"|echo|export|find|gcc|gem|git|go|grep|gunzip|gzip|head|helm|java|jq|kill|kubectl|ln|ls|make"
    r"|mkdir|mount|mv|mysql|node|npm|npx|openssl|perl|pip|pip3|ps|psql|python|python3|rm|rsync|scp"
    r"|sed|sh|sort|ssh|sudo|systemctl|tail|tar|tee|top|touch|uniq|unzip|wc|wget|xargs|yarn|zip)"
)
_ENDINGS = (
    r"(?:py|js|ts|c|h|cpp|java|rb|rs|go|sh|txt|csv|json|xml|ya?ml|md|html?|css|sql|ini|cfg|conf|log"
    r"|zip|tar|gz|exe|dll|so|png|jpe?g|gif|svg|pdf|docx?|xlsx?|php|toml|lock)"
)
PIECES = re.compile(
    rf"""
      ```.*?(?:```|\Z) | ~~~.*?(?:~~~|\Z) | `[^`\n]+`            # marked as code
    | \$\$.{{1,1000}}?\$\$ | \\\[.{{1,1000}}?\\\] | \\\(.{{1,1000}}?\\\)    # marked as a formula
    | \\begin\{{([a-z*]+)\}}.{{0,2000}}?\\end\{{\1\}}
    | (?<![\w$])\$(?![\s\d])[^$\n]{{1,200}}(?<!\s)\$(?!\w)
    | (?<![\w$])\$\d[^$\n]{{0,100}}[\\^_=+][^$\n]{{0,100}}\$(?!\w)
    | \\[A-Za-z]+(?:\{{[^{{}}\n]{{0,100}}\}}){{0,3}}                      # a command of LaTeX
    | (?:https?|ftp|file|ssh|git)://\S+ | \bwww\.\S+
    | </?[A-Za-z][^<>\n]{{0,200}}> | \{{\{{[^{{}}\n]{{0,100}}\}}\}}
    | \$\{{[^{{}}\n]{{0,100}}\}} | \{{\w*\}} | \$[A-Z_]{{2,}}\b | %\(\w+\)[sd] | (?<!\w)%[sd]\b
    | "[\w-]+"\s{{0,3}}:                                                  # a key of JSON
    | (?<![\w/])(?:~|\.{{1,2}})?(?:/[\w.+@%-]+){{2,}}/?                   # a path
    | (?<![\w/])(?:~|\.{{1,2}})/[\w.+-]+ | \b[A-Za-z]:\\[^\s"']+
    | (?<![\w@.-])[\w-]+\.{_ENDINGS}\b(?!@)
    | (?<![\w.])(?:[a-z_]\w*|[A-Z][^\W_]*[_.]\w+)(?:\.{_NAME}){{0,8}}       # a call
      \((?:[^()\s,]|,[ ]?|[ ]=[ ]|\([^()\n]{{0,80}}\))*\)
    | \b[A-Za-z]\w*\[[^\[\]\n]{{0,40}}\]
    | \b[^\W_]+_\w+ | \b_\w+ | \b[a-z][a-z0-9]*[A-Z]\w*                   # a name
    | (?<![\w.-])[a-z][\w.+-]*[ ]-[A-Za-z]\w{{0,4}}\b(?:[ ]{_FLAG})* | (?<=\s)--[a-z][\w-]*(?:=\S+)?
    | {_OPERAND}(?:[ ]?(?:[=<>!]=|[+*/^=<>÷×·≤≥≠→]|->|=>|(?<=[ ])-(?=[ ]))[ ]?{_OPERAND})+
    """,
    re.S | re.X,
)

# Whole lines that are code.
CODE_LINE = re.compile(
    rf"""
    \s*(?:
      (?:async\ )?def\ {_NAME}\ ?\( | class\ {_NAME}\s*[:({{] | @{_NAME}[\w.]*(?:\(.*\))?$
    | (?:import|package|using|use)\ [\w.:*{{}}]+(?:,\ ?[\w.]+|\ as\ \w+)*;?$
    | from\ [\w.]+\ import\b | import\ .*\bfrom\ ['"]
    | \#(?:include|define|ifn?def|endif|pragma|!/)
    | (?:if|elif|while|else\ if|unless|switch|catch)\b.*[:{{]$ | for\ .*\ in\ .*:$
    | with\ .*(?:\(|\ as\ ).*:$ | (?:try|else|finally|do|begin|then|fi|done|end)\s*[:{{]?;?$
    | (?:if|for|while|switch|foreach)\ ?\(.*
    | (?:return|yield|raise|assert|del|throw|await)(?:\ \S+){{0,2}};?$
    | (?:return|yield|raise|assert|throw|await)\b.*[()\[\]=<>].* | (?:echo|puts|print)\ ["'$].*
    | (?:const|let|var|val|int|float|double|char|void|bool|string|auto|static|public|private|struct
        |protected|final|func|fn|function|enum|interface|impl|pub|mod|type|extern|unsigned|long)
      (?:[\ *&]+[\w<>\[\],.*&]+){{1,4}}(?:\s*=[^=].*|\(.*|\s*;|\s*\{{)$
    | (?:\$|>>>|\.\.\.|\#\ ?\$|[\w.-]+@[\w.-]+[:~$\#]+)\ \S.*                   # after a prompt
    | (?:sudo\ )?{_COMMANDS}(?:\ [\w./:@=-]+)*\ [-./~|>{{"'$&\\]\S*(?:\ .*)?
    | [a-z][\w.+-]*\ (?:[a-z][\w-]*\ )?{_FLAG}(?:\s.*)?
    | (?:sudo\ )?(?:{_COMMANDS}|conda)\ (?:add|apply|build|checkout|clone|commit|exec|fetch|init
        |install|pull|push|remove|run|start|status|stop|uninstall|update|upgrade)(?:\ .*)?[^.!?\s]$
    | [\w.\[\]'"*]+(?:,\ ?[\w.\[\]'"]+)*(?:\ ?:\ ?[\w.\[\],\ ]+)?\s*(?:[-+*/|&^%:]|//|\*\*|<<|>>)?=
      (?!=|\s*[A-Z][a-z]+(?:\ [A-Z][a-z.]+)+\s*$)\s*\S.*                        # an assignment
    | SELECT\b.* | INSERT\ INTO\b.* | UPDATE\ \w+\ SET\b.* | DELETE\ FROM\b.*
    | (?:CREATE|ALTER|DROP)\ (?:TABLE|INDEX|VIEW|DATABASE)\b.* | FROM\ \w+(?:\ \w+)?[;,]?$
    | WHERE\ [\w.]+\ ?(?:[=<>]|IN\b|LIKE\b|IS\b).* | (?:GROUP|ORDER)\ BY\b.* | VALUES\ ?\(.*
    | (?:(?:LEFT|RIGHT|INNER|OUTER|CROSS)\ )?JOIN\ \w.* | (?://|/\*|\*/|<!--|<\?).*
    | [\])}}(\[{{,;\s]+$ | (?!.*"\s*:).*[;{{}}]\s*(?://.*|/\*.*)?$ | .*[(\[\\]$ | .*=>.*
    | (?:\"\"\"|\'\'\').* | [\w.]+\([^)]*\)(?:\.\w+(?:\([^)]*\))?)*\s*[:;]?$
    )
    """,
    re.X,
)
BARE = re.compile(r"\w+(?:\s+\w+){0,3}\s*")
COMMENT = re.compile(r"\s*(?:#|//|--|;|\*|%|\"\"\"|''')")
UNIT = re.compile(r"\n|(?<=[.!?:;。！？：])[ \t]|[\"“”«»„]")
WORD = re.compile(r"[^\W\d_]+")
FORM = re.compile(r"\n|\d")
ENOUGH, SURE = 0.4, 3.0  # evidence for English in a passage
VETO = 40  # characters without names from which the detector outweighs the words
SWITCH = 1.5  # evidence that a change between English and other prose costs


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """Characters [start, end) of a text, in one language of `eyas.language`, UNKNOWN, or CODE_ONLY
    for code, formulas and addresses of pages.
    """

    start: int
    end: int
    language: str

    @property
    def is_code(self) -> bool:
        return self.language == CODE_ONLY


def passages(texts: Sequence[str]) -> list[list[Passage]]:
    """The passages of each text of a conversation, by place, without gaps.

    A text that says too little has the language of what stands beside it in the conversation.
    """
    code = [code_spans(text) for text in texts]
    units = [
        (number, start, end)
        for number, text in enumerate(texts)
        for start, end in _units(text, code[number])
    ]
    evidence = [english_evidence(texts[number][start:end]) for number, start, end in units]
    is_english = smoothed(evidence)
    spoken: list[list[Passage]] = [[Passage(*span, CODE_ONLY) for span in spans] for spans in code]
    first = 0
    while first < len(units):
        last = first
        while last + 1 < len(units) and is_english[last + 1] == is_english[first]:
            last += 1
        of_run = units[first : last + 1]
        said = " ".join(texts[number][start:end] for number, start, end in of_run)
        code_of_run = run_language(said, is_english[first], sum(evidence[first : last + 1]))
        for number, start, end in of_run:
            spoken[number].append(Passage(start, end, code_of_run))
        first = last + 1
    return [_joined(parts) for parts in spoken]


def run_language(text: str, is_english: bool, evidence: float) -> str:
    """The language of prose that its words say is English or not; `evidence` of 0 says nothing.

    English is in doubt when the detector takes the words without a capital, so without most names,
    for another language.
    """
    ordinary = " ".join(filter(_is_ordinary, WORD.findall(text)))
    without_names = language(ordinary) if len(ordinary) >= VETO else UNKNOWN
    if (is_english and evidence >= ENOUGH) or is_form(text):
        return ENGLISH if without_names == UNKNOWN or evidence >= SURE else without_names
    return language(text)


def _is_ordinary(word: str) -> bool:
    """Whether a word is no name, as far as lists and capitals say."""
    bits, rank = gazetteer().look_up(word)
    return word.islower() and (rank > 0 or not bits & ~FOREIGN)


def is_form(text: str) -> bool:
    """Whether a text is lines or numbers with names: an address, a signature. They are alike in all
    languages.
    """
    words = [word for word in WORD.findall(text) if len(word) > 2]
    capitals = sum(word[0].isupper() for word in words)
    return capitals > 1 and 3 * capitals >= 2 * len(words) and bool(FORM.search(text.strip()))


def _joined(parts: list[Passage]) -> list[Passage]:
    found: list[Passage] = []
    for one in sorted(parts, key=lambda one: one.start):
        if found and found[-1].language == one.language:
            found[-1] = dataclasses.replace(found[-1], end=one.end)
        else:
            found.append(one)
    return found


# English or not


@functools.cache
def _words() -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Words of English besides those of the gazetteer, of other languages, and of both."""
    lists = yaml.safe_load((FILES / "languages.yaml").read_text(encoding="utf-8"))
    shared = frozenset(lists["shared"].split())
    other = frozenset(word for words in lists["other"].values() for word in words.split())
    return frozenset(lists["english"].split()), other - shared, shared


def english_evidence(text: str) -> float:
    """Above 0: English; below: another language; 0: nothing says either."""
    return sum(map(_evidence, WORD.findall(text)))


@functools.lru_cache(1 << 16)
def _evidence(word: str) -> float:
    folded = bare_word(word)
    english, other, shared = _words()
    is_capital = word[0].isupper()
    if not folded.isascii():  # another script
        return 0 if is_capital else -float(min(len(word), 5))
    if folded in shared:
        return 0
    if folded in english:
        return 1
    bits, rank = gazetteer().look_up(word)
    if folded in other:
        return 0 if rank in (1, 2) else -0.5 if is_capital else -1.2
    is_name = bool(bits & ~FOREIGN)
    if rank in (1, 2):
        return 1
    if is_capital:
        return 0.3 if rank and not is_name else 0
    if STREET_END.search(folded) and len(word) > 6 and not rank:
        return 0
    if not word.isascii():
        return 0 if rank else -0.2 if is_name else -1.5
    return 0.6 if rank == 3 else 0.3 if rank else -0.2 if is_name or len(word) == 1 else -1


def smoothed(evidence: Sequence[float]) -> list[bool]:
    """Whether each unit is English: the most likely way through them, where a change costs SWITCH
    (Viterbi, two states).
    """
    if not evidence:
        return []
    scores, came_from = (0.0, 0.0), []  # of other, of English
    for one in evidence:
        other, english = scores
        came_from.append((english - SWITCH > other, english >= other - SWITCH))
        scores = (max(other, english - SWITCH) - one / 2, max(english, other - SWITCH) + one / 2)
    state = scores[1] >= scores[0]
    found = []
    for from_english in reversed(came_from):
        found.append(state)
        state = from_english[state]
    return found[::-1]


# Code


def code_spans(text: str) -> list[tuple[int, int]]:
    """Where a text is code, [start, end) by place, without overlaps."""
    marked = [match.span() for match in PIECES.finditer(text)]
    spans = sorted([*marked, *_code_lines(text, marked)])
    found: list[tuple[int, int]] = []
    for start, end in spans:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _code_lines(text: str, marked: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Lines that look like code, with comments between them and what is indented below them."""
    lines = list(_lines(text))
    is_code = [bool(CODE_LINE.match(text, start, end)) for start, end in lines]
    indents = [len(text[start:end]) - len(text[start:end].lstrip()) for start, end in lines]
    inside: int | None = None  # indent of the code line above
    for number, (start, end) in enumerate(lines):
        blank = not text[start:end].strip()
        if blank:
            continue
        if not is_code[number] and inside is not None:
            follows = number + 1 < len(lines) and is_code[number + 1]
            is_code[number] = indents[number] > inside or bool(
                (COMMENT.match(text, start, end) or BARE.fullmatch(text, start, end)) and follows
            )
        if is_code[number]:
            inside = indents[number] if inside is None else min(inside, indents[number])
            yield start, end
        else:
            inside = None


def _lines(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for line in text.splitlines(keepends=True):
        yield start, start + len(line)
        start += len(line)


def _units(text: str, code: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The prose between code, cut at ends of lines and sentences and at quotes."""
    edges = [0, *(edge for span in code for edge in span), len(text)]
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        while start < end:
            match = UNIT.search(text, start + 1, end)
            stop = match.end() if match else end
            yield start, stop
            start = stop
