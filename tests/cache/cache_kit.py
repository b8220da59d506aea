"""Small documents with known contents, small tiers, and faults that are thrown on demand."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.cache.document import DocumentKV, Lease, Payload, Wanted
from tamis.cache.keys import DocumentKey
from tamis.cache.pool import PagePool
from tamis.cache.spec import KVSpec
from tamis.cache.tiers.accounting import accounting_tier
from tamis.cache.tiers.base import Medium, Tier
from tamis.cache.tiers.device import Device, device_tier
from tamis.cache.tiers.disk import disk_tier
from tamis.cache.tiers.host import host_tier

SPEC = KVSpec(n_layers=2, n_kv_heads=2, head_dim=4, dtype="float32")
PAGE = 8
MODEL = b"m" * 16


class Injected(RuntimeError):
    """Thrown on purpose."""


def wanted(number: int) -> Wanted:
    """Document `number`: 1 to 25 tokens, decided by the number."""
    return Wanted(DocumentKey.of([number, 7], MODEL), 1 + number * 5 % 25)


def payload(row: Wanted) -> Payload:
    """The keys and values of a document, decided by its key."""
    made = torch.Generator().manual_seed(int.from_bytes(row.key.digest[:4], "little"))  # type: ignore[attr-defined]
    return Payload.of(*torch.randn(2, *SPEC.shape(row.n_tokens), generator=made).unbind(0))


def pool(n_pages: int) -> PagePool:
    return PagePool(SPEC, n_pages, page=PAGE)


def tiers(folder: Path, *, device: int = 12, host: int = 8, disk: int = 60_000) -> list[Tier]:
    """Device and host of so many pages, disk of so many bytes."""
    return [
        device_tier(pool(device)),
        host_tier(SPEC, host * SPEC.page_bytes(PAGE), page=PAGE, pinned=False),
        disk_tier(folder, SPEC, MODEL, disk),
    ]


def counting(*budgets: int) -> list[Tier]:
    """Accounting tiers t0, t1, ... in which a token takes one byte."""
    return [accounting_tier(f"t{i}", budget, lambda n: n) for i, budget in enumerate(budgets)]


def same(a: Payload | None, b: Payload) -> bool:
    return a is not None and torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


def intact(tier: Tier, documents: Lease | tuple[DocumentKV, ...]) -> bool:
    """Whether leased documents still have the contents that their keys say."""
    medium = tier.medium
    assert isinstance(medium, Device)
    for d in documents:
        keys, values = medium.pool.read_tokens(d.pages, d.n_tokens)
        if not same(Payload.of(keys, values), payload(Wanted(d.key, d.n_tokens))):
            return False
    return True


class Faults:
    """Makes every so many calls of the given functions fail, at random."""

    def __init__(self, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share = 0.0
        self.thrown = 0
        self._rng = rng
        self._monkeypatch = monkeypatch

    def maybe(self, error: BaseException) -> None:
        if self._rng.random() < self.share:
            self.thrown += 1
            raise error

    def into(self, owner: Any, name: str, error: Callable[[], BaseException], *, after: bool = False) -> None:
        """Let `owner.name` fail sometimes, before it does anything, or after it has done its work."""
        real = getattr(owner, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            if not after:
                self.maybe(error())
            result = real(*args, **kwargs)
            if after:
                self.maybe(error())
            return result

        self._monkeypatch.setattr(owner, name, faulty)

    def everywhere(self, all_tiers: list[Tier]) -> None:
        """At allocation and copies of each tier, at fsync and rename of the disk."""
        for tier in all_tiers:
            medium: Medium = tier.medium
            self.into(medium, "claim", lambda: Injected("claim"))
            self.into(medium, "write", lambda: Injected("write"))
            self.into(medium, "write", lambda: OSError("written, then failed"), after=True)
            self.into(medium, "settle", lambda: Injected("settle"))
        self.into(os, "fsync", lambda: OSError("fsync"))
        self.into(os, "replace", lambda: OSError("rename"))
