"""How far one prefill's next-token distribution lies from another's."""

from __future__ import annotations

import torch


def kl_divergence(p_logits: torch.Tensor, q_logits: torch.Tensor) -> float:
    """KL(p || q) in nats of two logit vectors [vocabulary]; 0 where they agree, computed in float64."""
    p, q = (t.detach().cpu().double().log_softmax(-1) for t in (p_logits, q_logits))
    return max(0.0, float((p.exp() * (p - q)).sum()))
