"""What codes find, and what records lose, on a model's own queries and keys: each choice of the self-indexing form.

Knows recorded tensors; `record` gets them from a model. Two tables. "find": the share of the exact best records that a
scorer finds, and the attention mass of what is then attended (the first and last tokens too). "lose": the error of the
attention output if all but the whole tokens are read from their records, against full precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from tamis.attention.hook import Switch
from tamis.cache.selfindex.documents import Placed, encode_document, pair_energy, shared_tables, turned_queries
from tamis.cache.selfindex.keep import Keep, energy_of, exact_tokens
from tamis.core.errors import InvalidInput
from tamis.kernels.reference import selfindex as reference
from tamis.kernels.reference.selfindex import Fit
from tamis.kernels.selfindex import Layout, Part, Tables, by_group, dequantised, group_mean
from tamis.model.rope import Rotary

SIGNS = Fit(steps=0, balance=False)
PAGE = 16  # Quest's (arXiv 2406.10774)


@dataclass(frozen=True)
class Recorded:
    """One layer of one prompt: q [Hq, W, D] of its last W rows; keys and values [Hkv, T, D]; all turned, W <= T."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float


@dataclass(frozen=True)
class Protocol:
    """`rows` last rows are judged, the recorded rows before them are the window; `share` of T is chosen outside the
    `first` and `last` tokens, which are always attended."""

    rows: int = 8
    share: float = 0.075
    first: int = 64
    last: int = 64


@dataclass(frozen=True)
class Row:
    """A mean over layers. bytes: read per token and KV head for "find", kept for "lose"; what a table lacks is NaN."""

    table: str
    variant: str
    bytes: float
    overlap: float = math.nan
    mass: float = math.nan
    error: float = math.nan


@dataclass
class Recorder:
    """A job for `Switch.running`: computes dense attention, or with `mask` bool [T, T], and keeps what `layers` saw."""

    layers: tuple[int, ...]
    window: int = 128
    mask: torch.Tensor | None = None
    kept: dict[int, Recorded] = field(default_factory=dict)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `attention.hook.Job`."""
        if layer in self.layers:
            self.kept[layer] = Recorded(q[:, -self.window :].clone(), k.clone(), v.clone(), scale)
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], self.mask, is_causal=self.mask is None, scale=scale, enable_gqa=True
        )
        return out[0], None


def spread_layers(n_layers: int, most: int = 7) -> tuple[int, ...]:
    """Up to `most` layers from the first to the last."""
    return tuple(sorted({round(i * (n_layers - 1) / max(1, most - 1)) for i in range(most)}))


def record(
    model: Any, switch: Switch, tokens: Sequence[int], layers: Iterable[int], *, mask: torch.Tensor | None = None
) -> dict[int, Recorded]:
    """One forward pass of `tokens` through a model whose attention has `switch` (`attention.hook.install`)."""
    job = Recorder(tuple(layers), mask=mask)
    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    with torch.inference_mode(), switch.running(job, len(tokens)):
        model(ids, use_cache=False, logits_to_keep=1)
    return job.kept


def study(layers: Sequence[Recorded], protocol: Protocol | None = None) -> list[Row]:
    """Both tables for layers of one prompt. Raises InvalidInput where it is too short."""
    how = protocol or Protocol()
    n, w = layers[0].keys.shape[-2], layers[0].q.shape[-2]
    if n < how.first + how.last + PAGE or w <= how.rows:
        raise InvalidInput(f"{n} tokens and {w} recorded rows; the protocol needs more: {how}.")
    rows: list[Row] = []
    for table, made in (("find", [_find(x, how) for x in layers]), ("lose", [_lose(x, how) for x in layers])):
        for name in made[0]:
            values = torch.tensor([m[name] for m in made], dtype=torch.float64).mean(0).tolist()
            rows.append(Row(table, name, values[0], *values[1:]))
    return rows


def document_study(
    layers: Sequence[Recorded], starts: Sequence[int], rotary: Rotary, *, rows: int = 8, share: float = 0.075
) -> list[Row]:
    """ "find" for documents encoded alone; starts: first token of each, and the end of the last.

    Record the prompt with a mask that keeps documents from seeing each other. Tokens outside of documents are left out.
    """
    made = [_documents(x, starts, rotary, rows, share) for x in layers]
    return [
        Row("documents", name, *torch.tensor([m[name] for m in made], dtype=torch.float64).mean(0).tolist())
        for name in made[0]
    ]


def _find(x: Recorded, how: Protocol) -> dict[str, tuple[float, float, float]]:
    heads, n, d = x.keys.shape
    q, keys = x.q[:, -how.rows :].float(), x.keys.float()
    body, values = keys[:, how.first : n - how.last], x.values[:, how.first : n - how.last].float()
    count, mean_q = round(how.share * n), group_mean(q, heads)
    exact = mean_q @ body.transpose(1, 2)
    best = reference.highest(exact, count)
    mass = _mass(q, keys, x.scale)
    outside = mass[..., : how.first].sum(-1) + mass[..., n - how.last :].sum(-1)
    energy = energy_of(x.q[:, : -how.rows], heads)
    layout = Layout(d)
    codes = layout.plane_bytes["codes"] + how.share * (layout.record_bytes - layout.plane_bytes["codes"])

    def judged(scores: torch.Tensor, read: float, count: int = count) -> tuple[float, float, float]:
        chosen = reference.highest(scores, count)
        kept = (mass[..., how.first : n - how.last] * chosen[:, None]).sum(-1) + outside
        return read, float((chosen & best).sum() / best.sum()), float(kept.mean())

    def coded(fit: Fit, weigh: torch.Tensor | None = None) -> torch.Tensor:
        tables = reference.fit_tables(body, values, layout, energy=weigh, fit=fit)
        return reference.score(mean_q, reference.compress(body, values, tables, layout, signs=fit.steps == 0), tables)

    full, equal = 4.0 * d, 64  # pages of 64 for equal bytes: an index of pages of 16 alone costs more than all of ours
    share = (codes - full / equal) / full
    return {
        "exact": judged(exact, full),
        "signs (the paper)": judged(coded(SIGNS), codes),
        "signs, not centred": judged(coded(replace(SIGNS, centre=False)), codes),
        "signs, balanced": judged(coded(Fit(steps=0), energy), codes),
        "refined once": judged(coded(Fit(1, balance=False)), codes),
        "refined": judged(coded(Fit(balance=False)), codes),
        "refined, weighed": judged(coded(Fit(balance=False), energy), codes),
        "refined, weighed, balanced (selfindex)": judged(coded(Fit(), energy), codes),
        "quest, page 16": judged(_quest(mean_q, body, PAGE), full / PAGE + how.share * full),
        "quest, page 64, bytes of selfindex": judged(_quest(mean_q, body, equal), codes, max(1, round(share * n))),
    }


def _lose(x: Recorded, how: Protocol) -> dict[str, tuple[float, float, float, float]]:
    heads, n, d = x.keys.shape
    q = x.q[:, -how.rows :].float()
    old = n - how.last
    keys, values = x.keys.float(), x.values.float()
    window = x.q[:, : -how.rows]
    exact = exact_tokens(window, keys[:, :old], Keep(), x.scale)
    whole = torch.ones((heads, n), dtype=torch.bool, device=keys.device)
    whole[:, :old] = torch.zeros_like(whole[:, :old]).scatter_(-1, exact, True)
    true = reference.attend_exact(by_group(q, heads), keys, values, scale=x.scale, causal=True)[0]

    def lost(k: torch.Tensor, v: torch.Tensor, size: float) -> tuple[float, float, float, float]:
        k, v = (torch.where(whole[..., None], t, made) for t, made in ((keys, k), (values, v)))
        out = reference.attend_exact(by_group(q, heads), k, v, scale=x.scale, causal=True)[0]
        return size, math.nan, math.nan, float(((out - true).norm(dim=-1) / true.norm(dim=-1)).mean())

    made = {}
    for channels in (d // 4, d // 2, d):
        layout = Layout(d, channels)
        for name, fit, weigh in (("", Fit(), energy_of(window, heads)), (", signs", SIGNS, None)):
            tables = reference.fit_tables(keys, values, layout, energy=weigh, left_out=whole, fit=fit)
            records = reference.compress(keys, values, tables, layout, signs=fit.steps == 0)
            made[f"scales of {channels} channels{name}"] = lost(
                *dequantised(records, tables, layout), layout.record_bytes
            )
    for channels, zero in ((32, True), (32, False), (64, True)):
        k, v = _released(keys, values, whole, channels, zero)
        name = f"sign and magnitude, {channels} channels, {'zero' if zero else 'no key zero'}"
        made[name] = lost(k, v, d / 8 + d / 2 + d / channels * (8 if zero else 6))
    return made


def _released(
    keys: torch.Tensor, values: torch.Tensor, whole: torch.Tensor, channels: int, zero: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values through the published form: sign, 2-bit magnitude and value, min-max float16 parameters."""
    use = (~whole).float()[..., None]
    mean = (keys * use).sum(1, keepdim=True) / use.sum(1, keepdim=True)
    most = ((keys - mean).abs() * use).amax(1, keepdim=True).clamp(min=1e-9)
    normal = (keys - mean) / most
    size = _min_max(normal.abs(), channels, zero)
    return size * torch.where(normal > 0, 1.0, -1.0) * most + mean, _min_max(values, channels, True)


def _min_max(x: torch.Tensor, channels: int, zero: bool) -> torch.Tensor:
    groups = torch.unflatten(x, -1, (-1, channels))
    low = groups.amin(-1, keepdim=True) if zero else torch.zeros_like(groups[..., :1])
    step = ((groups.amax(-1, keepdim=True) - low) / 3).clamp(min=1e-6).half().float()
    low = low.half().float()
    return (((groups - low) / step).round().clamp(0, 3) * step + low).flatten(-2)


def _quest(q: torch.Tensor, keys: torch.Tensor, page: int) -> torch.Tensor:
    """Upper bounds of whole pages' scores [Hkv, R, T], the same for all tokens of a page; a short last page counts."""
    bounds = []
    for block in torch.split(keys, page, 1):
        high, low = block.amax(1)[:, None], block.amin(1)[:, None]
        bound = torch.maximum(q * high, q * low).sum(-1, keepdim=True)
        bounds.append(bound.expand(-1, -1, block.shape[1]))
    return torch.cat(bounds, -1)


def _mass(q: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """[Hkv, g, R, T]: causal attention of the last R rows."""
    scores = by_group(q, keys.shape[0]) @ keys[:, None].transpose(-1, -2) * scale
    rows, n = q.shape[-2], keys.shape[-2]
    return scores.masked_fill(~torch.ones(rows, n, dtype=torch.bool).tril(n - rows), -math.inf).softmax(-1)


def _documents(
    x: Recorded, starts: Sequence[int], rotary: Rotary, rows: int, share: float
) -> dict[str, tuple[float, float, float]]:
    heads, _, d = x.keys.shape
    begin, end = starts[0], starts[-1]
    spans = list(pairwise(starts))
    q, layout = x.q[:, -rows:].float(), Layout(d)
    local = [(rotary.rotate(x.keys[:, a:b].float(), -a), x.values[:, a:b].float()) for a, b in spans]
    energy = pair_energy(energy_of(x.q[:, :-rows], heads), rotary)
    own = [encode_document(k, v, layout, energy=energy) for k, v in local]
    one = shared_tables(local, layout, energy=energy)
    shared = [encode_document(k, v, layout, tables=one) for k, v in local]
    signs = [encode_document(k, v, layout, fit=SIGNS) for k, v in local]
    body = x.keys[:, begin:end].float()
    mass = (by_group(q, heads) @ body[:, None].transpose(-1, -2) * x.scale).softmax(-1)
    first = torch.zeros(end - begin, dtype=torch.bool)
    first[[a - begin for a in starts[:-1]]] = True
    count = round(share * (end - begin))
    exact = (group_mean(q, heads) @ body.transpose(1, 2)).masked_fill(first, -math.inf)
    best = reference.highest(exact, count)

    def judged(scores: torch.Tensor, size: float, keep: bool = True) -> tuple[float, float, float]:
        chosen = reference.highest(scores, count)
        kept = (mass * (chosen | first if keep else chosen)[:, None]).sum(-1)
        return size, float((chosen & best).sum() / best.sum()), float(kept.mean())

    def scored(parts: list[Part], turn: bool = True) -> torch.Tensor:
        placed = [Placed(p, a if turn else 0) for p, (a, _) in zip(parts, spans, strict=True)]
        turned = turned_queries(q, placed, rotary)
        return torch.cat([reference.part_scores(t, p) for t, p in zip(turned, parts, strict=False)], -1)

    bare = [Part(p.records, _without_mean(p.tables), p.exact, p.keys, p.values) for p in own]
    size = layout.record_bytes
    return {
        "exact": judged(exact, 4 * d),
        "own tables (selfindex)": judged(scored(own), size),
        "own tables, first token not kept": judged(scored(own), size, False),
        "shared tables": judged(scored(shared), size),
        "signs (the paper), own tables": judged(scored(signs), size),
        "own tables, no bias": judged(scored(bare), size),
        "own tables, query not turned": judged(scored(own, False), size),
    }


def _without_mean(tables: Tables) -> Tables:
    return replace(tables, mean=torch.zeros_like(tables.mean))


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """The tables as text, a line a row."""
    for r in rows:
        numbers = f"{r.overlap:8.3f} {r.mass:8.3f}" if r.table != "lose" else f"{r.error:8.4f}"
        yield f"{r.table:10s} {r.variant:42s} {r.bytes:7.1f} {numbers}"
