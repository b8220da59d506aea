"""Decode steps over blocks in slots for the tests of the kernels: scenes, steps by two modules, errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tamis.kernels.block_pool import BlockPool, PoolLayer, PoolRoom
from tamis.kernels.blocks import COARSE, BlockRule
from tamis.kernels.reference import offload as reference
from tamis.kernels.reference.blocks import pool_keys

SMALL = BlockRule(top=6, first=1, local=2, block=16, window=8, stride=4, dense_tokens=0)
TENSORS = ("slots", "tail", "ring", "pooled", "held", "used", "stamp", "place", "count")


@dataclass(frozen=True)
class Case:
    """tokens of each sequence before the first step; the pool is filled with a random prompt of them."""

    tokens: tuple[int, ...] = (150, 61)
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    n_blocks: int = 12
    slots: int = 5
    rule: BlockRule = SMALL
    wide: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def room(self) -> PoolRoom:
        return PoolRoom(1, len(self.tokens), self.kv_heads, self.dim, self.n_blocks, self.slots, self.rule,
                        wide=self.wide)  # fmt: skip

    def normal(self, draw: torch.Generator, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw).to(self.dtype)

    def pool(self, device: str = "cpu", seed: int = 0) -> PoolLayer:
        """A layer whose sequences have been appended token by token, by the reference."""
        draw = torch.Generator().manual_seed(seed)
        layer = BlockPool(self.room, dtype=self.dtype, device="cpu").layers[0]
        for t in (layer.host, layer.pooled, layer.tail, layer.ring, layer.slots, *([layer.wide] if self.wide else [])):
            t.fill_(float("nan"))  # what is not written must not be read
        last = max(self.tokens)
        k, v = (self.normal(draw, last, len(self.tokens), self.kv_heads, self.dim) for _ in range(2))
        for i in range(last):
            # a shorter one begins later, so that all end together
            at = torch.tensor([max(0, i - (last - n)) for n in self.tokens])
            reference.append(layer, k[i], v[i], at)
        return moved(layer, device)


def moved(layer: PoolLayer, device: str) -> PoolLayer:
    """A copy of a layer on another device, its host memory pinned."""
    made = dict(vars(layer))
    for name, t in made.items():
        if isinstance(t, torch.Tensor):
            on_host = name == "host"
            made[name] = (t.clone().pin_memory() if device != "cpu" else t.clone()) if on_host else t.clone().to(device)
    return PoolLayer(**made)


def walk(
    case: Case, steps: ModuleType, n: int, *, device: str = "cpu", wants: list[torch.Tensor] | None = None,
    mode: str = "own", forget: bool = False, wrong: str = "",
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """n decode steps by a module; yields after each what a test compares. wants: instead of what is selected."""
    pool = case.pool(device)
    draw = torch.Generator().manual_seed(7)
    positions = torch.tensor(case.tokens, dtype=torch.int32, device=device)
    out = torch.full((len(pool.stamp), case.room.width), -7, dtype=torch.int32, device=device)
    for i in range(n):
        shape = (len(case.tokens), case.kv_heads, case.dim)
        k, v, f = (case.normal(draw, *shape).to(device) for _ in range(3))
        q = case.normal(draw, len(case.tokens), case.heads, case.dim).to(device)
        lag = 0 if mode == "own" else 1
        before = steps.scores(f, pool, positions, scale=None, lag=1) if mode == "raw" else None
        steps.append(pool, k, v, positions)
        values = before if before is not None else steps.scores(q, pool, positions, scale=0.3, lag=lag)
        steps.select(values, positions, case.rule, out, pool.last)
        wanted = out if wants is None else wants[i].to(device)
        if forget:
            pool.forget()
        pool.count.zero_()
        steps.place(pool, wanted.roll(1, 0) if wrong == "rows" else wanted)
        if wrong != "copies":
            steps.fetch(pool)
        made = steps.attend(q, pool.slots, pool.place, pool.tail, positions, scale=0.3)
        held = {name: getattr(pool, name).cpu().clone() for name in TENSORS}
        tasks = pool.tasks[: int(pool.count)].cpu()
        yield {
            "scores": values.cpu(), "wanted": out.cpu().clone(), "out": made.cpu(), "host": pool.host.clone(),
            "tasks": {tuple(t) for t in tasks.tolist()}, "n_tasks": len(tasks), **held,
            **({"wide": pool.wide.cpu().clone()} if pool.wide is not None else {}),
        }  # fmt: skip
        positions += 1


def difference(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """By what two steps differ: shares of unequal numbers, and relative errors of what is computed."""
    made: dict[str, float] = {
        "tasks": float(found["tasks"] != expected["tasks"] or found["n_tasks"] != expected["n_tasks"])
    }
    for name in ("wanted", "held", "used", "stamp", "place", "count"):
        made[name] = float((found[name] != expected[name]).float().mean())
    for name in ("slots", "tail", "ring", "host"):
        made[name] = float((found[name].nan_to_num(9) != expected[name].nan_to_num(9)).float().mean())
    for name in ("scores", "pooled", "out", *(["wide"] if "wide" in found else [])):
        a, b = (t.float().nan_to_num(9, posinf=8, neginf=-8) for t in (found[name], expected[name]))
        made[name] = float((a - b).norm() / b.norm())
    return made


def kept(found: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether the differences of a step are those of a right kernel: NaN never is."""
    allowed = 1e-5 if dtype == torch.float32 else 5e-3
    rough = ("scores", "pooled", "wide", "out")
    return all(value <= (allowed if name in rough else 0.0) for name, value in found.items())


def selection_error(
    steps: ModuleType,
    values: torch.Tensor,
    positions: torch.Tensor,
    rule: BlockRule,
    *,
    given: torch.Tensor | None = None,
) -> float:
    """Share of wrong places; given: scores that the module gets instead."""
    out = torch.full((2, len(values), max(1, rule.top - 1)), -7, dtype=torch.int32, device=values.device)
    steps.select(values if given is None else given, positions, rule, out[0])
    reference.select(values, positions, rule, out[1])
    return float((out[0] != out[1]).float().mean())


def tied(rows: int, n: int, levels: int, seed: int = 0) -> torch.Tensor:
    """Scores [rows, n] of few different values, negative, zero of both signs and -inf among them."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(-levels, levels, (rows, n), generator=draw).float() / 4
    values[values == 0.25] = -0.0
    values[torch.rand(rows, n, generator=draw) < 0.1] = -torch.inf
    return values


def prefill_errors(
    steps: ModuleType, tokens: int, first: int, rule: BlockRule, *, heads: tuple[int, int] = (4, 2), dim: int = 16,
    own: bool = True, wide: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu", wrong: str = "",
) -> dict[str, float]:  # fmt: skip
    """Errors of scores and selection of the last rows of a prompt: relative, and a share."""
    draw = torch.Generator().manual_seed(3)
    query, kv = heads
    keys = torch.randn(kv, tokens, dim, generator=draw).to(dtype).to(device)
    q = torch.randn(query if own else kv, tokens - first, dim, generator=draw).to(dtype).to(device)
    pooled = pool_keys(keys, rule.window, rule.stride)
    coarse = pool_keys(keys, COARSE * rule.window, COARSE * rule.stride) if wide else None
    given = {"scale": 0.3 if own else None, "wide": coarse, "n_blocks": rule.n_blocks(tokens)}
    expected = reference.prefill_scores(q, pooled, first, rule, **given)
    asked = q.flip(0) if wrong == "heads" else q
    made = steps.prefill_scores(asked.contiguous(), pooled, first + (wrong == "first") * rule.stride, rule, **given)
    seen = expected > -torch.inf
    found = {"seen": float(((made > -torch.inf) != seen).float().mean())}
    found["scores"] = float((made[seen] - expected[seen]).norm() / expected[seen].norm()) if seen.any() else 0.0
    choice, right = steps.prefill_select(made, first, rule), reference.prefill_select(made, first, rule)
    return found | {"selection": float((choice != right).float().mean())}


def piece_errors(
    batch: int = 3, hidden: int = 40, wide: int = 1100, heads: tuple[int, int, int] = (5, 2, 16), *,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> dict[str, float]:  # fmt: skip
    """Relative errors of what lies between the products of a decode step. heads: all, the first turned, channels."""
    from tamis.bench import fuse, offload_step
    from tamis.kernels.triton import step_pieces

    draw = torch.Generator().manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw).to(dtype).to(device)

    x, y, weight, gated = normal(batch, hidden), normal(batch, hidden), normal(hidden), normal(batch, 2 * wide)
    count, first, dim = heads
    angle = torch.randn(dim // 2, generator=draw).to(device)
    turned = normal(batch, count, dim)
    pairs = {
        "norm": [m.rms_norm(x, weight, 1e-5) for m in (step_pieces, fuse)],
        "add_norm": [torch.stack(m.add_norm(x, y, weight, 1e-5)) for m in (step_pieces, fuse)],
        "swiglu": [m.swiglu(gated) for m in (step_pieces, fuse)],
        "rotate": [m.rotate(turned.clone(), angle.cos(), angle.sin(), first) for m in (step_pieces, offload_step)],
    }
    return {name: float((a.float() - b.float()).norm() / b.float().norm()) for name, (a, b) in pairs.items()}


def attend_errors(
    steps: ModuleType, tokens: int, first: int, rule: BlockRule, *, heads: tuple[int, int] = (4, 2), dim: int = 16,
    dtype: torch.dtype = torch.float32, device: str = "cpu", wrong: str = "",
) -> dict[str, float]:  # fmt: skip
    """Relative error of the attention of the last rows of a prompt to blocks chosen by random scores.

    q, k and v are views whose rows do not lie one behind the other, as a model has them.
    """
    draw = torch.Generator().manual_seed(5)
    query, kv = heads
    n = tokens - first

    def normal(rows: int, count: int) -> torch.Tensor:
        return torch.randn(rows, count, dim, generator=draw).to(dtype).to(device).transpose(0, 1)

    q, k, v = normal(n, query), normal(tokens, kv), normal(tokens, kv)
    n_blocks = rule.n_blocks(tokens)
    values = torch.randn(kv, rule.n_choices(first, n), n_blocks, generator=draw).to(device)
    chosen = reference.prefill_select(values, first, rule)
    expected = reference.prefill_attend(q.double(), k.double(), v.double(), chosen, first, rule, scale=0.3)
    if wrong == "a block more":
        chosen = chosen.clone()
        chosen[:, -1] |= torch.arange(n_blocks, device=device) == int((~chosen[0, -1]).nonzero()[0])
    if wrong == "another choice":
        chosen = chosen.roll(1, 1) | (torch.arange(n_blocks, device=device) == n_blocks - 1)
    made = steps.prefill_attend(q, k, v, chosen, first + (wrong == "later"), rule, scale=0.3)
    assert made.shape == q.shape
    return {"out": float((made.double() - expected).norm() / expected.norm())}
