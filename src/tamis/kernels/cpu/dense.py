"""Dense causal attention on a CPU with its log-sum-exp, by PyTorch's fused operator."""

from __future__ import annotations

import torch


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [Hq, T, D], k and v [Hkv, T, D] → out [Hq, T, D] and natural log-sum-exp [Hq, T] in float32."""
    group = q.shape[0] // k.shape[0]
    k, v = (t.repeat_interleave(group, 0)[None] for t in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q[None], k, v, 0.0, True, scale=scale)
    return out[0], lse[0].float()
