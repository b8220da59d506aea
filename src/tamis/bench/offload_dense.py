"""What block-sparse decoding from host memory is measured against: full attention, resident and from host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import linear

from tamis.bench.decode_clock import timed
from tamis.bench.machine import why_of
from tamis.bench.offload_step import EPS, Weights
from tamis.core.errors import TamisError

SLICE = 4  # layers of the step from host memory, which takes the longer the more there are
Full = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def best_full(weights: Weights, batch: int, tokens: int, note: Callable[[str], None]) -> tuple[str, Full]:
    """The fastest full attention of a step of q [B, Hq, 1, D] here."""
    from tamis.bench.decode_scene import sdpa

    s, device, dtype = weights.shape, weights.scale.device, weights.scale.dtype
    kinds = {"full-math": SDPBackend.MATH}
    if device.type == "cuda":
        kinds = {"full-cudnn": SDPBackend.CUDNN_ATTENTION, "full-fa2": SDPBackend.FLASH_ATTENTION}
    q = torch.randn(batch, s.heads, 1, s.head_dim, device=device).to(dtype)
    k, v = (torch.empty(batch, s.kv_heads, tokens, s.head_dim, dtype=dtype, device=device).normal_() for _ in range(2))
    found: dict[str, float] = {}
    runs = {name: sdpa(kind, s.head_dim**-0.5) for name, kind in kinds.items()}
    for name, run in runs.items():
        try:
            found[name] = min(timed({name: functools.partial(run, q, k, v)}, device, 3, calls=2)[name])
        except Exception as e:  # foreign kernels raise what they like
            note(f"{name} is left out: {why_of(e)}")
    if not found:
        raise TamisError("no full attention runs here.")
    best = min(found, key=lambda name: found[name])
    return best, runs[best]


def resident(weights: Weights, run: Full, batch: int, tokens: int, rounds: int) -> tuple[list[float], int]:
    """Seconds of whole steps with all keys and values on the device, and of how many layers they are its own."""
    s, device, dtype = weights.shape, weights.scale.device, weights.scale.dtype
    each = 4 * s.kv_heads * s.head_dim * tokens * batch
    n = weights.layers
    if device.type == "cuda":
        torch.cuda.empty_cache()
        n = max(1, min(n, int((torch.cuda.mem_get_info(device)[0] - (6 << 30)) // each)))
    size = (n, 2, batch, s.kv_heads, tokens, s.head_dim)
    caches = torch.empty(size, dtype=dtype, device=device).normal_()
    at = torch.tensor([tokens - 1], device=device)
    x = torch.randn(batch, s.hidden, device=device).to(dtype)

    def step() -> torch.Tensor:
        total, y = x, weights.pieces.norm(x, weights.scale, EPS)
        for i in range(weights.layers):
            total, y = _layer(weights, run, i, total, y, caches[i % n], at)
        return linear(y, weights.head)

    return timed({"dense": step}, device, rounds)["dense"], n


def from_host(
    weights: Weights, run: Full, host: torch.Tensor, batch: int, tokens: int, rounds: int
) -> tuple[list[float], int]:
    """Seconds of whole steps that copy every layer's keys and values, the next layer's beside this one's work; timed on
    SLICE layers, times the layers. host: flat pinned memory, read again and again where it is too small for all."""
    s, device, dtype = weights.shape, weights.scale.device, weights.scale.dtype
    source = host.view(dtype)
    size = (2, batch, s.kv_heads, tokens, s.head_dim)
    each = 2 * batch * s.kv_heads * tokens * s.head_dim
    n = min(SLICE, weights.layers)
    room = torch.zeros((2, *size), dtype=dtype, device=device)
    x = torch.randn(batch, s.hidden, device=device).to(dtype)
    at = torch.tensor([tokens - 1], device=device)
    cuda = device.type == "cuda"
    side = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]

    def load(i: int) -> None:
        flat, done = room[i % 2].view(-1), 0
        while done < each:
            begin = (i * each + done) % len(source)
            some = min(each - done, len(source) - begin)
            flat[done : done + some].copy_(source[begin : begin + some], non_blocking=True)
            done += some

    def step() -> torch.Tensor:
        total, y = x, weights.pieces.norm(x, weights.scale, EPS)
        for i in range(n + 1):
            if side is None:
                load(i)
            else:
                side.wait_stream(torch.cuda.current_stream())  # what it overwrites has been read
                with torch.cuda.stream(side):
                    load(i)
            if i:
                total, y = _layer(weights, run, i - 1, total, y, room[(i - 1) % 2], at)
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
        return y

    seconds = timed({"dense": step}, device, max(1, rounds // 8), calls=0)["dense"]
    # n layers copy n + 1 times: the first one's, which another step's last layer would hide
    return [t * weights.layers / (n + 1) for t in seconds], n


def _layer(
    weights: Weights, run: Full, i: int, x: torch.Tensor, y: torch.Tensor, cache: torch.Tensor, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    v, q, k = weights.heads(y, i, forecast=False)
    cache[0].index_copy_(2, at, k[:, :, None])
    cache[1].index_copy_(2, at, v[:, :, None])
    return weights.behind(x, run(q[:, :, None].contiguous(), cache[0], cache[1]), i)
