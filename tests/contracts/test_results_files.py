"""Every file of results can be appended to, and names nothing of the machine that it was made on but its hardware."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tamis.bench.results import COLUMNS, HEADER

FILES = sorted((Path(__file__).parents[2] / "results").glob("*.csv"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_it_is_whole(path: Path) -> None:
    text = path.read_bytes().decode()
    assert text.startswith(HEADER), "a bench refuses to append to another header, line ends included"
    assert "\r" not in text and text.endswith("\n")
    rows = list(csv.reader(text.splitlines()))
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert not [row for row in rows if any(root in field for field in row for root in ("/tmp/", "/home/", "/root/"))]
    assert all(float(row[COLUMNS.index("p50")]) == float(row[COLUMNS.index("p50")]) for row in rows[1:])
