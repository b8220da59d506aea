"""How far one prefill's next-token distribution lies from another's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tamis.core.errors import InvalidInput

if TYPE_CHECKING:
    import torch


def kl_divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL(p || q) in nats of two logit vectors [V]: what q loses where p is the truth. Computed in float64.

    Never below 0. Infinite where q rules out (logit -inf) what p does not. Raises InvalidInput on other shapes or NaN.
    """
    check_logits(p, q)
    log_p, log_q = (t.detach().cpu().double().log_softmax(-1) for t in (p, q))
    share = log_p.exp()
    terms = (share * (log_p - log_q)).masked_fill(share == 0, 0.0)  # 0 log 0 is 0, also against q's own 0
    return max(0.0, float(terms.sum()))


def check_logits(p: torch.Tensor, q: torch.Tensor) -> None:
    """Raises InvalidInput unless both are vectors [V] of one length without NaN."""
    if p.dim() != 1 or p.shape != q.shape or not p.numel() or bool(p.isnan().any()) or bool(q.isnan().any()):
        raise InvalidInput(
            f"logits are {list(p.shape)} and {list(q.shape)} with {int(p.isnan().sum()) + int(q.isnan().sum())} NaN; "
            "expected two vectors [V] of one length without NaN."
        )
