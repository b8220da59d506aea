"""The self-indexing form in plain PyTorch: fit, compress, score, select, dequantise, attend. Truth of the kernels.

Everything is float32 and works on any leading dims. Only the order of work matters to a reader; `kernels.cpu.selfindex`
has the scoring and the step that a CPU can afford. From arXiv 2603.14224, changed as `kernels.selfindex` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.reference.paged import merge
from tamis.kernels.selfindex import (
    CELLS,
    GROUP,
    Layout,
    Part,
    Records,
    Tables,
    by_group,
    check_pair,
    dequantised,
    group_mean,
    hide,
    looked_up,
    merged,
    normal_form,
    pack_nibbles,
    pack_pairs,
    pack_scales,
    unpack_nibbles,
    unpack_scales,
)

LEAST = 1e-6  # below this a spread counts as none: a constant channel
STEP = 0.9957  # the step of a uniform 4-level quantiser of least error, in standard deviations of a normal variable
TOKENS_AT_ONCE = 4096  # compared with all centroids at a time: 16 distances a group are the largest tensor made


@dataclass(frozen=True)
class Fit:
    """How tables are made.

    steps          refinements of the centroids after the signs gave the first ones; 0 keeps the signs (the paper's)
    sample_tokens  evenly spaced tokens that the centroids are fitted to; mean and spread are of all
    balance        order channels by how much they move scores, so that each group has one of the strongest quarter
    centre         subtract the channels' means from keys (off only to show what that is worth)
    """

    steps: int = 3
    sample_tokens: int = 1024
    balance: bool = True
    centre: bool = True

    def __post_init__(self) -> None:
        if self.steps < 0 or self.sample_tokens < 1:
            raise InvalidInput(f"{self.steps} steps on {self.sample_tokens} tokens; give 0 or more, and 1 or more.")


def fit_tables(
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    *,
    energy: torch.Tensor | None = None,
    left_out: torch.Tensor | None = None,
    fit: Fit | None = None,
) -> Tables:
    """Tables for keys and values [.., T, D], T >= 1.

    energy    [.., D]: mean squared query per channel, so that what queries look at is coded best; default: all alike
    left_out  bool [.., T]: tokens that are kept whole (a first token would drag the mean towards itself); if they are
              all the tokens, none is left out
    Not finite numbers are left out of every sum.
    """
    check_pair(keys, values, layout)
    fit = fit or Fit()
    if not keys.shape[-2]:
        raise InvalidInput("0 tokens to make tables from; give at least 1.")
    use = _used(keys, left_out)
    k, mean = _centred(keys, use, fit.centre)
    v, value_mean = _centred(values, use)
    variance = _mean(k.square(), use)
    weight = torch.ones_like(variance) if energy is None else _weights(energy.expand(variance.shape))
    order = _order(variance * weight) if fit.balance else torch.arange(layout.head_dim).expand(variance.shape)
    order = order.to(torch.uint8).to(keys.device)
    stored, weight = _ordered(k, order), _ordered(weight[..., None, :], order)[..., 0, :].bfloat16()
    n = stored.shape[-2]
    at = torch.linspace(0, n - 1, min(n, fit.sample_tokens), device=keys.device).round().long()
    split = _split(weight.float())
    centroids = _centroids(_split(stored[..., at, :]), split, use[..., at], fit.steps).bfloat16()
    rest = stored - looked_up(centroids, _codes(stored, centroids, None if fit.steps == 0 else weight))
    value_scale = _spread(_mean(v.square(), use)).bfloat16()
    spread = _spread(_mean(rest.square(), use)).bfloat16()
    return Tables(mean.bfloat16(), order, centroids, weight, spread, value_mean.bfloat16(), value_scale)


def compress(
    keys: torch.Tensor, values: torch.Tensor, tables: Tables, layout: Layout, *, signs: bool = False
) -> Records:
    """Records of keys and values [.., T, D].

    signs: codes are the signs of the centred channels (tables of `Fit(steps=0)`); else the nearest centroid. Not a
    number becomes the channel's mean, infinities the largest finite number.
    """
    check_pair(keys, values, layout)
    stored = tables.stored(_finite(keys, tables.mean))
    codes = _codes(stored, tables.centroids, None if signs else tables.weight)
    rest = (stored - looked_up(tables.centroids, codes)) / tables.residual_scale.float()[..., None, :]
    centred = _finite(values, tables.value_mean) / tables.value_scale.float()[..., None, :]
    residuals, key_scales = _two_bits(rest, layout.scale_channels)
    kept, value_scales = _two_bits(centred, layout.scale_channels)
    return Records(pack_nibbles(codes), pack_pairs(residuals), pack_pairs(kept), key_scales, value_scales)


def lookup_tables(q: torch.Tensor, tables: Tables) -> torch.Tensor:
    """float32 [.., R, G, 16]: what each code of each group adds to the score of query rows q [.., R, D]."""
    return torch.einsum("...gci,...rgi->...rgc", tables.centroids.float(), _split(tables.stored(q)))


def score(q: torch.Tensor, records: Records, tables: Tables) -> torch.Tensor:
    """float32 [.., Hkv, R, T]: scores of query rows q [.., Hkv, R, D] from the codes alone, with the mean's bias.

    q is the mean of the query heads that share a KV head. Unscaled: in units of q times key.
    """
    lut = lookup_tables(q, tables)
    codes = unpack_nibbles(records.codes).long()  # [.., T, G]
    index = codes.transpose(-1, -2)[..., None, :, :]  # [.., 1, G, T]
    per_group = lut.gather(-1, index.expand(*lut.shape[:-1], codes.shape[-2]))
    return per_group.sum(-2) + tables.bias(q)[..., None]


def select(scores: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [.., min(count, T)]: the highest of scores [.., T], in order of position; of equal ones the earlier.

    The count is exact. Not-a-number counts as -inf.
    """
    if count < 0:
        raise InvalidInput(f"{count} tokens to select; give 0 or more.")
    return highest(scores, count).nonzero()[:, -1].view(*scores.shape[:-1], min(count, scores.shape[-1]))


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """bool [.., T]: true at what `select` gives."""
    n = min(count, scores.shape[-1])
    if not n:
        return torch.zeros_like(scores, dtype=torch.bool)
    clean = torch.where(scores.isnan(), -math.inf, scores)
    bar = clean.topk(n, -1).values[..., -1:]
    above, equal = clean > bar, clean == bar
    return above | (equal & (equal.cumsum(-1) <= n - above.sum(-1, keepdim=True)))


def attend_records(
    q: torch.Tensor, records: Records, tables: Tables, layout: Layout, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [.., Hkv, g, R, D] over all of `records` [.., Hkv, K, ..].

    The channel order and the mean's bias (per query head) are applied to the query, the values' channel scales and mean
    to the output, once, as a kernel does. Returns float32 out [.., Hkv, g, R, D] and log-sum-exp [.., Hkv, g, R];
    without keys 0 and -inf.
    """
    keys, values = normal_form(records, tables, layout)
    rows = q.float().flatten(-3, -2)
    scores = (tables.stored(rows) @ keys.transpose(-1, -2) + tables.bias(rows)[..., None]) * scale
    out, lse = merged(scores, values)
    out = out * tables.value_scale.float()[..., None, :] + tables.value_mean.float()[..., None, :]
    out = torch.where(lse[..., None] > -math.inf, out, 0.0)
    return torch.unflatten(out, -2, q.shape[-3:-1]), torch.unflatten(lse, -1, q.shape[-3:-1])


def attend_exact(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [.., Hkv, g, R, D] over keys and values [.., Hkv, F, D]; causal: row i sees F - R + i + 1 of them.

    Returns float32 out [.., Hkv, g, R, D] and log-sum-exp [.., Hkv, g, R]; a row that sees none has 0 and -inf.
    """
    scores = q.float() @ keys.float()[..., None, :, :].transpose(-1, -2) * scale
    if causal:
        rows, n = q.shape[-2], keys.shape[-2]
        visible = torch.arange(n, device=q.device) <= torch.arange(n - rows, n, device=q.device)[:, None]
        scores = scores.masked_fill(~visible, -math.inf)
    return merged(scores, values.float()[..., None, :, :])


def part_scores(q: torch.Tensor, part: Part) -> torch.Tensor:
    """float32 [.., Hkv, R, T]: `score` of a part for query heads q [.., Hq, R, D]; -inf where tokens are kept whole."""
    scores = score(group_mean(q, part.records.codes.shape[-3]), part.records, part.tables)
    return hide(scores, part.exact)


def attention(
    queries: Sequence[torch.Tensor],
    parts: Sequence[Part],
    recent: tuple[torch.Tensor, torch.Tensor],
    layout: Layout,
    *,
    count: int,
    scale: float,
    chosen: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One attention over compressed parts and recent exact tokens: the `count` best records of all parts together.

    queries  q [.., Hq, R, D] as each part's keys must be scored with (turned back by a document's offset), and last
             q itself, for the recent tokens: one more than parts
    recent   keys, values [.., Hkv, F, D], the last R of them the query rows' own: row i sees F - R + i + 1. Always
             attended, as are the parts' exact tokens; `count` is on top of those
    chosen   bool [.., Hkv, R, T] per part instead of a selection
    Returns out [.., Hq, R, D] in q's dtype and float32 log-sum-exp [.., Hq, R].
    """
    if len(queries) != len(parts) + 1:
        raise InvalidInput(f"{len(queries)} queries for {len(parts)} parts; give one for each and one for the rest.")
    kv_heads = recent[0].shape[-3]
    if chosen is None:
        chosen = choose([part_scores(q, p) for q, p in zip(queries, parts, strict=False)], count)
    made = [attend_exact(by_group(queries[-1], kv_heads), *recent, scale=scale, causal=True)]
    for q, part, mask in zip(queries, parts, chosen, strict=False):
        grouped = by_group(q, kv_heads)
        made.append(attend_exact(grouped, part.keys, part.values, scale=scale))
        made.append(_attend_masked(grouped, part, mask, layout, scale))
    out, lse = merge(iter(made))
    return out.flatten(-4, -3).to(queries[-1].dtype), lse.flatten(-3, -2)


def choose(scores: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """bool [.., Hkv, R, T] for each of scores [.., Hkv, R, T]: the `count` best over all, never one at -inf."""
    if not scores:
        return []
    joined = torch.cat(list(scores), -1)
    mask = highest(joined, count) & (joined > -math.inf)
    return list(torch.split(mask, [s.shape[-1] for s in scores], -1))


def _attend_masked(
    q: torch.Tensor, part: Part, mask: torch.Tensor, layout: Layout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A part's chosen records; all are dequantised, which a reference may."""
    keys, values = dequantised(part.records, part.tables, layout)
    scores = q.float() @ keys[..., None, :, :].transpose(-1, -2) * scale
    scores = scores.masked_fill(~mask[..., None, :, :], -math.inf)
    return merged(scores, values[..., None, :, :])


def _used(keys: torch.Tensor, left_out: torch.Tensor | None) -> torch.Tensor:
    """float32 [.., T]: 1 for tokens that the statistics are of."""
    use = torch.ones(keys.shape[:-1], device=keys.device)
    if left_out is None:
        return use
    some = (~left_out).expand(use.shape)
    return torch.where(some.any(-1, keepdim=True), some.float(), use)


def _mean(x: torch.Tensor, use: torch.Tensor) -> torch.Tensor:
    return (x * use[..., None]).sum(-2) / use.sum(-1)[..., None].clamp(min=1)


def _centred(x: torch.Tensor, use: torch.Tensor, centre: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """x minus its mean rounded to bfloat16, 0 where not finite; and that mean."""
    finite = x.isfinite()
    clean = torch.where(finite, x, 0).float()
    seen = finite * use[..., None]
    mean = ((clean * seen).sum(-2) / seen.sum(-2).clamp(min=1)).bfloat16().float()
    mean = mean if centre else torch.zeros_like(mean)
    return torch.where(finite, clean - mean[..., None, :], 0.0), mean


def _finite(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    most = torch.finfo(torch.bfloat16).max / 4
    away = x.float().clamp(-most, most) - mean.float()[..., None, :]
    return torch.where(away.isnan(), 0.0, away)


def _spread(square: torch.Tensor) -> torch.Tensor:
    spread = square.sqrt()
    return torch.where(spread > LEAST, spread, torch.ones_like(spread))


def _weights(energy: torch.Tensor) -> torch.Tensor:
    """Mean 1, never 0: a channel that no query of the window used may be used by the next."""
    clean = torch.where(energy.isfinite(), energy.float(), 0.0).clamp(min=0)
    mean = clean.mean(-1, keepdim=True)
    return torch.where(mean > 0, clean / mean.clamp(min=torch.finfo(torch.float32).tiny), 1.0).clamp(1e-3, 1e3)


def _order(strength: torch.Tensor) -> torch.Tensor:
    """Channels by strength, every second quarter turned round, so that sums of groups come out alike."""
    quarters = torch.unflatten(strength.sort(dim=-1, descending=True, stable=True).indices, -1, (GROUP, -1)).clone()
    quarters[..., 1::2, :] = quarters[..., 1::2, :].flip(-1)
    return quarters.flatten(-2)


def _ordered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.gather(-1, order.long()[..., None, :].expand(x.shape))


def _split(stored: torch.Tensor) -> torch.Tensor:
    """[.., D] in stored order as [.., G, 4]."""
    return torch.unflatten(stored, -1, (GROUP, -1)).transpose(-1, -2)


def _centroids(x: torch.Tensor, weight: torch.Tensor, use: torch.Tensor, steps: int) -> torch.Tensor:
    """float32 [.., G, 16, 4] of groups x [.., T, G, 4]: means by sign, then `steps` rounds of k-means.

    An empty cell keeps what it had; at the start that is the corner of the mean magnitudes with its signs.
    """
    sign = torch.tensor([[1.0 if c >> i & 1 else -1.0 for i in range(GROUP)] for c in range(CELLS)], device=x.device)
    centroids = torch.unflatten(_mean(x.abs().flatten(-2), use), -1, x.shape[-2:])[..., None, :] * sign
    codes = _sign_codes(x)
    for step in range(steps + 1):
        if step:
            codes = _nearest(x, centroids, weight)
        cells = torch.nn.functional.one_hot(codes, CELLS).float() * use[..., None, None]
        counts = cells.sum(-3)
        sums = torch.einsum("...tgc,...tgi->...gci", cells, x)
        centroids = torch.where(counts[..., None] > 0, sums / counts[..., None].clamp(min=1), centroids)
    return centroids


def _sign_codes(x: torch.Tensor) -> torch.Tensor:
    bits = torch.tensor([1 << i for i in range(GROUP)], device=x.device)
    codes: torch.Tensor = ((x > 0) * bits).sum(-1)
    return codes


def _nearest(x: torch.Tensor, centroids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scaled = centroids * weight[..., None, :]
    product = torch.einsum("...tgi,...gci->...tgc", x, scaled)
    distance = (centroids * scaled).sum(-1)[..., None, :, :] - 2 * product
    return distance.argmin(-1)


def _codes(stored: torch.Tensor, centroids: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """int64 [.., T, G]: signs where `weight` is None, else the nearest centroid."""
    made = []
    for x in torch.split(_split(stored), TOKENS_AT_ONCE, -3):
        made.append(_sign_codes(x) if weight is None else _nearest(x, centroids.float(), _split(weight.float())))
    return (
        torch.cat(made, -2) if made else stored.new_zeros((*stored.shape[:-1], centroids.shape[-3]), dtype=torch.long)
    )


def _two_bits(x: torch.Tensor, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0..3 [.., D] and scale bytes [.., D / channels]: levels (code - 1.5) * scale, the scale refitted once."""
    groups = torch.unflatten(x, -1, (-1, channels))
    scale = groups.square().mean(-1, keepdim=True).sqrt() * STEP
    level = _level(groups, scale)
    scale = (groups * level).sum(-1, keepdim=True) / level.square().sum(-1, keepdim=True)
    packed = pack_scales(scale)
    return (_level(groups, unpack_scales(packed)) + 1.5).flatten(-2), packed[..., 0]


def _level(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return ((x / scale.clamp(min=LEAST)) - 0.5).round().clamp(-2, 1) + 0.5
