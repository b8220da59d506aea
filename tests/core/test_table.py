from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tamis
from tamis.core.errors import InvalidInput, NothingFound, StoreBusy, StoreDamaged, TamisError, Unavailable
from tamis.core.table import MemoryTables, TableFile, Tables, close_tables, delete_tables, open_tables

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX processes and limits")


@pytest.fixture(params=["disk", "memory"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    return TableFile(tmp_path / "t") if request.param == "disk" else MemoryTables()


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(tamis.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_the_verbs(tables: Tables) -> None:
    assert tables.read("a", b"k") is None
    assert (tables.keys("a"), list(tables.items("a"))) == ([], [])
    tables.write({"a": {b"k2": b"v2", b"k1": b""}, "b": {b"k": b"x"}})
    assert list(tables.items("a")) == [(b"k1", b""), (b"k2", b"v2")]
    assert tables.keys("a") == [b"k1", b"k2"]
    assert tables.read_many("a", [b"k2", b"none", b"k1", b"", b"k2"]) == [b"v2", None, b"", None, b"v2"]
    tables.write({"a": {b"k1": None, b"none": None}, "b": {b"k": b"y"}})
    assert tables.keys("a") == [b"k2"]
    assert tables.read("b", b"k") == b"y"
    assert tables.add("b", b"k", b"late") == b"y"
    assert tables.add("c", b"k", b"first") == b"first"
    assert tables.read("c", b"k") == b"first"
    tables.close()


def test_keys_out_of_range(tmp_path: Path) -> None:
    tables = TableFile(tmp_path)
    for key in (b"", b"k" * 512):
        with pytest.raises(InvalidInput, match="1 to 511"):
            tables.write({"a": {b"fine": b"1", key: b"v"}})
    assert tables.keys("a") == []
    tables.write({"a": {b"k" * 511: b"v"}})
    tables.close()


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(NothingFound, match=r"no store at .*none.*`tamis index`"):
        open_tables(tmp_path / "none", readonly=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInput, match="is a file"):
        open_tables(tmp_path / "file")


def test_read_only_until_someone_writes(tmp_path: Path) -> None:
    TableFile(tmp_path).close()
    reader = open_tables(tmp_path, readonly=True)
    with pytest.raises(StoreBusy, match="read-only"):
        reader.write({"a": {b"k": b"v"}})
    writer = open_tables(tmp_path)
    assert writer is reader, "one handle per process, and the reader's stays valid"
    writer.write({"a": {b"k": b"v"}})
    assert reader.read("a", b"k") == b"v"
    close_tables(tmp_path)
    assert reader.read("a", b"k") == b"v"
    close_tables(tmp_path)
    close_tables(tmp_path)
    for use in (lambda: reader.read("a", b"k"), lambda: list(reader.items("a")), lambda: reader.write({"a": {}})):
        with pytest.raises(Unavailable, match="was closed"):
            use()


def test_a_second_handle_on_the_same_files_is_refused(tmp_path: Path) -> None:
    tables = open_tables(tmp_path)
    with pytest.raises(StoreBusy, match="open in this process already"):
        TableFile(tmp_path)
    tables.write({"a": {b"k": b"v"}})
    close_tables(tmp_path)


def test_closing_under_an_iteration_is_told(tmp_path: Path) -> None:
    tables = TableFile(tmp_path)
    tables.write({"a": {bytes([i]): b"v" for i in range(9)}})
    pairs = tables.items("a")
    next(pairs)
    tables.close()
    with pytest.raises(Unavailable, match="was closed"):
        list(pairs)


def test_a_replaced_folder_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "t"
    open_tables(path).write({"a": {b"k": b"old"}})
    delete_tables(path)
    assert open_tables(path).keys("a") == []
    for file in path.iterdir():
        file.unlink()
    assert open_tables(path).keys("a") == []
    delete_tables(path)


def test_an_interrupted_creation_is_finished(tmp_path: Path) -> None:
    (tmp_path / ".tamis-new").mkdir()
    (tmp_path / ".tamis-new" / "data.mdb").write_bytes(b"")
    tables = TableFile(tmp_path)
    tables.write({"a": {b"k": b"v"}})
    assert not (tmp_path / ".tamis-new").exists()
    tables.close()


def test_grows_past_its_map_and_follows_growth_by_others(tmp_path: Path) -> None:
    small = 64 << 10
    tables = TableFile(tmp_path, map_bytes=small)
    tables.write({"a": {b"k": b"v"}})
    script = """
import sys
from pathlib import Path
from tamis.core.table import TableFile
t = TableFile(Path(sys.argv[1]), map_bytes=1 << 16)
for i in range(40):
    t.write({"a": {b"%d" % i: bytes(20000)}, "from child": {b"k": b"v"}})
"""
    other = child(script, tmp_path)
    assert other.communicate(timeout=60) == ("", "")
    assert len(tables.keys("a")) == 41, "the reader follows"
    assert tables.read("from child", b"k") == b"v"
    tables.write({"a": {b"mine": bytes(8 << 20)}})
    assert len(tables.read("a", b"mine") or b"") == 8 << 20
    tables.close()
    stale = TableFile(tmp_path, map_bytes=small)
    assert child(script.replace("20000", "2000000"), tmp_path).communicate(timeout=60) == ("", "")
    stale.write({"a": {b"last": b"v"}})
    assert len(stale.keys("a")) == 43
    stale.close()


def test_growing_does_not_pull_the_map_from_under_a_reader(tmp_path: Path) -> None:
    tables = TableFile(tmp_path, map_bytes=64 << 10, wait_s=0.2)
    tables.write({"a": {bytes([i]): bytes(1000) for i in range(20)}})
    pairs = tables.items("a")
    first = next(pairs)
    with pytest.raises(StoreBusy, match="has to be remapped"):
        tables.write({"a": {b"big": bytes(4 << 20)}})
    assert len([first, *pairs]) == 20
    tables.write({"a": {b"big": bytes(4 << 20)}})
    assert len(tables.keys("a")) == 21
    tables.close()


@POSIX
def test_a_writer_that_stops_is_waited_for_only_so_long(tmp_path: Path) -> None:
    TableFile(tmp_path).close()
    holder = child(
        """
import sys
from pathlib import Path
from tamis.core.lmdb_file import _writer_lock
with _writer_lock(Path(sys.argv[1]), 1):
    print("held", flush=True)
    sys.stdin.read()
""",
        tmp_path,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    tables = TableFile(tmp_path, wait_s=0.1)  # reading needs no lock
    assert tables.keys("a") == []
    with pytest.raises(StoreBusy, match=r"written by another process, for 0\.1 s"):
        tables.write({"a": {b"k": b"v"}})
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    tables.write({"a": {b"k": b"v"}})
    tables.close()


@POSIX
def test_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from pathlib import Path
from tamis.core.errors import StoreBusy
from tamis.core.table import TableFile
t = TableFile(Path(sys.argv[1]))
t.write({"a": {b"old": bytes(1000)}})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    t.write({"a": {b"old": b"lost", b"new": bytes(4 << 20)}})
except StoreBusy as e:
    print(e)
print(t.keys("a") == [b"old"], t.read("a", b"old") == bytes(1000))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
t.write({"a": {b"new": bytes(4 << 20)}})
print(t.keys("a"))
"""
    out, problems = child(script, tmp_path).communicate(timeout=60)
    assert problems == ""
    said, kept, after = out.splitlines()
    assert "could not be written" in said
    assert "free some disk space" in said
    assert kept == "True True"
    assert after == "[b'new', b'old']"
    with pytest.raises(StoreBusy, match="could not be created"):
        TableFile(Path("/proc/none/store"))


@POSIX
def test_a_forked_child_must_open_its_own(tmp_path: Path) -> None:
    script = """
import os, sys
from tamis.core.errors import Unavailable
from tamis.core.table import open_tables
mine = open_tables(sys.argv[1])
mine.write({"a": {b"k": b"v"}})
if os.fork() == 0:
    try:
        mine.read("a", b"k")
    except Unavailable as e:
        print("forked" in str(e), flush=True)
    print(open_tables(sys.argv[1]).read("a", b"k"), flush=True)
    open_tables(sys.argv[1]).write({"a": {b"k": b"child"}})
    os._exit(0)
print(os.wait()[1], mine.read("a", b"k"))
"""
    assert child(script, tmp_path).communicate(timeout=60) == ("True\nb'v'\n0 b'child'\n", "")


def test_threads_read_and_write_at_once(tmp_path: Path) -> None:
    tables, faults = open_tables(tmp_path), []

    def work(me: int) -> None:
        try:
            for i in range(15):
                tables.write({"a": {b"%d-%d" % (me, i): bytes(100)}})
                pairs = dict(tables.items("a"))
                assert all(b"%d-%d" % (me, j) in pairs for j in range(i + 1))
        except (TamisError, AssertionError) as e:
            faults.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert faults == []
    assert len(tables.keys("a")) == 60, "a thread that died of anything else wrote less"
    close_tables(tmp_path)


def test_one_of_many_adders_wins(tmp_path: Path) -> None:
    script = """
import sys
from tamis.core.table import open_tables
sys.stdin.readline()
print(open_tables(sys.argv[1]).add("a", b"k", sys.argv[2].encode()).decode())
"""
    racers = [child(script, tmp_path / "t", n) for n in range(4)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = {racer.communicate(timeout=60) for racer in racers}
    assert len(answers) == 1, answers
    assert answers.pop()[0].strip() == (open_tables(tmp_path / "t").read("a", b"k") or b"").decode()
    close_tables(tmp_path / "t")


def _filled(path: Path) -> bytes:
    tables = TableFile(path)
    for i in range(4):  # several commits, so that pages have been freed
        tables.write({"a": {b"%d" % n: bytes([i]) * (n * 37 % 6000) for n in range(i, 300, 2)}})
    tables.close()
    return (path / "data.mdb").read_bytes()


@pytest.mark.parametrize("content", [b"", b"x", b"notes\n" * 9000, bytes(4096), bytes(1 << 20)])
def test_a_file_that_is_no_store(tmp_path: Path, content: bytes) -> None:
    _filled(tmp_path)
    (tmp_path / "data.mdb").write_bytes(content)
    for readonly in (False, True):
        with pytest.raises(StoreDamaged, match="tamis index --rebuild"):
            open_tables(tmp_path, readonly=readonly)
    assert (tmp_path / "data.mdb").read_bytes() == content, "nothing is repaired unasked"
    delete_tables(tmp_path)
    open_tables(tmp_path).write({"a": {b"k": b"v"}})
    close_tables(tmp_path)


@POSIX
def test_no_damage_brings_the_process_down(tmp_path: Path) -> None:
    whole = _filled(tmp_path / "t")
    reader = """
import sys
from pathlib import Path
from tamis.core.errors import StoreDamaged
from tamis.core.table import TableFile
path, outcomes = Path(sys.argv[1]), []
for line in sys.stdin:
    (path / "data.mdb").write_bytes(Path(line.strip()).read_bytes())
    print("next", flush=True)
    try:
        t = TableFile(path)
        pairs = dict(t.items("a"))
        t.write({"a": {k: b"changed" * 40 for k in pairs}, "b": {b"k": bytes(30000)}})
        t.close()
        print("read", flush=True)
    except StoreDamaged as e:
        print("damaged", flush=True)
"""
    chance, cases = random.Random(1), []
    for n in range(120):
        hurt = bytearray(whole)
        page = chance.randrange(len(whole) // 4096) * 4096 if n % 2 else chance.randrange(12) * 4096
        kind = n % 4
        if kind == 3:
            hurt = hurt[: page + 100]
        elif kind == 2:
            hurt[page : page + 4096] = chance.randbytes(4096)
        else:
            for _ in range(1 + 4 * kind):
                hurt[page + chance.randrange(120 if n % 3 else 4096)] ^= 1 << chance.randrange(8)
        cases.append(tmp_path / f"case{n}")
        cases[-1].write_bytes(hurt)
    (tmp_path / "out").mkdir()
    process = child(reader, tmp_path / "out")
    out, problems = process.communicate("".join(f"{c}\n" for c in cases), timeout=60)
    done = out.split().count("read"), out.split().count("damaged")
    assert (process.returncode, problems) == (0, ""), f"case {sum(done)}"
    assert sum(done) == len(cases)
    assert done[1] > 40, "most of it must have been seen"


def test_checking_a_large_file_is_quick(tmp_path: Path) -> None:
    tables = TableFile(tmp_path)
    tables.write({"a": {b"%d" % n: bytes(5700) for n in range(3000)}})
    tables.close()
    start = time.perf_counter()
    TableFile(tmp_path).close()
    assert time.perf_counter() - start < 1.0
