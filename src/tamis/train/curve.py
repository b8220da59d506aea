"""The loss curve of a run, as CSV and, where matplotlib is installed, as a picture."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path

from tamis.core.files import write_whole
from tamis.train.state import Point

SMOOTH = 20  # steps of the moving mean


ANSWER_ROWS = "KL from the teacher, answer rows (nats)"


def write_curve(folder: Path, history: Sequence[Point], label: str = ANSWER_ROWS) -> list[Path]:
    """Write loss.csv and loss.png into `folder`, the curve being `Point.kl`; returns the files written."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([f.name for f in fields(Point)])
    rows.writerows(astuple(p) for p in history)
    write_whole(folder / "loss.csv", text.getvalue())
    made = [folder / "loss.csv"]
    try:
        import matplotlib
    except ImportError:
        return made
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 3.6))
    steps, values = [p.step for p in history], [p.kl for p in history]
    axis.plot(steps, values, color="#cccccc", linewidth=0.8, label="step")
    axis.plot(steps, moving_mean(values), color="#00798c", label=f"mean of {SMOOTH}")
    axis.set(xlabel="optimiser step", ylabel=label, ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    scratch = folder / ".loss.png"
    figure.savefig(scratch, dpi=120, format="png", metadata={"Software": ""})
    pyplot.close(figure)
    os.replace(scratch, folder / "loss.png")
    return [*made, folder / "loss.png"]


def moving_mean(values: Sequence[float], width: int = SMOOTH) -> list[float]:
    """The mean of each value and up to `width` - 1 before it."""
    return [sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i + 1 - width) : i + 1]]]
