"""Addresses change with everything that changes keys and values, and with nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tamis.cache.keys import DocumentKey, PrefixKey, fingerprint_digest, prefix_keys
from tamis.core.errors import InvalidInput
from tamis.model.fingerprint import ModelFingerprint

ONE, TWO = b"1" * 16, b"2" * 16


def test_a_document_is_where_its_tokens_are_wherever_it_lies() -> None:
    key = DocumentKey.of([1, 2, 3], ONE)
    assert key == DocumentKey.of(np.array([1, 2, 3]), ONE) and hash(key) == hash(DocumentKey.of((1, 2, 3), ONE))
    others = [DocumentKey.of([1, 2], ONE), DocumentKey.of([1, 2, 3], TWO), DocumentKey.of([1, 2, 3], ONE, "document/b")]
    assert len({key, *others}) == len({k.name for k in (key, *others)}) == 4
    assert "document" in str(key)


def test_a_prefix_and_a_document_never_meet() -> None:
    assert DocumentKey("x", ONE, TWO) != PrefixKey("x", ONE, TWO)
    assert DocumentKey("x", ONE, TWO).name != PrefixKey("x", ONE, TWO).name
    with pytest.raises(InvalidInput, match="never share"):
        DocumentKey.of([1], ONE, "prefix")
    with pytest.raises(InvalidInput, match="never share"):
        prefix_keys([1, 2], ONE, block=1, namespace="document/mine")


@given(st.lists(st.integers(0, 3), min_size=0, max_size=12), st.lists(st.integers(0, 3), min_size=0, max_size=12))
def test_prefixes_share_addresses_as_far_as_they_agree(a: list[int], b: list[int]) -> None:
    keys = prefix_keys(a, ONE, block=3), prefix_keys(b, ONE, block=3)
    assert len(keys[0]) == len(a) // 3
    for i, (x, y) in enumerate(zip(*keys, strict=False), 1):
        assert (x == y) == (a[: 3 * i] == b[: 3 * i])


def test_a_block_depends_on_its_place() -> None:
    first, second = prefix_keys([1, 2, 1, 2], ONE, block=2)
    assert first != second


@pytest.mark.parametrize("bad", ["", "é", "a\n", "x" * 101])
def test_bad_namespaces(bad: str) -> None:
    with pytest.raises(InvalidInput, match="namespace"):
        DocumentKey.of([1], ONE, bad)


def test_bad_sizes() -> None:
    with pytest.raises(InvalidInput, match="fingerprint has 3 bytes; expected 16"):
        DocumentKey.of([1], b"abc")
    with pytest.raises(InvalidInput, match="digest"):
        DocumentKey("x", ONE, b"")
    with pytest.raises(InvalidInput, match="blocks of 0"):
        prefix_keys([1], ONE, block=0)


def test_every_field_of_the_model_counts() -> None:
    model = ModelFingerprint("a", "w", "t", "r", "d")
    changed = [dataclasses.replace(model, **{f.name: "x"}) for f in dataclasses.fields(model)]
    assert len({fingerprint_digest(m) for m in (model, *changed)}) == 6
    assert len(fingerprint_digest(model)) == 16
