"""The secret key of hashes and surrogates. With it a suspected value can be confirmed in a ledger;
without it a hash only says which values are equal.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from eyas.errors import ConfigError

VARIABLE = "EYAS_PRIVACY_KEY"
NUM_BYTES = 32
SHORTEST = 16  # characters of a key given by hand
HASH_DIGITS = 16


def key_path() -> Path:
    """The key file in the user's config folder."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "eyas" / "privacy.key"


def privacy_key() -> bytes:
    """The key: from EYAS_PRIVACY_KEY, else from the key file, made at the first use with mode 0600.
    Raises ConfigError for a key that can be guessed or a file that others can read.
    """
    if given := os.environ.get(VARIABLE, ""):
        if len(given) < SHORTEST:
            raise ConfigError(
                f"{VARIABLE} is shorter than {SHORTEST} characters",
                "give a random one (openssl rand -hex 32)",
            )
        return hashlib.sha256(given.encode()).digest()
    path = key_path()
    try:
        if not path.exists():
            _make(path)
        mode, key = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot make or read the key file {path}", f"set {VARIABLE} instead ({error.strerror})"
        ) from error
    if mode & 0o077:
        raise ConfigError(f"others can read the key file {path}", f"chmod 600 {path}")
    if len(key) != NUM_BYTES:
        raise ConfigError(
            f"the key file {path} is damaged",
            "restore it, or delete it for a new key (hashes and surrogates change)",
        )
    return key


def key_place() -> str:
    """Where `privacy_key` reads: "variable" or "file"."""
    return "variable" if os.environ.get(VARIABLE) else "file"


def _make(path: Path) -> None:
    """Write the file whole or not at all; of several processes the first to link it wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(secrets.token_bytes(NUM_BYTES))
    try:
        os.link(partial, path)
    except FileExistsError:
        pass  # another process was first
    finally:
        partial.unlink()


def keyed(key: bytes, *parts: str) -> bytes:
    """HMAC-SHA256 over the parts, each with its length: no two lists give the same bytes."""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return hmac.digest(
        key, b"".join(len(part).to_bytes(8, "big") + part for part in encoded), "sha256"
    )


def key_id(key: bytes) -> str:
    """Tells keys apart without showing them; part of artifacts' identities."""
    return keyed(key, "key id").hex()[:HASH_DIGITS]
