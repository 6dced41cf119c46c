"""Surrogates: of the same kind and form, one map of them for a conversation, assigned to nobody;
every mention of a value is replaced, and a name stays one person.
"""

import ipaddress
import re
import string
import unicodedata
from collections import Counter

import phonenumbers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stdnum import luhn

from eyas.data.filters import PersonalData
from eyas.data.ledger import Drop, SourceRow
from eyas.privacy.detector import Detector
from eyas.privacy.findings import Finding
from eyas.privacy.identifiers import is_national_id
from eyas.privacy.invented import (
    CITIES,
    COUNTRIES,
    FAMILY,
    GIVEN,
    OWN,
    SCRIPTS,
    STREETS,
    KeyedRandom,
    fill_form,
    match_case,
)
from eyas.privacy.mentions import Mentions
from eyas.privacy.patterns import PHONE_REGIONS, is_base58check, is_bech32
from eyas.privacy.pii import BY_NAME, NAME_TYPES, PII_TYPES, TYPES, PrivacyConfig, canonical
from eyas.privacy.surrogates import Surrogates, clean
from tests.marks import KEY, unmarked

VALUES = {one.name: re.search("⟨(.*)⟩", one.example, re.S)[1] for one in PII_TYPES}
CARDS = [
    "4242424242424242", "4222222222222", "378282246310005", "5555555555554444",
    "2223003122003222", "6011111111111117", "3530111333300000", "30569309025904",
    "6304000000000000", "180015070420458", "501864667909",
]  # fmt: skip
IBANS = [
    "GB29NWBK60161331926819",
    "DE89 3704 0044 0532 0130 00",
    "fr1420041010050500013m02606",
    "NO93 8601 1117 947",
]
PHONES = [
    "(212) 736-5000", "+1-212-736-5000", "1 212 736 5000", "212.736.5000x4587", "020 7031 3000",
    "+44 20 7031 3000", "+44 (0)7911 123456", "+61 2 9374 4000", "01 42 68 53 00",
    "+33 1 42 68 53 00", "030 303986300", "+49 (0)89 1234567", "+39 02 3661 8300", "555 2368",
]  # fmt: skip


def made(type, value, conversation="c"):
    return Surrogates(KEY, conversation, [(type, value)]).of(type, value)


def test_every_type_has_one_of_its_kind():
    for type, value in VALUES.items():
        surrogate = made(type, value)
        assert canonical(type, surrogate) != canonical(type, value)
        assert surrogate == made(type, value), "the same every time"
        assert surrogate != made(type, value, conversation="another")
        assert len(surrogate.splitlines()) == len(value.splitlines())
        if BY_NAME[type].is_numbered:
            assert re.sub(r"\w", "0", surrogate) == re.sub(r"\w", "0", value), "its separators"


def test_cards_pass_their_check_in_a_test_range():
    for value in CARDS:
        surrogate = made("CREDIT_CARD", value)
        assert len(surrogate) == len(value)
        assert luhn.is_valid(surrogate)
        assert surrogate[0] == value[0] or value[:4] in ("1800", "2223") or value[0] in "25"
        assert BY_NAME["CREDIT_CARD"].is_reserved(surrogate)


def test_accounts_pass_their_check_at_a_bank_that_does_not_exist():
    for value in IBANS:
        surrogate = made("IBAN_CODE", value)
        letters = re.sub(r"\W", "", surrogate).upper()
        assert int("".join(str(int(one, 36)) for one in letters[4:] + letters[:4])) % 97 == 1
        assert letters[:2] == value[:2].upper()
        assert set(letters[4:8]) <= {"X", "0"}
        assert surrogate.islower() == value.islower()


def test_phones_keep_their_form_and_prefix_and_reach_nobody():
    for value in PHONES:
        surrogate = made("PHONE_NUMBER", value)
        assert re.sub(r"\d", "0", surrogate) == re.sub(r"\d", "0", value)
        prefix = re.match(r"\+\d+|1 |0?", value)[0] if value[:2] not in ("+1",) else "+1"
        assert surrogate.startswith(prefix)
        digits = re.sub(r"\D", "", surrogate.removeprefix(prefix).replace("(0)", ""))
        assert digits.startswith("00") or re.search(r"55501\d\d", digits)


@settings(deadline=None)
@given(st.sampled_from(PHONE_REGIONS))
def test_every_countrys_example_number_becomes_one_that_reaches_nobody(region):
    example = phonenumbers.format_number(
        phonenumbers.example_number(region), phonenumbers.PhoneNumberFormat.INTERNATIONAL
    )
    number = phonenumbers.parse(made("PHONE_NUMBER", example))
    national = phonenumbers.national_significant_number(number)
    assert number.country_code == phonenumbers.parse(example).country_code
    assert "55501" in national or not phonenumbers.is_valid_number(number)


@given(st.binary(min_size=1, max_size=8))
def test_social_security_numbers_were_never_given(key):
    area, group, _ = Surrogates(key, "c", []).of("US_SSN", "219-45-9876").split("-")
    assert area[0] == "9"
    assert 1 <= int(group) < 50


def test_identity_numbers_fail_their_check():
    values = ["54362315K", "390.533.447-05", "756.9217.0769.85", "RCCMNL83S18D969H", "S1234567D"]
    for value in values:
        assert is_national_id(value)
        assert not is_national_id(made("NATIONAL_ID", value))


def test_addresses_on_the_net_are_those_for_documentation():
    nets = [
        ipaddress.ip_network(net)
        for net in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")
    ]
    for value in ("8.8.8.8", "2a00:1450:4001:81b::200e"):
        address = ipaddress.ip_address(made("IP_ADDRESS", value))
        assert any(address in net for net in nets)
        assert address.version == ipaddress.ip_address(value).version
    for type, form in {
        "EMAIL_ADDRESS": r"[a-z.0-9]+@example\.(com|org|net)",
        "URL": r"https://[a-z]+\.example\.com/\w+",
        "URL_CREDENTIALS": r"postgres://\w+:\w+@[a-z]+\.example\.com/",
    }.items():
        assert re.fullmatch(form, made(type, VALUES[type]))
    assert made("URL", "www.python.org").startswith("www.example.com/")


@pytest.mark.parametrize(
    ("value", "valid", "form"),
    [
        ("1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa", is_base58check, "1[1-9A-HJ-NP-Za-km-z]{33}"),
        ("bc1qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t4", is_bech32, "bc1q[02-9ac-hj-np-z]{38}"),
        ("0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed", None, "0x[0-9a-f]{40}"),
    ],
)
def test_wallets_keep_their_form_and_fail_their_check(value, valid, form):
    assert re.fullmatch(form, made("CRYPTO", value))
    assert valid is None or not valid(made("CRYPTO", value))


def test_keys_keep_their_makers_prefix_and_form():
    surrogate = made("API_KEY", "sk-ant-api03-AbCd1234efGH")
    assert surrogate.startswith("sk-ant-")
    assert re.sub(r"\d", "0", surrogate).count("0") == 6
    lines = made("PRIVATE_KEY", VALUES["PRIVATE_KEY"]).splitlines()
    assert (lines[0], lines[-1]) == ("-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----")
    assert [*map(len, lines)] == [*map(len, VALUES["PRIVATE_KEY"].splitlines())]


def test_the_same_person_has_the_same_surrogate_however_named():
    names = ["Ada Berg", "ADA BERG", "Berg", "ada", "Dr. Ada M. Berg", "Ms. Berg's"]
    surrogates = Surrogates(KEY, "c", [("PERSON", name) for name in names])
    full, capitals, family, given, titled, possessive = (
        surrogates.of("PERSON", name) for name in names
    )
    first, last = full.split()
    assert first in GIVEN
    assert last in FAMILY
    assert (capitals, family, given) == (full.upper(), last, first.lower())
    assert re.fullmatch(rf"Dr\. {first} [A-Z]\. {last}", titled)
    assert possessive == f"Ms. {last}'s"
    assert re.fullmatch(rf"[A-Z]\. {last}", surrogates.of("PERSON", "A. Berg"))


def test_places_and_addresses_keep_their_form():
    surrogates = Surrogates(KEY, "c", [])
    city = surrogates.of("LOCATION", "Paris")
    assert city in CITIES
    assert surrogates.of("LOCATION", "France") in COUNTRIES
    address = surrogates.of("STREET_ADDRESS", "12 Rue Lepic, 75018 Paris\n4711")
    found = re.fullmatch(r"[1-9]\d* (\w+) Street, (\w+) \d{5}\n\d{4}", address)
    assert found
    assert found[1] in STREETS
    assert found[2] in CITIES


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([type for type in TYPES if type != "PRIVATE_KEY"]), st.integers(2, 40))
def test_different_values_have_different_surrogates(type, count):
    values = [KeyedRandom(KEY, str(number)).like(VALUES[type]) for number in range(count)]
    values = list({canonical(type, value): value for value in values}.values())
    surrogates = Surrogates(KEY, "c", [(type, value) for value in values])
    results = [canonical(type, surrogates.of(type, value)) for value in values]
    assert not set(results) & {canonical(type, value) for value in values}
    if type not in NAME_TYPES:
        assert len(set(results)) == len(values)


def test_names_do_not_run_out():
    endings = ("son", "dottir", "ova", "escu", "ini")
    values = [f"{first}{last}" for first in GIVEN[:40] for last in endings]
    surrogates = Surrogates(KEY, "c", [("PERSON", value) for value in values])
    assert len({surrogates.of("PERSON", value) for value in values}) == len(values)


@pytest.mark.parametrize(("script", "letter"), zip(SCRIPTS, "あ가กကក一", strict=True))
def test_names_of_a_script_do_not_run_out(script, letter):
    assert re.match(script, letter)
    letters = [chr(ord(letter) + number) for number in range(25)]
    values = [one + other for one in letters[:20] for other in letters]
    surrogates = Surrogates(KEY, "c", [("PERSON", value) for value in values])
    made = {surrogates.of("PERSON", value) for value in values}
    assert len(made) == 500
    assert made.isdisjoint(values)
    assert max(map(len, made)) < 100


@given(st.binary(max_size=40), st.text(max_size=10), st.integers(1, 1000))
def test_draws_are_repeatable_and_in_range(key, seed, bound):
    first, again = KeyedRandom(key, seed), KeyedRandom(key, seed)
    numbers = [first.below(bound) for _ in range(20)]
    assert numbers == [again.below(bound) for _ in range(20)]
    assert all(0 <= number < bound for number in numbers)


def test_draws_are_even():
    counts = Counter(KeyedRandom(KEY, "even").digits(10_000))
    assert all(850 < counts[digit] < 1150 for digit in string.digits), "five standard deviations"


def test_forms():
    assert [match_case("Nora", like) for like in ("ADA", "ada", "Ada")] == ["NORA", "nora", "Nora"]
    assert fill_form("5555550134123", "(415) 736-5000 x987") == "(555) 555-0134 x123"
    assert fill_form("gb12xxxx", "GB-99 AbCd") == "GB-12 XxXx"


RESERVED = [
    ("EMAIL_ADDRESS", "a@mail.example.com", True),
    ("EMAIL_ADDRESS", "a@example.com.evil.org", False),
    ("EMAIL_ADDRESS", "a@notexample.com", False),
    ("PHONE_NUMBER", "(415) 555-0134", True),
    ("PHONE_NUMBER", "(212) 736-5000", False),
    ("CREDIT_CARD", "4242 4242 4242 4242", True),
    ("CREDIT_CARD", "4929 1234 5678 9015", False),
    ("IP_ADDRESS", "8.8.8.8", False),
]


def test_what_is_set_aside_for_examples():
    for type, value, is_reserved in RESERVED:
        assert BY_NAME[type].is_reserved(value) == is_reserved, value
    for type in ("EMAIL_ADDRESS", "CREDIT_CARD", "PHONE_NUMBER"):
        assert BY_NAME[type].is_reserved(made(type, VALUES[type]))


def test_a_whole_conversation():
    config = PrivacyConfig(actions=dict.fromkeys(TYPES, "surrogate"))
    texts = [unmarked(one.example) for one in PII_TYPES if one.find]
    texts[-1] += f" and again {VALUES['EMAIL_ADDRESS']}"
    result = clean(texts, Detector(config).find_all(texts), config, KEY)
    assert not [value for value in VALUES.values() if value in "".join(result)]
    mail = re.search(r"\S+@example\.\w+", result[TYPES.index("EMAIL_ADDRESS")])
    assert mail
    assert result[-1].endswith(mail.group())


# Mentions

CONFIG = PrivacyConfig(actions={"password": "surrogate", "credit_card": "surrogate"})


def replaced(texts, *values, config=CONFIG):
    """Texts in which only the first mention of each value (type, value) was found."""
    found = [[] for _ in texts]
    for type, value in values:
        number = next(number for number, text in enumerate(texts) if value in text)
        start = texts[number].index(value)
        found[number] += [Finding(type, start, start + len(value), hash=value)]
    for findings in found:
        findings.sort(key=lambda one: one.start)
    mentions = Mentions(texts, found)
    completed = mentions.complete(texts, found)
    made = clean(texts, completed, config, KEY)
    assert not [one for text in made for one in mentions.find(text)]
    return made


def person(value, *texts, also=()):
    return replaced(list(texts), ("PERSON", value), *(("PERSON", one) for one in also))


FORMS = [
    ("Natalia", "Natalia", "{}"),
    ("Natalia", "NATALIA", "{upper}"),
    ("Natalia", "Natalia's", "{}'s"),
    ("Natalia", "Natalia’s", "{}'s"),
    ("James", "James'", "{}'"),
    ("Weng", "weng.pdf", "{lower}.pdf"),
    ("José", "Jose", "{}"),
    ("José", "Jose\u0301", "{}"),
    ("Søren", "Soren", "{}"),
    ("Mike", "Mikes", "{}s"),
    ("Annika", "Annikas", "{}s"),
    ("Natalia", "Na\u200btalia", "{}"),
    ("Natalia", "Nаtаliа", "{}"),
    ("Соколова", "Соколовой", "{}"),
]


@pytest.mark.parametrize(("name", "mention", "form"), FORMS)
def test_every_form_of_a_name_gets_its_surrogate(name, mention, form):
    first, second = person(name, f"I met {name} once.", f"And then, {mention} sold it.")
    made = first.removeprefix("I met ").removesuffix(" once.")
    assert made in {*GIVEN, *OWN[r"[\u0400-\u04ff]"][0]}
    wanted = form.format(made, upper=made.upper(), lower=made.lower())
    assert second.replace("’", "'") == f"And then, {wanted} sold it."


def test_a_first_name_alone_is_the_same_person():
    made = person("Ada Berg", "Ada Berg wrote.", "What did Ada want?", "Mrs. Berg? BERG, ADA!")
    given, family = made[0].removesuffix(" wrote.").split()
    assert given in GIVEN
    assert family in FAMILY
    assert made[1] == f"What did {given} want?"
    assert made[2] == f"Mrs. {family}? {family.upper()}, {given.upper()}!"


def test_words_are_left_alone():
    texts = [
        "I asked Will and Mark, and Robert too.",
        "Will he come? Will the shop open? I will mark it. Roberta stays.",
        "Then Will left. Mark ate.",
    ]
    made = person("Will", *texts, also=("Mark", "Robert"))
    will, mark = re.fullmatch(r"I asked (\w+) and (\w+), and \w+ too\.", made[0]).groups()
    assert made[1] == texts[1]
    assert made[2] == f"Then {will} left. {mark} ate."


def test_a_name_within_an_address_is_replaced_too():
    texts = ["Diane Lane lives at 12 Meadow Lane, Boston."]
    made = replaced(texts, ("PERSON", "Diane Lane"), ("STREET_ADDRESS", "12 Meadow Lane, Boston"))
    assert "Lane" not in made[0]


SPELLINGS = [
    ("CREDIT_CARD", "4111 1111 1111 1111", "4111-11111111 1111"),
    ("EMAIL_ADDRESS", "ana.lee@acme.com", "Ana.Lee@ACME.com"),
    ("EMAIL_ADDRESS", "ana.lee@acme.com", "ana.lee (at) acme (dot) com"),
    ("PHONE_NUMBER", "(212) 736-5000", "212/736 5000"),
    ("HANDLE", "@ana_lee84", "ana_lee84"),
    ("PASSWORD", "hunter22", "hunter22"),
    ("DATE_OF_BIRTH", "5 March 1984", "５ March １９８４"),
    ("DATE_OF_BIRTH", "12/04/1988", "12.04.1988"),
    ("DATE_OF_BIRTH", "12-04-1988", "12 04 1988"),
]


@pytest.mark.parametrize(("type", "value", "mention"), SPELLINGS)
def test_a_value_found_once_is_replaced_everywhere(type, value, mention):
    made = replaced([f"It is {value} .", f"again {mention} , please"], (type, value))
    first = made[0].removeprefix("It is ").removesuffix(" .")
    second = made[1].removeprefix("again ").removesuffix(" , please")
    assert value not in made[0]
    assert re.sub(r"\W", "", first) == re.sub(r"\W", "", second)


def test_a_date_in_digits_is_one_in_any_order_and_with_or_without_zeros():
    texts = ["DOB 05/04/1988", "5.4.1988, 1988-04-05, 4/5/1988"]
    first, second = replaced(texts, ("DATE_OF_BIRTH", "05/04/1988"))
    date = first.removeprefix("DOB ")
    german, iso, american = second.split(", ")
    assert date == german == iso
    assert {date, american}.isdisjoint(["05/04/1988", "4/5/1988"])


def test_a_user_who_is_called_like_a_word_is_replaced_in_paths_and_addresses_alone():
    texts = ["In /home/work/a.py I work.", "See work@host:/srv/work/b, does it work?"]
    first, second = replaced(texts, ("HANDLE", "work"))
    user = first.removeprefix("In /home/").removesuffix("/a.py I work.")
    assert second == f"See {user}@host:/srv/{user}/b, does it work?"


def test_a_name_of_a_script_without_spaces_is_replaced_as_a_whole():
    made = person("王丽华", "我叫王丽华，住在北京。", "王丽华你好")
    name = made[0].removeprefix("我叫").removesuffix("，住在北京。")
    assert 1 < len(name) < 4
    assert made[1] == f"{name}你好"


@pytest.mark.parametrize(
    ("name", "mention"),
    [
        ("राजेश कुमार", "राजेश"),
        ("अनीता", "अनीता"),
        ("রহিমা খাতুন", "খাতুন"),
        ("மீனாட்சி சுந்தரம்", "மீனாட்சி"),
        ("Anna 王丽华", "Anna"),
        ("Anna 王丽华", "王丽华"),
        ("Anna สมชาย", "สมชาย"),
    ],
)
def test_words_of_a_name_are_whole_with_their_marks_and_of_any_script(name, mention):
    made = person(name, f"- {name} -", f"- {mention} -")
    full, again = (one.removeprefix("- ").removesuffix(" -").split() for one in made)
    assert len(full) == len(name.split())
    assert {unicodedata.category(sign)[0] for sign in "".join(full)} <= {"L", "M"}
    assert again == [full[name.split().index(mention)]]
    assert not set(full) & set(name.split())


def test_a_year_within_a_name_is_replaced():
    (made,) = person("Anna 1984", "- Anna 1984 -")
    assert re.fullmatch(r"- [A-Z][a-z]+ \d{4} -", made)
    assert "1984" not in made


def test_a_row_of_which_a_value_would_remain_is_dropped(monkeypatch):
    keep = PersonalData(PrivacyConfig(), KEY)
    row = SourceRow("", "", "", None, ("I am ana@python.org",))
    assert isinstance(keep(row), SourceRow)
    monkeypatch.setattr(Surrogates, "of", lambda self, type, value: value)
    dropped = keep(row)
    assert isinstance(dropped, Drop)
    assert dropped.reason == "pii.email_address"
    assert "python.org" not in repr(dropped)


NAMES = st.sampled_from(["Natalia Weng", "Robert", "José Álvarez", "Mary-Ann Cooper", "Weng"])
BETWEEN = st.sampled_from([" met ", ". ", "'s friend, ", " & ", "\n", " ", "/", ", the "])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(NAMES, BETWEEN, st.booleans()), min_size=1, max_size=8))
def test_no_name_survives_and_none_becomes_two(parts):
    text = "".join((name.upper() if loud else name) + sign for name, sign, loud in parts)
    words = dict.fromkeys(parts[0][0].split())
    made = person(parts[0][0].upper() if parts[0][2] else parts[0][0], text)[0]
    for word in words:
        assert word.casefold() not in made.casefold()
    assert len(made.split()) == len(text.split())
