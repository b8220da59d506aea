"""A file is whole or not there: kills at every step, damage at every byte, files of other models and formats."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cache_kit import MODEL, SPEC, payload, same, wanted

from tamis.cache.document import Payload
from tamis.cache.keys import DocumentKey, prefix_keys
from tamis.cache.spec import KVSpec
from tamis.cache.tiers.base import Tier
from tamis.cache.tiers.disk import HEADER_BYTES, disk_tier
from tamis.core.errors import InvalidInput, PoolFull, StoreBusy

BUDGET = 200_000


def opened(folder: Path, *, budget: int = BUDGET) -> Tier:
    return disk_tier(folder, SPEC, MODEL, budget)


def stored(folder: Path, *numbers: int) -> list[Path]:
    """Write documents and close; their files in order."""
    tier = opened(folder)
    tier.put([(wanted(i).key, payload(wanted(i))) for i in numbers])
    tier.medium.close()
    return [folder / f"{wanted(i).key.name}.safetensors" for i in numbers]  # type: ignore[attr-defined]


def aside(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "aside").iterdir())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_any_reader_of_safetensors_reads_it(dtype: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    spec = KVSpec(3, 2, 8, dtype)
    tier = disk_tier(tmp_path, spec, MODEL, BUDGET)
    keys, values = torch.randn(2, *spec.shape(5)).to(getattr(torch, dtype)).unbind(0)
    key = DocumentKey.of(range(5), MODEL)
    tier.put([(key, Payload.of(keys, values))])
    with safe_open(tmp_path / f"{key.name}.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("keys"), keys) and torch.equal(file.get_tensor("values"), values)
        meta = file.metadata()
    assert meta["format"] == "tamis-kv" and meta["version"] == "1" and meta["fingerprint"] == MODEL.hex()
    assert same(tier.get([key])[0], Payload.of(keys, values))
    tier.medium.close()


def test_documents_outlive_the_process_with_their_order(tmp_path: Path) -> None:
    files = stored(tmp_path, 3, 1, 2)
    for age, file in enumerate(files):
        os.utime(file, (1000 + age, 1000 + age))
    tier = opened(tmp_path)
    assert list(tier.entries) == [wanted(i).key for i in (3, 1, 2)]
    assert all(same(tier.get([wanted(i).key])[0], payload(wanted(i))) for i in (1, 2, 3))
    tier.check()
    tier.medium.close()
    small = opened(tmp_path, budget=2 * HEADER_BYTES + 2000)
    assert wanted(3).key not in small.entries, "a smaller budget keeps the youngest"
    small.check()
    small.medium.close()


def test_prefix_blocks_come_back_as_such(tmp_path: Path) -> None:
    keys = prefix_keys(range(8), MODEL, block=4)
    tier = opened(tmp_path)
    tier.put([(key, Payload.of(*torch.randn(2, *SPEC.shape(4)).unbind(0))) for key in keys])
    tier.medium.close()
    again = opened(tmp_path)
    assert set(again.entries) == set(keys)
    again.medium.close()


@pytest.mark.parametrize("place", [0, 9, 200, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 700, -1])
def test_a_changed_byte_anywhere_is_seen(place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file,) = stored(tmp_path, 4)
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)
    tier = opened(tmp_path)
    assert tier.get([wanted(4).key]) == [None] and not tier.entries
    assert "treated as missing" in caplog.text and aside(tmp_path) == [file.name]
    tier.put([(wanted(4).key, payload(wanted(4)))])
    assert same(tier.get([wanted(4).key])[0], payload(wanted(4)))
    tier.check()
    tier.medium.close()


@pytest.mark.parametrize("size", [0, 5, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 99, "more"])
def test_a_cut_or_longer_file_is_set_aside(size: int | str, tmp_path: Path) -> None:
    (file,) = stored(tmp_path, 4)
    file.write_bytes(file.read_bytes()[:size] if isinstance(size, int) else file.read_bytes() + b"x")
    tier = opened(tmp_path)
    assert not tier.entries and aside(tmp_path) == [file.name]
    tier.check()
    tier.medium.close()


def test_damage_while_it_is_open_is_seen_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = opened(tmp_path)
    rows = [wanted(i) for i in (1, 2, 3)]
    tier.put([(row.key, payload(row)) for row in rows])
    names = [tmp_path / f"{row.key.name}.safetensors" for row in rows]  # type: ignore[attr-defined]
    names[0].unlink()
    names[1].write_bytes(names[1].read_bytes()[:-1])
    got = tier.get([row.key for row in rows])
    assert got[:2] == [None, None] and same(got[2], payload(rows[2]))
    assert "cannot be read" in caplog.text and "end is cut" in caplog.text
    tier.check()
    tier.medium.close()


def test_files_of_another_model_shape_version_or_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file,) = stored(tmp_path, 4)
    kept = file.read_bytes()
    (length,) = struct.unpack("<Q", kept[:8])

    def changed(**meta: str) -> bytes:
        text = json.loads(kept[8 : 8 + length])
        text["__metadata__"] |= meta
        return kept[:8] + json.dumps(text, separators=(",", ":")).encode().ljust(length) + kept[8 + length :]

    for data, said in (
        (changed(fingerprint="00" * 16), "was made by the model with fingerprint 0000"),
        (changed(version="2"), "format tamis-kv 2; this Tamis reads tamis-kv 1"),
        (changed(namespace="document/other"), "does not fit its name"),
        (changed(kind="secret"), "header cannot be read"),
        (changed(digest="zz"), "header cannot be read"),
    ):
        file.write_bytes(data)
        tier = opened(tmp_path)
        assert not tier.entries and said in caplog.text
        tier.medium.close()
        caplog.clear()
    file.write_bytes(kept)
    other = disk_tier(tmp_path, KVSpec(2, 2, 4, "bfloat16"), MODEL, BUDGET)
    assert not other.entries and "keys and values of" in caplog.text
    other.medium.close()


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "notes.txt").write_text("x")
    tier = opened(tmp_path)
    tier.check()
    tier.medium.close()
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights" and (tmp_path / "notes.txt").exists()


def test_keys_of_another_model_are_refused(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    for key in (DocumentKey.of([1], b"x" * 16), "anything"):
        with pytest.raises(InvalidInput, match="folder of its own"):
            tier.put([(key, payload(wanted(1)))])
    tier.medium.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="no file locks on this system")
    tier = opened(tmp_path)
    with pytest.raises(StoreBusy, match="another process"):
        opened(tmp_path)
    tier.medium.close()
    opened(tmp_path).medium.close()


def test_files_set_aside_count_and_make_way(tmp_path: Path) -> None:
    (file,) = stored(tmp_path, 4)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    tier = opened(tmp_path, budget=size + 100)
    assert aside(tmp_path)
    tier.check()
    tier.put([(wanted(4).key, payload(wanted(4)))])
    assert not aside(tmp_path)
    tier.check()
    with pytest.raises(PoolFull):
        tier.put([(wanted(1).key, payload(wanted(1)))])
    tier.medium.close()


def test_a_file_that_cannot_be_deleted_still_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = stored(tmp_path, 4)[0].stat().st_size
    tier = opened(tmp_path, budget=size + 100)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError("no")))
        tier.drop([wanted(4).key])
        tier.check()
        with pytest.raises(PermissionError):
            tier.put([(wanted(4).key, payload(wanted(4)))])
        tier.check()
    tier.put([(wanted(4).key, payload(wanted(4)))])
    assert same(tier.get([wanted(4).key])[0], payload(wanted(4)))
    tier.check()
    tier.medium.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to tell folders from files")
def test_bytes_reach_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill does not show what a power cut would: that needs the order of data, name and folder."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(handle: int) -> None:
        size = os.fstat(handle).st_size
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else f"data {size}")
        fsync(handle)

    def watched_replace(a: Path, b: Path) -> None:
        events.append("rename")
        replace(a, b)

    tier = opened(tmp_path)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    tier.put([(wanted(4).key, payload(wanted(4)))])
    assert events == [f"data {tier.medium.bytes_of(21)}", "rename", "folder"]
    tier.medium.close()


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_failing_disk_leaves_nothing(step: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path)
    real, calls = getattr(os, step), iter(range(99))

    def failing(*arguments: object) -> None:
        if next(calls) == at:
            raise OSError("no space left")
        real(*arguments)

    monkeypatch.setattr(os, step, failing)
    with pytest.raises(OSError, match="no space"):
        tier.put([(wanted(i).key, payload(wanted(i))) for i in (1, 2)])
    tier.check()
    assert not list(tmp_path.glob("*.safetensors")) and not list(tmp_path.glob("*.tmp"))
    tier.medium.close()


CHILD = """
import builtins, os, random, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:4]
import torch
from cache_kit import MODEL, SPEC, payload, same, wanted
from tamis.cache.tiers.disk import disk_tier

root = Path(sys.argv[1])
real = {name: getattr(os, name) for name in ("fsync", "replace", "fork", "kill", "waitpid")}


def die():
    real["kill"](os.getpid(), signal.SIGKILL)


def dying_after(n):
    # the n-th of all opens, writes, fsyncs and renames kills the process: even n before it is done, odd n after
    left = [n]

    def wrapped(function):
        def call(*a, **k):
            left[0] -= 1
            if left[0] == 0:
                die()
            result = function(*a, **k)
            left[0] -= 1
            if left[0] == 0:
                die()
            return result
        return call

    import tamis.cache.tiers.disk as disk
    os.fsync, os.replace = wrapped(os.fsync), wrapped(os.replace)
    disk._append = wrapped(disk._append)
    disk.open = wrapped(open)


def child(folder, told, n):
    tier = disk_tier(folder, SPEC, MODEL, 10**6)
    if n is not None:
        dying_after(n)
    for i in range(12 if n is not None else 10**6):
        row = wanted(i % 60)
        if i >= 60:
            tier.drop([row.key])
        tier.put([(row.key, payload(row))])
        os.write(told, bytes([i % 60]))
        if i % 5 == 4:
            tier.drop([row.key])  # dropped on purpose: nobody may miss it, but it may not be half there
            os.write(told, bytes([100 + i % 60]))
    os._exit(0)


def round_(name, n):
    folder = root / name
    read, write = os.pipe()
    pid = real["fork"]()
    if pid == 0:
        os.close(read)
        child(folder, write, n)
    os.close(write)
    if n is None:
        time.sleep(random.uniform(0.01, 0.2))
        real["kill"](pid, signal.SIGKILL)
    heard = b""
    while more := os.read(read, 65536):
        heard += more
    os.close(read)
    _, status = real["waitpid"](pid, 0)
    told = {}
    for byte in heard:
        told[byte % 100] = byte < 100
    tier = disk_tier(folder, SPEC, MODEL, 10**6)
    tier.check()
    assert not list((folder / "aside").iterdir()), "nothing is damaged"
    assert not list(folder.glob("*.tmp"))
    last = heard[-1] % 100 if heard else -1
    for number, kept in told.items():
        got = tier.get([wanted(number).key])[0]
        open_ended = n is None and number == (last + 1) % 60 or not kept or number == last
        assert same(got, payload(wanted(number))) or (got is None and open_ended), (name, number, kept)
    for entry in list(tier.entries.values()):
        assert tier.get([entry.key])[0] is not None
    tier.medium.close()
    return os.WIFSIGNALED(status)


killed = 0
for n in range(1, 400):
    if not round_(f"step{n}", n):
        break
    killed += 1
    import shutil
    shutil.rmtree(root / f"step{n}")
assert 60 < killed < 399, killed
for n in range(12):
    assert round_("random", None)
print(killed)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_a_kill_at_any_instant_loses_only_what_was_not_committed(tmp_path: Path) -> None:
    """Each child dies at one step further than the last, until one lives; then some die at random instants."""
    here = Path(__file__).resolve().parent
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(tmp_path / "kill"), str(here), str(here.parents[1] / "src")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 60
    shutil.rmtree(tmp_path / "kill")
