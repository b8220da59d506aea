"""Documents in self-indexed form at their own positions: made once, scored and attended at any offset without a copy.

Keys of a document encoded alone are turned at local positions 0, 1, .. A prompt that places it `offset` tokens further
on turns the query back instead: <R(p) q, R(offset + t) k> = <R(p - offset) q, R(t) k>. All that was derived from keys
is local, so it is used with the turned query: look-up tables, and the bias (R(-offset) q) . mean, which differs between
documents and so may be left out of neither the choice nor the softmax. A document's first token is the attention sink
of its own pass, which codes miss: it is always kept whole and always attended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.cpu import selfindex as cpu
from tamis.kernels.reference import selfindex as reference
from tamis.kernels.reference.selfindex import Fit
from tamis.kernels.selfindex import Layout, Part, Tables
from tamis.model.rope import Rotary

SHARED_BELOW = 2048  # tokens of a document under which its own tables cost more than 3 % of its records


@dataclass(frozen=True)
class Placed:
    """A document's part of one layer, and the position of its first token in the prompt."""

    part: Part
    offset: int


def pair_energy(energy: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Query energy [.., D] with both channels of a rotary pair alike, as it is over all offsets."""
    half = rotary.dims // 2
    a, b, rest = energy[..., :half], energy[..., half : 2 * half], energy[..., 2 * half :]
    return torch.cat([(a + b) / 2, (a + b) / 2, rest], -1)


def encode_document(
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    *,
    tables: Tables | None = None,
    energy: torch.Tensor | None = None,
    first: int = 1,
    fit: Fit | None = None,
) -> Part:
    """The part of one document and layer: keys at local positions and values [Hkv, T, D], T >= 1.

    tables  shared ones (`shared_tables`); None: the document's own, fitted without its first tokens
    first   tokens at its start that are kept whole, 1 or more
    """
    if first < 1 or not keys.shape[-2]:
        raise InvalidInput(f"{keys.shape[-2]} tokens, {first} kept whole; give at least one of each.")
    exact = torch.arange(min(first, keys.shape[-2]), device=keys.device).expand(*keys.shape[:-2], -1)
    own = tables
    if own is None:
        own = reference.fit_tables(keys, values, layout, energy=energy, left_out=_first_tokens(keys, first), fit=fit)
    signs = fit is not None and fit.steps == 0
    kept = (t[..., : exact.shape[-1], :].clone() for t in (keys, values))
    return Part(reference.compress(keys, values, own, layout, signs=signs), own, exact, *kept)


def shared_tables(
    documents: Sequence[tuple[torch.Tensor, torch.Tensor]],
    layout: Layout,
    *,
    energy: torch.Tensor | None = None,
    first: int = 1,
    fit: Fit | None = None,
) -> Tables:
    """One set of tables per KV head for any documents of one layer, from samples (keys, values) [Hkv, T, D] of them.

    Documents then need no tables of their own, at 0.003 of attention mass in the study.
    """
    if not documents:
        raise InvalidInput("no documents to make tables from; give at least one.")
    keys, values = (torch.cat([d[i] for d in documents], -2) for i in (0, 1))
    left_out = torch.cat([_first_tokens(k, first) for k, _ in documents], -1)
    return reference.fit_tables(keys, values, layout, energy=energy, left_out=left_out, fit=fit)


def turned_queries(q: torch.Tensor, documents: Sequence[Placed], rotary: Rotary) -> list[torch.Tensor]:
    """q [.., Hq, R, D], turned at its absolute positions, as each document must be scored with; and q itself last."""
    return [*(rotary.rotate(q, -d.offset) for d in documents), q]


def attend_documents(
    q: torch.Tensor,
    documents: Sequence[Placed],
    recent: tuple[torch.Tensor, torch.Tensor],
    rotary: Rotary,
    layout: Layout,
    *,
    count: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [Hq, R, D] over documents and the exact tokens `recent` (keys, values [Hkv, F, D] at absolute
    positions, the last R the rows' own): `count` records of all documents together, and every exact token.

    Returns out [Hq, R, D] in q's dtype and float32 log-sum-exp [Hq, R].
    """
    queries, parts = turned_queries(q, documents, rotary), [d.part for d in documents]
    step = cpu.decode if q.shape[-2] == 1 and q.device.type == "cpu" else reference.attention
    return step(queries, parts, recent, layout, count=count, scale=scale)


def _first_tokens(keys: torch.Tensor, first: int) -> torch.Tensor:
    position = torch.arange(keys.shape[-2], device=keys.device)
    return (position < first).expand(keys.shape[:-1])
