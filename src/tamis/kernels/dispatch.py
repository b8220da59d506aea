"""The attention calls that the rooms above make, and the choice of the kernel behind them.

Nothing of Triton is imported before a Triton kernel is about to run. A kernel asked for by name that cannot run
raises `Unavailable` with the reason; under "auto" the next one is taken, and the log says so once.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tamis.core.errors import InvalidInput, Unavailable
from tamis.core.registry import Registry
from tamis.kernels.lists import TILE, TileLists, Tiling, check_shapes, lists_from_mask
from tamis.kernels.packed import check_lengths, every_tile_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """What a kernel is asked to take: device, dtype, head dim, tokens of a tile, and how the tensors lie in memory.

    `dense_rows`: the head dim is contiguous; `steps_of_16`: bases and the other strides are multiples of 16 bytes;
    `aligned`: the lists' tiles are known to start at multiples of `tile` (`TileLists.aligned`).
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    tile: int
    dense_rows: bool = True
    steps_of_16: bool = True
    aligned: bool = True

    @classmethod
    def of(cls, tensors: tuple[torch.Tensor, ...], tile: int, *, aligned: bool = True) -> Case:
        """The case of a call with these q, k, v (and out)."""
        q = tensors[0]
        step = 16 // q.element_size()
        lies = all(t.data_ptr() % 16 == 0 and t.stride(0) % step == 0 and t.stride(1) % step == 0 for t in tensors)
        return cls(q.device, q.dtype, q.shape[2], tile, all(t.stride(2) == 1 for t in tensors), lies, aligned)


@dataclass(frozen=True)
class Kernel:
    """What must be known of an implementation before it is imported.

    `missing` says why it cannot run on this machine, `refuses` why it cannot take a case; None means it can.
    `into`: it takes `out=`. `lse_costs`: it takes `need_lse=`, because the log-sum-exp costs it a pass of its own.
    """

    missing: Callable[[], str | None]
    refuses: Callable[[Case], str | None]
    into: bool = False
    lse_costs: bool = False


KERNELS = Registry("attention kernel")
_ABOUT: dict[str, Kernel] = {}  # best first


def register(name: str, target: str, about: Kernel) -> None:
    """Add an implementation ("module:function"). The order of registration is the order of preference."""
    KERNELS.add(name, target)
    _ABOUT[name] = about


def available() -> dict[str, str | None]:
    """Every kernel, best first, and why it cannot run on this machine (None: it can)."""
    return {name: about.missing() for name, about in _ABOUT.items()}


def choose(device: torch.device, dtype: torch.dtype, *, head_dim: int = 128, tile: int = TILE) -> str:
    """The name that "auto" stands for with tensors of this kind that lie well in memory and aligned lists."""
    return _choose(Case(torch.device(device), dtype, head_dim, tile))


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: TileLists,
    scale: float,
    *,
    kernel: str = "auto",
    out: torch.Tensor | None = None,
    need_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query row over the tiles listed for its head and tile, causal inside them.

    q [Hq, Tq, D], k and v [Hkv, Tk, D] on one device and of one dtype, Hq a multiple of Hkv, any strides with D
    contiguous; `scale` > 0 multiplies the scores; `out` [Hq, Tq, D] is written if given. Returns out and the
    natural-log log-sum-exp [Hq, Tq] in float32, which may be NaN throughout if `need_lse` is off. Raises
    `InvalidInput` for tensors no kernel may be given, `UnknownName` for a kernel that does not exist and
    `Unavailable` for one that cannot run here.
    """
    check_shapes(q, k, v, lists)
    _check_values(q, k, v, scale, out)
    case = Case.of((q, k, v) if out is None else (q, k, v, out), lists.tile, aligned=lists.aligned)
    name = _choose(case) if kernel == "auto" else _named(kernel, case)
    run, about = KERNELS.get(name), _ABOUT[name]
    options: dict[str, Any] = {"out": out} if out is not None and about.into else {}
    if about.lse_costs:
        options["need_lse"] = need_lse
    made: tuple[torch.Tensor, torch.Tensor] = run(q, k, v, lists, scale, **options)
    if out is None or about.into:
        return made
    return out.copy_(made[0]), made[1]


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, kernel: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense causal attention, the last row of q seeing the last key: shapes, results and errors as above.

    On a GPU this is the block-sparse kernel with every tile listed, which on Hopper is as fast as a dense one.
    """
    if q.device.type == "cpu" and kernel == "auto" and q.shape[1] == k.shape[1]:
        from tamis.kernels.cpu.dense import causal_attention as on_cpu

        return on_cpu(q, k, v, scale)
    lists = _every_tile(q.shape[1], k.shape[1], q.shape[0], q.device)
    return block_sparse_attention(q, k, v, lists, scale, kernel=kernel)


def packed_causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, lengths: Sequence[int], *, kernel: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense causal attention of whole prompts packed one behind another, none of which sees another.

    q [Hq, T, D], k and v [Hkv, T, D], where `lengths` (1 token or more each) sum up to T; results and errors as above,
    and `InvalidInput` for other lengths. On a CPU it is a loop over the prompts, elsewhere one call with the lists
    of all, which are kept for the next layers.
    """
    check_lengths(lengths, q.shape[1])
    if k.shape[1] != q.shape[1]:
        raise InvalidInput(f"q has {q.shape[1]} tokens, k {k.shape[1]}; packed prompts are whole: give all their rows.")
    if len(lengths) == 1:
        return causal_attention(q, k, v, scale, kernel=kernel)
    if q.device.type != "cpu" or kernel != "auto":
        lists = every_tile_of(tuple(lengths), q.shape[0], q.device)
        return block_sparse_attention(q, k, v, lists, scale, kernel=kernel)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
    ends = list(itertools.accumulate(lengths))
    for n, end in zip(lengths, ends, strict=True):
        own = slice(end - n, end)
        out[:, own], lse[:, own] = causal_attention(q[:, own], k[:, own], v[:, own], scale)
    return out, lse


@functools.lru_cache(maxsize=4)  # the layers of a model ask for the same lists
def _every_tile(n_rows: int, n_keys: int, heads: int, device: torch.device) -> TileLists:
    queries, keys = Tiling.of_segments([n_rows]), Tiling.of_segments([n_keys - n_rows, n_rows])  # cut alike
    mask = torch.ones((heads, len(queries), len(keys)), dtype=torch.bool, device=device)
    return lists_from_mask(mask, queries, keys, n_keys - n_rows)


def _check_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor | None) -> None:
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v))
        raise InvalidInput(f"q, k, v are {kinds}; all three must have one dtype and one device.")
    if not scale > 0:
        raise InvalidInput(f"scale is {scale}; it must be positive. Negate q instead of the scale.")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.device != q.device):
        raise InvalidInput(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; it must be like q: "
            f"{q.dtype} {tuple(q.shape)} on {q.device}."
        )


def _choose(case: Case) -> str:
    skipped: list[str] = []
    for name, about in _ABOUT.items():
        why = about.missing() or about.refuses(case)
        if why is None:
            if skipped and case.device.type == "cuda":
                _say_once(f"block-sparse attention runs on {name!r}: {'; '.join(skipped)}")
            return name
        skipped.append(f"{name}: {why}")
    raise Unavailable(f"no attention kernel takes these tensors. {'; '.join(skipped)}.")


def _named(name: str, case: Case) -> str:
    if name not in KERNELS:
        KERNELS.get(name)  # raises, with the nearest name
    why = _ABOUT[name].missing() or _ABOUT[name].refuses(case)
    if why is not None:
        raise Unavailable(f"attention kernel {name!r} cannot be used: {why}. kernel='auto' picks one that can.")
    return name


@functools.cache
def _say_once(message: str) -> None:
    log.info(message)


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _capability() -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _gluon_missing() -> str | None:
    capability, version = _capability(), _version("triton")
    if capability is None:
        return "there is no NVIDIA GPU"
    if capability != (9, 0):
        return f"the GPU is sm_{capability[0]}{capability[1]} and the kernel is for sm_90"
    if version is None or version.split(".")[:2] != ["3", "6"]:
        return f"it is written for Triton 3.6 and {f'{version} is' if version else 'no Triton is'} installed"
    return None


def _hopper_refuses(case: Case) -> str | None:
    if case.device.type != "cuda":
        return f"the tensors are on {case.device}"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"the tensors are {case.dtype} and must be bfloat16 or float16"
    if case.tile != TILE:
        return f"tiles are {case.tile} tokens and must be {TILE}"
    if case.head_dim % 8 or case.head_dim > 128:
        return f"head dim {case.head_dim} is not a multiple of 8 up to 128"
    if not case.dense_rows or not case.steps_of_16:
        return "a tensor does not start and step in multiples of 16 bytes with the head dim contiguous"
    return None


@functools.cache
def _fa4_installed() -> bool:
    # looked up by hand: find_spec("flash_attn.cute") would import what else is installed as flash_attn
    package = importlib.util.find_spec("flash_attn")
    if package is None or package.submodule_search_locations is None:
        return False
    return importlib.machinery.PathFinder.find_spec("flash_attn.cute", package.submodule_search_locations) is not None


def _fa4_missing() -> str | None:
    capability = _capability()
    if capability is None:
        return "there is no NVIDIA GPU"
    if capability != (9, 0):
        # on sm_100 its lists are for pairs of query tiles, 256 rows
        return f"the GPU is sm_{capability[0]}{capability[1]}; it takes lists for tiles of {TILE} rows on sm_90 only"
    if not _fa4_installed():
        return "flash-attn-4 is not installed; pip install 'tamis[fa4]' adds it"
    return None


def _fa4_refuses(case: Case) -> str | None:
    why = _hopper_refuses(case)
    if why is None and not case.aligned:
        why = (
            f"a tile does not start at a multiple of {TILE} tokens; pad documents and chunks to whole tiles, or use "
            "a kernel that takes any start"
        )
    return why


def _triton_missing() -> str | None:
    if _version("triton") is None:
        return "Triton is not installed"
    capability = _capability()
    if _interpreted() or (capability is not None and capability >= (8, 0)):
        return None
    if capability is None:
        return "there is no NVIDIA GPU"
    return f"the GPU is sm_{capability[0]}{capability[1]} and the kernel needs sm_80"


def _triton_refuses(case: Case) -> str | None:
    dtypes = [torch.float16, torch.float32] + [torch.bfloat16] * (not _interpreted())
    if case.device.type != "cuda" and not _interpreted():
        return f"the tensors are on {case.device}"
    if case.dtype not in dtypes:
        return f"the tensors are {case.dtype} and must be one of {', '.join(map(str, dtypes))}"
    if case.tile not in (16, 32, 64, 128):
        return f"tiles are {case.tile} tokens and must be 16, 32, 64 or 128"
    if case.head_dim > 256:
        return f"head dim is {case.head_dim} and must be at most 256"
    return None if case.dense_rows else "the head dim of a tensor is not contiguous"


def _cpu_refuses(case: Case) -> str | None:
    return None if case.device.type == "cpu" else f"the tensors are on {case.device}"


def _nothing(*_: Any) -> None:
    return None


register(
    "gluon", "tamis.kernels.gluon.block_sparse:block_sparse_attention", Kernel(_gluon_missing, _hopper_refuses, True)
)
# under the interpreter it is thousands of times slower than PyTorch: for tests, which ask for it by name
register("cpu", "tamis.kernels.cpu.block_sparse:block_sparse_attention", Kernel(_nothing, _cpu_refuses, lse_costs=True))
register(
    "triton", "tamis.kernels.triton.block_sparse:block_sparse_attention", Kernel(_triton_missing, _triton_refuses, True)
)
# its compiler takes seconds for every new shape of call, and it is no faster: for machines where the others cannot run
register("fa4", "tamis.kernels.fa4.block_sparse:block_sparse_attention", Kernel(_fa4_missing, _fa4_refuses, True))
register("reference", "tamis.kernels.reference.block_sparse:block_sparse_attention", Kernel(_nothing, _nothing))
