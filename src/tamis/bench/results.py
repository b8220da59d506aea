"""The rows that every published number comes from: one CSV file per bench, one schema, only ever added to.

Knows rows and files; not what was measured or how.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from tamis.bench.machine import Machine
from tamis.core.errors import InvalidInput

COLUMNS = (
    "date", "commit", "command", "gpu", "driver", "torch", "triton", "case", "provider", "metric", "p20", "p50", "p80",
    "unit",
)  # fmt: skip
HEADER = ",".join(COLUMNS) + "\n"


@dataclass(frozen=True)
class Row:
    """One measured number.

    case      such as "llama-3.1-8b/bf16/65536"
    provider  who made it, such as "sampled" or "dense-fa4"
    metric    such as "ttft_s", "speedup", "density", "kl"
    p20, p50, p80   quantiles over the repetitions (`quantiles`), in `unit` ("s", "1" for a plain number, ...)
    """

    case: str
    provider: str
    metric: str
    p20: float
    p50: float
    p80: float
    unit: str

    def __post_init__(self) -> None:
        for name in ("case", "provider", "metric", "unit"):
            value = getattr(self, name)
            if not value or "\n" in value or "\r" in value:
                raise InvalidInput(f"{name} is {value!r}; expected one line of text, not empty.")
        if not self.p20 <= self.p50 <= self.p80:  # false for NaN too
            raise InvalidInput(f"{self.metric} has p20 {self.p20}, p50 {self.p50}, p80 {self.p80}; expected rising.")

    @classmethod
    def of(cls, case: str, provider: str, metric: str, values: Sequence[float], *, unit: str) -> Row:
        """The row of some repetitions of one measurement."""
        return cls(case, provider, metric, *quantiles(values), unit)


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p20, p50 and p80, interpolated linearly. Raises InvalidInput if there is no value or one is NaN."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not sample.size or bool(np.isnan(sample).any()):
        raise InvalidInput(f"values are {values!r}; give at least one number, and no NaN.")
    p20, p50, p80 = (float(v) for v in np.quantile(sample, (0.2, 0.5, 0.8)))
    return p20, p50, p80


def append_rows(
    rows: Iterable[Row],
    bench: str,
    *,
    machine: Machine,
    command: str,
    folder: Path | str = "results",
    date: datetime | None = None,
) -> Path:
    """Add a batch to `folder`/`bench`.csv with one write, so that a crash leaves all of it or none. Returns the path.

    The header is written with the first batch; without a GPU, the column `gpu` says "none" and names the CPU.
    `date` is when the bench ran (None: now), kept in UTC to the second.
    Raises InvalidInput, and writes nothing, if the file has another header or ends within a line.
    """
    if not bench or bench != Path(bench).name or bench.startswith("."):
        raise InvalidInput(f"bench is {bench!r}; expected the bare name of a file, such as 'prefill'.")
    path = Path(folder) / f"{bench}.csv"
    when = (date or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    stamp = (when, machine.commit, " ".join(command.split()))
    parts = (machine.device, machine.driver, machine.torch, machine.triton)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        numbers = [_number(v) for v in (row.p20, row.p50, row.p80)]
        writer.writerow([*stamp, *parts, row.case, row.provider, row.metric, *numbers, row.unit])
    if not text.getvalue():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        fresh = _check(file.seek(0, io.SEEK_END), file, path)
        file.write(((HEADER if fresh else "") + text.getvalue()).encode())
    return path


@dataclass
class Case:
    """What a benchmark found of one case, provider by provider: rows for its results file, and notes."""

    name: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, provider: str, metric: str, values: Sequence[float], unit: str) -> None:
        """A row of some repetitions."""
        self.rows.append(Row.of(self.name, provider, metric, values, unit=unit))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            found.setdefault(row.provider, {})[row.metric] = row.p50
        return {"case": self.name, "found": found, "notes": self.notes}


def read_rows(path: Path | str) -> list[dict[str, str]]:
    """All rows of a results file, oldest first, by column name. Raises InvalidInput if it has another header."""
    with Path(path).open("rb") as file:
        fresh = _check(file.seek(0, io.SEEK_END), file, Path(path))
    if fresh:
        return []
    with Path(path).open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def _check(size: int, file: io.RawIOBase | io.BufferedReader, path: Path) -> bool:
    """Whether the file is still empty. Raises InvalidInput if it is not one of ours, or was cut."""
    if not size:
        return True
    file.seek(0)
    head = file.read(len(HEADER.encode())) or b""
    if head != HEADER.encode():
        found = head.decode(errors="replace").split("\n")[0]
        raise InvalidInput(
            f"{path} starts with {found!r}; results files start with {HEADER.strip()!r}. Move it away, or give another."
        )
    file.seek(size - 1)
    if file.read(1) != b"\n":
        raise InvalidInput(f"{path} ends within a line. Remove what follows its last line break.")
    return False


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"
