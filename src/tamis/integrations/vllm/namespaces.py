"""Namespaces that cannot be guessed: a name with a code that only the holder of a secret can make.

Whoever may send requests to vLLM may name any namespace, since its engine does not see API keys. Where the operator
asks for signed ones (`config.Settings.namespaces`), a name stands with the first 16 bytes of its HMAC-SHA256 (RFC 2104)
behind "~": `/v1/documents` hands them out to API keys, `client.signed_namespace` makes them elsewhere. Plain Python.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from pathlib import Path

from tamis.core.errors import InvalidInput

SECRET_BYTES = 16  # at least
_MARK, _DIGITS, _FOR = "~", 32, b"tamis namespace\0"


def sign(secret: bytes, name: str) -> str:
    """The name with its code. Raises InvalidInput for a secret that is too short."""
    if len(secret) < SECRET_BYTES:
        raise InvalidInput(
            f"the secret of namespaces has {len(secret)} bytes; give {SECRET_BYTES} random ones or more."
        )
    code = hmac.new(secret, _FOR + name.encode(errors="replace"), hashlib.sha256).hexdigest()
    return f"{name}{_MARK}{code[:_DIGITS]}"


def verified(secret: bytes, signed: str) -> str:
    """The name that was signed with this secret. Raises InvalidInput, for a name without a code, too."""
    name, _, _ = signed.rpartition(_MARK)
    if not name or not hmac.compare_digest(sign(secret, name).encode(), signed.encode(errors="replace")):
        raise InvalidInput(
            "tamis.namespace is missing or not signed for this server; give the `namespace` that GET /v1/documents "
            "answers, or one that the server's operator signed."
        )
    return name


@functools.cache
def secret_of(file: str) -> bytes:
    """What stands in the file, blanks around it left out; read once a process. Raises InvalidInput."""
    try:
        secret = Path(file).expanduser().read_bytes().strip()
    except (OSError, RuntimeError, ValueError) as e:  # "~" of nobody's home, a path with a zero byte
        raise InvalidInput(f"namespace_secret {file!r} cannot be read ({e}); name a file that vLLM may read.") from e
    sign(secret, "")
    return secret
