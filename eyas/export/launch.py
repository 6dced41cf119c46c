"""The commands that launch an exported head, and a parser that checks them against what the engines
accept.

Knows what a launch says. What the engines' options are, and which of them go together, is data,
engines.yaml beside this file, with the versions and documents that it was read from. It holds the
usual options, not all that there are.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from eyas.errors import ConfigError

EngineName = Literal["sglang", "vllm"]
SHARE = re.compile(r"\d*\.?\d+")
DTYPES = ("bfloat16", "float16", "float32")


class Option(BaseModel):
    """One option of an engine's command, or one key of an option that holds JSON. aliases: other
    names of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["text", "count", "share", "switch", "json"]
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    keys: dict[str, Option] = {}
    required: tuple[str, ...] = ()

    def read(self, name: str, value: Any) -> Any:
        """The value as the engine takes it. Raises ConfigError."""
        if self.type == "json":
            return self._read_json(name, value)
        if self.type == "count":
            if isinstance(value, bool) or not str(value).isdecimal() or int(value) < 1:
                raise ConfigError(f"{name} {value!r} is no whole number from 1", "give one")
            return int(value)
        if self.type == "share":
            if SHARE.fullmatch(str(value)) is None or not 0 < float(value) <= 1:
                raise ConfigError(
                    f"{name} {value!r} is no share above 0, of at most 1", "give one, such as 0.85"
                )
            return float(value)
        if self.type == "switch":
            return True
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{name} {value!r} is no text", "give one")
        if self.choices and value not in self.choices:
            raise ConfigError(
                f"{name} {value} is unknown to the engine",
                f"choose one of {', '.join(self.choices)}",
            )
        return value

    def _read_json(self, name: str, value: Any) -> dict[str, Any]:
        try:
            found = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{name} is not JSON: {error}", "quote it for the shell") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{name} is not a JSON object", "give one")
        return read_options(name, found, self.keys, self.required)


class Rule(BaseModel):
    """What options ask of each other: where all of `when` are given with these values, or with any
    (null).

    needs: options that must be given too. one_more: an option that counts one more than another,
    [more, than], where both are given. why: what the engine does otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    when: dict[str, str | int | None]
    needs: tuple[str, ...] = ()
    one_more: tuple[str, str] | None = None
    why: str

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigError for values that do not keep it."""
        if not all(
            name in given and value in (None, given[name]) for name, value in self.when.items()
        ):
            return
        place = " ".join(
            name if value is None else f"{name} {value}" for name, value in self.when.items()
        )
        for name in self.needs:
            if name not in given:
                raise ConfigError(f"{place} needs {name}: {self.why}", "give it")
        more, than = self.one_more or ("", "")
        if more in given and than in given and given[more] != given[than] + 1:
            raise ConfigError(
                f"{place}: {more} is {given[more]}, {than} {given[than]}: {self.why}",
                f"give {given[than] + 1}",
            )


class EngineCommand(BaseModel):
    """How an engine is started. arguments: those without a name, in order; required: names of
    either kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: str
    documents: tuple[str, ...]
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    required: tuple[str, ...]
    options: dict[str, Option]
    rules: tuple[Rule, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"

    def known(self, name: str) -> tuple[str, Option]:
        """An option under its first name. Raises ConfigError for one that the list has not."""
        for own, option in self.options.items():
            if name == own or name in option.aliases:
                return own, option
        raise unlisted(name, self.title, self.options)


def unlisted(name: str, where: str, known: Iterable[str]) -> ConfigError:
    """What is not in engines.yaml: misspelt, or an option that the list lacks."""
    hint = (
        f"check its spelling, or leave it out and add it by hand; the list has: {', '.join(known)}"
    )
    return ConfigError(f"{name} is not in our list of {where}'s options", hint)


@cache
def engines() -> dict[str, EngineCommand]:
    """The engines of engines.yaml."""
    content = yaml.safe_load(
        files("eyas.export").joinpath("engines.yaml").read_text(encoding="utf-8")
    )
    return {name: EngineCommand.model_validate(one) for name, one in content.items()}


def parse(engine: EngineName, command: str) -> dict[str, Any]:
    """A launch command as its engine would read it: values by option. Raises ConfigError for what
    it would not accept.
    """
    known = engines()[engine]
    try:
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(
            f"a shell cannot read this command: {error}", "close what is quoted"
        ) from error
    if tuple(words[: len(known.command)]) != known.command:
        raise ConfigError(
            f"{known.name} is not started by {' '.join(words[:3])!r}",
            f"write {' '.join(known.command)}",
        )
    given = read_words(known, words[len(known.command) :])
    arguments = {name: Option(type="text") for name in known.arguments}
    values = read_options(known.title, given, known.options | arguments, known.required)
    for rule in known.rules:
        rule.check(values)
    return values


def read_words(known: EngineCommand, words: Sequence[str]) -> dict[str, str]:
    """The words after a command as values by option, under its first name. Raises ConfigError."""
    rest, given = list(words), dict[str, str]()
    unnamed = iter(known.arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            given[next(unnamed, word)] = word
            continue
        name, equals, value = word.partition("=")
        own, option = known.known(name)
        if own in given:
            raise ConfigError(f"{name} is given twice", "give it once")
        if option.type == "switch":
            if equals:
                raise ConfigError(f"{name} takes no value", f"write {name} alone, or leave it out")
        elif not equals and not rest:
            raise ConfigError(f"{name} has no value", "give one")
        elif not equals:
            value = rest.pop(0)
        given[own] = value
    return given


def read_options(
    where: str, given: Mapping[str, Any], known: Mapping[str, Option], required: Sequence[str]
) -> dict[str, Any]:
    """Values by name, each as its option takes it. Raises ConfigError for one that is not listed or
    missing.
    """
    for name in given:
        if name not in known:
            raise unlisted(name, where, known)
    for name in required:
        if name not in given:
            raise ConfigError(f"{where} needs {name}", "give it")
    return {name: known[name].read(name, value) for name, value in given.items()}


@dataclass(frozen=True, slots=True)
class Launch:
    """How an engine is to start: the target as the engine finds it, and the size of drafts (the
    root counted).

    dtype: the target's precision, which the engines compute the head in as well; None leaves it to
    them. max_length: of a request in tokens; None is the target's own.
    """

    target: str
    num_draft_steps: int
    tree_topk: int
    num_verify_tokens: int
    dtype: str | None = None
    max_length: int | None = None

    @property
    def title(self) -> str:
        """The target's name for people: of a folder, its last part."""
        return Path(self.target).name if Path(self.target).is_absolute() else self.target

    @property
    def served_nodes(self) -> int:
        """Tokens that the target judges: no more than the drafts' steps can give; a chain's are its
        drafts and the root.
        """
        if self.tree_topk == 1:
            return self.num_draft_steps + 1
        candidates = self.tree_topk + (self.num_draft_steps - 1) * self.tree_topk**2
        return min(self.num_verify_tokens, candidates + 1)

    @property
    def sglang(self) -> str:
        """SGLang's command, in the folder of the card."""
        options = {
            "--model-path": self.target,
            "--dtype": self.dtype,
            "--context-length": self.max_length,
            "--speculative-algorithm": "EAGLE3",
            "--speculative-draft-model-path": "./sglang",
            "--speculative-num-steps": self.num_draft_steps,
            "--speculative-eagle-topk": self.tree_topk,
            "--speculative-num-draft-tokens": self.served_nodes,
        }
        return command_of("sglang", [], options)

    @property
    def vllm(self) -> str:
        """vLLM's command, in the folder of the card. vLLM drafts chains only."""
        speculation = {
            "method": "eagle3",
            "model": "./vllm",
            "num_speculative_tokens": self.num_draft_steps,
        }
        options = {
            "--dtype": self.dtype,
            "--max-model-len": self.max_length,
            "--speculative-config": json.dumps(speculation),
        }
        return command_of("vllm", [self.target], options)


def command_of(engine: EngineName, arguments: Sequence[str], options: Mapping[str, object]) -> str:
    """A command line by line, for a shell, without options that are None; one that the engine would
    refuse is our fault.
    """
    start = " ".join([*engines()[engine].command, *map(shlex.quote, arguments)])
    command = " \\\n    ".join(
        [
            start,
            *(
                f"{name} {shlex.quote(str(value))}"
                for name, value in options.items()
                if value is not None
            ),
        ]
    )
    parse(engine, command)
    return command
