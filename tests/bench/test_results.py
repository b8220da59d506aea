"""Result files: one schema, whole batches, nothing that is not ours; and a machine that describes itself anywhere."""

from __future__ import annotations

import csv
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from tamis.bench import machine as machine_module
from tamis.bench.machine import Machine, describe_machine
from tamis.bench.results import COLUMNS, HEADER, Row, append_rows, quantiles, read_rows
from tamis.core.errors import InvalidInput

H200 = Machine("EPYC", 16, "3.12.1", "2.11.0+cu130", "5.24.0", "3.6.0", "NVIDIA H200", "580.159", "0123456789ab")
WHEN = datetime(2026, 3, 1, 12, 0, 5, tzinfo=UTC)
ROW = Row.of("llama-3.1-8b/bf16/65536", "sampled", "ttft_s", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], unit="s")


def add(folder: Path, *rows: Row, command: str = "tamis bench prefill", machine: Machine = H200) -> Path:
    return append_rows(rows, "prefill", machine=machine, command=command, folder=folder / "results", date=WHEN)


def test_the_schema() -> None:
    assert HEADER == "date,commit,command,gpu,driver,torch,triton,case,provider,metric,p20,p50,p80,unit\n"


def test_a_row_by_hand(tmp_path: Path) -> None:
    path = add(tmp_path, ROW)
    assert path == tmp_path / "results" / "prefill.csv"
    assert path.read_text() == HEADER + (
        "2026-03-01T12:00:05Z,0123456789ab,tamis bench prefill,NVIDIA H200,580.159,2.11.0+cu130,3.6.0,"
        "llama-3.1-8b/bf16/65536,sampled,ttft_s,2,3.5,5,s\n"
    )


def test_the_header_stands_once(tmp_path: Path) -> None:
    add(tmp_path, ROW, ROW)
    first = (tmp_path / "results/prefill.csv").read_bytes()
    path = add(tmp_path, ROW)
    assert path.read_bytes().startswith(first) and path.read_text().count("date,") == 1
    assert len(read_rows(path)) == 3


def test_reading_gives_back_what_was_written(tmp_path: Path) -> None:
    odd = Row('a, "b"', "ü", "kl", 1e-9, 0.123456789, 1e12, "1")
    (row,) = read_rows(add(tmp_path, odd, command="x  --json '{\"a\": 1}'\n --y"))
    assert (row["case"], row["provider"], row["command"]) == ('a, "b"', "ü", "x --json '{\"a\": 1}' --y")
    assert [float(row[p]) for p in ("p20", "p50", "p80")] == pytest.approx([1e-9, 0.123457, 1e12])
    assert tuple(row) == COLUMNS


def test_dates_are_utc(tmp_path: Path) -> None:
    berlin = datetime(2026, 3, 1, 1, 30, tzinfo=timezone(timedelta(hours=2)))
    path = append_rows([ROW], "b", machine=H200, command="c", folder=tmp_path, date=berlin)
    assert read_rows(path)[0]["date"] == "2026-02-28T23:30:00Z"
    append_rows([ROW], "b", machine=H200, command="c", folder=tmp_path)
    age = datetime.now(UTC) - datetime.fromisoformat(read_rows(path)[1]["date"])
    assert timedelta(seconds=-2) < age < timedelta(minutes=1)


def test_without_a_gpu_the_cpu_is_named(tmp_path: Path) -> None:
    bare = Machine("EPYC", 2, "3.11.7", "2.13.0+cpu", "5.24.0", "", "", "", "unknown")
    (row,) = read_rows(add(tmp_path, ROW, machine=bare))
    assert (row["gpu"], row["driver"], row["triton"], row["commit"]) == ("none (EPYC, 2 cores)", "", "", "unknown")


def test_a_batch_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that fails halfway leaves the file as it was."""
    path = add(tmp_path, ROW)
    before = path.read_bytes()

    def failing() -> object:
        yield ROW
        raise RuntimeError("the bench died")

    with pytest.raises(RuntimeError, match="died"):
        add(tmp_path, *failing())  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="died"):
        append_rows(failing(), "prefill", machine=H200, command="c", folder=path.parent)  # type: ignore[arg-type]
    assert path.read_bytes() == before


def test_no_rows_write_nothing(tmp_path: Path) -> None:
    assert not add(tmp_path).exists()


@pytest.mark.parametrize("text", ["date,commit\n", HEADER.replace("p20", "p25"), HEADER.upper(), "x", HEADER[:-1]])
def test_a_file_with_another_header_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results" / "prefill.csv"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(InvalidInput, match="results files start with 'date,commit,command,"):
        add(tmp_path, ROW)
    with pytest.raises(InvalidInput, match="results files start with"):
        read_rows(path)
    assert path.read_text() == text


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = add(tmp_path, ROW)
    path.write_bytes(path.read_bytes()[:-5])
    before = path.read_bytes()
    with pytest.raises(InvalidInput, match="ends within a line"):
        add(tmp_path, ROW)
    assert path.read_bytes() == before


def test_an_empty_file_gets_its_header(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results/prefill.csv").touch()
    assert read_rows(tmp_path / "results/prefill.csv") == []
    assert len(read_rows(add(tmp_path, ROW))) == 1


@pytest.mark.parametrize("bench", ["", "../prefill", "a/b", ".hidden", ".."])
def test_a_bench_is_a_bare_name(tmp_path: Path, bench: str) -> None:
    with pytest.raises(InvalidInput, match="bare name"):
        append_rows([ROW], bench, machine=H200, command="c", folder=tmp_path)


def test_quantiles() -> None:
    assert quantiles([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (2.0, 3.5, 5.0)
    assert quantiles([7.0]) == (7.0, 7.0, 7.0)
    assert quantiles([0.0, 10.0]) == pytest.approx((2.0, 5.0, 8.0))


@pytest.mark.parametrize("values", [[], [1.0, float("nan")]])
def test_quantiles_of_nothing(values: list[float]) -> None:
    with pytest.raises(InvalidInput, match="at least one number, and no NaN"):
        quantiles(values)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"case": ""}, "case is ''"),
        ({"provider": "a\nb"}, "provider is"),
        ({"p20": 2.0}, "expected rising"),
        ({"p50": float("nan")}, "expected rising"),
    ],
)
def test_rows_that_cannot_be_right(changes: dict[str, object], says: str) -> None:
    fields: dict[str, object] = {"case": "c", "provider": "p", "metric": "m", "p20": 1.0, "p50": 1.0, "p80": 1.0}
    with pytest.raises(InvalidInput, match=says):
        Row(**(fields | changes), unit="s")  # type: ignore[arg-type]


class TestMachine:
    def test_this_one(self) -> None:
        import torch

        found = describe_machine()
        assert found.cpu and found.cores >= 1 and found.torch == torch.__version__ and found.commit
        assert found.python == ".".join(map(str, sys.version_info[:3]))
        assert set(found.to_dict()) >= {"cpu", "gpu", "driver", "commit"}
        assert found.gpu in found.device or found.device.startswith("none (")

    def test_nothing_is_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(machine_module, "_CPU_FILE", tmp_path / "cpuinfo")
        monkeypatch.setattr(machine_module, "_DRIVER_FILE", tmp_path / "driver")
        monkeypatch.setattr(machine_module, "_version", lambda package: "")
        monkeypatch.setattr(machine_module, "_torch_gpu", lambda: "")
        found = describe_machine.__wrapped__()
        assert (found.gpu, found.driver, found.torch, found.triton, found.commit) == ("", "", "", "", "unknown")

    def test_what_nvidia_smi_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said = "NVIDIA H200, 580.159\nNVIDIA H200, 580.159"
        monkeypatch.setattr(machine_module, "_run", lambda *command: said if command[0] == "nvidia-smi" else "")
        monkeypatch.setattr(machine_module, "_torch_gpu", lambda: "")
        found = describe_machine.__wrapped__()
        assert (found.gpu, found.driver) == ("NVIDIA H200", "580.159")

    def test_the_driver_from_the_kernel_module(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Mon\nGCC 13\n")
        monkeypatch.setattr(machine_module, "_DRIVER_FILE", tmp_path / "version")
        assert machine_module._driver_from_kernel() == "580.159.03"

    def test_packages_that_are_not_installed(self) -> None:
        assert machine_module._version("surely-not-installed-anywhere") == ""

    def test_a_command_that_hangs_or_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine_module, "_WAIT_S", 0.2)
        assert machine_module._run(sys.executable, "-c", "import time; time.sleep(30)") == ""
        assert machine_module._run(sys.executable, "-c", "print('half'); raise SystemExit(3)") == ""

    def test_the_commit_is_that_of_tracked_files(self, tmp_path: Path) -> None:
        def git(*command: str) -> str:
            identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
            done = subprocess.run(
                ["git", "-C", str(tmp_path), *identity, *command], capture_output=True, text=True, check=False
            )
            return done.stdout.strip()

        ours, foreign = tmp_path / "ours.py", tmp_path / "foreign.py"
        ours.write_text("1\n")
        foreign.write_text("1\n")
        assert machine_module._commit(ours) == "unknown"
        git("init", "-q")
        git("add", "ours.py")
        git("commit", "-qm", "one")
        head = git("rev-parse", "--short=12", "HEAD")
        if not head:
            pytest.skip("git is not installed here")
        assert machine_module._commit(ours) == head
        assert machine_module._commit(foreign) == "unknown"
        ours.write_text("2\n")
        assert machine_module._commit(ours) == f"{head}-dirty"


def test_the_file_is_plain_csv(tmp_path: Path) -> None:
    with add(tmp_path, ROW, ROW).open(newline="") as file:
        rows = list(csv.reader(file))
    assert tuple(rows[0]) == COLUMNS and {len(r) for r in rows} == {len(COLUMNS)}
