from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import tamis
from tamis.core.errors import InvalidInput, NothingFound, StoreBusy, StoreDamaged, StoreMismatch
from tamis.core.table import close_tables, open_tables
from tamis.index.record import HEADER_BYTES, Record, document_id, dump
from tamis.index.spec import IndexSpec, Thresholds
from tamis.index.store import META, RECORDS, SPEC_KEY, RecordStore

MakeRecord = Callable[..., Record]


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "kb" if request.param == "disk" else None


def test_the_verbs(place: Path | None, spec: IndexSpec, make_record: MakeRecord) -> None:
    records = [make_record(i, spec, n_tokens=8 + i) for i in range(6)]
    ids = [r.document_id for r in records]
    with RecordStore.open(place, spec) as store:
        assert store.has(ids) == [False] * 6
        store.put(records[:4])
        assert store.has(ids) == [True] * 4 + [False] * 2
        assert store.get([ids[5], ids[0], ids[3], ids[0]]) == [None, records[0], records[3], records[0]]
        assert store.ids() == sorted(ids[:4])
        store.put([])
        store.remove([ids[0], ids[5]])
        assert len(store) == 3
        assert store.verify() == []
        stats = store.stats()
        assert (stats.documents, stats.tokens) == (3, 9 + 10 + 11)
        assert stats.record_bytes == sum(len(dump(r)) for r in records[1:4])
        assert stats.payload_bytes == stats.record_bytes - 3 * HEADER_BYTES
        assert stats.bytes_per_token == pytest.approx(stats.record_bytes / 30)
        assert stats.bytes_per_layer_head_1024_tokens == pytest.approx(stats.bytes_per_token * 1024 / 6)


def test_empty_store(place: Path | None, spec: IndexSpec) -> None:
    with RecordStore.open(place, spec) as store:
        assert (store.ids(), store.get([]), store.verify(), store.stats().documents) == ([], [], [], 0)
        assert store.stats().bytes_per_token == 0


def test_it_lasts_and_can_be_opened_without_a_spec(tmp_path: Path, spec: IndexSpec, make_record: MakeRecord) -> None:
    record = make_record(1, spec)
    with RecordStore.open(tmp_path, spec) as store:
        store.put([record])
    store.close()  # a second time does nothing
    with RecordStore.open(tmp_path, None, readonly=True) as store:
        assert store.spec == spec
        assert store.get([record.document_id]) == [record]
        with pytest.raises(StoreBusy, match="read-only"):
            store.put([record])


def test_closing_one_use_leaves_the_other(tmp_path: Path, spec: IndexSpec, make_record: MakeRecord) -> None:
    one, two = RecordStore.open(tmp_path, spec, create=True), RecordStore.open(tmp_path, spec)
    one.close()
    one.close()
    two.put([make_record(1, spec)])
    assert len(two) == 1
    two.close()


def test_nothing_there(tmp_path: Path, spec: IndexSpec) -> None:
    for options in ({"create": False}, {"readonly": True}):
        with pytest.raises(NothingFound, match="tamis index"):
            RecordStore.open(tmp_path / "none", spec, **options)
    assert not (tmp_path / "none").exists()
    open_tables(tmp_path / "other").write({"corpus": {b"a": b"b"}})
    close_tables(tmp_path / "other")
    with pytest.raises(NothingFound, match="no index yet"):
        RecordStore.open(tmp_path / "other", None)
    with pytest.raises(InvalidInput, match="memory"):
        RecordStore.open(None, None)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInput, match="is a file"):
        RecordStore.open(tmp_path / "file", spec)


def test_another_spec_is_refused_and_every_difference_named(
    tmp_path: Path, spec: IndexSpec, make_spec: Callable[..., IndexSpec], make_record: MakeRecord
) -> None:
    with RecordStore.open(tmp_path, spec) as store:
        store.put([make_record(1, spec)])
    model = replace(spec.fingerprint, architecture="qwen3", weights="w2", tokenizer="t2", rotary="yarn", dtype="bf16")
    other = make_spec(fingerprint=model, tile=16, prefix="system", thresholds=Thresholds(0.1, 0.2, 0.3, "share"))
    with pytest.raises(StoreMismatch) as caught:
        RecordStore.open(tmp_path, other)
    for words in (
        "architecture is 'llama' against 'qwen3'",
        "weights is 'wwwwwwww' against 'w2'",
        "tokenizer is 'tttttttt' against 't2'",
        "rotary is 'theta=10000' against 'yarn'",
        "dtype is 'float32' against 'bf16'",
        "tile is 8 against 16",
        "prefix is 'none' against 'system'",
        "alpha is 0.001 against 0.1",
        "beta is 0.01 against 0.2",
        "gamma is 0.1 against 0.3",
        "ca_rule is 'any' against 'share'",
        "tamis index --rebuild",
    ):
        assert words in str(caught.value)
    assert "n_layers" not in str(caught.value)
    with RecordStore.open(tmp_path, spec) as store:
        assert len(store) == 1
    with RecordStore.open(tmp_path, other, rebuild=True) as store:
        assert len(store) == 0
        store.put([make_record(1, other)])
    with RecordStore.open(tmp_path, other, rebuild=True) as store:
        assert len(store) == 1, "a store that fits is not emptied"


def test_a_record_of_another_spec_is_refused(
    place: Path | None, spec: IndexSpec, make_spec: Callable[..., IndexSpec], make_record: MakeRecord
) -> None:
    good, bad = make_record(1, spec), make_record(2, make_spec(prefix="other"))
    with RecordStore.open(place, spec) as store:
        with pytest.raises(StoreMismatch, match=bad.document_id.hex()):
            store.put([good, bad])
        assert len(store) == 0, "all or nothing"


def test_bad_records_are_found_and_refused(
    tmp_path: Path, spec: IndexSpec, make_spec: Callable[..., IndexSpec], make_record: MakeRecord
) -> None:
    good, moved, hurt, foreign = (make_record(i, spec) for i in range(4))
    foreign = make_record(3, make_spec(prefix="other"))
    with RecordStore.open(tmp_path, spec) as store:
        store.put([good])
        tables = open_tables(tmp_path)
        tables.write(
            {
                RECORDS: {
                    moved.document_id: dump(good),
                    hurt.document_id: dump(hurt)[:-1] + b"\x55",
                    foreign.document_id: dump(foreign),
                    b"short": b"",
                }
            }
        )
        close_tables(tmp_path)
        reasons = {p.document_id: p.reason for p in store.verify()}
        assert set(reasons) == {moved.document_id, hurt.document_id, foreign.document_id, b"short"}
        assert good.document_id.hex() in reasons[moved.document_id]
        assert "checksum" in reasons[hurt.document_id]
        assert "another spec" in reasons[foreign.document_id]
        assert store.get([good.document_id]) == [good]
        with pytest.raises(StoreDamaged, match="is that of"):
            store.get([moved.document_id])
        with pytest.raises(StoreDamaged, match="checksum"):
            store.get([good.document_id, hurt.document_id])
        with pytest.raises(StoreMismatch):
            store.get([foreign.document_id])
        store.put([moved, hurt])
        store.remove([p.document_id for p in store.verify()])
        assert store.verify() == []
        assert len(store) == 3


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        (b"not json", "does not say"),
        (b"[]", "does not say"),
        (b'{"format": 1, "spec": {"tile": 3}}', "does not say"),
        (b'{"format": 2, "spec": {}}', "newer Tamis"),
        (None, "not what they were made with"),
    ],
)
def test_a_damaged_description(
    tmp_path: Path, spec: IndexSpec, make_record: MakeRecord, meta: bytes | None, words: str
) -> None:
    with RecordStore.open(tmp_path, spec) as store:
        store.put([make_record(1, spec)])
    open_tables(tmp_path).write({META: {SPEC_KEY: meta}})
    close_tables(tmp_path)
    with pytest.raises(StoreDamaged, match=words):
        RecordStore.open(tmp_path, spec)
    with RecordStore.open(tmp_path, spec, rebuild=True) as store:
        assert len(store) == 0


@pytest.mark.parametrize("ruin", ["empty", "text", "zeros", "cut"])
def test_a_damaged_file(tmp_path: Path, spec: IndexSpec, make_record: MakeRecord, ruin: str) -> None:
    with RecordStore.open(tmp_path, spec) as store:
        store.put([make_record(i, spec, n_tokens=400) for i in range(300)])
    data = tmp_path / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(
        {
            "empty": b"",
            "text": b"these are my notes\n" * 5000,
            "zeros": whole[: 3 * 4096] + bytes(len(whole) - 3 * 4096),
            "cut": whole[: len(whole) // 2],
        }[ruin]
    )
    with pytest.raises(StoreDamaged, match="tamis index --rebuild"):
        RecordStore.open(tmp_path, spec)
    with RecordStore.open(tmp_path, spec, rebuild=True) as store:
        assert len(store) == 0
        store.put([make_record(1, spec)])


# Puts the documents 0, 1, 2 ... that are missing, one commit each, and says each number once it is committed.
WRITER = """
import sys
from tamis.index.record import Record, document_id
from tamis.index.spec import Fingerprint, IndexSpec
from tamis.index.store import RecordStore

spec = IndexSpec(Fingerprint("a", "b", "c", "d", "e"), 900, 4, "", 8)
print("ready", flush=True)
store = RecordStore.open(sys.argv[1], spec)
for i in range(int(sys.argv[2])):
    if not store.has([document_id([i])])[0]:
        store.put([Record(document_id([i]), spec.digest, 8, 900, 4, 8, bytes([i]) * 900)])
        print(i, flush=True)
"""
MANY = 200


def _start(path: Path, count: int = MANY) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(tamis.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(count)], stdout=subprocess.PIPE, text=True, env=environment
    )


def _finish(child: subprocess.Popen[str]) -> list[int]:
    """The numbers that the child reported before it ended."""
    out, _ = child.communicate(timeout=60)
    return [int(line) for line in out.splitlines(keepends=True) if line.endswith("\n") and line != "ready\n"]


def _sound(path: Path) -> dict[int, bytes]:
    """Every stored document by number, after the whole store was verified."""
    with RecordStore.open(path, None, readonly=True) as store:
        assert store.verify() == []
        held = store.get([document_id([i]) for i in range(MANY)])
        assert sum(r is not None for r in held) == len(store)
    return {i: r.payload for i, r in enumerate(held) if r is not None}


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_at_any_instant_nothing_committed_is_lost(tmp_path: Path) -> None:
    chance, folder, inside = random.Random(0), 0, 0
    reported: list[int] = []
    held: dict[int, bytes] = {}
    for _ in range(20):
        if len(held) == MANY:  # too fast: go on with a fresh store
            folder, reported, held = folder + 1, [], {}
        child = _start(tmp_path / str(folder))
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0, 0.03))
        child.send_signal(signal.SIGKILL)
        reported += _finish(child)
        try:
            held = _sound(tmp_path / str(folder))
        except NothingFound:  # killed before it had even said what the store is for
            held = {}
        assert set(reported) <= set(held)
        assert len(held) <= len(reported) + 20, "at most one commit a run can be done and not yet reported"
        inside += 0 < len(held) < MANY
    assert inside > 3, "the kills must fall inside the work"
    rest = _finish(_start(tmp_path / str(folder)))
    assert set(rest) == set(range(MANY)) - set(held), "only what was missing is written"
    assert _sound(tmp_path / str(folder)) == {i: bytes([i]) * 900 for i in range(MANY)}


def test_readers_see_whole_commits_while_a_writer_works(tmp_path: Path) -> None:
    path = tmp_path / "kb"
    assert _finish(_start(path, 1)) == [0]
    child, counts = _start(path), [1]
    with RecordStore.open(path, None, readonly=True) as store:
        while child.poll() is None:
            assert store.verify() == []
            counts.append(len(store))
        counts.append(len(store))
    assert _finish(child) == list(range(1, MANY))
    assert counts == sorted(counts)
    assert counts[-1] == MANY
    assert len(set(counts)) > 3, "the reader must have read during the writing"
