"""Whether the steps that a bench times compute what the reference computes, at the shape's own heads and rule."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from tamis.bench.shapes import Shape
from tamis.core.errors import TamisError
from tamis.kernels.block_pool import BlockPool, PoolLayer, PoolRoom
from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference import offload as reference

STEPS, REQUESTS = 3, 2
ALLOWED = {"scores": 1e-2, "own scores": 2e-2, "attention": 2e-2}  # relative; the rest is equal


def check(shape: Shape, rule: BlockRule, ops: ModuleType, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Largest errors of some steps by name; raises TamisError where one is too large.

    Selection, slots and copies must be equal. Each step of the reference is given the numbers that the kernels found,
    so that what rounds differently is not counted twice.
    """
    tokens = 2 * rule.top * rule.block + rule.block - 2  # a block ends within the steps
    room = PoolRoom(1, REQUESTS, shape.kv_heads, shape.head_dim, rule.n_blocks(tokens) + 1,
                    rule.top + rule.top // 2, rule, wide=True)  # fmt: skip
    pool = BlockPool(room, dtype=dtype, device=device)
    for t in (pool.host, pool.slots, pool.tail, pool.ring, pool.pooled, pool.wide):
        assert t is not None
        t.copy_(torch.randn(t.shape).to(dtype))
    layer = pool.layers[0]
    other = _copy(layer)
    positions = torch.full((REQUESTS,), tokens - 1, dtype=torch.int32, device=device)
    wanted = torch.empty((room.rows, room.width), dtype=torch.int32, device=device)
    scale = shape.head_dim**-0.5
    errors = dict.fromkeys(ALLOWED, 0.0)
    for step in range(STEPS):
        k, v, f = (torch.randn(REQUESTS, shape.kv_heads, shape.head_dim, device=device).to(dtype) for _ in range(3))
        q = torch.randn(REQUESTS, shape.heads, shape.head_dim, device=device).to(dtype)
        for name, x, scaled in (("own scores", q, scale), ("scores", f, None)):
            made = ops.scores(x, layer, positions, scale=scaled, lag=1)
            expected = reference.scores(x, layer, positions, scale=scaled, lag=1)
            errors[name] = max(errors[name], _error(made, expected))
        ops.select(made, positions, rule, wanted)
        _same(f"selection of step {step}", wanted, reference.select(made, positions, rule, torch.empty_like(wanted)))
        for module, one in ((ops, layer), (reference, other)):
            module.append(one, k, v, positions)
            one.count.zero_()
            module.place(one, wanted)
            module.fetch(one)
        _synchronize(device)
        for name in ("held", "place", "used", "count", "slots", "tail", "host"):
            _same(f"{name} of step {step}", getattr(layer, name), getattr(other, name))
        made = ops.attend(q, layer.slots, layer.place, layer.tail, positions, scale=scale)
        expected = reference.attend(q, layer.slots, layer.place, layer.tail, positions, scale=scale)
        errors["attention"] = max(errors["attention"], _error(made, expected))
        positions += 1
    wrong = {name: error for name, error in errors.items() if not error <= ALLOWED[name]}
    if wrong:
        raise TamisError(f"the kernels disagree with the reference: {wrong}, allowed {ALLOWED}.")
    return errors


def _copy(layer: PoolLayer) -> PoolLayer:
    made: dict[str, Any] = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in vars(layer).items()}
    return PoolLayer(**made)


def _error(made: torch.Tensor, expected: torch.Tensor) -> float:
    seen = expected > -torch.inf
    if not torch.equal(seen, made > -torch.inf):
        return float("inf")
    a, b = made[seen].double(), expected[seen].double()
    return float((a - b).norm() / b.norm())


def _same(what: str, made: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(made, expected):
        share = float((made != expected).float().mean())
        raise TamisError(f"{what}: {share:.2%} of the numbers differ from the reference.")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
