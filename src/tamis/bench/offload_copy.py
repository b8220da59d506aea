"""How fast blocks come from pinned host memory: by a kernel of so many programs, and by the copy engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tamis.bench.decode_clock import timed
from tamis.bench.machine import why_of
from tamis.bench.results import Row
from tamis.kernels.copy_engine import copy_tasks

PROGRAMS = (1, 2, 4, 8, 16, 32)
BLOCK_BYTES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10)
MOVED = 128 << 20  # bytes of a timed copy
ROUNDS = 8
CHUNKED = ((8192, 16), (4096, 8), (4096, 4), (2048, 2))  # words and warps of a program, tried at the default count


@dataclass(frozen=True)
class Copied:
    """What was measured of one way: GB/s of each round."""

    case: str
    provider: str
    rates: list[float]


def measure(
    host: torch.Tensor, device: torch.device, *, programs: Sequence[int] = PROGRAMS, moved: int = MOVED,
    note: Callable[[str], None] = lambda _: None,
) -> list[Copied]:  # fmt: skip
    """Time copies of blocks of several sizes from flat pinned host memory (int32), blocks in a random order.

    The copy engine also moves one large piece: the ceiling. On a CPU there is one plain copy, which says nothing of a
    GPU.
    """
    found: list[Copied] = []
    if device.type != "cuda":
        target = torch.empty_like(host)
        return [_timed("copy/all", "cpu", lambda: target.copy_(host), host.nbytes, device)]
    moved = min(moved, host.nbytes)
    target = torch.empty(moved // 4, dtype=torch.int32, device=device)
    found.append(_timed("copy/whole", "engine", lambda: target.copy_(host[: moved // 4], non_blocking=True), moved,
                        device))  # fmt: skip
    for nbytes in BLOCK_BYTES:
        try:
            found += _of_size(host, target, nbytes, programs, device)
        except Exception as e:  # whatever a launch raises; the other sizes go on
            note(f"copies of {nbytes} bytes are left out: {why_of(e)}")
    return found


def _of_size(
    host: torch.Tensor, target: torch.Tensor, nbytes: int, programs: Sequence[int], device: torch.device
) -> list[Copied]:
    from tamis.kernels.triton.offload_move import PROGRAMS as DEFAULT
    from tamis.kernels.triton.offload_move import copy_blocks

    words, n = nbytes // 4, target.nbytes // nbytes
    draw = torch.Generator().manual_seed(0)
    source = torch.randperm(host.numel() // words, generator=draw)[:n]
    tasks = torch.stack([source, torch.randperm(n, generator=draw)], -1).int().to(device)
    count = torch.tensor([n], dtype=torch.int32, device=device)
    case, moved = f"copy/{nbytes >> 10}kb", n * nbytes
    copy = functools.partial(copy_blocks, host, target, tasks, count, words)
    copy()
    pieces = host[: host.numel() // words * words].view(-1, words)
    if not torch.equal(target[: n * words].view(n, words)[tasks[:, 1].long()].cpu(), pieces[source]):
        raise AssertionError("the kernel copied something else")
    found = [_timed(case, f"kernel-{p}-ctas", functools.partial(copy, programs=p), moved, device) for p in programs]
    if nbytes == 32 << 10:
        for chunk, warps in CHUNKED:
            run = functools.partial(copy, programs=DEFAULT, chunk=chunk, warps=warps)
            found.append(_timed(case, f"kernel-{DEFAULT}-ctas-{warps}-warps-{chunk * 4 >> 10}kb", run, moved, device))
    slots = target[: n * words].view(-1, 1, 1, words)
    engine = functools.partial(copy_tasks, pieces[:, None, None], slots, tasks, count)
    found.append(_timed(case, "engine", engine, moved, device))
    return found


def _timed(case: str, provider: str, run: Callable[[], object], nbytes: int, device: torch.device) -> Copied:
    seconds = timed({provider: run}, device, ROUNDS, calls=0)[provider]
    return Copied(case, provider, [nbytes / s / 1e9 for s in seconds])


def rows(found: list[Copied]) -> list[Row]:
    """Rows of the results file."""
    return [Row.of(one.case, one.provider, "gb_per_s", one.rates, unit="GB/s") for one in found]
