"""Every error a user can meet, in one tree.

A message answers three questions: what came in, what is allowed, what to do next.
`code` is stable and may be matched by programs; the sentence may improve.
Errors about input are also `ValueError`s, so that callers need not know Tamis to catch them.
"""

from __future__ import annotations


class TamisError(Exception):
    """Base of everything Tamis raises on purpose."""

    code = "tamis"


class InvalidInput(TamisError, ValueError):
    """An argument is outside what the function allows."""

    code = "invalid_input"


class UnknownName(InvalidInput):
    """A name is not in a registry; the message lists the ones that are."""

    code = "unknown_name"


class Unavailable(TamisError, RuntimeError):
    """Something was asked for by name and cannot run here; the message says why."""

    code = "unavailable"


class ModelUnsupported(TamisError, ValueError):
    """The model's attention or rotary geometry is not one that Tamis has been proved on."""

    code = "model_unsupported"


class ModelNotFound(TamisError, FileNotFoundError):
    """No model by that name or path."""

    code = "model_not_found"


class ContextOverflow(InvalidInput):
    """The prompt does not fit the model's context."""

    code = "context_overflow"


class StoreMismatch(TamisError, ValueError):
    """A store was written for another model, tokenizer, tile size or thresholds."""

    code = "store_mismatch"


class StoreDamaged(TamisError, RuntimeError):
    """A store or one of its records cannot be trusted; the message says how to rebuild it."""

    code = "store_damaged"


class StoreBusy(TamisError, RuntimeError):
    """Another process holds the writer's lock."""

    code = "store_busy"


class DocumentUnreadable(InvalidInput):
    """A file holds no text that Tamis can read."""

    code = "document_unreadable"


class NothingFound(TamisError, LookupError):
    """There is nothing to answer from: no documents, or none that match."""

    code = "nothing_found"


class PoolFull(TamisError, MemoryError):
    """Fewer pages or bytes are free than were asked for; nothing was taken."""

    code = "pool_full"


class CacheFull(TamisError, MemoryError):
    """Documents of one request do not fit beside what is in use; the message has the bytes needed and available."""

    code = "cache_full"

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class Busy(TamisError, RuntimeError):
    """No more requests are taken now; `retry_after_s` says when to try again."""

    code = "busy"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Refused(TamisError, PermissionError):
    """Who asks is not known, or may not do this."""

    code = "refused"


class Cancelled(TamisError, RuntimeError):
    """A request was ended before it was done; the message says by what."""

    code = "cancelled"


class CacheTimeout(TamisError, TimeoutError):
    """Another request computes a document and did not finish in time."""

    code = "cache_timeout"


class NotCached(TamisError, LookupError):
    """A document is in no tier, and no way to compute it was given."""

    code = "not_cached"


class Diverged(TamisError, ArithmeticError):
    """A training run no longer gives numbers."""

    code = "diverged"


class BrokenInvariant(TamisError, AssertionError):
    """A bug of Tamis: the books of a cache do not agree with what it holds."""

    code = "broken_invariant"
