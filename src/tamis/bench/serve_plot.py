"""The picture of what `tamis bench serve` wrote: time to first token and between tokens by policy. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tamis.core.errors import Unavailable


def draw(made: Mapping[str, Any], out: Path | str) -> None:
    """Cumulative shares of requests over each time, an SLO as a line. Raises Unavailable without matplotlib."""
    try:
        import matplotlib
    except ImportError as e:
        raise Unavailable("a plot needs matplotlib: pip install matplotlib. The numbers were written.") from e
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("ttft_s", "time to first token (s)"),
        ("itl_s", "between pieces of text (s)"),
        ("e2e_s", "to the end (s)"),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4), sharey=True)
    for axis, (name, label) in zip(axes, panels, strict=True):
        for policy, values in made["values"].items():
            if found := sorted(values[name]):
                shares = [(i + 1) / len(found) for i in range(len(found))]
                axis.step(found, shares, where="post", label=policy)
        if (limit := made["slo"].get(name)) is not None:
            axis.axvline(limit, color="#999999", linestyle=":", linewidth=1)
        axis.set(xscale="log", xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    axes[0].legend(fontsize=7)
    figure.suptitle(made["case"], fontsize=8)
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)
