"""Our choice of tokens to recompute: those that later text looks at, fewer of them the deeper the layer.

The question's rows first go through the model alone, reading the documents as they are stored, which costs what a few
decode steps cost. What they look at on the way is known for every layer, so a token is recomputed up to the layer
behind which nobody looks at it any more: the sets of the stages are nested, their mean is the share asked for.
`values` also weighs how far a token's values are from the stored ones, which takes a layer of all tokens to know.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tamis.attention.blend_cacheblend import CheckedPass, deviation, most
from tamis.attention.reuse_pass import PrefillPass, Read
from tamis.kernels.paged import DOCUMENT, LENGTH, PAGE, POSITION, KeyTiles

if TYPE_CHECKING:
    from tamis.attention.reuse import Session

PROBES = 8  # last rows of the request that are asked what they look at; 32 chose no better
STAGES = 3
SPREAD = 0.5  # the first stage recomputes 1.5 times the share, the last one half of it
TILES = 256  # key tiles scored at once


def choose(session: Session, share: float) -> torch.Tensor:
    """Prefill with `share` (0 to 1, in the mean over layers) of the stored tokens recomputed; logits [vocabulary]."""
    begin = time.perf_counter()
    return recomputed(session, share, probed(session), begin)


def recomputed(session: Session, share: float, mass: torch.Tensor, begin: float) -> torch.Tensor:
    """Prefill with nested sets of stored tokens recomputed, by `mass` float32 [layers, n_tokens]: what a token's keys
    and values are worth in each layer. begin: when choosing began. Returns logits [vocabulary]."""
    fresh = session.layout.fresh
    stages, left = [], ~fresh
    for first, part in schedule(share, mass.shape[0]):
        # what a layer's keys are worth is how much is looked at from here on; in the first one they are right anyway
        worth = mass[max(1, first) :].sum(0)
        # at least 0, so that -1 keeps out those that were given up before
        left = most(torch.where(left, worth, -1.0), session, part)
        stages.append(session.stage(fresh | left, first=first))
    session.trace.choose_s = time.perf_counter() - begin
    session.trace.recomputed = int(left.sum())
    return session.run(PrefillPass(session.ground.own, stages))


def choose_by_values(session: Session, share: float) -> torch.Tensor:
    """As `choose`, but with one set for all layers, of the highest mass times distance of the values at layer 1."""
    begin = time.perf_counter()
    mass = probed(session)[1:].sum(0)
    session.trace.choose_s = time.perf_counter() - begin
    first = session.stage(torch.ones_like(session.layout.fresh), own=session.layout.fresh)
    job = WeighedPass(session.ground.own, [first], session=session, share=share, mass=mass)
    return session.run(job)


def schedule(share: float, layers: int) -> list[tuple[int, float]]:
    """(first layer, share of the tokens) of each stage; the mean over equal stages is `share`, none is above 1."""
    count = max(1, min(STAGES, layers))
    spread = min(SPREAD, (1 - share) / share) if count > 1 else 0.0
    if not spread:
        return [(0, share)]
    steps = [1 - 2 * i / (count - 1) for i in range(count)]  # 1 to -1
    return [(i * layers // count, share * (1 + spread * step)) for i, step in enumerate(steps)]


def probed(session: Session) -> torch.Tensor:
    """float32 [layers, n_tokens] on the CPU: attention of the last rows to stored tokens, summed over heads and rows.

    What it says of other tokens means nothing. Waits for the device once.
    """
    first = session.stage(session.layout.fresh)
    after = int(torch.searchsorted(first.rows, session.layout.reused[-1].end))
    job = ProbePass(session.ground.own, [first], n_tokens=session.layout.n_tokens, rows=(after, len(first.rows)))
    session.run(job)
    return torch.stack(job.mass).cpu()


@dataclass
class ProbePass(PrefillPass):
    """The rows that a request computes anyway, and what the last of them (rows [first, end)) look at."""

    n_tokens: int = field(kw_only=True)
    rows: tuple[int, int] = field(kw_only=True)
    mass: list[torch.Tensor] = field(default_factory=list)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Job.attend`."""
        out, lse = super().attend(layer, q, k, v, scale)
        self.look(layer, q, lse, scale)
        return out, lse

    def look(self, layer: int, q: torch.Tensor, lse: torch.Tensor, scale: float) -> None:
        """Note what is looked at; q [Hq, n, D] and lse [Hq, n] of all rows."""
        rows = slice(max(self.rows[0], self.rows[1] - PROBES), self.rows[1])
        reads = self.stages[0].reads
        self.mass.append(sum_of([column_mass(r, layer, q[:, rows], lse[:, rows], scale, self.n_tokens) for r in reads]))


@dataclass
class WeighedPass(CheckedPass):
    """Tokens by what later text looks at, times how far their values are from the stored ones."""

    mass: torch.Tensor = field(kw_only=True)

    def score(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """float32 [n_tokens]."""
        return self.mass.to(v.device) * deviation(self.session, layer, v).sqrt()


def column_mass(
    read: Read, layer: int, q: torch.Tensor, lse: torch.Tensor, scale: float, n_tokens: int
) -> torch.Tensor:
    """float32 [n_tokens]: attention of rows q [Hq, r, D] with log-sum-exp [Hq, r] to the keys of `read`, summed over
    heads and rows, by position. Rows must stand behind the keys; what is said of later ones means nothing."""
    keys, page = read.pool.keys[layer], read.tiles.page
    kv_heads, dim = keys.shape[1], q.shape[2]
    slots = torch.arange(page, device=q.device)
    made = torch.zeros(n_tokens + 1, device=q.device)  # the last one takes what lies behind a page's length
    for table in torch.split(read.tiles.table, TILES):
        k = keys.index_select(0, table[:, PAGE].long())  # [m, Hkv, page, D]
        turned = turned_for(q, read.tiles, table[:, DOCUMENT].long()).reshape(len(table), kv_heads, -1, dim)
        scores = torch.matmul(turned, k.transpose(2, 3)).float() * scale - lse.reshape(kv_heads, -1, 1)
        at = torch.where(slots < table[:, LENGTH, None], table[:, POSITION, None] + slots, n_tokens)
        made.index_add_(0, at.flatten().long(), scores.exp().sum((1, 2)).flatten())
    return made[:n_tokens]


def sum_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of one or more tensors of one shape."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def turned_for(q: torch.Tensor, tiles: KeyTiles, document: torch.Tensor) -> torch.Tensor:
    """q [Hq, r, D] as the keys of each document int64 [m] (-1: q itself) are scored with: [m, Hq, r, D]."""
    many = q.expand(len(document), *q.shape)
    if tiles.cos is None or tiles.sin is None:
        return many
    moved = (document >= 0)[:, None]
    cos = torch.where(moved, tiles.cos[document.clamp(min=0)], 1.0)[:, None, None].to(q.dtype)
    sin = torch.where(moved, tiles.sin[document.clamp(min=0)], 0.0)[:, None, None].to(q.dtype)
    half = cos.shape[-1]
    a, b = many[..., :half], many[..., half : 2 * half]
    return torch.cat([a * cos + b * sin, b * cos - a * sin, many[..., 2 * half :]], -1)
