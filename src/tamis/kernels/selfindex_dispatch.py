"""Decode steps and compression in self-indexed form as the rooms above call them, and the choice of the kernel.

Nothing of Triton is imported before a Triton kernel is about to run. A kernel asked for by name that cannot run
raises `Unavailable` with the reason; under "auto" the best one that takes the tensors runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tamis.core.errors import InvalidInput, Unavailable
from tamis.core.registry import Registry
from tamis.kernels.choice import chosen, no_triton
from tamis.kernels.selfindex import Layout, Records, Tables, check_pair
from tamis.kernels.selfindex_arena import PAIR, Arena, turned_forth
from tamis.kernels.selfindex_notes import Notes, note
from tamis.kernels.selfindex_workspace import Workspace

DECODE, COMPRESS = Registry("self-indexing kernel"), Registry("self-indexing kernel")
MOST_GROUP = 64  # query heads of a KV head: rows of a program's products
ON_A_GPU = ("triton", "nvrtc")  # kernels that need a workspace
FIT_TOKENS = 4096  # of a long prompt that tables are fitted to on a GPU


def selfindex_decode(
    q: torch.Tensor,
    arena: Arena,
    *,
    count: int | torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    work: Workspace | None = None,
    kernel: str = "auto",
) -> PAIR:
    """One decode step of a batch: the `count` best records of each KV head, and all whole tokens.

    q      [B, Hq, 1, D], turned at absolute positions; its keys are in the arena already (`Arena.append`). On a GPU
           bf16, fp16 or fp32, the dtype of the arena
    count  records for every sequence; or int32 [B] on q's device, which is read during the step: a captured graph
           then serves any counts up to what `work` was reserved for. `work.count` itself saves a copy
    work   from `Workspace.reserve`, shared by the layers of a model; made for this call if None, which a captured graph
           must not do
    Returns out [B, Hq, 1, D] (`out` if given) and the natural log-sum-exp [B, Hq, 1] in float32; 0 and -inf where a
    sequence has no token. Equal to `kernels.reference.selfindex.attention` but for the choice between records whose
    scores differ by less than a 65,000th of what they can. Raises `InvalidInput` for what no kernel may be given,
    `UnknownName` and `Unavailable` for a kernel that does not exist or cannot run here.
    """
    check_step(q, arena, scale, out)
    name = _chosen(kernel, q, arena)
    if name not in ON_A_GPU:
        counts = count.tolist() if isinstance(count, torch.Tensor) else [count] * q.shape[0]
        made = _by_sequence(DECODE.get(name), q, arena, counts, scale)
        return made if out is None else (out.copy_(made[0]), made[1])
    if work is None:
        most = int(count.max()) if isinstance(count, torch.Tensor) else count
        work = Workspace.reserve(arena, q.shape[1], most, dtype=q.dtype)
    if isinstance(count, torch.Tensor):
        if count is not work.count:
            work.count.copy_(count)
    else:
        if min(count, arena.room.slots) > work.chosen.shape[1]:
            raise InvalidInput(
                f"{count} records with room for {work.chosen.shape[1]}; reserve a larger workspace, or choose fewer."
            )
        work.count.fill_(count)
    step: PAIR = DECODE.get(name)(q, arena, work, scale=scale, out=out)
    return step


def selfindex_compress(
    keys: torch.Tensor, values: torch.Tensor, tables: Tables, layout: Layout, *, kernel: str = "auto"
) -> Records:
    """Records of keys and values [.., T, D] by the nearest centroids of `tables` with the same leading dims.

    As `kernels.reference.selfindex.compress`, whose sums round in another order: a code whose two nearest centroids are
    alike, or a scale on the border of two bytes, may differ. Raises as `selfindex_decode`.
    """
    check_pair(keys, values, layout)
    if tables.mean.shape[:-1] != keys.shape[:-2]:
        raise InvalidInput(
            f"tables of {tuple(tables.mean.shape[:-1])} for keys of {tuple(keys.shape[:-2])}; give one for each."
        )
    if kernel != "auto" and kernel not in COMPRESS:
        COMPRESS.get(kernel)  # raises, with the nearest name
    why = no_triton(keys)
    if kernel == "triton" and why is not None:
        raise Unavailable(f"the Triton kernel cannot compress these tensors: {why}. kernel='auto' picks one that can.")
    name = "triton" if kernel == "auto" and keys.device.type == "cuda" and why is None else kernel
    made: Records = COMPRESS.get("reference" if name == "auto" else name)(keys, values, tables, layout)
    return made


def fit_sampled(
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    *,
    energy: torch.Tensor | None = None,
    left_out: torch.Tensor | None = None,
    tokens: int = FIT_TOKENS,
    **options: Any,
) -> Tables:
    """`reference.selfindex.fit_tables` on at most `tokens` evenly spaced ones of keys and values [.., T, D].

    Means and spreads of thousands of tokens are those of all to 2 %, at a cost that does not grow with the prompt; many
    layers can be fitted at once, stacked in front. Waits for nothing.
    """
    from tamis.kernels.reference.selfindex import fit_tables

    n = keys.shape[-2]
    if n > tokens:
        at = (torch.arange(tokens, device=keys.device) * n) // tokens
        keys, values = keys[..., at, :], values[..., at, :]
        left_out = None if left_out is None else left_out[..., at]
    return fit_tables(keys, values, layout, energy=energy, left_out=left_out, **options)


def selfindex_append(arena: Arena, keys: torch.Tensor, values: torch.Tensor) -> None:
    """`Arena.append` in one launch where Triton runs: keys and values [B, Hkv, 1, D] of a step."""
    if arena.device.type == "cuda" and no_triton(keys) is None:
        importlib.import_module("tamis.kernels.triton.selfindex_decode").append(arena, keys, values)
        return
    arena.append(keys, values)


def selfindex_note(
    arena: Arena,
    notes: Notes,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    kernel: str = "auto",
) -> None:
    """A token of every sequence that is there: `Arena.append` for these alone, and what `Notes` keeps of its query.

    q [B, Hq, 1, D] and keys, values [B, Hkv, 1, D], all turned and D contiguous. One launch where Triton runs (or is
    asked for by name), waits for nothing. Raises `Unavailable` where a kernel that was asked for cannot run.
    """
    why = no_triton(q)
    if kernel == "triton" and why is not None:
        raise Unavailable(f"the Triton kernel cannot note these tensors: {why}. kernel='auto' picks one that can.")
    if kernel == "triton" or (kernel == "auto" and arena.device.type == "cuda" and why is None):
        importlib.import_module("tamis.kernels.triton.selfindex_note").note(arena, notes, q, keys, values)
    else:
        note(arena, notes, q, keys, values)


def step_of(
    q: torch.Tensor, arena: Arena, *, kernel: str = "auto"
) -> tuple[str, Callable[..., None], Callable[..., Any]]:
    """For who makes many steps of one shape: the kernel's name, `selfindex_note` and `selfindex_decode`, chosen once.

    The functions are called as these two, the second with `count` and `work` given (`work.count` itself on a GPU), and
    check nothing. Raises as they do.
    """
    name = _chosen(kernel, q, arena)
    why = no_triton(q)
    noting: Callable[..., None] = note
    if name in ON_A_GPU or (kernel == "auto" and arena.device.type == "cuda" and why is None):
        noting = importlib.import_module("tamis.kernels.triton.selfindex_note").note
    if name not in ON_A_GPU:
        return name, noting, partial(selfindex_decode, kernel=name)
    launch: Callable[..., PAIR] = DECODE.get(name)

    def decode(
        q: torch.Tensor,
        arena: Arena,
        *,
        count: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        work: Workspace,
    ) -> PAIR:
        assert count is work.count, "what the kernel reads"
        return launch(q, arena, work, scale=scale, out=out)

    return name, noting, decode


def check_step(q: torch.Tensor, arena: Arena, scale: float, out: torch.Tensor | None) -> None:
    """Refuse what no kernel may be given."""
    room = arena.room
    if q.dim() != 4 or q.shape[0] != room.requests or q.shape[2] != 1 or q.shape[3] != arena.layout.head_dim:
        raise InvalidInput(
            f"q is {tuple(q.shape)}; expected [{room.requests}, query heads, 1, {arena.layout.head_dim}]: one row of "
            "each sequence of the arena."
        )
    if q.shape[1] % room.kv_heads:
        raise InvalidInput(f"{q.shape[1]} query heads over {room.kv_heads} KV heads; the first must be a multiple.")
    if q.device.type != arena.device.type or q.stride(-1) != 1:
        raise InvalidInput(
            f"q is on {q.device} with strides {q.stride()}; the arena is on {arena.device}, D contiguous."
        )
    if not scale > 0:
        raise InvalidInput(f"scale is {scale}; it must be positive. Negate q instead of the scale.")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.device != q.device):
        raise InvalidInput(f"out is {out.dtype} {tuple(out.shape)}; it must be like q: {q.dtype} {tuple(q.shape)}.")


def reasons(q: torch.Tensor, arena: Arena) -> dict[str, str | None]:
    """Every kernel, best first, and why it cannot take these tensors here (None: it can)."""
    return {name: refuses(q, arena) for name, refuses in _REFUSES.items()}


def _chosen(kernel: str, q: torch.Tensor, arena: Arena) -> str:
    return chosen(kernel, DECODE, _REFUSES, (q, arena), "self-indexing kernel")


def _by_sequence(step: Callable[..., PAIR], q: torch.Tensor, arena: Arena, counts: list[int], scale: float) -> PAIR:
    """A step of the plain implementations, one sequence after the other."""
    outs, lses = [], []
    for b, count in enumerate(counts):
        parts, whole, turns = arena.held(b)
        queries = [q[b] if t is None else turned_forth(q[b], t[0], -t[1]) for t in turns]
        if not whole[0].shape[-2] and not parts:
            outs.append(torch.zeros_like(q[b]))
            lses.append(torch.full(q.shape[1:3], -torch.inf, device=q.device))
            continue
        out, lse = step([*queries, q[b]], parts, whole, arena.layout, count=count, scale=scale)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def _triton_refuses(q: torch.Tensor, arena: Arena) -> str | None:
    if why := no_triton(q):
        return why
    if q.dtype != arena.keys.dtype:
        return f"q is {q.dtype} and the arena's whole tokens are {arena.keys.dtype}; they must be alike"
    if (group := q.shape[1] // arena.room.kv_heads) > MOST_GROUP:
        return f"{group} query heads share a KV head and must be at most {MOST_GROUP}"
    block = arena.room.block
    if block % 256 and (block & (block - 1) or block < 32):
        return f"blocks are {block} slots and must be a power of 2 or a multiple of 256"
    return None


def _nvrtc_refuses(q: torch.Tensor, arena: Arena) -> str | None:
    layout = arena.layout
    if q.device.type != "cuda" or torch.version.hip or not hasattr(torch.cuda, "_compile_kernel"):
        return f"PyTorch compiles it for an NVIDIA GPU; the tensors are on {q.device}, torch is {torch.__version__}"
    if why := _triton_refuses(q, arena):
        return why
    if (sm := torch.cuda.get_device_capability(q.device)) < (9, 0):
        return f"the GPU is sm_{sm[0]}{sm[1]}, and clusters of programs need sm_90"
    if q.dtype != torch.bfloat16 or (layout.head_dim, layout.scale_channels) != (128, 32):
        return f"it is for bfloat16, head_dim 128 and scales of 32 channels; these are {q.dtype}, {layout}"
    if (group := q.shape[1] // arena.room.kv_heads) > 8:
        return f"{group} query heads share a KV head and must be at most 8"
    return None if arena.room.block % 256 == 0 else f"blocks are {arena.room.block} slots and must be a multiple of 256"


def _cpu_refuses(q: torch.Tensor, arena: Arena) -> str | None:
    return None if q.device.type == "cpu" else f"the tensors are on {q.device}"


def _nothing_refused(q: torch.Tensor, arena: Arena) -> str | None:
    return None


# best first; under the interpreter Triton is thousands of times slower than PyTorch: tests ask for it by name
_REFUSES: dict[str, Callable[[torch.Tensor, Arena], str | None]] = {
    "cpu": _cpu_refuses,
    "nvrtc": _nvrtc_refuses,  # four launches instead of six, about half the instructions (results/decode.csv)
    "triton": _triton_refuses,
    "reference": _nothing_refused,
}
DECODE.add("cpu", "tamis.kernels.cpu.selfindex:decode")
DECODE.add("triton", "tamis.kernels.triton.selfindex_decode:selfindex_decode")
DECODE.add("nvrtc", "tamis.kernels.nvrtc.selfindex_decode:selfindex_decode")
DECODE.add("reference", "tamis.kernels.reference.selfindex:attention")
COMPRESS.add("triton", "tamis.kernels.triton.selfindex_compress:compress")
COMPRESS.add("reference", "tamis.kernels.reference.selfindex:compress")
