"""CacheBlend's choice of tokens to recompute (arXiv 2405.16444), as a peer: those whose values deviate most.

All tokens go through the first layer, so that the second layer's keys and values are what a full recompute would give.
The tokens whose values lie farthest from the stored ones (squared distance, as in the authors' code) are recomputed on
all later layers, one set for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tamis.attention.reuse_pass import PrefillPass

if TYPE_CHECKING:
    from tamis.attention.reuse import Session

CHECKED = 1  # the layer at which tokens are chosen


def choose(session: Session, share: float) -> torch.Tensor:
    """Prefill with `share` (0 to 1) of the stored tokens recomputed; logits [vocabulary]."""
    everything = torch.ones_like(session.layout.fresh)
    job = CheckedPass(
        session.ground.own, [session.stage(everything, own=session.layout.fresh)], session=session, share=share
    )
    return session.run(job)


@dataclass
class CheckedPass(PrefillPass):
    """All rows up to the layer that is checked, the chosen ones from there on."""

    session: Session = field(kw_only=True)
    share: float = field(kw_only=True)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Job.attend`. Waits for the device once, at the layer that is checked."""
        if layer != CHECKED:
            return super().attend(layer, q, k, v, scale)
        all_rows = self.stages[0]
        chosen = most(self.score(layer, q, k, v, scale), self.session, self.share)
        self.session.trace.recomputed = int(chosen.sum())
        stage = self.session.stage(self.session.layout.fresh | chosen, first=layer)
        self.stages.append(stage)
        index = stage.among(all_rows)
        part, part_lse = super().attend(layer, q[:, index], k[:, index], v[:, index], scale)
        # the other rows end here: the next layer does not get them
        out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.float32)
        out[:, index], lse[:, index] = part, part_lse
        return out, lse

    def score(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """float32 [n_tokens]: how much a token needs to be recomputed; of stored tokens only, the rest is 0."""
        return deviation(self.session, layer, v)


def deviation(session: Session, layer: int, v: torch.Tensor) -> torch.Tensor:
    """float32 [n_tokens]: squared distance of v [Hkv, n_tokens, D] from the stored values of a layer, 0 elsewhere."""
    made = torch.zeros(v.shape[1], device=v.device)
    for piece in session.layout.reused:
        _, stored = session.ground.stored.read(layer, piece.stored, piece.length)
        made[piece.start : piece.end] = (v[:, piece.start : piece.end].float() - stored.float()).square().sum((0, 2))
    return made


def most(score: torch.Tensor, session: Session, share: float) -> torch.Tensor:
    """bool [n_tokens] on the CPU: the stored tokens of the highest scores, `share` of them all, rounded."""
    stored = (~session.layout.fresh).nonzero()[:, 0]
    n = round(share * len(stored))
    chosen = torch.zeros_like(session.layout.fresh)
    chosen[stored[score.cpu()[stored].topk(n).indices]] = True
    return chosen
