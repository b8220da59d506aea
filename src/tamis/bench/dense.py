"""The dense attentions that sparse ones are measured against, each tried and checked before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tamis.core.errors import InvalidInput, TamisError, Unavailable
from tamis.core.registry import unknown
from tamis.kernels import dispatch

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

PROBE_TOKENS = 256
PROBE_ERROR = 0.02  # RMS over the RMS of the exact result; what bfloat16 costs is below


@dataclass(frozen=True)
class Heads:
    """What a provider is tried on: query heads, key heads, head dim."""

    query: int
    key: int
    dim: int


def dense_functions(
    device: torch.device, dtype: torch.dtype, heads: Heads, names: Sequence[str] = ("all",)
) -> tuple[dict[str, Attention], dict[str, str]]:
    """The dense attentions of `names` that run here, and why the others of "all" do not.

    Each takes q [Hq, T, D], k, v [Hkv, T, D] and the scale and gives [Hq, T, D]. Raises InvalidInput for a name that
    does not exist and Unavailable for one that was asked for by name and does not run or computes something else.
    """
    every = list(names) == ["all"]
    found: dict[str, Attention] = {}
    left_out: dict[str, str] = {}
    for name in MAKERS if every else names:
        if name not in MAKERS:
            if name == "all":
                raise InvalidInput(f"dense providers are {', '.join(names)}; 'all' stands alone.")
            raise InvalidInput(unknown("dense provider", name, [*MAKERS, "all"]))
        try:
            attention = MAKERS[name](device)
            _check(attention, device, dtype, heads)
        except Exception as e:  # foreign kernels raise what they like, and the reason is kept
            reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
            if not every:
                raise Unavailable(f"{name} was asked for and does not run here: {reason}") from e
            left_out[name] = reason
            continue
        found[name] = attention
    if not found:
        raise Unavailable(f"no dense attention runs here: {left_out}.")
    return found, left_out


def _check(attention: Attention, device: torch.device, dtype: torch.dtype, heads: Heads) -> None:
    draw = torch.Generator(device=device).manual_seed(0)
    q, k, v = (
        torch.randn(h, PROBE_TOKENS, heads.dim, device=device, dtype=dtype, generator=draw)
        for h in (heads.query, heads.key, heads.key)
    )
    scale = heads.dim**-0.5
    wide_k, wide_v = (t.float().repeat_interleave(heads.query // heads.key, 0) for t in (k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(q.float(), wide_k, wide_v, is_causal=True, scale=scale)
    made = attention(q, k, v, scale).float()
    error = float((made - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())
    if not error <= PROBE_ERROR:
        raise TamisError(f"its result is off by {error:.2g} of the exact one (allowed {PROBE_ERROR:g})")


def _flash_attention_4(device: torch.device) -> Attention:
    _needs_gpu(device)
    from flash_attn.cute.interface import _flash_attn_fwd

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1)[None].contiguous() for t in (q, k, v))
        out: torch.Tensor = _flash_attn_fwd(q, k, v, causal=True, softmax_scale=scale)[0]
        return out[0].transpose(0, 1)

    return run


def _cudnn(device: torch.device) -> Attention:
    _needs_gpu(device)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
            )[0]

    return run


def _tamis(device: torch.device) -> Attention:
    return lambda q, k, v, scale: dispatch.causal_attention(q, k, v, scale)[0]


def _needs_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable(f"it needs an NVIDIA GPU; this runs on {device.type}")


MAKERS: dict[str, Callable[[torch.device], Attention]] = {
    "dense-fa4": _flash_attention_4,
    "dense-cudnn": _cudnn,
    "dense-tamis": _tamis,
}
