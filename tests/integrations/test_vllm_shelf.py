"""Documents kept for vLLM: the same bits back, never a torn file, never over the budget, shared between processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tamis.core.errors import InvalidInput, NotCached, StoreDamaged
from tamis.integrations.vllm.shelf import Shelf
from tamis.prompt.segments import document_id

MODEL = bytes(range(16))
LAYERS, HEADS, WIDTH = 2, 2, 64
TOKEN_BYTES = 2 * LAYERS * HEADS * WIDTH * 4


def key(seed: int) -> bytes:
    return document_id([seed])


def document(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[int, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {i: torch.randn(2, HEADS, n, WIDTH, generator=made).to(dtype) for i in range(LAYERS)}


def same(a: dict[int, torch.Tensor], b: dict[int, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[i], b[i]) and a[i].dtype == b[i].dtype for i in a)


def files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("host_bytes", [0, 1 << 22])
def test_a_document_comes_back_bit_for_bit_also_in_another_process(
    tmp_path: Path, dtype: torch.dtype, host_bytes: int
) -> None:
    kept = document(131, dtype=dtype)
    shelf = Shelf(tmp_path, host_bytes, MODEL)
    assert not shelf.has(key(1))
    assert shelf.save(key(1), kept)
    assert shelf.has(key(1).hex())
    assert same(shelf.load(key(1)), kept)
    assert shelf.counts["loaded_host" if host_bytes else "loaded_disk"] == 1
    later = Shelf(tmp_path, host_bytes, MODEL)
    assert same(later.load(key(1)), kept)
    assert later.counts["loaded_disk"] == 1
    with later.hold(key(1)) as payload:
        assert payload.n_tokens == 131
        assert torch.equal(payload.values[1], kept[1][1])


def test_host_memory_alone_serves_and_evicts(tmp_path: Path) -> None:
    shelf = Shelf(None, 2 * 128 * TOKEN_BYTES, MODEL)
    with pytest.raises(NotCached):
        shelf.load(key(0))
    assert all(shelf.save(key(i), document(100, i)) for i in range(2))
    shelf.pin(key(0))
    assert shelf.pinned(key(0)) and not shelf.pinned(key(1))
    assert shelf.save(key(2), document(100, 2))
    assert [shelf.has(key(i)) for i in range(3)] == [True, False, True]
    assert not shelf.save(key(3), document(300, 3))
    assert {(d.digest, d.pinned) for d in shelf.documents()} == {(key(0), True), (key(2), False)}
    assert shelf.unpin(key(0)) and not shelf.unpin(key(0))
    assert shelf.delete(key(0)) and not shelf.has(key(0)) and not shelf.delete(key(0))


def test_a_document_larger_than_the_host_comes_from_the_disk(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 128 * TOKEN_BYTES, MODEL)
    kept = document(200)
    assert shelf.save(key(1), kept)
    assert same(shelf.load(key(1)), kept) and same(shelf.load(key(1)), kept)
    assert shelf.counts["loaded_disk"] == 2


def test_namespaces_models_and_parts_do_not_see_each_other(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 0, MODEL, "document/a")
    assert shelf.save(key(1), document(5))
    assert not shelf.has(key(1), "document/b")
    assert not Shelf(tmp_path, 0, bytes(16)).has(key(1), "document/a")
    first, second = (Shelf(tmp_path, 0, MODEL, "document/a", part=(i, 2)) for i in range(2))
    assert not first.has(key(1))
    assert first.save(key(1), document(5, 1))
    assert not first.has(key(1)), "the other part is missing"
    assert second.save(key(1), document(5, 2))
    assert first.has(key(1)) and second.has(key(1))
    assert same(first.load(key(1)), document(5, 1)) and same(second.load(key(1)), document(5, 2))
    with pytest.raises(InvalidInput, match="namespace"):
        shelf.has(key(1), "prefix/a")


@pytest.mark.parametrize("harm", ["cut", "flip", "header", "foreign", "other"])
def test_a_damaged_file_is_refused_deleted_and_computed_again(tmp_path: Path, harm: str) -> None:
    shelf = Shelf(tmp_path, 1 << 22, MODEL)
    assert shelf.save(key(1), document(50)) and shelf.save(key(2), document(50, 1))
    shelf.close()
    path = shelf.folder and shelf.folder.folder / shelf.folder._file(shelf.address(key(1)), 0)
    other = shelf.folder and shelf.folder.folder / shelf.folder._file(shelf.address(key(2)), 0)
    assert path and other
    data = bytearray(path.read_bytes())
    if harm == "cut":
        data = data[:-7]
    elif harm == "flip":
        data[-9] ^= 4
    elif harm == "header":
        data[30] ^= 1
    elif harm == "foreign":
        data = bytearray(b"not a shelf's file")
    else:
        data = bytearray(other.read_bytes())
    path.write_bytes(data)
    later = Shelf(tmp_path, 1 << 22, MODEL)
    with pytest.raises(StoreDamaged):
        later.load(key(1))
    assert not later.has(key(1)) and later.counts["damaged"] == 1
    assert later.save(key(1), document(50)) and same(later.load(key(1)), document(50))


def test_files_are_safetensors_that_others_can_read(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 0, MODEL)
    shelf.save(key(1), document(9))
    with safe_open(files(tmp_path)[0], "pt") as file:
        assert torch.equal(file.get_tensor("keys")[0], document(9)[0][0])
        assert file.metadata()["digest"] == key(1).hex()


def test_bf16_rounds_once_and_keeps_the_dtype(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 1 << 22, MODEL, payload="bf16")
    kept = document(40)
    shelf.save(key(1), kept)
    first, again = shelf.load(key(1)), shelf.load(key(1))
    assert same(first, {i: t.bfloat16().float() for i, t in kept.items()}) and same(first, again)


def test_selfindex_takes_a_fraction_and_gives_the_same_bits_from_every_tier(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(0)
    basis = torch.randn(4, WIDTH, generator=made)
    kept = {i: torch.randn(2, HEADS, 1024, 4, generator=made) @ basis for i in range(LAYERS)}
    shelf = Shelf(tmp_path, 1 << 24, MODEL, payload="selfindex")
    assert shelf.save(key(1), kept)
    first, again = shelf.load(key(1)), shelf.load(key(1))
    assert same(first, again) and same(first, Shelf(tmp_path, 0, MODEL, payload="selfindex").load(key(1)))
    assert torch.equal(first[0][:, :, :1], kept[0][:, :, :1]), "the first token is kept whole"
    error = (first[0] - kept[0]).norm() / kept[0].norm()
    assert error < 0.35
    assert files(tmp_path)[0].stat().st_size < 1024 * TOKEN_BYTES / 5


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), min_size=1, max_size=30))
def test_the_folder_never_exceeds_its_budget(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, int]]
) -> None:
    root = tmp_path_factory.mktemp("shelf")
    budget = 4096 * 3 + 100 * TOKEN_BYTES
    shelf = Shelf(root, 0, MODEL, disk_bytes=budget)
    for number, n in saves:
        shelf.save(key(number), document(n))
        assert sum(p.stat().st_size for p in root.glob("*/*")) <= budget
        assert shelf.has(key(number)), "the newest is never what makes way"


def test_the_least_recently_read_makes_way_and_pinned_ones_do_not(tmp_path: Path) -> None:
    size = 4096 + 50 * TOKEN_BYTES
    shelf = Shelf(tmp_path, 0, MODEL, disk_bytes=3 * size)
    for i in range(3):
        shelf.save(key(i), document(50))
        os.utime(files(tmp_path)[-1])
        time.sleep(0.01)
    shelf.pin(key(1))
    assert shelf.pinned(key(1)) and not shelf.pinned(key(0))
    shelf.load(key(0))
    assert shelf.save(key(3), document(50))
    assert [shelf.has(key(i)) for i in range(4)] == [True, True, False, True]
    for i in (0, 3):
        shelf.pin(key(i))
    assert not shelf.save(key(4), document(50)) and shelf.counts["full"] == 1
    with pytest.raises(NotCached):
        shelf.pin(key(4))
    assert shelf.unpin(key(0)) and shelf.save(key(4), document(50)) and not shelf.has(key(0))


def _write_for_ever(root: str) -> None:
    shelf = Shelf(root, 0, MODEL)
    for i in range(1_000_000):
        shelf.save(document_id([1, i]), document(64, i))


def test_a_killed_writer_leaves_whole_files_and_what_it_left_makes_way(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_write_for_ever, args=(str(tmp_path),))
    process.start()
    deadline = time.monotonic() + 60
    while len(files(tmp_path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    shelf = Shelf(tmp_path, 0, MODEL)
    documents = shelf.documents()
    assert len(documents) >= 3
    for d in documents:
        assert shelf.load(d.digest)[0].shape == (2, HEADS, 64, WIDTH)
    folder = files(tmp_path)[0].parent
    (folder / f"{'0' * 32}.0of1.safetensors.1-0.tmp").write_bytes(bytes(100))
    shelf.save(key(1), document(3))
    assert not list(tmp_path.glob("*/*.tmp"))


def _save_some(root: str, budget: int, start: int) -> None:
    shelf = Shelf(root, 0, MODEL, disk_bytes=budget)
    for i in range(20):
        shelf.save(document_id([2, start + i % 10]), document(64, start + i % 10))


def test_processes_share_a_folder_and_its_budget(tmp_path: Path) -> None:
    budget = 8 * (4096 + 64 * TOKEN_BYTES)
    code = "import sys; from test_vllm_shelf import _save_some as s; s(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(budget), str(start)], env=os.environ | {"PYTHONPATH": path}
        )
        for start in (0, 5)
    ]
    shelf, seen = Shelf(tmp_path, 0, MODEL, disk_bytes=budget), 0
    while any(run.poll() is None for run in runs):
        for d in shelf.documents():
            try:
                loaded = shelf.load(d.digest)
            except NotCached:
                continue
            number = next(i for i in range(15) if document_id([2, i]) == d.digest)
            assert same(loaded, document(64, number))
            seen += 1
        assert shelf.folder and shelf.folder.used_bytes() <= budget
    assert [run.returncode for run in runs] == [0, 0] and seen


@pytest.mark.parametrize(
    ("choices", "word"),
    [
        ({"directory": None, "host_bytes": 0}, "directory"),
        ({"payload": "zip"}, "payload"),
        ({"host_bytes": -1}, "host_bytes"),
        ({"disk_bytes": 100}, "4096"),
        ({"part": (2, 2)}, "part 2 of 2"),
        ({"directory": None, "payload": "selfindex"}, "directory"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, choices: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        Shelf(**({"directory": tmp_path, "host_bytes": 1 << 20, "fingerprint": MODEL} | choices))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(2, HEADS, 0, WIDTH), (3, HEADS, 4, WIDTH), (HEADS, 4, WIDTH)])
def test_wrong_documents_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="2, Hkv, n, D"):
        Shelf(tmp_path, 0, MODEL).save(key(1), {0: torch.zeros(shape)})
    with pytest.raises(InvalidInput, match="hex"):
        Shelf(tmp_path, 0, MODEL).has("no hex")
