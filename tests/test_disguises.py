"""Values in disguise: in digits of other scripts, between separators of any kind, spelt out. What
is found is the whole disguise, and what takes its place is another value.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.fold import fold
from eyas.privacy.detector import Detector
from eyas.privacy.findings import mask
from eyas.privacy.key import canonical
from eyas.privacy.pii import TYPES, PrivacyConfig
from eyas.privacy.surrogates import clean

KEY = b"k" * 32
CONFIG = PrivacyConfig(
    policy="surrogate",
    actions={
        **dict.fromkeys(TYPES, "surrogate"),
        "person": "keep",
        "street_address": "keep",
        "location": "keep",
        "url": "keep",
    },
)
PATTERNS = Detector(CONFIG)
FULL_WIDTH = str.maketrans("0123456789@.", "０１２３４５６７８９＠．")
ARABIC, DEVANAGARI, BOLD = (
    str.maketrans("0123456789", "".join(chr(ord(zero) + digit) for digit in range(10)))
    for zero in "٠०𝟎"
)
DIGITS = (FULL_WIDTH, ARABIC, DEVANAGARI, BOLD)
NUMBERS = {
    "CREDIT_CARD": "4111 1111 1111 1111",
    "IBAN_CODE": "DE89 3704 0044 0532 0130 00",
    "US_SSN": "219-45-9876",
    "PHONE_NUMBER": "(212) 736-5000",
    "IP_ADDRESS": "8.8.8.8",
    "NATIONAL_ID": "390.533.447-05",
}
SEPARATORS = [
    ".",
    "/",
    "_",
    "-",
    "–",
    "—",
    "  ",
    "\n",
    "\r\n",
    " - ",
    " / ",
    "\u00a0",
    "\u2009",
    "|",
]
FOUND = {
    "write to john [at] acme.com": "write to <EMAIL_ADDRESS>",
    "write to john (at) gmail (dot) com!": "write to <EMAIL_ADDRESS>!",
    "john dot smith at gmail dot com": "<EMAIL_ADDRESS>",
    "john_at_gmail_dot_com": "<EMAIL_ADDRESS>",
    "mail john{at}acme[dot]co[dot]uk": "mail <EMAIL_ADDRESS>",
    "john&#64;acme.com": "<EMAIL_ADDRESS>",
    "it is john @ gmail . com": "it is <EMAIL_ADDRESS>",
    "јоhn＠асmе.com": "<EMAIL_ADDRESS>",
    "jo\u200bhn@\u2060acme.com": "<EMAIL_ADDRESS>",
    "johnATgmailDOTcom": "<EMAIL_ADDRESS>",
    "john@gmail dot com": "<EMAIL_ADDRESS>",
    "john arroba gmail punto com": "<EMAIL_ADDRESS>",
    "⁴¹¹¹ ¹¹¹¹ ¹¹¹¹ ¹¹¹¹": "<CREDIT_CARD>",
    "**4111** **1111** **1111** **1111**": "**<CREDIT_CARD>**",
    "[4111] [1111] [1111] [1111]": "[<CREDIT_CARD>]",
    "4111....1111....1111....1111": "<CREDIT_CARD>",
    "card: 4111, 1111, 1111, 1111": "card: <CREDIT_CARD>",
    "four one one one 1111 1111 1111": "<CREDIT_CARD>",
    "ssn: 2 1 9 4 5 9 8 7 6": "ssn: <US_SSN>",
    "phone two one two seven three six five zero zero zero": "phone <PHONE_NUMBER>",
    "call me at (212) 736\n5000": "call me at <PHONE_NUMBER>",
    "tel 212 / 736 / 5000": "tel <PHONE_NUMBER>",
    "my pw is Hunter22!": "my pw is <PASSWORD>",
    "Password - Hunter22": "Password - <PASSWORD>",
    "user/pass: ana/Hunter22!": "user/pass: <PASSWORD>/<PASSWORD>",
    "mac address 3C22FB9A107E": "mac address <MAC_ADDRESS>",
    "https://maps.example/?q=40.7128,-74.0060": "https://maps.example/?q=<COORDINATES>",
    "write on t.me/ana_lee84": "write on t.me/<HANDLE>",
    "log in with password Tr0ub4dor and go": "log in with password <PASSWORD> and go",
    "the credentials are admin / s3cret!x": "the credentials are <PASSWORD> / <PASSWORD>",
    "Login: bob:hunter22": "Login: <PASSWORD>:<PASSWORD>",
    "user bob, password hunter22": "user bob, password <PASSWORD>",
    "from 8[.]8[.]8[.]8": "from <IP_ADDRESS>",
    "card number 41-111111 1111-1111": "card number <CREDIT_CARD>",
    "pay 4-1-1-1-1-1-1-1-1-1-1-1-1-1-1-1": "pay <CREDIT_CARD>",
    "4️⃣1️⃣1️⃣1️⃣ 1111 1111 1111": "<CREDIT_CARD>",
    "SSN 219 / 45 / 9876": "SSN <US_SSN>",
    "I was born on March 5th, 1984.": "I was born on <DATE_OF_BIRTH>.",
    "DOB: 1984-03-05": "DOB: <DATE_OF_BIRTH>",
    "née le 5 août 1984": "née le <DATE_OF_BIRTH>",
    "geboren am 5. März 1984": "geboren am <DATE_OF_BIRTH>",
    '{"date_of_birth": "05/03/1984"}': '{"date_of_birth": "<DATE_OF_BIRTH>"}',
    "my license plate is 7ABC-123": "my license plate is <LICENSE_PLATE>",
    "Kennzeichen: M-AB 1234": "Kennzeichen: <LICENSE_PLATE>",
    "device 3C:22:FB:9A:10:7E is up": "device <MAC_ADDRESS> is up",
    "3c22.fb9a.107e": "<MAC_ADDRESS>",
    "MAC 00-11-22-33-44-55": "MAC <MAC_ADDRESS>",
    "at 40°42'46\"N 74°00'22\"W": "at <COORDINATES>",
    "coordinates: 40.7128, -74.0060": "coordinates: <COORDINATES>",
    '{"lat": 40.7128, "lng": -74.0060}': '{"lat": <COORDINATES>}',
    "follow me on Instagram @ana_lee.84!": "follow me on Instagram <HANDLE>!",
    "my username is ana_lee84": "my username is <HANDLE>",
    "Discord: ana.lee#1234": "Discord: <HANDLE>",
}
LEFT = [
    "we meet at noon. The dot com bubble",
    "look at gmail.com, sign up at yahoo.com",
    "x = a @ b.T and self.w @ layer.weight",
    "values[at] = rows[at].name",
    "the password must have 8 characters, as in SHA256 or base64",
    "with password authentication, use password-less login",
    "credentials are stored in the vault",
    "login: required, password: optional",
    "columns 4500 5200 3900\n4100 4400 4711",
    "2019, 2020, 2021, 2022",
    "1000 - 500 = 500, 350 - 50 - 1500",
    "5000/500 = 10 reams for the office",
    "born in 1984, on 05/03/1984 the invoice was paid",
    "the plate is hot; registration opens 2024",
    "10:20:30:40:50:60 and 00:00:00:00:00:00",
    "f1:f2 ratio 0.1234, 0.5678",
    "loss 40.7128, 74.0060",
    "@property and @types/node, @media print, user@pve",
    "12:30, 5/8, 3½ and 1 2 3 4 5 6 7 8 9 10 11 12 13",
    "u2 and r/python, issue#1234",
    "done at a point in the process, the chain at the point at which it ends",
    "With pw-midi2play, how do I play? pass - the test",
    "There are 974000 / 1000 = 974 groups",
    "call it a matrix:\n1 2 3\n8 9 4\n7 6 5",
    "one two three four five six seven",
]


def test_disguises_are_found_whole():
    assert {text: mask(text, PATTERNS.find(text)) for text in FOUND} == FOUND


def test_what_only_looks_like_one_is_left():
    assert {text: found for text in LEFT if (found := PATTERNS.find(text))} == {}


@pytest.mark.parametrize("type", NUMBERS)
def test_digits_of_any_script_are_found_and_replaced(type):
    """A surrogate that is the value in plain digits would count as masked."""
    for digits in DIGITS:
        text = f"here: {NUMBERS[type].translate(digits)} ok"
        found = PATTERNS.find(text)
        assert [one.type for one in found] == [type], text
        made = clean([text], [found], CONFIG, KEY)[0]
        assert made.startswith("here: ")
        assert made.endswith(" ok")
        assert canonical(type, NUMBERS[type]) not in canonical(type, made)
        assert made.isascii()


@pytest.mark.parametrize("separator", SEPARATORS)
def test_cards_between_any_separators(separator):
    for number in ("4111 1111 1111 1111", "3782 822463 10005", "5555 5555 5555 4444"):
        value = number.replace(" ", separator)
        assert (
            mask(f"pay {value} now", PATTERNS.find(f"pay {value} now")) == "pay <CREDIT_CARD> now"
        )
        iban = "DE89 3704 0044 0532 0130 00".replace(" ", separator)
        assert mask(iban, PATTERNS.find(iban)) == "<IBAN_CODE>"


INVISIBLE = st.sampled_from(["\u200b", "\u00ad", "\u2060", "\ufeff", "\u200d", "\ufe0f", ""])


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(NUMBERS)), st.sampled_from((None, *DIGITS)), st.data())
def test_no_disguised_value_is_left(type, digits, data):
    value = NUMBERS[type].translate(digits or {})
    value = "".join(letter + data.draw(INVISIBLE) for letter in value)
    text = f"Hello, {value}, thanks"
    made = clean([text], [PATTERNS.find(text)], CONFIG, KEY)[0]
    assert canonical(type, NUMBERS[type]) not in canonical(type, fold(made).text)
    assert PATTERNS.find(mask(text, PATTERNS.find(text))) == []
