"""Keys, tokens, passwords and private keys: those of their makers' layouts are found, talk about
them is left alone.

Every value is made up here from its layout; none was ever valid. They are put together at run time,
so that no scanner takes this file for a leak.
"""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.privacy.detector import Detector
from eyas.privacy.findings import mask
from eyas.privacy.pii import PrivacyConfig
from eyas.privacy.secrets import PLUGINS, api_keys, passwords, plugin_patterns, private_keys

MIXED = (string.ascii_letters + string.digits) * 40
HEX = "0123456789abcdef" * 40
PATTERNS = Detector(
    PrivacyConfig(
        policy="mask", actions={"person": "keep", "street_address": "keep", "location": "keep"}
    )
)


def some(count, letters=MIXED, start=37):
    return letters[start : start + count]


KEYS = {
    "OpenAI project": "sk-proj-" + some(48),
    "OpenAI service": "sk-svcacct-" + some(40),
    "OpenAI": "sk-" + some(48),
    "OpenAI, old": "sk-" + some(20) + "T3Blbk" + "FJ" + some(20),
    "Anthropic": "sk-ant-api03-" + some(80) + "-AA",
    "OpenRouter": "sk-or-v1-" + some(64, HEX),
    "Hugging Face": "hf_" + some(34),
    "Google": "AIza" + some(35),
    "Google OAuth": "ya29." + some(60),
    "Google client": "GOCSPX-" + some(28),
    "GitHub": "ghp_" + some(36),
    "GitHub app": "ghs_" + some(36),
    "GitHub, fine-grained": "github_pat_" + some(22) + "_" + some(59),
    "GitLab": "glpat-" + some(20),
    "Slack": "xoxb-" + "123456789012-1234567890123-" + some(24),
    "Slack app": "xapp-1-A0" + some(60),
    "AWS": "AKIA" + "IOSFODNN7" + "EXAMPLE",
    "Stripe": "sk_live_" + some(24),
    "Stripe test": "pk_test_" + some(24),
    "SendGrid": "SG." + some(22) + "." + some(43),
    "Twilio": "SK" + some(32, HEX),
    "npm": "npm_" + some(36),
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + some(80),
    "DigitalOcean": "dop_v1_" + some(64, HEX),
    "Shopify": "shpat_" + some(32, HEX),
    "Groq": "gsk_" + some(52),
    "Replicate": "r8_" + some(37),
    "Perplexity": "pplx-" + some(48),
    "NVIDIA": "nvapi-" + some(60),
    "Telegram": "123456789:" + some(35),
    "Mailchimp": some(32, HEX) + "-us12",
    "Square": "sq0csp-" + some(43),
    "JWT": "eyJ" + some(30) + ".eyJ" + some(60) + "." + some(43),
    "JWT of real length": "eyJ" + some(300) + ".eyJ" + some(900) + "." + some(342),
}
NAMED = {
    "api_key = '{}'": some(32),
    'export OPENAI_API_KEY="{}"': some(40),
    "the secret key is {} .": some(24, HEX),
    '{{"client_secret": "{}"}}': some(32),
    "access token: {}": some(40),
    "Authorization: Bearer {}": some(40),
    "aws_secret_access_key = '{}'": some(40),
}
PASSWORDS = {
    "my password is hunter2": "my password is <PASSWORD>",
    "Password: Tr0ub4dor&3, ok?": "Password: <PASSWORD>, ok?",
    "pwd=s3cr3t!x": "pwd=<PASSWORD>",
    'db_password = "correct-h0rse"': 'db_password = "<PASSWORD>"',
    "the password for my bank account is Xy12zz9": "the password for my bank account is <PASSWORD>",
    "Passwort: geheim123": "Passwort: <PASSWORD>",
    "mot de passe : soleil99": "mot de passe : <PASSWORD>",
    '"password": "p@ssw0rd!"': '"password": "<PASSWORD>"',
    "passphrase is now blue-42-sky.": "passphrase is now <PASSWORD>.",
}
LEFT = [
    "How do I reset my password?",
    "The password is incorrect.",
    "The password is wrong!",
    "How do I remove a password to bypass restrictions?",
    "Is a password for each restrictions?",
    "password: required",
    "password = getpass.getpass()",
    'password = os.environ["PASSWORD"]',
    "password: str = Field(min_length=8)",
    "const password = req.body.password;",
    'password="your_password"',
    "password=${PASSWORD}",
    "password: <password>",
    "username=^USER^&password=^PASS^",
    "password = ********",
    "password is case-sensitive",
    "def check(password: string)",
    "What is an API key, and is api_key = None fine?",
    "api_key=YOUR_API_KEY_GOES_HERE",
    "token = tokenizer.decode(ids)",
    "-----BEGIN PUBLIC KEY-----",
    "The file starts with -----BEGIN PRIVATE KEY----- and ends with -----END PRIVATE KEY-----.",
    "sk-learn and sk-image are short names",
    "hf_hub_download(repo_id)",
    "commit 5d41402abc4b2a76b9719d911017c592aabbccdd",
    "550e8400-e29b-41d4-a716-446655440000",
    "d41d8cd98f00b204e9800998ecf8427e",
    "================================================",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "supercalifragilisticexpialidocious_and_more",
    "https://github.com/python/cpython/commit/0123456789abcdef",
    "import torch; x = torch.nn.functional.scaled_dot_product_attention2",
]


@pytest.mark.parametrize(
    "sentence", ["{}", "my key {} leaked", "curl -H 'x: {}'", "KEY={}\n", "({})."]
)
def test_keys_are_found_whole(sentence):
    for maker, key in KEYS.items():
        masked = mask(sentence.format(key), PATTERNS.find(sentence.format(key)))
        assert masked in (
            sentence.format("<API_KEY>"),
            sentence.replace("KEY=", "").format("<API_KEY>"),
        ), maker


def test_values_behind_a_name_are_found():
    for sentence, value in NAMED.items():
        text = sentence.format(value)
        assert mask(text, PATTERNS.find(text)) == sentence.format("<API_KEY>")


def test_passwords_are_found():
    assert {text: mask(text, PATTERNS.find(text)) for text in PASSWORDS} == PASSWORDS


def test_talk_and_code_are_left_alone():
    assert {text: found for text in LEFT if (found := PATTERNS.find(text))} == {}


BODY = "\n".join([some(64)] * 20)
BLOCKS = {
    "RSA": f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\n{BODY}\n-----END RSA "
    "PRIVATE KEY-----",
    "PKCS 8": f"-----BEGIN PRIVATE KEY-----\n{BODY}\n-----END PRIVATE KEY-----",
    "OpenSSH": f"-----BEGIN OPENSSH PRIVATE KEY-----\n{BODY}\n-----END OPENSSH PRIVATE KEY-----",
    "PGP": f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{BODY}=\n=abcd\n-----END PGP PRIVATE KEY "
    "BLOCK-----",
    "in JSON": "-----BEGIN PRIVATE KEY-----\\n"
    + BODY.replace("\n", "\\n")
    + "\\n-----END PRIVATE KEY-----",
    "cut": f"-----BEGIN EC PRIVATE KEY-----\n{BODY}",
}


def test_private_keys_are_found_from_heading_to_end():
    for kind, block in BLOCKS.items():
        text = f"here: {block}"
        assert mask(text, PATTERNS.find(text)) == "here: <PRIVATE_KEY>", kind


def test_two_blocks_are_two_keys():
    text = f"{BLOCKS['RSA']}\nand\n{BLOCKS['OpenSSH']}\n?"
    assert mask(text, PATTERNS.find(text)) == "<PRIVATE_KEY>\nand\n<PRIVATE_KEY>\n?"


def test_a_putty_key_is_found_without_a_heading_of_ours():
    text = f"PuTTY-User-Key-File-2: ssh-rsa\nPrivate-Lines: 8\n{BODY}\nPrivate-MAC: 00"
    assert some(64) not in mask(text, PATTERNS.find(text))


def test_the_plugins_are_patterns():
    assert len(PLUGINS) >= 15
    assert all(hasattr(pattern, "finditer") for pattern in plugin_patterns())
    assert not [name for name in PLUGINS if "entropy" in name or "keyword" in name]


@given(st.text(max_size=200))
def test_any_text_is_read(text):
    for search in (api_keys, passwords, private_keys):
        assert all(0 <= one.start < one.end <= len(text) for one in search(text))
