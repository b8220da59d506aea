"""Draw the plots of README and docs from results/. `python scripts/plots.py`; needs matplotlib."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from tamis.bench.results import read_rows

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {
    "threshold": "#d1495b", "sampled": "#00798c", "oracle": "#999999", "stored": "#edae49", "none": "#444444",
    "xattention": "#6a4c93", "flexprefill": "#66a182", "vertical_slash": "#2e4057",
}  # fmt: skip


def latest(path: Path) -> dict[tuple[str, str, str], float]:
    """{(case, provider, metric): p50}, later rows replacing earlier ones."""
    return {(r["case"], r["provider"], r["metric"]): float(r["p50"]) for r in read_rows(path)}


def means(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """{case: {provider: {metric: p50}}}."""
    out: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (case, provider, metric), value in latest(path).items():
        out[case][provider][metric] = value
    return out


def density_kl(out: Path) -> None:
    """Density against the divergence of the question's rows, one panel per prompt length."""
    cases = {c: v for c, v in means(ROOT / "results/selectors.csv").items() if c.startswith("qwen2.5-coder-1.5b/")}
    order = sorted(cases, key=lambda c: int(c.rpartition("/")[2]))
    figure, axes = pyplot.subplots(1, len(order), figsize=(4.2 * len(order), 3.6), sharey=True, squeeze=False)
    for axis, case in zip(axes[0], order, strict=True):
        for provider, metrics in cases[case].items():
            kind = provider.partition(":")[0]
            axis.scatter(metrics["density"], max(metrics["kl_rows"], 1e-3), color=COLOURS[kind], s=28)
            axis.annotate(
                provider.replace(",local=sampled", "").replace("sampled:", "").replace("threshold:", "θ:"),
                (metrics["density"], max(metrics["kl_rows"], 1e-3)), fontsize=5, xytext=(3, 2),
                textcoords="offset points",
            )  # fmt: skip
        axis.set(yscale="log", title=f"{case.rpartition('/')[2]} tokens", xlabel="density (share computed)")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("KL from dense, question rows (nats)")
    for kind, colour in COLOURS.items():
        axes[0][-1].scatter([], [], color=colour, label=kind)
    axes[0][-1].legend(fontsize=6)
    _save(figure, out)


def ttft(out: Path) -> None:
    """Time to first token of the best dense provider and of each replayed selector."""
    cases = means(ROOT / "results/ttft.csv")
    order = sorted((c for c in cases if c.startswith("llama-3.1-8b/bf16")), key=lambda c: int(c.rpartition("/")[2]))
    figure, axis = pyplot.subplots(figsize=(6.4, 3.6))
    shown = {"dense-tamis": ("dense", "#444444"), "sampled": ("SIFT, sampled", "#00798c"),
             "threshold": ("SIFT, threshold", "#d1495b")}  # fmt: skip
    for i, (key, (label, colour)) in enumerate(shown.items()):
        for j, case in enumerate(order):
            found = [m for p, m in cases[case].items() if p.partition(":")[0] == key]
            if found:
                bar: Any = axis.bar(j + 0.27 * (i - 1), found[0]["ttft_s"], 0.25, color=colour, label=label)
                mark = f"{found[0]['ttft_s']:.2f} s" + (f"\n{found[0]['speedup']:.2f}x" if i else "")
                axis.bar_label(bar, labels=[mark], fontsize=7)
    axis.set_xticks(range(len(order)), [f"{int(c.rpartition('/')[2]) // 1024}K" for c in order])
    axis.set(ylabel="time to first token (s)", xlabel="prompt tokens", ylim=(0, 11.8))
    axis.set_title("Llama-3.1-8B shape, bf16, one NVIDIA H200", fontsize=10)
    handles = {h.get_label(): h for h in axis.containers}
    axis.legend(handles.values(), handles.keys(), fontsize=8)
    _save(figure, out)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Software": ""})
    pyplot.close(figure)
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    density_kl(ROOT / "docs/img/density_kl.png")
    ttft(ROOT / "docs/img/ttft.png")
    sys.exit(0)
