"""The row filter for personal data: what the policy makes of a row, in its system prompt and in
every turn.
"""

import dataclasses
import pickle

from eyas.data.filters import PersonalData, find_all_types
from eyas.data.ledger import Drop, SourceRow
from eyas.data.sources import SourceConfig
from eyas.privacy.findings import Finding
from eyas.privacy.key import value_hash
from eyas.privacy.pii import TYPES, PrivacyConfig

KEY = b"k" * 32
NO_NAMES = {"person": "keep", "street_address": "keep", "location": "keep"}


def row(*turns, system=None):
    return SourceRow(
        source="set", licence="MIT", where="set.jsonl:1", id=None, turns=turns, system=system
    )


def filter_of(policy="mask", **actions):
    return PersonalData(PrivacyConfig(policy=policy, actions={**NO_NAMES, **actions}), KEY)


MAILS = row("Hi", "I am ana@python.org", system="Ask bob@python.org.")


def test_a_row_is_masked_wherever_something_is_found():
    cleaned = filter_of()(MAILS)
    assert cleaned.turns == ("Hi", "I am <EMAIL_ADDRESS>")
    assert cleaned.system == "Ask <EMAIL_ADDRESS>."
    hashes = [
        value_hash(KEY, "EMAIL_ADDRESS", value) for value in ("bob@python.org", "ana@python.org")
    ]
    assert cleaned.masked == (
        Finding("EMAIL_ADDRESS", 4, 18, turn=None, hash=hashes[0]),
        Finding("EMAIL_ADDRESS", 5, 19, turn=1, hash=hashes[1]),
    )
    assert filter_of()(cleaned).turns == cleaned.turns, "nothing is left to find"


def test_a_type_that_is_kept_stays():
    assert filter_of(email_address="keep")(MAILS).turns == MAILS.turns
    clean = row("Hi", system="")
    assert dataclasses.replace(filter_of()(clean), names=()) == clean


def test_a_type_that_drops_takes_the_row_and_names_the_gravest():
    dropped = filter_of(email_address="drop")(MAILS)
    assert isinstance(dropped, Drop)
    assert dropped.reason == "pii.email_address"
    assert [dataclasses.replace(one, hash="") for one in dropped.found] == [
        Finding("EMAIL_ADDRESS", 4, 18, turn=None),
        Finding("EMAIL_ADDRESS", 5, 19, turn=1),
    ]
    card = filter_of("drop")(row("ana@python.org pays with 4242424242424242"))
    assert (card.reason, [one.type for one in card.found]) == (
        "pii.credit_card",
        ["EMAIL_ADDRESS", "CREDIT_CARD"],
    )
    assert "4242" not in repr(card)
    assert "ana@" not in repr(card)


def test_a_person_has_one_surrogate_in_a_conversation():
    """The same address in the system prompt and in two turns; another one differs."""
    mails = row(
        "I am ana@python.org", "ANA@python.org, not bob@python.org", system="To ana@python.org"
    )
    made = filter_of("surrogate")(mails)
    ana = made.turns[0].removeprefix("I am ")
    assert ana.partition("@")[2] in ("example.com", "example.org", "example.net")
    assert made.system == f"To {ana}"
    assert made.turns[1].startswith(f"{ana}, not ")
    assert not made.turns[1].endswith(ana)
    assert len(made.masked) == 4
    assert "python.org" not in repr(made)


def test_names_are_replaced_by_default():
    config = PrivacyConfig()
    made = PersonalData(config, KEY)(
        row("My name is Susan Miller.", "Tell me, is Susan a common name?")
    )
    assert made.turns[0].startswith("My name is ")
    assert "Susan" not in repr(made)
    given = made.turns[0].removeprefix("My name is ").split()[0]
    assert (
        made.turns[1] == f"Tell me, is {given} a common name?"
        or made.turns[1] == "Tell me, is Susan a common name?"
    )


def test_rows_that_differ_in_their_values_alone_become_the_same():
    """With surrogates as with masks, so that duplicates are found."""
    texts = [
        "Write to ana@python.org or call (415) 555-0134.",
        "Write to bob@gnu.org or call (617) 555-0199.",
    ]
    for policy in ("surrogate", "mask"):
        first, second = (filter_of(policy)(row(text)).turns for text in texts)
        assert first == second
    other = filter_of("surrogate")(row("Please write to ana@python.org or call (415) 555-0134."))
    assert other.turns[0] != f"Please w{filter_of('surrogate')(row(texts[0])).turns[0][1:]}", (
        "another conversation"
    )


def test_the_key_decides_the_surrogates_and_nothing_else_does():
    config = PrivacyConfig(actions=NO_NAMES)
    first, again, other = (PersonalData(config, key)(MAILS) for key in (KEY, KEY, b"another"))
    assert first == again
    assert first.turns != other.turns
    assert [one.hash for one in first.masked] != [one.hash for one in other.masked]


def test_many_rows_at_once_are_as_one_by_one():
    rows = [
        MAILS,
        row("Hi"),
        row("4242424242424242"),
        row("I am carl@python.org", system="Be kind."),
    ]
    keep = filter_of("surrogate")
    assert keep.many(rows) == [keep(one) for one in rows]
    assert keep.many([]) == []


def test_configs_travel_between_processes():
    config = PrivacyConfig(actions={"phone_number": "drop"})
    assert pickle.loads(pickle.dumps(config)) == config
    assert PrivacyConfig.model_validate(config.model_dump(mode="json")) == config


def test_people_are_shown_no_type_at_all():
    assert {one.type for one in find_all_types("see https://www.python.org, ana@python.org")} == {
        "URL",
        "EMAIL_ADDRESS",
    }
    assert {one.type for one in find_all_types("I live in Paris")} <= set(TYPES)


def test_a_row_says_where_names_were_searched_for():
    spoken = row("My name is Susan Miller.", "Please read this:\n```\nlen(nums)\n```")
    by_ours = dict.fromkeys(("person", "location"), "mask")
    found = PersonalData(PrivacyConfig(actions=by_ours), KEY)(spoken).names
    assert {(one.by, one.reason) for one in found} == {("eyas", ""), ("", "code")}
    assert sum(one.characters for one in found) == spoken.characters
    for reason, config in {
        "policy": PrivacyConfig(actions=NO_NAMES),
        "fictional": PrivacyConfig(fictional=True),
    }.items():
        (names,) = {(one.by, one.reason) for one in PersonalData(config, KEY)(spoken).names}
        assert names == ("", reason)


def test_a_source_has_a_policy_of_its_own():
    of_run = PrivacyConfig(policy="drop")
    own = PrivacyConfig(actions={"person": "mask"})
    assert SourceConfig(path="x").privacy(of_run) == of_run
    assert SourceConfig(path="x", personal=own).privacy(of_run) == own
    invented = SourceConfig(path="x", fictional=True).privacy(of_run)
    kept = {type for type in TYPES if invented.action(type) == "keep"} - {"URL"}
    assert kept == {"PERSON", "STREET_ADDRESS", "LOCATION"}
    word_problem = row("Susan Miller has 3 apples. Mail ana@python.org.")
    masked = invented.model_copy(update={"policy": "mask"})
    assert PersonalData(masked, KEY)(word_problem).turns == (
        "Susan Miller has 3 apples. Mail <EMAIL_ADDRESS>.",
    )
