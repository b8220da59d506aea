"""Who may ask: API keys, of which only hashes are kept, and how many requests each may have at once.

A key file has a line for each key: its name, the SHA-256 of the key in hex, and, if there is one, the most requests
at once. Keys are made here, of 256 random bits, so that a plain hash of them tells nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tamis.core.errors import Busy, InvalidInput, Refused

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
HASH = re.compile(r"[0-9a-f]{64}")
RETRY_S = 1


@dataclass(frozen=True)
class Key:
    """One line of a key file."""

    name: str
    sha256: str
    most_at_once: int | None = None


class KeyRing:
    """All keys of a server; none: everybody may ask, as the owner ""."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        self.keys = tuple(keys)
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()

    @classmethod
    def read(cls, path: str | Path) -> KeyRing:
        """From a key file. Raises InvalidInput for a line that is none, a name that stands twice, and an empty file."""
        keys = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            words = line.split("#")[0].split()
            if not words:
                continue
            fits = len(words) in (2, 3) and NAME.fullmatch(words[0]) and HASH.fullmatch(words[1])
            if not fits or not all(word.isdigit() for word in words[2:]):
                raise InvalidInput(
                    f"line {number} of {path} is no key; a line has a name, a SHA-256 in hex and, if wanted, the most "
                    "requests at once. `tamis serve --new-key NAME` writes one."
                )
            keys.append(Key(words[0], words[1], int(words[2]) if len(words) == 3 else None))
        names = [key.name for key in keys]
        if not keys or len(set(names)) < len(names):
            raise InvalidInput(f"{path} holds {len(keys)} keys named {names}; give at least one, no name twice.")
        return cls(keys)

    def owner(self, authorization: str | None) -> Key:
        """Whose key an Authorization header holds. Raises Refused if it is nobody's.

        Every key is compared, each in the same time, so that the answer's delay tells nothing.
        """
        if not self.keys:
            return Key("", "")
        scheme, _, token = (authorization or "").partition(" ")
        given = hashlib.sha256(token.strip().encode()).hexdigest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(given, key.sha256):
                found = key
        if found is None or scheme.lower() != "bearer":
            raise Refused("the API key is missing or not known. Send it as 'Authorization: Bearer KEY'.")
        return found

    @contextmanager
    def running(self, key: Key) -> Iterator[None]:
        """While one request of a key runs. Raises Busy if it has as many as it may."""
        with self._lock:
            if key.most_at_once is not None and self._running[key.name] >= key.most_at_once:
                raise Busy(
                    f"this key has {key.most_at_once} requests running and may not have more. Try again.",
                    retry_after_s=RETRY_S,
                )
            self._running[key.name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[key.name] -= 1


def new_key(path: str | Path, name: str, most_at_once: int | None = None) -> str:
    """Make a key, add its hash to the file, which only its owner may read, and return the key: it is kept nowhere."""
    if not NAME.fullmatch(name):
        raise InvalidInput(f"key name {name!r}; use 1 to 64 letters, digits, '.', '_' and '-'.")
    path = Path(path)
    if path.exists() and name in {key.name for key in KeyRing.read(path).keys}:
        raise InvalidInput(f"{path} holds a key named {name!r}; use another name, or remove its line first.")
    key = f"tamis-{secrets.token_urlsafe(32)}"
    limit = "" if most_at_once is None else f" {most_at_once}"
    path.touch(mode=0o600, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{name} {hashlib.sha256(key.encode()).hexdigest()}{limit}\n")
    return key
