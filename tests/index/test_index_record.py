from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from tamis.core.errors import InvalidInput, StoreDamaged
from tamis.index.encode import Bits, trivial_bits
from tamis.index.record import HEADER_BYTES, Record, document_id, dump, load
from tamis.index.spec import IndexSpec

MakeRecord = Callable[..., Record]


def test_round_trip(spec: IndexSpec, make_record: MakeRecord, random_bits: Callable[..., Bits]) -> None:
    record = make_record(7, spec)
    again = load(dump(record))
    assert again == record
    assert again.bits().equal(random_bits(2, 3, 5, seed=7))
    assert len(dump(record)) == HEADER_BYTES + len(record.payload)
    assert HEADER_BYTES <= 96


def test_header_bytes_are_the_written_layout(spec: IndexSpec) -> None:
    record = Record.of(trivial_bits(2, 3, 5, 8), document_id=bytes(range(16)), spec=spec, n_tokens=5)
    data = dump(record)
    assert data[:12] == b"TAMISREC\x01\x00\x00\x00"
    assert data[12:44] == bytes(range(16)) + spec.digest
    assert data[44:60] == bytes([5, 0, 0, 0, 2, 0, 3, 0, 8, 0, 0, 0, 2, 0, 0, 0])
    assert data[68:] == b"\xff\xf0"


def test_every_flipped_byte_is_noticed(spec: IndexSpec, make_record: MakeRecord) -> None:
    data = dump(make_record(1, spec))
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            hurt = bytearray(data)
            hurt[at] ^= flip
            with pytest.raises(StoreDamaged, match="tamis index --rebuild"):
                load(bytes(hurt))


def test_every_cut_and_any_tail_is_noticed(spec: IndexSpec, make_record: MakeRecord) -> None:
    data = dump(make_record(1, spec))
    for n in range(len(data)):
        with pytest.raises(StoreDamaged):
            load(data[:n])
    with pytest.raises(StoreDamaged, match="cut or padded"):
        load(data + b"\0")
    with pytest.raises(StoreDamaged, match="starts with"):
        load(b"plain text, and enough of it to be as long as a header would be, or longer")


def test_a_newer_format_says_so(spec: IndexSpec, make_record: MakeRecord) -> None:
    data = bytearray(dump(make_record(1, spec)))
    struct.pack_into("<H", data, 8, 2)
    with pytest.raises(StoreDamaged, match="written by a newer Tamis"):
        load(bytes(data))


def test_document_ids() -> None:
    ids = [1, 2, 128_000]
    same = [ids, tuple(ids), np.array(ids), np.array(ids, dtype=">i8"), torch.tensor(ids), torch.tensor(ids).int()]
    assert {document_id(x) for x in same} == {bytes.fromhex("ade71a7e2b943a840bcca6ade7a14b64")}
    assert document_id([1, 2]) != document_id([2, 1])
    for wrong in ([], [-1], [1 << 31], [1.5], [[1]], ["a"]):
        with pytest.raises(InvalidInput, match="token ids"):
            document_id(wrong)  # type: ignore[arg-type]


def test_a_record_must_be_consistent(
    spec: IndexSpec, make_record: MakeRecord, random_bits: Callable[..., Bits]
) -> None:
    record = make_record(1, spec)
    for change in ({"n_tokens": 0}, {"n_tokens": 80}, {"n_heads": 4}, {"document_id": b"x"}, {"payload": b""}):
        with pytest.raises(InvalidInput):
            replace(record, **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"3 heads; the index has 2 and 3|9 layers"):
        Record.of(random_bits(9, 3, 1), document_id=bytes(16), spec=spec, n_tokens=5)
