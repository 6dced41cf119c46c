"""Addresses of crypto wallets, each by its own check: Base58Check, Bech32 and Bech32m, Ethereum's
mixed case.

Knows how such addresses are written. Sources: Bitcoin's Base58Check, BIP 173 and BIP 350, EIP-55,
and FIPS 202 for Keccak-f.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from eyas.privacy.recognizer import Place

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
BECH32_CONST, BECH32M_CONST = 1, 0x2BC830A3

# Bitcoin 1 and 3, Litecoin L and M, Dogecoin D, Tron T, Zcash t.
BASE58_ADDRESS = re.compile(rf"(?<![\w+/])[13LMDTt][{BASE58}]{{24,34}}(?![\w+/])")
BECH32_ADDRESS = re.compile(r"(?<!\w)(?:bc|tb|ltc)1[02-9ac-hj-np-z]{11,87}(?!\w)", re.I)
ETHEREUM_ADDRESS = re.compile(r"(?<!\w)0x[0-9a-fA-F]{40}(?!\w)")


def wallets(text: str) -> Iterator[Place]:
    """Wallet addresses whose checksum is right. Ethereum's have one only where capitals and small
    letters are mixed.
    """
    for pattern, valid in (
        (BASE58_ADDRESS, is_base58check),
        (BECH32_ADDRESS, is_bech32),
        (ETHEREUM_ADDRESS, is_ethereum),
    ):
        for match in pattern.finditer(text):
            if valid(match.group()):
                yield "CRYPTO", *match.span()


def is_base58check(address: str) -> bool:
    """Whether it is a version, 20 bytes of hash, and the first four bytes of their double SHA-256."""
    number = 0
    for letter in address:
        number = number * 58 + BASE58.index(letter)
    leading = len(address) - len(address.lstrip("1"))
    data = bytes(leading) + number.to_bytes((number.bit_length() + 7) // 8, "big")
    return len(data) in (25, 26) and _double_sha256(data[:-4])[:4] == data[-4:]


def base58check(payload: bytes) -> str:
    """The address of a version byte and a hash."""
    data = payload + _double_sha256(payload)[:4]
    number, letters = int.from_bytes(data, "big"), ""
    while number:
        number, rest = divmod(number, 58)
        letters = BASE58[rest] + letters
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + letters


def is_bech32(address: str) -> bool:
    """Whether the six last letters are the check of BIP 173 or of BIP 350."""
    if address not in (address.lower(), address.upper()):
        return False
    prefix, _, data = address.lower().rpartition("1")
    if not prefix or len(data) < 6 or set(data) - set(BECH32):
        return False
    return _bech32_checksum(prefix, [BECH32.index(letter) for letter in data]) in (
        BECH32_CONST,
        BECH32M_CONST,
    )


def bech32(prefix: str, values: list[int]) -> str:
    """The BIP 173 address of values of five bits, the first of which is the version."""
    check = _bech32_checksum(prefix, [*values, *[0] * 6]) ^ BECH32_CONST
    return f"{prefix}1" + "".join(
        BECH32[value] for value in [*values, *[(check >> 5 * (5 - at)) & 31 for at in range(6)]]
    )


def is_ethereum(address: str) -> bool:
    """Whether the case of the letters is that of EIP-55, or there is no case to check."""
    digits = address[2:]
    return digits in (digits.lower(), digits.upper()) or digits == checksum_case(digits)


def checksum_case(digits: str) -> str:
    """EIP-55: a letter is a capital where the hex digit of the Keccak-256 of the small ones is 8 or
    more.
    """
    small = digits.lower()
    return "".join(
        letter.upper() if int(check, 16) >= 8 else letter
        for letter, check in zip(small, keccak256(small.encode()).hex(), strict=False)
    )


def keccak256(data: bytes) -> bytes:
    """Ethereum's hash: Keccak with the padding from before SHA-3, for inputs of one block (fewer
    than 136 bytes).
    """
    rate = 136
    assert len(data) < rate
    block = bytearray(data.ljust(rate, b"\0"))
    block[len(data)] ^= 0x01
    block[-1] ^= 0x80
    lanes = [int.from_bytes(block[at : at + 8], "little") for at in range(0, rate, 8)] + [0] * 8
    return b"".join(
        lane.to_bytes(8, "little")
        for lane in _keccak_f([lanes[5 * y : 5 * y + 5] for y in range(5)])[0][:4]
    )


def _keccak_f(rows: list[list[int]]) -> list[list[int]]:
    """Keccak-f[1600] on lanes rows[y][x]: theta, rho and pi, chi, iota, 24 times."""
    constant = 1
    for _ in range(24):
        parity = [rows[0][x] ^ rows[1][x] ^ rows[2][x] ^ rows[3][x] ^ rows[4][x] for x in range(5)]
        change = [parity[x - 1] ^ _rotated(parity[(x + 1) % 5], 1) for x in range(5)]
        rows = [[lane ^ change[x] for x, lane in enumerate(row)] for row in rows]
        x, y, current = 1, 0, rows[0][1]
        for step in range(24):
            x, y = y, (2 * x + 3 * y) % 5
            current, rows[y][x] = rows[y][x], _rotated(current, (step + 1) * (step + 2) // 2)
        rows = [[row[x] ^ (~row[(x + 1) % 5] & row[(x + 2) % 5]) for x in range(5)] for row in rows]
        for bit in range(7):
            rows[0][0] ^= (constant & 1) << ((1 << bit) - 1)
            constant = (constant << 1) ^ (0x171 if constant & 0x80 else 0)
    return rows


def _rotated(lane: int, by: int) -> int:
    by %= 64
    return (lane << by | lane >> (64 - by)) & ((1 << 64) - 1)


def _double_sha256(data: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(data).digest()).digest()


def _bech32_checksum(prefix: str, values: list[int]) -> int:
    generator = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
    check = 1
    for value in [
        *(ord(letter) >> 5 for letter in prefix),
        0,
        *(ord(letter) & 31 for letter in prefix),
        *values,
    ]:
        top = check >> 25
        check = (check & 0x1FFFFFF) << 5 ^ value
        for bit in range(5):
            check ^= generator[bit] if top >> bit & 1 else 0
    return check
