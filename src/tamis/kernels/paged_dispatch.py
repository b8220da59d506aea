"""Attention over pages as the rooms above call it, and the choice of the kernel behind it.

Nothing of Triton is imported before a Triton kernel is about to run. A kernel asked for by name that cannot run
raises `Unavailable` with the reason; under "auto" the best one that takes the tensors runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tamis.core.errors import InvalidInput
from tamis.core.registry import Registry
from tamis.kernels.choice import chosen, no_triton
from tamis.kernels.decode_plan import DecodePlan
from tamis.kernels.paged import KeyTiles, PagedLists, check_pages, check_rows

PREFILL, DECODE = Registry("paged attention kernel"), Registry("paged attention kernel")
MOST_ROWS = 128  # of one program of a decode step: query heads of a KV head times rows of a request
Refusal = Callable[[torch.Tensor, torch.Tensor, int], str | None]


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: KeyTiles,
    lists: PagedLists,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query row over the key tiles listed for its head and tile, causal by absolute positions.

    q [Hq, Tq, D], turned at its absolute positions; keys and values [pages, Hkv, page, D], one layer of a pool, of q's
    dtype and device, Hq a multiple of Hkv, D contiguous; `scale` > 0 multiplies the scores; `out` [Hq, Tq, D] is
    written if given. Returns out and the natural-log log-sum-exp [Hq, Tq] in float32; a row that sees no key has 0 and
    -inf, so results over disjoint keys can be merged. Raises `InvalidInput` for tensors no kernel may be given,
    `UnknownName` for a kernel that does not exist and `Unavailable` for one that cannot run here.
    """
    check_pages(q, keys, values, tiles)
    check_rows(q, lists)
    _check_values(q, keys, values, scale, out)
    name = _chosen(kernel, q, keys, 1)
    return _into(out, PREFILL.get(name), name, (q, keys, values, tiles, lists), scale)


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode step of a batch: q [B, Hq, Tq, D], B and Tq those of the plan, each request over its own key tiles.

    The rest is as for `paged_attention`: out [B, Hq, Tq, D] and log-sum-exp [B, Hq, Tq]. On a GPU nothing waits for
    the device and every shape is fixed by the plan's room, so the call can be captured in a CUDA graph.
    """
    if q.dim() != 4 or (q.shape[0], q.shape[2]) != (plan.room.requests, plan.room.tokens):
        raise InvalidInput(
            f"q is {tuple(q.shape)}; expected [{plan.room.requests}, query heads, {plan.room.tokens}, D], the requests "
            "and query rows that the plan was reserved for."
        )
    check_pages(q, keys, values, plan.tiles)
    _check_values(q, keys, values, scale, out)
    name = _chosen(kernel, q, keys, q.shape[1] // keys.shape[1] * q.shape[2])
    return _into(out, DECODE.get(name), name, (q, keys, values, plan), scale)


def reasons(q: torch.Tensor, keys: torch.Tensor, rows: int = 1) -> dict[str, str | None]:
    """Every kernel, best first, and why it cannot take these tensors here (None: it can).

    `rows`: of one program of a decode step, query heads of a KV head times rows of a request.
    """
    return {name: refuses(q, keys, rows) for name, refuses in _REFUSES.items()}


def _chosen(kernel: str, q: torch.Tensor, keys: torch.Tensor, rows: int) -> str:
    return chosen(kernel, PREFILL, _REFUSES, (q, keys, rows), "paged attention kernel")


def _into(
    out: torch.Tensor | None, run: Callable[..., Any], name: str, args: tuple[Any, ...], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "triton":
        made: tuple[torch.Tensor, torch.Tensor] = run(*args, scale=scale, out=out)
        return made
    made = run(*args, scale=scale)
    return made if out is None else (out.copy_(made[0]), made[1])


def _check_values(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor | None
) -> None:
    if not q.dtype == keys.dtype == values.dtype or not q.device == keys.device == values.device:
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in (q, keys, values))
        raise InvalidInput(f"q, keys, values are {kinds}; all three must have one dtype and one device.")
    if not scale > 0:
        raise InvalidInput(f"scale is {scale}; it must be positive. Negate q instead of the scale.")
    if any(t.stride(-1) != 1 for t in (q, keys, values) if t.numel()):
        raise InvalidInput("the head dim of q, keys or values is not contiguous; make it so with contiguous().")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.device != q.device):
        raise InvalidInput(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; it must be like q: "
            f"{q.dtype} {tuple(q.shape)} on {q.device}."
        )


def _triton_refuses(q: torch.Tensor, keys: torch.Tensor, rows: int) -> str | None:
    if why := no_triton(q):
        return why
    if keys.shape[2] not in (16, 32, 64, 128):
        return f"pages are {keys.shape[2]} keys and must be 16, 32, 64 or 128"
    if q.shape[-1] > 256:
        return f"head dim is {q.shape[-1]} and must be at most 256"
    if rows > MOST_ROWS:
        return f"{rows} query rows share a KV head of a request and must be at most {MOST_ROWS}"
    return None


def _cpu_refuses(q: torch.Tensor, keys: torch.Tensor, rows: int) -> str | None:
    return None if q.device.type == "cpu" else f"the tensors are on {q.device}"


def _nothing_refused(q: torch.Tensor, keys: torch.Tensor, rows: int) -> str | None:
    return None


# best first; under the interpreter Triton is thousands of times slower than PyTorch: tests ask for it by name
_REFUSES: dict[str, Refusal] = {"cpu": _cpu_refuses, "triton": _triton_refuses, "reference": _nothing_refused}
for _name in _REFUSES:
    _module = "paged" if _name != "triton" else "paged_{}"
    PREFILL.add(_name, f"tamis.kernels.{_name}.{_module.format('prefill')}:paged_attention")
    DECODE.add(_name, f"tamis.kernels.{_name}.{_module.format('decode')}:paged_decode")
