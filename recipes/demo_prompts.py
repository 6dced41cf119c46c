"""Write the prompts of the demo: users' sides of task dialogues, word problems and command
questions, all made up.

Knows the templates beside it (demo_prompts.yaml) and the shapes that conversation sets come in.
Knows nothing of eyas: what it writes is an ordinary set as found in the wild, with some personal
data, duplicates, empty and broken rows, so that cleaning has something to find. The private data in
it are invented or published for use in examples; films, bands and airlines are real.

    python recipes/demo_prompts.py eyas/builtin/demo_prompts.jsonl.gz

The rows are shuffled: any beginning of the file is a fair sample of it. Licence of templates and
output: CC0-1.0.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

TEMPLATES = Path(__file__).with_suffix(".yaml")
SEED, NUM_GOOD = 7, 3000
SHARE_PLANTED, SHARE_SHAREGPT, SHARE_WITHOUT_ID, SHARE_LOWER, SHARE_UNFINISHED = (
    0.05,
    0.25,
    0.1,
    0.07,
    0.2,
)
NUM_DUPLICATES, NUM_EMPTY, NUM_BROKEN = 60, 16, 12
KINDS = {"task": 0.53, "coffee": 0.09, "maths": 0.18, "command": 0.2}

# What an assistant might have said, in the least telling words: readers of user turns are to leave
# it out.
REPLIES = (
    "Sure, let me look.",
    "Of course.",
    "One moment, please.",
    "Okay, noted.",
    "Let me check that.",
    "Certainly.",
)

# Numbers that belong to nobody: set aside for fiction (phones), by card networks for tests, by the
# IBAN registry as examples.
CARDS = """
    4111 1111 1111 1111; 4012 8888 8888 1881; 4242424242424242; 5555 5555 5555 4444;
    5105-1051-0510-5100; 378282246310005; 3714 496353 98431; 6011 1111 1111 1117; 6011000990139424;
    30569309025904; 3530 1113 3330 0000; 4000-0566-5566-5556
"""
IBANS = """
    DE89 3704 0044 0532 0130 00; GB29NWBK60161331926819; FR1420041010050500013M02606;
    NL91 ABNA 0417 1643 00; ES91 2100 0418 4502 0005 1332; CH93 0076 2011 6238 5295 7;
    AT611904300234573201; BE68 5390 0754 7034; IT60X0542811101000000123456
"""
PHONES = """
    (415) 555-01{}; 212-555-01{}; +1 303 555 01{}; 646.555.01{}; 07700 9001{}; +44 20 7946 09{};
    50555501{}; 020 7946 06{}
"""
SURNAMES = "lee; ortiz; novak; hughes; tanaka; okoye; berg; silva; marsh; keller; dunn; rossi"
MAIL_FORMS = """
    {first}.{last}@example.com; {first}{last}{digits}@example.org; {first}_{last}@mail.example.net;
    {first}{digits}@example.com
"""

ASKING = re.compile(
    r"(?:what|which|who|where|when|how|is|are|do|does|can|could|will|would|should)\b", re.I
)
NOT_AFTER_ON = re.compile(
    r"\b[Oo]n (?=(?:tomorrow|later today|the day after|this \w+day|next \w+day"
    r"|\w+ next week|\w+ this week))"
)


def listed(text: str) -> list[str]:
    return [" ".join(value.split()) for value in text.split(";")]


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


class Writer:
    """Fills templates for one conversation: a slot keeps its value from turn to turn."""

    def __init__(self, rng: random.Random, slots: dict[str, list[str]]) -> None:
        self.rng = rng
        self._slots = slots
        self._drawn: dict[str, list[str]] = {}
        self._numbers: dict[str, int] = {}

    def write(self, template: str) -> str:
        """One turn: alternatives chosen, slots filled, spacing and capitals put right."""
        while "[" in template:
            template = re.sub(
                r"\[([^\[\]]*)\]", lambda match: self.rng.choice(match[1].split("|")), template
            )
        while "{" in template:
            template = re.sub(r"\{([^{}]+)\}", lambda match: self._filled(match[1]), template)
        text = re.sub(r"\s+([,.?!:])", r"\1", " ".join(template.split()))
        text = re.sub(
            r"\b([aA])\(n\) (?=([aeiouAEIO8]|1[18]\b|SUV)?)",
            lambda match: f"{match[1]}{'n' if match[2] else ''} ",
            text,
        )
        text = NOT_AFTER_ON.sub("", text)
        text = re.sub(r"(^|[.?!] )([a-z])", lambda match: match[1] + match[2].upper(), text)
        return text

    def bind(self, slot: str, values: list[str]) -> None:
        self._drawn[slot] = self.rng.sample(values, len(values))

    def _filled(self, slot: str) -> str:
        kind, rest = slot[0], slot[1:]
        if kind == "=":
            return str(reckoned(rest, self._numbers))
        if kind in "#!":
            name, _, span = rest.partition(":")
            if span:
                low, high = map(int, span.split("-"))
                self._numbers[name] = self.rng.randint(low, high)
            return str(self._numbers[name]) if kind == "#" else ""
        name, _, place = slot.partition(".")
        lower = name.lower()
        if lower not in self._drawn:
            self.bind(lower, self._slots[lower])
        value = self._drawn[lower][int(place or 1) - 1]
        return value if name == lower else value[0].upper() + value[1:]


def reckoned(expression: str, numbers: dict[str, int]) -> int:
    """A sum of products such as a*b+c-2."""
    total = 0
    for sign, product in re.findall(r"([+-]?)([^+-]+)", expression):
        value = math.prod(
            int(factor) if factor.isdigit() else numbers[factor] for factor in product.split("*")
        )
        total += -value if sign == "-" else value
    return total


class Author:
    """Writes conversations, as lists of the user's turns."""

    def __init__(self, rng: random.Random, templates: dict[str, Any]) -> None:
        self.rng = rng
        self.slots = {name: listed(text) for name, text in templates["slots"].items()}
        self.tasks = {
            name: {part: lines(text) for part, text in task.items()}
            for name, task in templates["tasks"].items()
        }
        self.coffee = {part: lines(text) for part, text in templates["coffee"].items()}
        self.maths = {part: lines(text) for part, text in templates["maths"].items()}
        self.closings, self.links = lines(templates["closings"]), lines(templates["links"])
        self.asks, self.more = (
            lines(templates["commands"]["asks"]),
            lines(templates["commands"]["more"]),
        )
        self.commands = {
            name: listed(text) for name, text in templates["commands"]["tasks"].items()
        }
        self.planted = {
            kind: lines(templates["planted"][kind])
            for kind in ("answer", "booking", "card", "iban")
        }
        self.payments: dict[str, str] = templates["payments"]

    def conversation(self) -> list[str]:
        """1 to 4 user turns of one conversation, typed as people type; some with personal data."""
        kind = self.rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
        writer = Writer(self.rng, self.slots)
        if kind == "maths":
            turns = self.problem(writer)
        elif kind == "command":
            turns = self.command(writer)
        else:
            kind = self.rng.choice(list(self.tasks)) if kind == "task" else kind
            turns = self.task(writer, self.tasks.get(kind, self.coffee))
        turns = self.styled(turns)
        return self.with_personal_data(turns, kind) if self.rng.random() < SHARE_PLANTED else turns

    def task(self, writer: Writer, task: dict[str, list[str]]) -> list[str]:
        """Opened in a few words and then explained, or told at once; then questions and changes of
        mind.
        """
        rng = self.rng
        num_turns = rng.choices([1, 2, 3, 4], weights=[35, 28, 22, 15])[0]
        short = rng.random() < (0.15 if num_turns == 1 else 0.5)
        opening = ["short", "detail"] if short else ["full"]
        turns = [writer.write(rng.choice(task[part])) for part in opening[:num_turns]]
        later = rng.sample(task["ask"], len(task["ask"])) + rng.sample(
            task["change"], len(task["change"])
        )
        rng.shuffle(later)
        turns += [writer.write(template) for template in later[: num_turns - len(turns)]]
        if num_turns > 2 and rng.random() < 0.35:
            turns[-1] = writer.write(rng.choice(self.closings))
        elif num_turns > 2 and rng.random() < 0.25:
            other = rng.choice(self.tasks[rng.choice(list(self.tasks))]["full"])
            turns[-1] = (
                f"{writer.write(rng.choice(self.links))} {self._joined(writer.write(other))}"
            )
        return turns

    def problem(self, writer: Writer) -> list[str]:
        turns = [writer.write(self.rng.choice(self.maths["problems"]))]
        if self.rng.random() < 0.12:
            turns.append(writer.write(self.rng.choice(self.maths["follow"])))
        return turns

    def command(self, writer: Writer) -> list[str]:
        command = self.rng.choice(list(self.commands))
        writer.bind("command", [command])
        writer.bind("task", self.commands[command])
        turns = [writer.write(self.rng.choice(self.asks))]
        if self.rng.random() < 0.15:
            turns.append(writer.write(self.rng.choice(self.more)))
        return turns

    def styled(self, turns: list[str]) -> list[str]:
        """Most people end a sentence; a few type in small letters throughout."""
        lower = self.rng.random() < SHARE_LOWER
        styled = []
        for turn in turns:
            if turn[-1] not in ".?!" and self.rng.random() > SHARE_UNFINISHED:
                turn += "?" if ASKING.match(re.split(r"[.?!,:] ", turn)[-1]) else "."
            styled.append(turn.lower() if lower else turn)
        return styled

    def with_personal_data(self, turns: list[str], kind: str) -> list[str]:
        """The conversation with one or two sentences more, in some turn, that say how to reach or
        charge the user.
        """
        rng = self.rng
        kinds = ["answer" if kind in ("maths", "command") else "booking"]
        if kind in self.payments and rng.random() < 0.4:
            kinds = rng.choice([[self.payments[kind]], [self.payments[kind], *kinds]])
        private = {
            "email": [self.email()],
            "phone": [self.phone()],
            "card": listed(CARDS),
            "iban": listed(IBANS),
        }
        said = [Writer(rng, private).write(rng.choice(self.planted[kind])) for kind in kinds]
        place = rng.randrange(len(turns))
        turn = turns[place] if turns[place][-1] in ".?!" else f"{turns[place]}."
        return [*turns[:place], " ".join([turn, *said]), *turns[place + 1 :]]

    def email(self) -> str:
        first, last = self.rng.choice(self.slots["kid"]).lower(), self.rng.choice(listed(SURNAMES))
        return self.rng.choice(listed(MAIL_FORMS)).format(
            first=first, last=last, digits=self.rng.randint(1, 99)
        )

    def phone(self) -> str:
        return self.rng.choice(listed(PHONES)).format(self.rng.randint(10, 99))

    def _joined(self, text: str) -> str:
        """A sentence after a comma or colon, where no name stands first."""
        first = text.split()[0]
        return (
            text
            if first in ("I", "I'm", "I'd") or not first.rstrip("',").isalpha()
            else text[0].lower() + text[1:]
        )


def packed(turns: list[str], number: int, rng: random.Random) -> dict[str, Any]:
    """A row in OpenAI's form or in ShareGPT's, assistant turns between the user's, with or without
    an id.
    """
    sharegpt = rng.random() < SHARE_SHAREGPT
    role, content, user, assistant = (
        ("from", "value", "human", "gpt") if sharegpt else ("role", "content", "user", "assistant")
    )
    messages = [{role: user, content: turns[0]}]
    for turn in turns[1:]:
        messages += [{role: assistant, content: rng.choice(REPLIES)}, {role: user, content: turn}]
    row: dict[str, Any] = {} if rng.random() < SHARE_WITHOUT_ID else {"id": f"demo-{number:04d}"}
    return {**row, "conversations" if sharegpt else "messages": messages}


def broken(row: str, rng: random.Random) -> str:
    """A line as a cut download or a careless script leaves it."""
    return rng.choice(
        [
            row[: rng.randrange(12, len(row) - 4)],
            row.replace('"role": "user", ', "").replace('"from": "human", ', ""),
            json.dumps([json.loads(row).get("id", "row")]),
            row.replace('"messages"', '"dialogue"').replace('"conversations"', '"dialogue"'),
            "<html><body>502 Bad Gateway</body></html>",
        ]
    )


def empty(number: int, rng: random.Random) -> str:
    """A row in which the user says nothing."""
    messages = rng.choice(
        [
            [],
            [{"role": "user", "content": "   "}],
            [{"role": "assistant", "content": "Hello, how can I help?"}],
        ]
    )
    return json.dumps({"id": f"demo-{number:04d}", "messages": messages})


def duplicate(turns: list[str], rng: random.Random) -> list[str]:
    """The same again, as it is or in other case and spacing."""
    way = rng.randrange(4)
    return [(turn, turn.upper(), f"  {turn} ", turn.replace(" ", "  "))[way] for turn in turns]


def demo_rows(num_good: int = NUM_GOOD, seed: int = SEED) -> list[str]:
    """The lines of the file: `num_good` different conversations, and what cleaning is to find,
    shuffled.
    """
    rng = random.Random(seed)
    author = Author(rng, yaml.safe_load(TEMPLATES.read_text(encoding="utf-8")))
    conversations: dict[str, list[str]] = {}
    while len(conversations) < num_good:
        turns = author.conversation()
        conversations.setdefault(" ".join(" / ".join(turns).lower().split()), turns)
    return as_found(list(conversations.values()), rng, NUM_DUPLICATES, NUM_EMPTY, NUM_BROKEN)


def as_found(
    good: list[list[str]], rng: random.Random, num_duplicates: int, num_empty: int, num_broken: int
) -> list[str]:
    """The lines of a set as found in the wild: these conversations, and what cleaning is to find,
    shuffled.
    """
    again = [duplicate(turns, rng) for turns in rng.sample(good, min(num_duplicates, len(good)))]
    rows = [
        json.dumps(packed(turns, number, rng), ensure_ascii=False)
        for number, turns in enumerate([*good, *again])
    ]
    rows += [broken(row, rng) for row in rng.sample(rows, min(num_broken, len(rows)))]
    rows += [empty(len(rows) + number, rng) for number in range(num_empty)]
    rng.shuffle(rows)
    return rows


def write_file(description: str | None, rows: Callable[[], list[str]]) -> None:
    """A recipe's command: its lines, packed the same on every day, into the file it is given."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    data = "".join(f"{row}\n" for row in rows()).encode()
    out.write_bytes(gzip.compress(data, compresslevel=9, mtime=0))
    print(f"{out}: {len(data.splitlines())} rows, {out.stat().st_size} bytes")


if __name__ == "__main__":
    write_file(__doc__, demo_rows)
