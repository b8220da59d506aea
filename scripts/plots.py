"""Draw the plots of README and docs from results/. `python scripts/plots.py`; needs matplotlib."""

from __future__ import annotations

import json
import re
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
        points = {p: (m["density"], max(m["kl_rows"], 1e-3)) for p, m in cases[case].items()}
        for provider, (x, y) in points.items():
            axis.scatter(x, y, color=COLOURS[provider.partition(":")[0]], s=24)
            if any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values()):
                continue  # only what nothing beats in both has room for its name
            name = provider.replace(",local=sampled", "").replace("sampled:", "").replace("threshold:", "θ:")
            axis.annotate(
                name.replace("paired=true", "paired"), (x, y), fontsize=5, xytext=(3, 2), textcoords="offset points"
            )
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
            if not i:  # the one that the speed-ups are against: dense providers ran again in later sittings
                found = [{"ttft_s": m["ttft_s"] * m["speedup"]} for p, m in cases[case].items() if p == "sampled"]
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


def reuse_quality(out: Path) -> None:
    """KL of the first answer token against the share of stored tokens computed again; an adapter over all sets."""
    every = means(ROOT / "results/reuse_quality.csv")
    pooled = re.compile(r".*/qa/\d+")  # all question sets together
    cases = {c: v for c, v in every.items() if pooled.fullmatch(c) or any(p.startswith("blend:") for p in v)}
    figure, axes = pyplot.subplots(1, len(cases), figsize=(4.6 * len(cases), 3.8), sharey=True, squeeze=False)
    named = [p.rpartition("blend=")[2] for v in cases.values() for p in v if p.startswith("blend:") and ",blend=" in p]
    rules = dict(zip(dict.fromkeys(sorted(named)), COLOURS.values(), strict=False))
    points = {
        "reuse": ("reuse", "x"),
        "adapted/reuse": ("adapter + reuse", "*"),
        "adapted/dense": ("adapter, dense", "^"),
    }
    for axis, (case, providers) in zip(axes[0], cases.items(), strict=True):
        for rule, colour in rules.items():
            found = [m for p, m in providers.items() if p.startswith("blend:") and p.endswith(f"blend={rule}")]
            line = sorted((m["recomputed_mean"], m["kl_mean"]) for m in found)
            if line:
                axis.plot(*zip(*line, strict=True), color=colour, marker="o", markersize=4, label=f"blend, {rule}")
        for provider, (label, marker) in points.items():
            if provider in providers:
                m = providers[provider]
                at = m.get("recomputed_mean", 1.0)  # dense computes all
                axis.scatter(at, m["kl_mean"], color="#444444", marker=marker, label=label, zorder=3)
        if "none" in providers:
            axis.axhline(providers["none"]["kl_mean"], color="#999999", linestyle=":", label="SIFT, no cross tiles")
        axis.set(title=case, xlabel="share of stored tokens computed again")
        axis.title.set_fontsize(7)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0][0].set(ylabel="KL from dense, first answer token (nats)", ylim=(0, None))
    _save(figure, out)


def decode_quality(out: Path) -> None:
    """KL of the answer's tokens against the bytes that a step reads, one line per way to attend."""
    case = "qwen2.5-coder-1.5b/bfloat16/qa/cacheblend_musique_10doc/8192/20"
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for provider, m in means(ROOT / "results/decode_quality.csv")[case].items():
        if m["kl_mean"] > 0:
            points[provider.partition("@")[0]].append((m["density_mean"], m["kl_mean"]))
    figure, axis = pyplot.subplots(figsize=(5.6, 3.6))
    for (method, line), colour in zip(sorted(points.items()), COLOURS.values(), strict=False):
        axis.plot(*zip(*sorted(line), strict=True), color=colour, marker="o", markersize=4, label=method)
    axis.set(yscale="log", xlabel="bytes read at a step, share of bfloat16's", ylabel="KL from full (nats)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    _save(figure, out)


def reuse_hits(out: Path) -> None:
    """Share of document tokens served from the cache against the pool's bytes, one panel per workload."""
    budgets = ("1gb", "10gb", "50gb", "unlimited")
    cases = means(ROOT / "results/reuse.csv")
    workloads = [w for w in ("ragpulse", "zipf2.1") if any(f"{w}/{b}" in cases for b in budgets)]
    shown = {"prefix": ("prefix caching", "#6a4c93"), "cacheblend": ("CacheBlend", "#edae49"),
             "block": ("Block-Attention copies", "#d1495b"), "lazy": ("Tamis, in place", "#00798c")}  # fmt: skip
    figure, axes = pyplot.subplots(1, len(workloads), figsize=(4.2 * len(workloads), 3.6), sharey=True, squeeze=False)
    for axis, workload in zip(axes[0], workloads, strict=True):
        for provider, (label, colour) in shown.items():
            rates = [cases.get(f"{workload}/{b}", {}).get(f"{provider}-modelled", {}) for b in budgets]
            found = [(i, r["token_hit_rate"]) for i, r in enumerate(rates) if "token_hit_rate" in r]
            if found:
                axis.plot(*zip(*found, strict=True), color=colour, label=label, marker="o", markersize=4)
        axis.set_xticks(range(len(budgets)), ["1 GB", "10 GB", "50 GB", "unlimited"])
        axis.set(title=workload, xlabel="keys and values of Llama-3.1-8B", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("document tokens served from the cache")
    axes[0][0].legend(fontsize=7)
    _save(figure, out)


def offload_timeline(out: Path, source: Path, shown: int = 8) -> None:
    """Copies beside the layers that they run along with: some layers in the middle of a step, a panel each case."""
    cases = dict(list(json.loads(source.read_text(encoding="utf-8")).items())[:3])
    figure, axes = pyplot.subplots(len(cases), 1, figsize=(7.6, 1.5 + 1.3 * len(cases)), squeeze=False)
    for axis, (case, found) in zip(axes[:, 0], cases.items(), strict=True):
        layers = found["layers"]
        first = max(0, (len(layers) - shown) // 2)
        last = min(len(layers) - 1, first + shown)
        zero = layers[first][0]
        for i in range(first, last):
            begin, attends, copy, copied = ((t - zero) / 1e3 for t in layers[i])
            end = (layers[i + 1][0] - zero) / 1e3
            axis.barh(1, attends - begin, left=begin, height=0.7, color="#66a182", edgecolor="white")
            axis.barh(1, end - attends, left=attends, height=0.7, color="#00798c", edgecolor="white")
            axis.text((begin + end) / 2, 1, f"layer {i}", ha="center", va="center", fontsize=6, color="white")
            axis.barh(0, copied - copy, left=copy, height=0.7, color="#d1495b", edgecolor="white")
            axis.text((copy + copied) / 2, 0, f"for {i}", ha="center", va="center", fontsize=6, color="white")
        axis.set_yticks([0, 1], ["copy stream", "compute"])
        axis.set_title(case, fontsize=8)
        axis.set_xlabel("µs", fontsize=8)
        axis.tick_params(labelsize=8)
    named = {"projections, choice of blocks, wait": "#66a182", "attention, MLP": "#00798c", "host to device": "#d1495b"}
    for label, colour in named.items():
        axes[0][0].barh(0, 0, color=colour, label=label)
    figure.legend(fontsize=7, loc="lower center", ncols=3, frameon=False)
    figure.subplots_adjust(bottom=0.3)
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
    if (ROOT / "results/reuse_quality.csv").exists():
        reuse_quality(ROOT / "docs/img/reuse_quality.png")
    if (ROOT / "results/decode_quality.csv").exists():
        decode_quality(ROOT / "docs/img/decode_quality.png")
    if (ROOT / "results/reuse.csv").exists():
        reuse_hits(ROOT / "docs/img/reuse_hits.png")
    if (ROOT / "results/offload_timeline.json").exists():
        offload_timeline(ROOT / "docs/img/offload_timeline.png", ROOT / "results/offload_timeline.json")
    sys.exit(0)
