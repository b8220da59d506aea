"""What a decode step is timed on: one layer of random keys and values, whole and in self-indexed form.

Keys are normal numbers with a spread and a mean of their own in each channel, as those of models have, so that scores
spread and the counters of a selection are met unevenly. A prompt is one part; of a long one the last 1,024 tokens
before the open run stand for generated ones, in a part of their own at its own positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tamis.bench.paged import angles
from tamis.bench.shapes import Shape
from tamis.cache.selfindex.keep import Budget
from tamis.core.errors import InvalidInput
from tamis.kernels.decode_plan import DecodePlan, Room
from tamis.kernels.paged import KeyTiles, Segment
from tamis.kernels.paged_dispatch import paged_decode
from tamis.kernels.selfindex import Layout, Part
from tamis.kernels.selfindex_arena import Arena, ArenaRoom, Held
from tamis.kernels.selfindex_dispatch import fit_sampled, selfindex_compress

OPEN, EXACT, GENERATED, GENERATED_EXACT = 96, 64, 1024, 32
LONG, PAGE = 8192, 128
CHECKED = 0.02  # RMS over the RMS of the exact result

Full = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Scene:
    """q [B, Hq, 1, D]; keys, values [B, Hkv, T, D]; the arena holds the same tokens, `count` of them are chosen."""

    shape: Shape
    tokens: int
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    arena: Arena
    count: int

    @classmethod
    def of(cls, shape: Shape, tokens: int, batch: int, share: float, device: torch.device, dtype: torch.dtype) -> Scene:
        """The same for every run."""
        if tokens < 2 * (OPEN + EXACT):
            raise InvalidInput(f"{tokens} tokens; a decode step is timed on {2 * (OPEN + EXACT)} or more.")
        draw = torch.Generator(device=device).manual_seed(0)
        size = (batch, shape.kv_heads, tokens, shape.head_dim)

        def normal(*n: int) -> torch.Tensor:
            return torch.empty(n, dtype=dtype, device=device).normal_(generator=draw)

        keys, values, q = normal(*size), normal(*size), normal(batch, shape.heads, 1, shape.head_dim)
        channels = (shape.kv_heads, 1, shape.head_dim)
        spread = torch.rand(channels, device=device, generator=draw) * 1.5 + 0.25
        shift = torch.randn(channels, device=device, generator=draw) * 2
        for b in range(batch):
            keys[b].mul_(spread.to(dtype)).add_(shift.to(dtype))
        arena = coded(shape, keys, values, dtype)
        return cls(shape, tokens, q, keys, values, arena, Budget(share).count(tokens))

    @property
    def scale(self) -> float:
        """1 / sqrt(head dim)."""
        return float(self.shape.head_dim**-0.5)

    def exact(self, b: int, head: int) -> torch.Tensor:
        """float32 [1, D]: full attention of one query head."""
        kv = head * self.shape.kv_heads // self.shape.heads
        scores = self.q[b, head].float() @ self.keys[b, kv].float().T * self.scale
        return scores.softmax(-1) @ self.values[b, kv].float()


def coded(shape: Shape, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> Arena:
    """An arena of keys and values [B, Hkv, T, D], its parts fitted and compressed on their device."""
    batch, heads, tokens, dim = keys.shape
    layout = Layout(dim)
    generated = GENERATED if tokens >= LONG else 0
    borders = [0, tokens - OPEN - generated, tokens - OPEN]
    spans = [(a, b) for a, b in itertools.pairwise(borders) if b > a]
    block = 512
    slots = sum(-(-(b - a) // block) for a, b in spans) * block
    rotary = shape.rotary or dim
    room = ArenaRoom(batch, heads, slots, len(spans), EXACT + GENERATED_EXACT, 128, rotary, block)
    arena = Arena(room, layout, dtype=dtype, device=keys.device)
    for b in range(batch):
        parts = []
        for (begin, end), n_exact in zip(spans, (EXACT, GENERATED_EXACT), strict=False):
            k, v = keys[b, :, begin:end], values[b, :, begin:end]
            exact = (torch.arange(n_exact, device=k.device) * (end - begin) // n_exact).expand(heads, n_exact)
            left_out = torch.zeros(k.shape[:-1], dtype=torch.bool, device=k.device).scatter_(1, exact, True)
            tables = fit_sampled(k, v, layout, left_out=left_out)
            index = exact[..., None].expand(heads, n_exact, dim)
            parts.append(
                Part(selfindex_compress(k, v, tables, layout), tables, exact, k.gather(1, index), v.gather(1, index))
            )
        run = keys[b, :, tokens - OPEN :], values[b, :, tokens - OPEN :]
        arena.update(b, Held(parts, [a for a, _ in spans], run), lambda o: angles(o, rotary))
    return arena


def copied(arena: Arena) -> Arena:
    """An arena of the same content in memory of its own: another layer's."""
    made = Arena(arena.room, arena.layout, dtype=arena.keys.dtype, device=arena.device)
    for name, new in vars(arena).items():
        if name.startswith("_"):
            continue
        kept = getattr(made, name)
        if isinstance(new, torch.Tensor):
            kept.copy_(new)
        elif hasattr(new, "nbytes"):
            for field in new.__dataclass_fields__:
                getattr(kept, field).copy_(getattr(new, field))
    made._placed = arena._placed
    return made


def full_functions(scene: Scene) -> tuple[dict[str, Full], dict[str, str]]:
    """Full attention of this step by name, each checked on one query head, and why others were left out.

    Each takes q, keys and values as the scene has them; `full-tamis` reads pages of its own copy.
    """
    from torch.nn.attention import SDPBackend

    cuda = scene.q.device.type == "cuda"
    makers: dict[str, Callable[[], Full]] = {"full-math": lambda: sdpa(SDPBackend.MATH, scene.scale)}
    if cuda:
        makers = {
            "full-cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION, scene.scale),
            "full-fa2": lambda: sdpa(SDPBackend.FLASH_ATTENTION, scene.scale),
        }
    makers["full-tamis"] = lambda: _paged(scene)
    found: dict[str, Full] = {}
    left_out: dict[str, str] = {}
    for name, make in makers.items():
        try:
            run = make()
            made = run(scene.q, scene.keys, scene.values)[0, :1, 0].float()
            expected = scene.exact(0, 0)
            error = float((made - expected).norm() / expected.norm())
            if not error <= CHECKED:
                raise InvalidInput(f"its result is off by {error:.2g} of the exact one (allowed {CHECKED:g})")
        except Exception as e:  # foreign kernels raise what they like, and the reason is kept
            left_out[name] = (str(e).strip().splitlines() or [type(e).__name__])[0]
            continue
        found[name] = run
    return found, left_out


def sdpa(backend: Any, scale: float) -> Full:
    """PyTorch's attention by one backend."""
    from torch.nn.attention import sdpa_kernel

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([backend]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)

    return run


def _paged(scene: Scene) -> Full:
    """Our own full decode over pages: its plan and pages are made here, once."""
    batch, heads, tokens, dim = scene.keys.shape
    if tokens % PAGE:
        raise InvalidInput(f"{tokens} tokens are not whole pages of {PAGE}")
    n = tokens // PAGE
    pools = [
        t.view(batch, heads, n, PAGE, dim).transpose(1, 2).reshape(batch * n, heads, PAGE, dim)
        for t in (scene.keys, scene.values)
    ]
    tiles = [KeyTiles.of([Segment(tuple(range(b * n, b * n + n)), tokens, 0)], page=PAGE) for b in range(batch)]
    at = torch.full((batch, 1), tokens - 1)
    room = Room(batch, batch * n, batch * n, page=PAGE)
    splits = DecodePlan.reserve(room, scene.q.device).write(tiles, at, kv_heads=heads)
    plan = DecodePlan.reserve(room._replace(splits=splits), scene.q.device)
    plan.write(tiles, at, kv_heads=heads)
    out = torch.empty_like(scene.q)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return paged_decode(q, pools[0], pools[1], plan, scale=scene.scale, out=out)[0]

    return run


def copies_of(nbytes: int, device: torch.device, most: int = 8) -> int:
    """Layers to go through in turn so that no cache of the device holds what one of them reads."""
    return 1 if device.type != "cuda" else max(1, min(most, math.ceil((256 << 20) / max(1, nbytes))))
