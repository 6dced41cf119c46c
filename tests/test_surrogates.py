"""Surrogates: of the same kind and form, consistent in a conversation, assigned to nobody."""

import ipaddress
import re

import phonenumbers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.privacy.detector import Detector
from eyas.privacy.identifiers import is_national_id
from eyas.privacy.key import NUMBERED, canonical
from eyas.privacy.patterns import (
    CARD_ISSUER,
    PHONE_REGIONS,
    is_base58check,
    is_bech32,
    luhn,
    parse_phone,
)
from eyas.privacy.pii import TYPES, PrivacyConfig
from eyas.privacy.surrogates import (
    CITIES,
    COUNTRIES,
    FAMILY,
    FICTIONAL_PHONES,
    GIVEN,
    STREETS,
    WORDED,
    KeyedRandom,
    Surrogates,
    clean,
    fill_form,
    is_fictional,
    match_case,
)

KEY = b"k" * 32
EXAMPLES = {
    "PRIVATE_KEY": "-----BEGIN PRIVATE KEY-----\nMIIEabc123\nQUJD\n-----END PRIVATE KEY-----",
    "URL_CREDENTIALS": "postgres://bob:hunter22@db.internal:5432/shop",
    "API_KEY": "sk-ant-api03-AbCd1234efGH",
    "PASSWORD": "Tr0ub4dor&3",
    "CREDIT_CARD": "4242-4242-4242-4242",
    "IBAN_CODE": "GB29 NWBK 6016 1331 9268 19",
    "US_SSN": "219-45-9876",
    "NATIONAL_ID": "54362315K",
    "CRYPTO": "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa",
    "EMAIL_ADDRESS": "Ana.Lee@mail.python.org",
    "IP_ADDRESS": "8.8.8.8",
    "PHONE_NUMBER": "(212) 736-5000",
    "DATE_OF_BIRTH": "March 5th, 1984",
    "LICENSE_PLATE": "7ABC-123",
    "MAC_ADDRESS": "3c:22:fb:9a:10:7e",
    "COORDINATES": "40.712776, -74.005974",
    "HANDLE": "@ana_lee.84",
    "URL": "https://www.python.org/downloads?x=1",
    "STREET_ADDRESS": "6750 Koskikatu 25 Apt. 864\nArtilleros, CO\nUruguay 64677",
    "PERSON": "Dr. Ada M. Berg",
    "LOCATION": "New Delhi",
}
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
PHONES = {
    "US": [
        "(212) 736-5000",
        "+1-212-736-5000",
        "1 212 736 5000",
        "212.736.5000x4587",
        "001-212-736-5000",
    ],
    "GB": ["020 7031 3000", "+44 20 7031 3000", "+44 (0)7911 123456", "07911 123456"],
    "AU": ["02 9374 4000", "+61 2 9374 4000"],
    "FR": ["01 42 68 53 00", "+33 1 42 68 53 00"],
    "DE": ["030 303986300", "+49 30 303986300", "+49 (0)89 1234567"],
    "SE": ["+46 (0)8 928 571 38", "08-928 571 38"],
    "IT": ["+39 02 3661 8300"],
    "IN": ["+91 80 6721 8000"],
}


def made(type, value, conversation="c", values=()):
    return Surrogates(KEY, conversation, [(type, value), *values]).of(type, value)


def is_unassigned(country_code, national):
    """Whether a national number, without the trunk 0, is set aside in a country of this code or not
    valid there.
    """
    regions = phonenumbers.region_codes_for_country_code(country_code)
    starts = tuple(start for region in regions for start in FICTIONAL_PHONES.get(region, ()))
    if national.startswith(starts):
        return True
    zeros = len(national) - len(national.lstrip("0"))
    number = phonenumbers.PhoneNumber(
        country_code=country_code,
        national_number=int(national),
        italian_leading_zero=zeros > 0,
        number_of_leading_zeros=max(zeros, 1),
    )
    return not phonenumbers.is_valid_number(number)


def digits(text):
    return re.sub(r"\D", "", text)


def test_every_type_has_one_of_its_kind():
    assert set(EXAMPLES) == set(TYPES)
    for type, value in EXAMPLES.items():
        surrogate = made(type, value)
        assert canonical(type, surrogate) != canonical(type, value)
        assert surrogate == made(type, value), "the same every time"
        assert surrogate != made(type, value, conversation="another")
        assert len(surrogate.splitlines()) == len(value.splitlines())
        if type in NUMBERED:
            assert re.sub(r"\w", "0", surrogate) == re.sub(r"\w", "0", value), "its separators"


def test_cards_pass_their_check_in_a_test_range():
    for value in CARDS:
        surrogate = made("CREDIT_CARD", value)
        assert len(surrogate) == len(value)
        assert luhn(surrogate)
        assert CARD_ISSUER.match(surrogate)
        assert surrogate[0] == value[0] or value[:4] in ("1800", "2223") or value[0] in "25"
        assert is_fictional("CREDIT_CARD", surrogate)


def test_accounts_pass_their_check_at_a_bank_that_does_not_exist():
    for value in IBANS:
        surrogate = made("IBAN_CODE", value)
        letters = re.sub(r"\W", "", surrogate).upper()
        assert int("".join(str(int(one, 36)) for one in letters[4:] + letters[:4])) % 97 == 1
        assert letters[:2] == value[:2].upper()
        assert set(letters[4:8]) <= {"X", "0"}
        assert surrogate.islower() == value.islower()


def test_phones_stay_in_their_country_and_reach_nobody():
    for region, value in [(region, value) for region, values in PHONES.items() for value in values]:
        surrogate = made("PHONE_NUMBER", value)
        assert re.sub(r"\d", "0", surrogate) == re.sub(r"\d", "0", value)
        read = next(parse_phone(re.split("x", value)[0]))
        country = phonenumbers.region_code_for_country_code(read.country_code)
        number = phonenumbers.parse(
            re.split("x", surrogate.replace("(0)", ""))[0].replace("001-", "+1-"), country
        )
        assert number.country_code == read.country_code
        assert region == country or not value.startswith("+")
        assert is_unassigned(number.country_code, phonenumbers.national_significant_number(number))
        if value.startswith("+") and region in FICTIONAL_PHONES:
            assert str(number.national_number).startswith(FICTIONAL_PHONES[region])
            assert is_fictional("PHONE_NUMBER", surrogate)


@settings(deadline=None)
@given(st.sampled_from(PHONE_REGIONS))
def test_every_countrys_example_number_becomes_one_that_is_not_valid_or_set_aside(region):
    example = phonenumbers.format_number(
        phonenumbers.example_number(region), phonenumbers.PhoneNumberFormat.INTERNATIONAL
    )
    number = phonenumbers.parse(made("PHONE_NUMBER", example))
    assert is_unassigned(number.country_code, phonenumbers.national_significant_number(number))
    assert not is_unassigned(
        phonenumbers.parse(example).country_code, digits(example)[len(str(number.country_code)) :]
    )


@given(st.binary(min_size=1, max_size=8))
def test_social_security_numbers_were_never_given(key):
    area, group, _ = Surrogates(key, "c", []).of("US_SSN", "219-45-9876").split("-")
    assert area[0] == "9"
    assert 1 <= int(group) < 50


def test_identity_numbers_fail_their_check():
    for value in (
        "54362315K",
        "390.533.447-05",
        "756.9217.0769.85",
        "RCCMNL83S18D969H",
        "S1234567D",
    ):
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
    assert re.fullmatch(
        r"[a-z.0-9]+@example\.(com|org|net)", made("EMAIL_ADDRESS", EXAMPLES["EMAIL_ADDRESS"])
    )
    assert is_fictional("EMAIL_ADDRESS", made("EMAIL_ADDRESS", EXAMPLES["EMAIL_ADDRESS"]))
    assert re.fullmatch(r"https://[a-z]+\.example\.com/\w+", made("URL", EXAMPLES["URL"]))
    assert made("URL", "www.python.org").startswith("www.example.com/")
    assert re.fullmatch(
        r"postgres://\w+:\w+@[a-z]+\.example\.com/",
        made("URL_CREDENTIALS", EXAMPLES["URL_CREDENTIALS"]),
    )


@pytest.mark.parametrize(
    ("value", "valid", "form"),
    [
        ("1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa", is_base58check, "1[1-9A-HJ-NP-Za-km-z]{33}"),
        ("bc1qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t4", is_bech32, "bc1q[02-9ac-hj-np-z]{38}"),
        ("0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed", None, "0x[0-9a-f]{40}"),
    ],
)
def test_wallets_keep_their_form_and_fail_their_check(value, valid, form):
    """Ethereum's in small letters have no check."""
    assert re.fullmatch(form, made("CRYPTO", value))
    assert valid is None or not valid(made("CRYPTO", value))


def test_keys_keep_their_makers_prefix_and_form():
    surrogate = made("API_KEY", "sk-ant-api03-AbCd1234efGH")
    assert surrogate.startswith("sk-ant-")
    assert re.sub(r"\d", "0", surrogate).count("0") == 6
    lines = made("PRIVATE_KEY", EXAMPLES["PRIVATE_KEY"]).splitlines()
    assert (lines[0], lines[-1]) == ("-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----")
    assert [len(line) for line in lines] == [
        len(line) for line in EXAMPLES["PRIVATE_KEY"].splitlines()
    ]


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
    assert surrogates.of("PERSON", "A. Berg") == f"{first[0]}. {last}"


def test_places_and_addresses_keep_their_form():
    surrogates = Surrogates(KEY, "c", [])
    city = surrogates.of("LOCATION", "Paris")
    assert city in CITIES
    assert surrogates.of("LOCATION", "France") in COUNTRIES
    address = surrogates.of("STREET_ADDRESS", "12 Rue Lepic, 75018 Paris, TX 75001")
    found = re.fullmatch(r"[1-9]\d Rue (\w+), [1-9]\d{4} (\w+), [A-Z]{2} [1-9]\d{4}", address)
    assert found
    assert found[1] in STREETS
    assert found[2] == city, "the same place as in the other mention"


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([type for type in TYPES if type != "PRIVATE_KEY"]), st.integers(2, 40))
def test_different_values_have_different_surrogates(type, count):
    """And none is a value of the conversation."""
    values = [KeyedRandom(KEY, str(number)).like(EXAMPLES[type]) for number in range(count)]
    values = list({canonical(type, value): value for value in values}.values())
    surrogates = Surrogates(KEY, "c", [(type, value) for value in values])
    results = [canonical(type, surrogates.of(type, value)) for value in values]
    assert not set(results) & {canonical(type, value) for value in values}
    if type not in WORDED:
        assert len(set(results)) == len(values)


def test_names_do_not_run_out():
    values = [
        f"{first}{last}" for first in GIVEN[:40] for last in ("son", "dottir", "ova", "escu", "ini")
    ]
    surrogates = Surrogates(KEY, "c", [("PERSON", value) for value in values])
    assert len({surrogates.of("PERSON", value) for value in values}) == len(values)


@given(st.binary(max_size=40), st.text(max_size=10), st.integers(1, 1000))
def test_draws_are_repeatable_and_in_range(key, seed, bound):
    first, again = KeyedRandom(key, seed), KeyedRandom(key, seed)
    numbers = [first.below(bound) for _ in range(20)]
    assert numbers == [again.below(bound) for _ in range(20)]
    assert all(0 <= number < bound for number in numbers)


def test_draws_are_even():
    draw = KeyedRandom(KEY, "even")
    counts = [0] * 10
    for _ in range(10_000):
        counts[draw.below(10)] += 1
    assert all(850 < count < 1150 for count in counts), "five standard deviations"


def test_forms():
    assert [match_case("Nora", like) for like in ("ADA", "ada", "Ada")] == ["NORA", "nora", "Nora"]
    assert fill_form("5555550134123", "(415) 736-5000 x987") == "(555) 555-0134 x123"
    assert fill_form("gb12xxxx", "GB-99 AbCd") == "GB-12 XxXx"


FICTIONAL = [
    ("EMAIL_ADDRESS", "a@mail.example.com", True),
    ("EMAIL_ADDRESS", "a@example.com.evil.org", False),
    ("EMAIL_ADDRESS", "a@notexample.com", False),
    ("PHONE_NUMBER", "+44 7700 900123", True),
    ("PHONE_NUMBER", "(415) 555-0134", True),
    ("PHONE_NUMBER", "(212) 736-5000", False),
    ("CREDIT_CARD", "4242 4242 4242 4242", True),
    ("CREDIT_CARD", "4929 1234 5678 9015", False),
    ("IP_ADDRESS", "8.8.8.8", False),
]


def test_what_is_fictional():
    for type, value, fictional in FICTIONAL:
        assert is_fictional(type, value) == fictional, value


def test_a_whole_conversation():
    """Everything replaced at once leaves nothing of what was there."""
    config = PrivacyConfig(actions=dict.fromkeys(TYPES, "surrogate"))
    detector = Detector(config)
    texts = [f"{type.lower()}: {value}" for type, value in EXAMPLES.items() if type not in WORDED]
    texts[-1] += f" and again {EXAMPLES['EMAIL_ADDRESS']}"
    result = clean(texts, detector.find_all(texts), config, KEY)
    assert len(result) == len(texts)
    assert not [value for value in EXAMPLES.values() if value in "".join(result)]
    mail = re.search(r"\S+@example\.\w+", result[list(EXAMPLES).index("EMAIL_ADDRESS")])
    assert mail
    assert result[-1].endswith(mail.group())
