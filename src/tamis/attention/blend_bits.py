"""Tokens to recompute by stored CA bits and sampled rows: those that later text looks at and that are wrong.

`blend_attention` knows what the question's rows look at; a token need not be recomputed either if what is stored of it
is right. So a few rows of every stored page go through the model with the question's: the share of their attention that
goes to other documents, which they could not see when they were stored, says how wrong the page's keys and values are.
Only pages whose stored CA bit is set count there (SIFT, arXiv 2606.09441, section 4: those that others look at).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from tamis.attention.blend_attention import ProbePass, sum_of, turned_for
from tamis.attention.blend_attention import recomputed as recomputed_by
from tamis.attention.reuse_pass import Read, Stage
from tamis.kernels.paged import DOCUMENT, PAGE, POSITION
from tamis.prompt.segments import Kind

if TYPE_CHECKING:
    from tamis.attention.reuse import Session

ROWS = 4  # of each stored page
SCORES = 1 << 24  # held at once


class Sample(NamedTuple):
    """Rows of stored pages. rows int64 [m] (positions), ROWS for each of P pages; piece int64 [m], the piece of the
    layout that each is in; page int64 [n_tokens], the page of each token, P for those that are not stored."""

    rows: torch.Tensor
    piece: torch.Tensor
    page: torch.Tensor


def choose(session: Session, share: float) -> torch.Tensor:
    """Prefill with `share` (0 to 1, in the mean over layers) of the stored tokens recomputed; logits [vocabulary].

    The sampled rows come on top: ROWS of each page, once.
    """
    begin = time.perf_counter()
    mass, wrong = probed(session)
    return recomputed_by(session, share, mass * wrong, begin)


def probed(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [layers, n_tokens] and [n_tokens] on the CPU: what the question looks at (as `blend_attention.probed`),
    and the share of its page's attention that goes to other documents, mean over layers. Waits for the device once."""
    sample = sampled(session)
    layout = session.layout
    rows = layout.fresh.clone()
    rows[sample.rows] = True
    stage = session.stage(rows, own=layout.fresh, written=layout.fresh)
    after = int(torch.searchsorted(stage.rows, layout.reused[-1].end))
    job = CrossPass(
        session.ground.own,
        [stage],
        n_tokens=layout.n_tokens,
        rows=(after, len(stage.rows)),
        weights=weights_of(session, stage, sample),
        index=torch.searchsorted(stage.rows, sample.rows).to(session.ground.device),
        positions=sample.rows.to(session.ground.device),
    )
    session.run(job)
    # in the first layer all see what they saw when they were stored: words, not what others made of them
    cross = torch.stack(job.cross[1:] or job.cross).mean(0).cpu().view(-1, ROWS).mean(1)
    return torch.stack(job.mass).cpu(), torch.cat([cross, cross.new_zeros(1)])[sample.page]


def sampled(session: Session) -> Sample:
    """ROWS rows of each stored page, spread evenly; one of a page shorter than that counts several times."""
    layout = session.layout
    rows: list[int] = []
    piece: list[int] = []
    page = torch.full((layout.n_tokens,), -1)
    for i, one in enumerate(layout.pieces):
        for at in range(one.start, one.end, layout.page) if one.stored else ():
            n = min(one.end, at + layout.page) - at
            page[at : at + n] = len(rows) // ROWS
            rows += [at + n * (2 * r + 1) // (2 * ROWS) for r in range(ROWS)]
            piece += [i] * ROWS
    page[page < 0] = len(rows) // ROWS
    return Sample(torch.tensor(rows), torch.tensor(piece), page)


def weights_of(session: Session, stage: Stage, sample: Sample) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each read, on its device: CA bits of its tiles bool [L, Hq, NT] (True where nothing is stored of them), and
    whether a tile counts as another document's for a sampled row, bool [NT, m]."""
    layout, made = session.layout, []
    starts = torch.tensor([piece.start for piece in layout.pieces])
    segments = zip(session.prompt.segments, session.prompt.spans, strict=True)
    spans = [span for segment, span in segments if segment.kind is Kind.DOCUMENT]
    bits = {span: own.ca for span, own in zip(spans, session.bits, strict=True) if own is not None}
    layers, heads = next(iter(bits.values())).shape[:2] if bits else (session.ground.own.spec.n_layers, 1)
    for r in stage.reads:
        at = r.tiles.table[:, POSITION].cpu().long()
        ca = torch.ones(layers, heads, len(at), dtype=torch.bool)
        for (start, end), own in bits.items():
            for i in ((at >= start) & (at < end) & ~layout.fresh[at]).nonzero()[:, 0].tolist():
                first = (int(at[i]) - start) // session.policy.tile
                last = (min(end, int(at[i]) + layout.page) - 1 - start) // session.policy.tile
                ca[:, :, i] = own[:, :, first : last + 1].any(-1)
        piece = torch.searchsorted(starts, at, right=True) - 1
        other = (piece[:, None] != sample.piece) & (at >= spans[0][0])[:, None]
        made.append((ca.to(stage.page.device), other.to(stage.page.device)))
    return made


@dataclass
class CrossPass(ProbePass):
    """As `ProbePass`, with sampled rows (`index` among the pass's rows) whose attention to other documents is kept:
    `cross`, float32 [m] of each layer, mean over heads."""

    weights: list[tuple[torch.Tensor, torch.Tensor]] = field(kw_only=True)
    index: torch.Tensor = field(kw_only=True)
    positions: torch.Tensor = field(kw_only=True)
    cross: list[torch.Tensor] = field(default_factory=list)

    def look(self, layer: int, q: torch.Tensor, lse: torch.Tensor, scale: float) -> None:
        """See `ProbePass.look`."""
        super().look(layer, q, lse, scale)
        own, lse = q[:, self.index], lse[:, self.index]
        reads = zip(self.stages[0].reads, self.weights, strict=True)
        parts = [
            cross_mass(r, layer, own, lse, scale, ca=ca[layer], other=other, positions=self.positions)
            for r, (ca, other) in reads
        ]
        self.cross.append(sum_of(parts))


def cross_mass(
    read: Read,
    layer: int,
    q: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    *,
    ca: torch.Tensor,
    other: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """float32 [m]: attention of rows q [Hq, m, D] at `positions`, with log-sum-exp [Hq, m], to the tiles of `read`
    that are of `other` bool [NT, m] documents and whose bit in `ca` bool [Hq or 1, NT] is set; mean over heads."""
    heads, m, dim = q.shape
    keys, tiles = read.pool.keys[layer], read.tiles
    kv_heads, page = keys.shape[1], tiles.page
    slots, readable = torch.arange(page, device=q.device), tiles.readable()
    made = torch.zeros(m, device=q.device)
    step = max(1, SCORES // (heads * m * page))
    for i in range(0, tiles.table.shape[0], step):
        table = tiles.table[i : i + step]
        k = keys.index_select(0, table[:, PAGE].long())  # [n, Hkv, page, D]
        many = turned_for(q, tiles, table[:, DOCUMENT].long()).reshape(len(table), kv_heads, -1, dim)
        scores = torch.matmul(many, k.transpose(2, 3)).float() * scale - lse.reshape(kv_heads, -1, 1)
        seen = readable[i : i + step, None] & (table[:, POSITION, None, None] + slots <= positions[:, None])
        scores = scores.view(len(table), heads, m, page).masked_fill(~seen[:, None], -torch.inf)
        mass = scores.exp().sum(-1) * ca[:, i : i + step].T[:, :, None]  # [n, Hq, m]
        made += (mass.sum(1) * other[i : i + step]).sum(0)
    return made / heads
