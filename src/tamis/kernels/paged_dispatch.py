"""Attention over pages as the rooms above call it, and the choice of the kernel behind it.

Nothing of Triton is imported before a Triton kernel is about to run. A kernel asked for by name that cannot run
raises `Unavailable` with the reason; under "auto" the best one that takes the tensors runs. Gluon is younger than the
rest of Triton: if a build for these tensors fails twice under "auto", the log says so once and the next kernel runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tamis.core.errors import InvalidInput
from tamis.core.log import logger
from tamis.core.registry import Registry
from tamis.kernels.choice import chosen, no_triton
from tamis.kernels.decode_plan import DecodePlan
from tamis.kernels.dispatch import available
from tamis.kernels.paged import KeyTiles, PagedLists, check_pages, check_rows

PREFILL, DECODE = Registry("paged attention kernel"), Registry("paged attention kernel")
MOST_ROWS = 128  # of one program of a decode step: query heads of a KV head times rows of a request
_BROKEN: dict[tuple[Any, ...], str] = {}  # builds of the Gluon kernel that failed, and why
log = logger("kernels")
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
    rest = (values, tiles, lists) if out is None else (values, tiles, lists, out)
    refuses = _REFUSES | {"gluon": functools.partial(_gluon_refuses, rest=rest)}
    args = (q, keys, values, tiles, lists)
    name = chosen(kernel, PREFILL, refuses, (q, keys, 1), "paged attention kernel")
    if name == "gluon" and kernel == "auto":
        build = (q.device, q.dtype, q.shape[-1], keys.shape[2], tiles.rotary_dims, tiles.holes is not None)
        for last in (False, True) if build not in _BROKEN else ():
            try:
                return _into(out, PREFILL.get(name), name, args, scale)
            except torch.OutOfMemoryError:
                raise
            except Exception as e:  # compilers raise what they like, and not always; a device's fault comes again
                if last:
                    _leave(build, e)
        refuses["gluon"] = lambda *_: _BROKEN[build]
        name = chosen(kernel, PREFILL, refuses, (q, keys, 1), "paged attention kernel")
    return _into(out, PREFILL.get(name), name, args, scale)


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
    shapes = (q.shape, keys.shape, values.shape)
    if plan.scratch.get("checked") != shapes:  # the plan's pages are the same for all layers
        check_pages(q, keys, values, plan.tiles)
        plan.scratch["checked"] = shapes
    _check_values(q, keys, values, scale, out)
    rows = q.shape[1] // keys.shape[1] * q.shape[2]
    name = chosen(kernel, DECODE, _DECODE_REFUSES, (q, keys, rows), "paged attention kernel")
    return _into(out, DECODE.get(name), name, (q, keys, values, plan), scale)


def reasons(q: torch.Tensor, keys: torch.Tensor, rows: int = 1) -> dict[str, str | None]:
    """Every kernel, best first, and why it cannot take these tensors here (None: it can).

    `rows`: of one program of a decode step, query heads of a KV head times rows of a request. q [Hq, Tq, D] asks about
    many query rows, q [B, Hq, Tq, D] about a decode step.
    """
    of_call = _REFUSES if q.dim() == 3 else _DECODE_REFUSES
    return {name: refuses(q, keys, rows) for name, refuses in of_call.items()}


def _leave(build: tuple[Any, ...], error: Exception) -> None:
    """Remember that the Gluon kernel cannot be built for these tensors, and say so."""
    told = next(iter(str(error).strip().splitlines()), "")
    _BROKEN[build] = f"it could not be built: {type(error).__name__}: {told}"
    log.warning("paged attention of %s, head dim %s, leaves the Gluon kernel: %s", build[1], build[2], _BROKEN[build])


def _into(
    out: torch.Tensor | None, run: Callable[..., Any], name: str, args: tuple[Any, ...], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if name in ("triton", "gluon"):
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


def _gluon_refuses(q: torch.Tensor, keys: torch.Tensor, rows: int, *, rest: tuple[Any, ...] = ()) -> str | None:
    """`rest`: values, tiles, lists and out, as far as they are known."""
    if q.device.type != "cuda":
        return f"the tensors are on {q.device}"
    if why := _no_gluon():
        return why
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the tensors are {q.dtype} and must be bfloat16 or float16"
    if keys.shape[2] not in (64, 128):
        return f"pages are {keys.shape[2]} keys and must be 64 or 128"
    if q.shape[-1] % 8 or q.shape[-1] > 128:
        return f"head dim {q.shape[-1]} is not a multiple of 8 up to 128"
    return _steps(q, keys, *(t for t in rest if isinstance(t, torch.Tensor))) or _plain(*rest[1:3])


@functools.cache
def _no_gluon() -> str | None:
    return available()["gluon"]


def _steps(*tensors: torch.Tensor) -> str | None:
    for t in tensors:
        if t.data_ptr() % 16 or any(s * t.element_size() % 16 for s in t.stride()[:-1]):
            return "a tensor does not start and step in multiples of 16 bytes"
    return None


def _plain(tiles: KeyTiles | None = None, lists: PagedLists | None = None) -> str | None:
    if tiles is not None and tiles.slopes is not None:
        return "there are ALiBi slopes"
    if tiles is not None and not len(tiles.table):
        return "there are no key tiles"
    if lists is not None and not 64 < lists.rows <= 128:
        return f"query tiles are of {lists.rows} rows and must be of 65 to 128"
    return None


def _cpu_refuses(q: torch.Tensor, keys: torch.Tensor, rows: int) -> str | None:
    return None if q.device.type == "cpu" else f"the tensors are on {q.device}"


def _nothing_refused(q: torch.Tensor, keys: torch.Tensor, rows: int) -> str | None:
    return None


# best first; under the interpreter Triton is thousands of times slower than PyTorch: tests ask for it by name
_REFUSES: dict[str, Refusal] = {
    "cpu": _cpu_refuses,
    "gluon": _gluon_refuses,
    "triton": _triton_refuses,
    "reference": _nothing_refused,
}
_DECODE_REFUSES = {name: refuses for name, refuses in _REFUSES.items() if name != "gluon"}
for _name in _REFUSES:
    _module = "paged_{}" if _name in ("triton", "gluon") else "paged"
    PREFILL.add(_name, f"tamis.kernels.{_name}.{_module.format('prefill')}:paged_attention")
    if _name in _DECODE_REFUSES:
        DECODE.add(_name, f"tamis.kernels.{_name}.{_module.format('decode')}:paged_decode")
