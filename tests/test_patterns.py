"""Values that have a form: found whole in the usual spelling, in disguise (digits of other scripts,
any separators, spelt out) and beside punctuation; talk about them is left alone.

Keys are made up here from their makers' layouts and put together at run time, so that no scanner
takes this file for a leak.
"""

import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.fold import fold
from eyas.privacy.detector import Detector
from eyas.privacy.findings import mask
from eyas.privacy.identifiers import IDENTIFIERS, is_national_id, national_ids
from eyas.privacy.patterns import is_base58check, is_bech32
from eyas.privacy.pii import TYPES, PrivacyConfig, canonical
from eyas.privacy.secrets import api_keys, passwords, private_keys
from eyas.privacy.surrogates import clean
from tests.marks import KEY, NO_NAMES, PATTERNS, marked, unmarked

CONFIG = PrivacyConfig(actions={**dict.fromkeys(TYPES, "surrogate"), **NO_NAMES, "url": "keep"})
LINKS = Detector(PrivacyConfig(actions={**NO_NAMES, "url": "mask"}))
DRAW = random.Random(0)  # no words and no order: else it is a numbered name
MIXED = "".join(DRAW.choices(string.ascii_letters + string.digits, k=2400))
HEX = "".join(DRAW.choices("0123456789abcdef", k=700))
FOUND = {
    "EMAIL_ADDRESS": [
        "write to ⟨Ana.Lee+x@mail.example.co.uk⟩.",
        "⟨ANA@EXAMPLE.COM⟩,⟨bob@example.org⟩",
        "write to ⟨john [at] acme.com⟩",
        "write to ⟨john (at) gmail (dot) com⟩ or ⟨anna(a)acme.se⟩!",
        "⟨john dot smith at gmail dot com⟩",
        "⟨john_at_gmail_dot_com⟩",
        "mail ⟨john{at}acme[dot]co[dot]uk⟩",
        "⟨john&#64;acme.com⟩",
        "it is ⟨john @ gmail . com⟩",
        "⟨јоhn＠асmе.com⟩",
        "⟨jo\u200bhn@\u2060acme.com⟩",
        "⟨johnATgmailDOTcom⟩",
        "⟨john@gmail dot com⟩",
        "⟨john arroba gmail punto com⟩",
    ],
    "PHONE_NUMBER": [
        "Phone:⟨212-555-0134⟩",
        "⟨(415) 555-0134 ext. 12⟩",
        "⟨415.555.0134⟩!",
        "my number ⟨4155550134⟩",
        "⟨1-800-555-0199⟩",
        "my number is ⟨5550134⟩",
        "⟨+44 (0)20 7946 0958⟩?",
        "⟨07700 900123⟩",
        "⟨020 7946 0958⟩",
        "⟨03.93.92.16.85⟩",
        "⟨(415) 555-0134⟩ ⟨(415) 555-0199⟩ ⟨07700 900123⟩",
        "2 ⟨(415) 555-0134⟩ 2",
        "call ⟨78 651 450⟩ now",
        "phone ⟨two one two seven three six five zero zero zero⟩",
        "call me at ⟨(212) 736\n5000⟩",
        "tel ⟨212 / 736 / 5000⟩",
    ],
    "CREDIT_CARD": [
        "⟨4111 1111 1111 1111⟩ 12/27 123",
        "⟨4111-1111-1111-1111⟩-123",
        "Visa ⟨4222222222222⟩.",
        "⟨3782 822463 10005⟩",
        "⟨⁴¹¹¹ ¹¹¹¹ ¹¹¹¹ ¹¹¹¹⟩",
        "**⟨4111** **1111** **1111** **1111⟩**",
        "[⟨4111] [1111] [1111] [1111⟩]",
        "⟨4111....1111....1111....1111⟩",
        "card: ⟨4111, 1111, 1111, 1111⟩",
        "card ⟨four one one one 1111 1111 1111⟩",
        "card number ⟨41-111111 1111-1111⟩",
        "pay ⟨4-1-1-1-1-1-1-1-1-1-1-1-1-1-1-1⟩",
        "⟨4️⃣1️⃣1️⃣1️⃣ 1111 1111 1111⟩",
    ],
    "IBAN_CODE": ["IBAN ⟨DE89 3704 0044 0532 0130 00⟩, please", "⟨gb29nwbk60161331926819⟩"],
    "US_SSN": [
        "my ssn is ⟨219-45-9876⟩",
        "Social Security number: ⟨219459876⟩",
        "ssn: ⟨2 1 9 4 5 9 8 7 6⟩",
        "SSN ⟨219 / 45 / 9876⟩",
    ],
    "IP_ADDRESS": [
        "from ⟨93.184.215.14⟩ and ⟨2a00:1450:4001:81b::200e⟩",
        "from ⟨93[.]184[.]215[.]14⟩",
    ],
    "URL": [
        "see ⟨https://www.python.org/downloads/⟩, or ⟨www.gnu.org⟩.",
        "(⟨http://a.org/x?y=1#z⟩)",
    ],
    "URL_CREDENTIALS": [
        "psql ⟨postgres://bob:hunter22@db.internal:5432/shop⟩ now",
        "⟨https://api.acme.io/v1?access_token=a1b2c3d4e5f6&x=1⟩",
    ],
    "CRYPTO": [
        "send it to ⟨1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa⟩",
        "⟨bc1qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t4⟩,",
        "⟨bc1p0xlxvlhemja6c4dqv22uapctqupfhlxm9h8z3k2e72q4k9hcz7vqzk5jj0⟩",
        "⟨BC1QW508D6QEJXTDG4Y5R3ZARVARY0C5XW7KV8F3T4⟩",
        "⟨0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed⟩!",
        "⟨0x5AAeb6053F3E94C9b9A09f33669435E7Ef1BeAed⟩ too",
    ],
    "PASSWORD": [
        "my pw is ⟨Hunter22!⟩",
        "Password - ⟨Hunter22⟩",
        "user/pass: ⟨ana⟩/⟨Hunter22!⟩",
        "log in with password ⟨Tr0ub4dor⟩ and go",
        "the credentials are ⟨admin⟩ / ⟨s3cret!x⟩",
        "Login: ⟨bob⟩:⟨hunter22⟩",
        "user bob, password ⟨hunter22⟩",
        "my password is ⟨hunter2⟩",
        "Password: ⟨Tr0ub4dor&3⟩, ok?",
        "pwd=⟨s3cr3t!x⟩",
        'db_password = "⟨correct-h0rse⟩"',
        "the password for my bank account is ⟨Xy12zz9⟩",
        "Passwort: ⟨geheim123⟩",
        "mot de passe : ⟨soleil99⟩",
        '"password": "⟨p@ssw0rd!⟩"',
        "passphrase is now ⟨blue-42-sky⟩.",
    ],
    "MAC_ADDRESS": [
        "mac address ⟨3C22FB9A107E⟩",
        "device ⟨3C:22:FB:9A:10:7E⟩ is up",
        "⟨3c22.fb9a.107e⟩",
        "MAC ⟨00-11-22-33-44-55⟩",
    ],
    "COORDINATES": [
        "https://maps.example/?q=⟨40.7128,-74.0060⟩",
        "at ⟨40°42'46\"N 74°00'22\"W⟩",
        "coordinates: ⟨40.7128, -74.0060⟩",
        '{"lat": ⟨40.7128, "lng": -74.0060⟩}',
    ],
    "HANDLE": [
        "write on t.me/⟨ana_lee84⟩",
        "follow me on Instagram ⟨@ana_lee.84⟩!",
        "my username is ⟨ana_lee84⟩",
        "Discord: ⟨ana.lee#1234⟩",
    ],
    "DATE_OF_BIRTH": [
        "I was born on ⟨March 5th, 1984⟩.",
        "DOB: ⟨1984-03-05⟩",
        "née le ⟨5 août 1984⟩",
        "geboren am ⟨5. März 1984⟩",
        '{"date_of_birth": "⟨05/03/1984⟩"}',
    ],
    "LICENSE_PLATE": ["my license plate is ⟨7ABC-123⟩", "Kennzeichen: ⟨M-AB 1234⟩"],
}
LEFT = [
    "Is 2147483647 prime, and 4242424242424242 divisible by 7?",
    "order_id,total\n4155550134,19.90\n4242424242424242,20",
    "scores 88-92-79-95, a draw of 03-12-24-33-41-49, signed on 07/27/1850",
    "part 415-555-0134, SKU 219-45-9876, gift code 4242 4242 4242 4242, blk_-5140683104843231963",
    "build 28.9.8357.2783, Chrome/73.0.1165.95, version 6.26.4.77, section 4.3.2.1",
    "nameserver 8.8.8.8, 1.1.1.1; git clone git@github.com:org/repo.git",
    "OID 1.3.6.1.4.1.7198.4.7, ZIP 08150-5508, UPC 097260929424, doi 10.5043/j.02485.2015.239326",
    "cd /home/user/app, look at this point it was done",
    "lodash@4.17.21",
    "@pytest.fixture",
    "a @ b.com",
    "on 2023-11-05 10:30 or 05.11.2023",
    "the 2015-2016 season, call it 1997 2017",
    "ISBN 978-3-16-148410-0",
    "pages 100-200 300",
    "pi is 3.1415926535",
    "$1,234,567,890 and 1 234 567 890",
    "1600000000000",
    "order 4111 1111 1111 1112",
    "DE12 3456 7890 1234 5678 90",
    "at 192.168.0.1, 127.0.0.1 and 2001:db8::1",
    "std::vector<bad::cafe>",
    "999999999",
    "000-12-3456, 666-12-3456 and 900-12-3456 are never assigned",
    "36 574 261 809 and 130692544 without a word beside them",
    "your passport was renewed in 2019",
    "git commit 5aaeb6053f3e94c9b9a09f33669435e7ef1beaed",
    "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNb has a wrong check",
    "bc1qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t5 and bc1Qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t4",
    "we meet at noon. The dot com bubble",
    "look at gmail.com, sign up at yahoo.com",
    "x = a @ b.T and self.w @ layer.weight",
    "values[at] = rows[at].name",
    "the password must have 8 characters, as in SHA256 or base64",
    "with password authentication, use password-less login",
    "credentials are stored in the vault",
    "login: required, password: optional",
    "born in 1984, on 05/03/1984 the invoice was paid",
    "the plate is hot; registration opens 2024",
    "10:20:30:40:50:60 and 00:00:00:00:00:00",
    "f1:f2 ratio 0.1234, 0.5678",
    "loss 40.7128, 74.0060",
    "@property and @types/node, @media print, user@pve",
    "12:30, 5/8, 3½ and 1 2 3 4 5 6 7 8 9 10 11 12 13",
    "done at a point in the process, the chain at the point at which it ends",
    "With pw-midi2play, how do I play? pass - the test",
    "call it a matrix:\n1 2 3\n8 9 4\n7 6 5",
    "one two three four five six seven",
    "How do I reset my password?",
    "The password is incorrect.",
    "How do I remove a password to bypass restrictions?",
    'password = os.environ["PASSWORD"]',
    "password: str = Field(min_length=8)",
    'password="your_password"',
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
    "hf_hub_download(repo_id), pass = 12, the pass is at 2,345m",
    "chatcmpl-9aXkQ2mLzR7vTnB4wYp1sDf8 and checkout-7d9c5b8f6c-x2x8q, numpy-1.26.4-py311h64a7726_0",
    "secret = user_profile_2024_final_v2_backup, sha256-9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "550e8400-e29b-41d4-a716-446655440000",
    "id_3f2b1c9d8e7a6f5b4c3d2e1f, main.3f2b1c9d8e7a6f5b4c3d2e1f.js",
    "css/site-3f2b1c9d8e7a6f5b4c3d2e1f.css, site-3f2b1c9d8e7a6f5b4c3d2e1f.css",
    "whats 4155552671 - 12?",
    "the legitimation of power, 1984-2021",
    "d41d8cd98f00b204e9800998ecf8427e",
    "================================================",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "https://github.com/python/cpython/commit/0123456789abcdef",
    "mysql -u root -p < x.sql",
    "DB_PASSWORD=$SECRET",
    "password = getpass.getpass()",
    "define('DB_PASSWORD', 'password_here');",
    "<password>required</password>",
    "openssl genrsa -out key.pem 2048",
    "redis-cli -h localhost ping",
    "curl --user username:password https://x.org",
    "curl -u $USER:$TOKEN https://x.org",
    "GPIO pin 1234",
    "the values 3,1415926535 and 2,7182818284",
    "081125 583030 27 INFO dfs.FSNamesystem: BLOCK*",
    "status: 200 len: 2767 time: 0.7891314",
    "订单号 20240101",
    "My account opened 2019-01-05, why is it slow?",
    "I topped up my account by 100 000 000 coins and created it in 2019-2020.",
    "conto 1000 1500 2000 in ordine",
    "The current account deficit was 123 456 million.",
    "bank account balance: 2023 2024, bank account: 2023 2024, my account is 12 500 dollars",
    "my tin can weighs 100 200 300 g",
    "tax id 2020 2021 2022",
    "spi 3000 4000 5000 baud",
    "recovery words like apple tree house garden river stone light music paper chair table pan",
    "open https://shop.example.net/home/products/list",
    "the title in src/home/page/index.js",
    "There were 1500000 people on the phone",
    "Call compute with modulus 1000000007",
    "Contact support for error code 80070057",
    "Order 4155550134 is what I called about",
    "Does the oil filter 481-29-7730 fit?",
    "the pump (552-88-4041) leaks",
    "After the move to nginx 1.25.130.7 the pages load slowly.",
    "It crashes with Outlook (16.0.145.20) alone.",
    "pip says that libfoo-6.10.106.9 is old",
    "FROM registry/app:4.19.72.99",
    "Shifts: Mon 0730-1400, Tue 0945-1615, Wed 0900-1445",
    "The crate is 6706 4808 9506 mm.",
    "Move it from bin 215-17-3791 to shelf 315-17-3792.",
]
# Form and ranges alone, by name: a check that is lost from the table has to fail
UNCHECKED = {"tax number", "PK CNIC", "VN CCCD", "BR RG", "VIN", "KR RRN, any", "document"}
UNCHECKED |= {"US ITIN", "UK NINO", "US EIN", "DK CPR", "AR DNI", "MX RFC", "ID NIK", "MY NRIC"}
UNCHECKED |= {"IN PAN"}


def some(count, letters=MIXED, start=37):
    return letters[start : start + count]


KEYS = {
    "OpenAI project": "sk-proj-" + some(48),
    "OpenAI": "sk-" + some(48),
    "OpenAI, old": "sk-" + some(20) + "T3Blbk" + "FJ" + some(20),
    "Anthropic": "sk-ant-api03-" + some(80) + "-AA",
    "OpenRouter": "sk-or-v1-" + some(64, HEX),
    "Hugging Face": "hf_" + some(34),
    "Hugging Face, letters alone": "hf_" + "QwXrTyBi" * 4 + "Zq",
    "of any maker": "phc_" + some(43),
    "npm, one digit": "npm_" + "QwxRtyBi" * 4 + "7Zqa",
    "Docker, spelt": "dckr_pat_" + "hello-World_again7" + "-Words_too",
    "Sentry": "sntrys_" + "eyJpYXQi/OjE3+" * 4,
    "with a UUID": "access-production-0b93b7d9-46bf-5407-4e32-48c801bef750",
    "Google": "AIza" + some(35),
    "Google OAuth": "ya29." + some(60),
    "Google client": "GOCSPX-" + some(28),
    "GitHub": "ghp_" + some(36),
    "GitHub, fine-grained": "github_pat_" + some(22) + "_" + some(59),
    "GitLab": "glpat-" + some(20),
    "Slack": "xoxb-" + "123456789012-1234567890123-" + some(24),
    "Slack app": "xapp-1-A0" + some(60),
    "AWS": "AKIA" + "IOSFODNN7" + "EXAMPLE",
    "Stripe": "sk_live_" + some(24),
    "Stripe test": "pk_test_" + some(24),
    "SendGrid": "SG." + some(22) + "." + some(43),
    "Twilio": "SK" + some(32, HEX),
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + some(80),
    "Telegram": "123456789:" + some(35),
    "Mailchimp": some(32, HEX) + "-us12",
    "Square": "sq0csp-" + some(43),
    "JWT": "eyJ" + some(30) + ".eyJ" + some(60) + "." + some(43),
    "JWT of real length": "eyJ" + some(300) + ".eyJ" + some(900) + "." + some(342),
}
NAMED = {
    "api_key = '{}'": some(32),
    "co = Cohere('{}')": some(40),
    'export OPENAI_API_KEY="{}"': some(40),
    "the secret key is {} .": some(24, HEX),
    '{{"client_secret": "{}"}}': some(32),
    "access token: {}": some(40),
    "Authorization: Bearer {}": some(40),
    "JWT_SECRET={}": some(32),
    "private key: {}": some(64, HEX),
    "aws_secret_access_key = '{}'": some(40),
    **dict.fromkeys(
        ("TELEGRAM_BOT_TOKEN={}", "my_github_token = '{}'", "AUTH0_TOKEN: {}", "my_hf_token: {}"),
        some(20),
    ),
}
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


# Passwords on command lines and in other languages, keys of more makers, phones as their people
# write them, mail under international domains and within links.
ELSEWHERE = {
    "PASSWORD": [
        "curl -u admin:⟨s3cretpw⟩ https://x.org",
        "sshpass -p ⟨'tr0ub4'⟩ ssh root@host",
        "mysql -u root -p⟨S3cret!x⟩ shop",
        "Mein Passwort lautet ⟨Sommer2024!⟩",
        "пароль от почты ⟨Zaq12wsx⟩",
        "我的密码：⟨Wang8899⟩",
        "密码是⟨Abc12345!⟩，请登录",
        "şifrem ⟨Ankara06!⟩",
        "パスワードは⟨Sakura99⟩です",
        "비밀번호는 ⟨Seoul88x⟩ 입니다",
        "my pin is ⟨3941⟩",
        "the wifi key: ⟨Abc12345!⟩",
        "export SMTP_PASSWORD=⟨wolk3.sieben⟩",
        "define('DB_PASSWORD', '⟨tulpe-Regen7⟩');",
        "<password>⟨blau4-kran⟩</password>",
        '<add key="DbPassword" value="⟨Kran5Turm⟩" />',
        "redis-cli -h cache -a ⟨Kr4nTurm99⟩ ping",
        "smbclient //srv/share -U anna%⟨Kr4nTurm9⟩",
        "openssl enc -aes-256-cbc -k ⟨Kr4nTurm9⟩ -in a",
        "htpasswd -b users anna ⟨Kr4nTurm9⟩",
        "net use Z: \\\\srv\\data /user:anna ⟨Kr4nTurm9⟩",
        "DB_PASS=⟨Kr4nTurm9⟩",
        "A jelszavam: ⟨Szia1234⟩, a jelszava: ⟨Szia1234⟩",
        "mongosh -u root -p ⟨Kr4nTurm9⟩",
        "requests.get(url, auth=('anna', '⟨Kr4nTurm9⟩'))",
        "CREATE USER anna IDENTIFIED BY '⟨Kr4nTurm9⟩'",
        "mi pin es ⟨4471⟩, мой пин ⟨4471⟩, Mein PIN ist ⟨4471⟩",
        *(
            f"{word} ⟨Kr4nTurm9⟩"
            for word in (
                *("passord:", "adgangskode:", "lösenord är", "salasana:", "heslo je", "jelszó:"),
                *("κωδικός:", "סיסמה:", "كلمة المرور:", "पासवर्ड:", "mật khẩu là", "รหัสผ่าน:"),
                *("kata sandi:", "parolă:"),
            )
        ),
    ],
    "API_KEY": [
        f"⟨hvs.{some(24)}⟩",
        f"⟨dapi{some(32, HEX)}⟩",
        f"⟨whsec_{some(32)}⟩, $⟨2b$12${some(53)}⟩",
        f"⟨key-{some(32, HEX)}⟩",
        f"⟨pat{some(14)}.{some(64, HEX)}⟩",
        f"⟨sl.u.{some(130)}⟩",
        f"⟨EAAA{some(60)}⟩",
        f"Authorization: ⟨SSWS 00{some(40)}⟩",
        f"[Interface]\n⟨PrivateKey = {some(42)}A=⟩",
        f"Cookie: ⟨PHPSESSID={some(26)}⟩",
        f"⟨xprv{some(107, '123456789ABCDEFGHJKLMNPQRSTUVWXYZ' * 5)}⟩",
        f"⟨https://discord.com/api/webhooks/123456789012345678/{some(68)}⟩",
        f"seed phrase: ⟨{'legal winner thank year ' * 3}yellow wave sausage⟩",
        f"mnemonic is '⟨{'legal winner thank year ' * 3}yellow wave sausage⟩ and nothing else",
        f"Seed phrase ⟨{'legal winner thank year ' * 3}yellow wave sausage⟩",
        "⟨5HueCGU8rMjxEXxiPuD5BDku4MkFqeZyd4dZ1jvhTVqvbTLvyTJ⟩",
        f"Cookie: session=⟨{some(32)}⟩",
        f"VERCEL_TOKEN=⟨{some(24)}⟩",
        f"PAT ⟨{'abcdefgh2345' * 4}abc7⟩",
    ],
    "DATE_OF_BIRTH": [
        "дата рождения: ⟨8 марта 1977⟩",
        "我出生于⟨1973年8月14日⟩",
        "Ich bin am ⟨10.05.2001⟩ geboren",
        "tanggal lahir ⟨24 Mei 1971⟩",
        "생년월일: ⟨1972년 7월 23일⟩",
    ],
    "LICENSE_PLATE": ["госномер ⟨Н080ЕВ51⟩", "车牌号：⟨京A87486⟩"],
    "COORDINATES": ["I live at ⟨57.03786, -5.29665⟩"],
    "HANDLE": [
        "scp x:/home/⟨annlee⟩/a.py",
        "file:///Users/⟨annlee⟩/a",
        "C:\\Users\\⟨jkowalski⟩\\Desktop",
        "微信号：⟨xiaomei_8421⟩",
    ],
    "NATIONAL_ID": [
        "my adhar no is ⟨2341 2341 2346⟩",
        "Führerschein-Nr. ⟨V253JPZS55⟩",
        "паспорт ⟨45 12 345678⟩",
        "routing number ⟨111000025⟩",
        "⟨X1234567⟩ is my passport number",
        "⟨234123412346⟩ is my Aadhaar number",
        "CPF in my app: ⟨390.533.447-05⟩",
        "My passport code is ⟨X1234567⟩",
        "mi cédula es ⟨1.032.447.918⟩, NIP ⟨6762034650⟩, رقم الهوية ⟨1084821903⟩",
    ],
    "US_SSN": ["My social security number, in case you need it, is ⟨219-45-9876⟩."],
    "PHONE_NUMBER": [
        "⟨2127365000⟩ is my telephone number",
        "Here's my cell in case of issues ⟨(212) 736-5000⟩",
        "My phone number, next line:\n⟨(212) 736-5000⟩",
        "You can text me any errors at ⟨212-736-5000⟩",
        "My zip is 10001 and ⟨212-736-5000⟩ is my phone",
        "her number is ⟨07911 284 665⟩, joignable au ⟨0642187793⟩, me liga no ⟨11984721630⟩",
        "κάλεσέ με στο ⟨6974 481 903⟩, contattami al ⟨347 882 1409⟩, ফোন ⟨01712482190⟩",
        "call ⟨41O-867-23O1⟩",
        '{"user_phone": "⟨6505551234⟩"}',
        "phone_number: ⟨5551234⟩",
        'data["user_phone"] = "⟨45 12 88 61⟩"',
        "home_tel=⟨12345678⟩",
        "phone,name,street,city,country,remarks of the person who called us last,Address line 2\n"
        "⟨5551234⟩,Ann,Main Street,York,UK,none at all,none",
        "call ⟨1 nine 1 nine 2 nine 6 four 9 seven⟩",
        "name,phone\nAna,⟨4155550134⟩",
        "Mi teléfono es ⟨612 345 678⟩",
        "Здравствуйте, меня зовут Иван, ⟨8 916 123-45-67⟩",
        "Me chama no zap ⟨(11) 91234-5678⟩",
        "Dzień dobry, proszę o kontakt w sprawie umowy, ⟨501 234 567⟩",
        "请联系⟨138 1234 5678⟩",
        "電話番号は⟨090-1234-5678⟩です",
        "⟨010-1234-5678⟩로 연락 주세요",
        "id,phone\n7,⟨4155550134⟩,x",
    ],
    "CREDIT_CARD": [
        "2026-01-02,20,⟨4242424242424242⟩,12/27",
        "карта ⟨2200000000000004⟩",
        "⟨4539148803436467⟩ is the number on my card",
        "Please charge my credit card for this order: ⟨4539 1488 0343 6467⟩",
        "⟨622848 0000000000000⟩是我的卡",
    ],
    "EMAIL_ADDRESS": [
        "schreib an ⟨info@bücher.de⟩ bitte",
        "⟨ivan@почта.рф⟩",
        "请写信到⟨ana@web.de⟩谢谢",
        "https://x.com/?⟨m=ana.lee%40web.de⟩",
        "mailto:⟨ana.lee@web.de⟩?subject=hi",
    ],
    "IP_ADDRESS": ["服务器⟨93.184.215.14⟩坏了"],
    "IBAN_CODE": [
        "kontonummer ⟨1503.13.24235⟩, číslo účtu ⟨19-2000145399/0800⟩",
        "my account number is ⟨85731890⟩",
        "CLABE: ⟨002180117861008907⟩",
        "my account: ⟨85731890⟩",
    ],
    "CRYPTO": [
        "⟨rN7n7otQDd6FczFgLdSqtcsAUxDkw6fzRH⟩",
        "⟨cosmos1fl48vsnmsdzcv85q5d2q4z5ajdha8yu34mf0eh⟩",
        "my solana wallet ⟨7EcDhSYGxXyscszYEp35KHN8vvw3svAuLKTzXwCFLtV⟩",
    ],
}


@pytest.mark.parametrize(
    "text",
    [
        "Employee record\nName: J. Doe\n⟨219-45-9876⟩\nStart: Monday",
        "Mary Kowal, ⟨219-45-9876⟩, and the patient ⟨219-45-9877⟩",
        "Our firewall blocked ⟨18.206.107.24⟩ again",
        "the attacker ⟨18.206.107.24⟩, then ⟨18.206.107.25⟩",
        "ssh deploy@⟨18.206.107.24⟩",
        "guy ⟨481-29-7730⟩, tenant ⟨512-44-8831⟩, jane smith (⟨519-44-8832⟩)",
        "el cliente ⟨481-29-7730⟩ y mi esposa ⟨512-44-8831⟩",
        "my case: they took me for jane ⟨481-29-7730⟩, a list with al ⟨512-44-8831⟩",
        "driver ⟨481-29-7730⟩ ran late; driver: bob ⟨415-555-2671⟩",
        "in order to verify me use ⟨481-29-7730⟩; thanks a lot, mine was ⟨481-29-7731⟩",
        "page 2: ⟨4539 1488 0343 6467⟩",
        "⟨4539 1488 0343 6467⟩\n⟨5500 0055 5555 5559⟩\n⟨3782 822463 10005⟩\n2210 Elm St",
        "bob ⟨24.17.88.201⟩, Jane (⟨24.17.88.202⟩), guest-⟨24.17.88.203⟩",
        "/var/log/auth.log:⟨124.17.88.201⟩ failed",
        "1 2 3 4 5 6 7 8 9 10 11 12 ⟨055-979-7114⟩",
        "His number⁴ is ⟨481-29-7730⟩², call ⟨415-555-2671⟩¹ or ⟨(415) 555-2672⟩³.",
        "PATIENT MRN ⟨00345678⟩, PASSPORT NO ⟨X1234567⟩, DL ⟨D1234567⟩",
        "⟨jane@web.com⟩¹ and ⟨54362315K⟩²",
    ],
)
def test_a_word_before_a_number_that_names_no_thing_leaves_it_found(text):
    assert marked(unmarked(text))[0] == text


def test_a_word_of_another_language_names_no_document():
    for text, drops in {
        "ein Kasten sin tapa, 54362315K": None,
        "DNI 54362315K": "NATIONAL_ID",
        "BSN: 111222333": "NATIONAL_ID",
        "her identity number is 54362315K": "NATIONAL_ID",
    }.items():
        found = PATTERNS.find(text)
        assert [one.type for one in found] == ["NATIONAL_ID"], text
        place = (found[0].type, text, found[0].start, found[0].end)
        assert PrivacyConfig().first_that_drops([place]) == drops, text


@pytest.mark.parametrize("type", {**FOUND, **ELSEWHERE})
def test_values_are_found_whole(type):
    for text in (*FOUND.get(type, ()), *ELSEWHERE.get(type, ())):
        detector = LINKS if type == "URL" else PATTERNS
        assert marked(unmarked(text), detector.find) == (text, {type})


def test_what_only_looks_like_one_is_left():
    assert {text: found for text in LEFT if (found := PATTERNS.find(text))} == {}


@pytest.mark.parametrize("sentence", ["⟨{}⟩", "curl -H 'x: ⟨{}⟩'", "KEY=⟨{}⟩\n", "(⟨{}⟩)."])
def test_keys_are_found_whole(sentence):
    for maker, key in KEYS.items():
        text = sentence.format(key)
        found, types = marked(unmarked(text))
        assert types == {"API_KEY"}, maker
        assert found in (text, text.replace("KEY=⟨", "⟨KEY=")), maker


def test_values_behind_a_name_are_found():
    for sentence, value in NAMED.items():
        assert marked(sentence.format(value)) == (sentence.format(f"⟨{value}⟩"), {"API_KEY"})


def test_private_keys_are_found_from_heading_to_end():
    for block in BLOCKS.values():
        text = f"here: ⟨{block}⟩"
        assert marked(unmarked(text)) == (text, {"PRIVATE_KEY"})
    text = f"⟨{BLOCKS['RSA']}⟩\nand\n⟨{BLOCKS['OpenSSH']}⟩\n?"
    assert marked(unmarked(text))[0] == text, "two keys"
    putty = f"PuTTY-User-Key-File-2: ssh-rsa\nPrivate-Lines: 8\n{BODY}\nPrivate-MAC: 00"
    assert some(64) not in mask(putty, PATTERNS.find(putty))


@given(st.text(max_size=200))
def test_any_text_is_searched(text):
    for search in (api_keys, passwords, private_keys):
        assert all(0 <= start < end <= len(text) for start, end in search(text))


@pytest.mark.parametrize("kind", IDENTIFIERS, ids=lambda one: one.name)
def test_national_numbers_are_found_by_their_check(kind):
    """Of the ten last digits or twenty-six last letters, few are right."""
    text = f"Hello, {kind.example}."
    found = [text[start:end] for start, end in national_ids(text)]
    assert found
    assert all(text.endswith(f"{one}.") for one in found)
    assert "<NATIONAL_ID>." in mask(text, PATTERNS.find(text))
    if kind.name not in UNCHECKED:
        last = string.digits if kind.example[-1].isdigit() else string.ascii_uppercase
        right = [one for one in last if list(national_ids(kind.example[:-1] + one))]
        assert 1 <= len(right) <= 3


def test_alone_most_national_numbers_need_a_word_beside_them():
    assert is_national_id("44051401359"), "the check alone does not ask for the word"
    assert PATTERNS.find("44051401359") == []


@pytest.mark.parametrize(
    ("valid", "address"),
    [
        (is_base58check, "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa"),
        (is_base58check, "LM2WMpR1Rp6j3Sa59cMXMs1SPzj9eXpGc1"),
        (is_bech32, "bc1qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t4"),
        (is_bech32, "bc1p0xlxvlhemja6c4dqv22uapctqupfhlxm9h8z3k2e72q4k9hcz7vqzk5jj0"),
    ],
)
def test_one_changed_letter_fails_a_wallets_check(valid, address):
    assert valid(address)
    changed = [
        address[:at] + ("2" if address[at] != "2" else "3") + address[at + 1 :]
        for at in range(4, len(address))
    ]
    assert not any(map(valid, changed))


# Disguises

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
    "IP_ADDRESS": "93.184.215.14",
    "NATIONAL_ID": "390.533.447-05",
}
SEPARATORS = [
    ".", "/", "_", "-", "–", "—", "  ", "\n", "\r\n", " - ", " / ", "\u00a0", "\u2009", "|"
]  # fmt: skip


@pytest.mark.parametrize("separator", SEPARATORS)
def test_cards_and_accounts_between_any_separators(separator):
    for type, number in (
        ("CREDIT_CARD", "4111 1111 1111 1111"),
        ("CREDIT_CARD", "3782 822463 10005"),
        ("CREDIT_CARD", "5555 5555 5555 4444"),
        ("IBAN_CODE", "DE89 3704 0044 0532 0130 00"),
    ):
        text = f"pay ⟨{number.replace(' ', separator)}⟩ now"
        assert marked(unmarked(text)) == (text, {type})


INVISIBLE = st.sampled_from(["\u200b", "\u00ad", "\u2060", "\ufeff", "\u200d", "\ufe0f", ""])


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(sorted(NUMBERS)), st.sampled_from((None, *DIGITS)), st.data())
def test_digits_of_any_script_are_found_and_replaced(type, digits, data):
    value = NUMBERS[type].translate(digits or {})
    value = "".join(letter + data.draw(INVISIBLE) for letter in value)
    text = f"Hello, {value}, thanks"
    found = PATTERNS.find(text)
    assert [one.type for one in found] == [type]
    made = fold(clean([text], [found], CONFIG, KEY)[0]).text
    assert made.startswith("Hello, ")
    assert made.endswith(", thanks")
    assert canonical(type, NUMBERS[type]) not in canonical(type, made)
    assert PATTERNS.find(mask(text, found)) == []
