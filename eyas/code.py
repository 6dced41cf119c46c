"""Which parts of a text are code: fences, formulas, links, paths, calls, names, flags, keys of
JSON, whole lines.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

# Parts of a line. Each looks ahead a bounded number of characters, so that time grows linearly.
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
# One of these is in every such part, and seldom in prose.
MAYBE_PIECE = (
    re.compile(r"[`~$\\<>{%/=_+*^÷×·≤≥≠→(\[]"),
    re.compile(r"\.[a-z]|[a-z0-9][A-Z]|\s-|\"\s{0,3}:|www\."),
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


@functools.lru_cache(maxsize=1 << 10)  # language and passages read the same text
def code_spans(text: str) -> Sequence[tuple[int, int]]:
    """Spans [start, end) of code in order, without overlaps."""
    is_marked = any(one.search(text) for one in MAYBE_PIECE)
    marked = [match.span() for match in PIECES.finditer(text)] if is_marked else []
    spans = sorted([*marked, *_code_lines(text)])
    found: list[tuple[int, int]] = []
    for start, end in spans:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _code_lines(text: str) -> Iterator[tuple[int, int]]:
    lines = list(_lines(text))
    is_code = [bool(CODE_LINE.match(text, start, end)) for start, end in lines]
    indents = [len(text[start:end]) - len(text[start:end].lstrip()) for start, end in lines]
    inside: int | None = None  # indent of the code line above
    for number, (start, end) in enumerate(lines):
        if not text[start:end].strip():
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
    return pairwise(accumulate(map(len, text.splitlines(keepends=True)), initial=0))


def prose_of(text: str) -> str:
    """A text with a space in place of its code."""
    parts, end = [], 0
    for start, stop in code_spans(text):
        parts.append(text[end:start])
        end = stop
    return " ".join([*parts, text[end:]])
