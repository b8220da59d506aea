"""The numbers of a TTFT bench as rows of results/ttft.csv, as plain values and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tamis.bench.peer import PeerTime
from tamis.bench.results import Row

PARTS = ("linear", "attention", "selection", "other")


@dataclass(frozen=True)
class Timed:
    """One provider at one length. Times in seconds, one per repetition; joules per prefill.

    layers_s   of it, the decoder layers; what remains is embedding, final norm and head
    parts      of a further pass, which is not in `ttft_s` because marking every product takes time too
    whole      layers of the model over layers built: 1 unless it is a slice
    recorded   (tokens, KL) of the run whose densities were replayed
    """

    provider: str
    tokens: int
    ttft_s: tuple[float, ...]
    layers_s: tuple[float, ...]
    parts: dict[str, float]
    density: float = 1.0
    joules: float | None = None
    whole: float = 1.0
    recorded: tuple[int, float] | None = None
    note: str = ""

    @property
    def scaled_s(self) -> tuple[float, ...]:
        """TTFT of the whole model: the slice's layers times the layers it stands for, its two ends once."""
        return tuple(t + (self.whole - 1) * own for t, own in zip(self.ttft_s, self.layers_s, strict=True))

    @property
    def shares(self) -> dict[str, float]:
        """Each part's share of all parts."""
        total = sum(self.parts.values())
        return {name: s / total for name, s in self.parts.items()}

    def rows(self, case: str, best_dense: Timed) -> list[Row]:
        """For results/ttft.csv; speed-ups and energy ratios against the best dense provider of the same run.

        Energy is that of what was built, a slice or all.
        """
        row, own, base = _Rows(case, self.provider), median(self.ttft_s), median(best_dense.ttft_s)
        row.add("ttft_s", self.ttft_s, "s")
        row.add("speedup", [base / t for t in self.ttft_s])
        if self.whole != 1:
            row.add("layers_s", self.layers_s, "s")
            row.add("ttft_scaled_s", self.scaled_s, "s")
            row.add("speedup_scaled", [median(best_dense.scaled_s) / t for t in self.scaled_s])
        row.add("density", [self.density])
        for name, share in self.shares.items():
            row.add(f"{name}_s", [self.parts[name]], "s")
            row.add(f"{name}_share", [share])
        if self.recorded is not None:
            row.add("recorded_tokens", [self.recorded[0]], "tokens")
            row.add("recorded_kl", [self.recorded[1]], "nat")
        if self.joules:
            row.add("joules", [self.joules], "J")
            row.add("edp", [self.joules * own], "J s")
            row.add("ed2p", [self.joules * own**2], "J s2")
        if self.joules and best_dense.joules:
            ratio = best_dense.joules * base / (self.joules * own)
            row.add("edp_ratio", [ratio])
            row.add("ed2p_ratio", [ratio * base / own])
        return row.made

    def summary(self, case: str, best_dense: Timed) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        own, base = median(self.ttft_s), median(best_dense.ttft_s)
        both = self.joules and best_dense.joules
        scaled = {} if self.whole == 1 else {"ttft_scaled_s": median(self.scaled_s), "layers_s": median(self.layers_s)}
        if scaled:
            scaled["speedup_scaled"] = median(best_dense.scaled_s) / median(self.scaled_s)
        return {
            "case": case,
            "provider": self.provider,
            "ttft_s": own,
            "speedup": base / own,
            **scaled,
            "density": self.density,
            "parts": self.parts,
            "shares": self.shares,
            "joules": self.joules,
            "edp_ratio": best_dense.joules * base / (self.joules * own) if both else None,  # type: ignore[operator]
            "note": self.note,
        }


@dataclass
class _Rows:
    case: str
    provider: str
    made: list[Row] = field(default_factory=list)

    def add(self, metric: str, values: Sequence[float], unit: str = "1") -> None:
        self.made.append(Row.of(self.case, self.provider, metric, values, unit=unit))


@dataclass(frozen=True)
class Comparison:
    """A peer's TTFT at one length, and over it the best dense and the best sparse one of the same sitting."""

    case: str
    provider: str
    ttft_s: float
    dense: str
    dense_over_peer: float
    sparse: str | None = None
    sparse_over_peer: float | None = None

    def __str__(self) -> str:
        text = f"{self.case}: {self.provider} {self.ttft_s:.3f} s; {self.dense} takes {self.dense_over_peer:.2f} of it"
        return text if self.sparse is None else f"{text}, {self.sparse} {self.sparse_over_peer:.2f}"


def compare(case: str, peer: PeerTime, best_dense: Timed, sparse: Sequence[Timed]) -> tuple[Comparison, list[Row]]:
    """A peer's numbers beside ours, and its rows."""
    row, theirs, base = _Rows(case, peer.provider), median(peer.ttft_s), median(best_dense.ttft_s)
    row.add("ttft_s", peer.ttft_s, "s")
    row.add("speedup", [base / t for t in peer.ttft_s])
    best = min(sparse, key=lambda t: median(t.ttft_s), default=None)
    made = Comparison(case, peer.provider, theirs, best_dense.provider, base / theirs)
    if best is not None:
        share = median(best.ttft_s) / theirs
        made = Comparison(case, peer.provider, theirs, best_dense.provider, base / theirs, best.provider, share)
    return made, row.made


@dataclass(frozen=True)
class TtftResult:
    """All of a bench. `left_out` are the dense providers that do not run here, with the reason."""

    results: list[dict[str, Any]]
    left_out: dict[str, str]
    peers: list[Comparison]
    experts: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)


def table(result: TtftResult) -> str:
    """One line per provider: TTFT, its parts in seconds and per cent, energy; then peers, what was left out, notes."""
    width = max((len(r["provider"]) for r in result.results), default=8)
    lines, case, notes = [], "", []
    for r in result.results:
        if r["case"] != case:
            case = r["case"]
            heads = "".join(f"{name:>16}" for name in PARTS)
            lines += ["", case, f"{'provider':{width}}    TTFT s  speedup  density{heads}    joules     EDP"]
        parts = "".join(
            f"{r['parts'][name]:9.3f} {r['shares'][name]:5.1%}" if name in r["parts"] else f"{'–':>15}"
            for name in PARTS
        )
        energy = f"{r['joules']:10.1f}" if r["joules"] else f"{'–':>10}"
        edp = f"{r['edp_ratio']:7.2f}x" if r["edp_ratio"] else f"{'–':>8}"
        lines.append(
            f"{r['provider']:{width}} {r['ttft_s']:9.3f} {r['speedup']:7.2f}x {r['density']:8.3f} {parts}{energy}{edp}"
        )
        if "ttft_scaled_s" in r:
            notes.append(f"{case} {r['provider']}: whole model {r['ttft_scaled_s']:.3f} s, {r['speedup_scaled']:.2f}x")
        if r["note"]:
            notes.append(f"{case} {r['provider']}: {r['note']}")
    lines += ["", *map(str, result.peers), *notes]
    lines += [f"left out: {name}: {why}" for name, why in result.left_out.items()]
    return "\n".join([*lines, f"experts: {result.experts}"] if result.experts else lines).strip("\n")
