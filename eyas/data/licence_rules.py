"""The licence policy: YAML rules that say which licences, terms and authors are refused.

A licence or a model has traits (`non-commercial`, `attribution`); a rule refuses traits in fields
of a source, and a trait that no rule refuses is a duty that goes with the prompts. A user's file
adds to licence_rules.yaml, replaces rules of the same name and removes rules.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import fsspec
import yaml
from pydantic import Field

from eyas.errors import ConfigError, MissingInputError
from eyas.settings import Settings, validated

SHIPPED = Path(__file__).with_name("licence_rules.yaml")
TermField = Literal["licence", "terms", "prompts_by", "answers_by"]

# Traits that the gate finds: a value is missing or in no table; differs from the registry; stands
# there unverified.
UNKNOWN, CONTRADICTED, UNVERIFIED = "unknown", "contradicted", "unverified"
NO_CONSENT = "no-consent"  # logs of requests without a stated basis
FOUND_BY_GATE = frozenset({UNKNOWN, CONTRADICTED, UNVERIFIED, NO_CONSENT})


class PolicyRule(Settings):
    """Refuses sources with one of the traits in one of the fields."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    fields: tuple[TermField, ...] = Field(min_length=1)
    refuse: tuple[str, ...] = Field(min_length=1)
    because: str = Field(min_length=1)


class LicenceEntry(Settings):
    """Licences with the same traits. ids: SPDX; `*` stands for any ending."""

    ids: tuple[str, ...] = Field(min_length=1)
    traits: tuple[str, ...] = ()


class AuthorEntry(Settings):
    """Authors under the same terms. names: an `author_key`; `*` stands for any ending."""

    family: str
    names: tuple[str, ...] = Field(min_length=1)
    traits: tuple[str, ...] = ()
    url: str = ""
    note: str = ""


class LicencePolicy(Settings):
    """A policy as it is in a file, or as `read_policy` returns it. In each table the first entry
    that fits counts.
    """

    name: str = Field(min_length=1)
    version: str = Field(min_length=1)
    extends: Literal["shipped", "nothing"] = "shipped"
    remove_rules: tuple[str, ...] = ()
    traits: dict[str, str] = Field({})
    rules: tuple[PolicyRule, ...] = ()
    licences: tuple[LicenceEntry, ...] = ()
    authors: tuple[AuthorEntry, ...] = ()

    @functools.cached_property
    def identity(self) -> str:
        """16 hex digits of the hash of its content."""
        content = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        return f"{self.name} {self.version} ({self.identity})"

    def licence(self, id: str) -> LicenceEntry | None:
        """The entry of an SPDX id; `GPL-2.0+` is also found under `GPL-2.0`."""
        ids = (id.casefold(), id.casefold().removesuffix("+"))
        return next((one for one in self.licences for id in ids if _fits(id, one.ids)), None)

    def author(self, name: str) -> AuthorEntry | None:
        """The entry of `human`, `program`, or a model in any usual spelling."""
        return next((one for one in self.authors if _fits(author_key(name), one.names)), None)

    def refuses(self, field: str, trait: str) -> bool:
        return any(field in rule.fields and trait in rule.refuse for rule in self.rules)


def author_key(author: str) -> str:
    """One spelling of an author's name: `OpenAI/GPT 4`, `gpt_4` and `gpt-4` are one."""
    return re.sub(r"[\s_]+", "-", author.strip().casefold().rsplit("/", 1)[-1])


@functools.cache
def shipped() -> LicencePolicy:
    """The policy of the package."""
    where = "the shipped policy"
    return _checked(_parsed(SHIPPED.read_text(encoding="utf-8"), where), where)


def read_policy(path: str | None) -> LicencePolicy:
    """The policy at a path, on top of the shipped one unless it extends nothing; None: the shipped
    one. Raises MissingInputError, ConfigError (a wrong field, an unknown trait or rule).
    """
    if path is None:
        return shipped()
    try:
        with fsspec.open(path, "rt", encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, ValueError) as error:
        raise MissingInputError(
            f"no policy can be read at {path}: {error}", "check the path, or leave `policy` out"
        ) from error
    own = _parsed(text, path)
    return _checked(own if own.extends == "nothing" else _over(shipped(), own, path), path)


def _parsed(text: str, where: str) -> LicencePolicy:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the policy {where} is not YAML: {error}", "correct the file") from error
    values = content if isinstance(content, dict) else {}
    return validated(LicencePolicy, values, f"the policy {where}")


def _over(base: LicencePolicy, own: LicencePolicy, where: str) -> LicencePolicy:
    _all_known(own.remove_rules, {rule.name for rule in base.rules}, "rule", where)
    gone = {*own.remove_rules, *(rule.name for rule in own.rules)}
    return own.model_copy(
        update={
            "traits": {**base.traits, **own.traits},
            "rules": (*(rule for rule in base.rules if rule.name not in gone), *own.rules),
            "licences": (*own.licences, *base.licences),
            "authors": (*own.authors, *base.authors),
        }
    )


def _checked(policy: LicencePolicy, where: str) -> LicencePolicy:
    names = Counter(rule.name for rule in policy.rules)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ConfigError(
            f"the policy {where} has two rules called {twice[0]!r}", "give each a name of its own"
        )
    if not policy.rules:
        what = f"the policy {where} has no rule, so it would let everything through"
        raise ConfigError(what, "write at least one rule")
    used = [trait for rule in policy.rules for trait in rule.refuse]
    entries: list[LicenceEntry | AuthorEntry] = [*policy.licences, *policy.authors]
    used += [trait for entry in entries for trait in entry.traits]
    _all_known(used, {*policy.traits, *FOUND_BY_GATE}, "trait", where)
    return policy


def _all_known(names: Iterable[str], known: Iterable[str], what: str, where: str) -> None:
    known = sorted(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        problem = f"the policy {where} names a {what} that does not exist: {unknown[0]!r}"
        raise ConfigError(problem, f"there are: {', '.join(known)}")


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern.casefold()) for pattern in patterns)
