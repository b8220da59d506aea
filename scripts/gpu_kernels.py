"""Check and time block-sparse attention on this machine's GPU; a table last, and rows for results/attention.csv.

    python scripts/gpu_kernels.py [--case 65536/d128/0.2 ...] [--provider gluon ...] [--csv results/attention.csv]

A provider is timed only after it has agreed with the reference. TFLOP/s count listed tiles, 4 * D * 128 * 128 each,
the diagonal tile whole; density is the share of the tiles below the diagonal that is listed, drawn at random.
flash-attn-4 (providers fa4-sparse and fa4-dense) and cuDNN are there to compare with.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

from tamis.kernels import dispatch
from tamis.kernels.lists import TileLists, Tiling, lists_from_mask
from tamis.kernels.reference.block_sparse import block_sparse_attention as reference

FIELDS = [
    "date",
    "commit",
    "command",
    "gpu",
    "driver",
    "torch",
    "triton",
    "case",
    "provider",
    "metric",
    "p20",
    "p50",
    "p80",
    "unit",
]
HEADS = {128: (32, 8), 64: (14, 2), 96: (32, 8)}
CASES = [
    "65536/d128/0.2", "65536/d128/0.1", "65536/d128/1.0", "65536/d128/0.4", "16384/d128/0.1", "16384/d128/0.2",
    "32768/d64/0.2", "32768/d64/1.0",
]  # fmt: skip
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Run = Callable[[], torch.Tensor]
TILE = 128


def tensors(n: int, dim: int) -> Tensors:
    """Random bf16 q [Hq, n, dim], k and v [Hkv, n, dim]."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    hq, hkv = HEADS[dim]
    q, k, v = (torch.randn(h, n, dim, device="cuda", generator=draw).bfloat16() for h in (hq, hkv, hkv))
    return q, k, v


def random_mask(n: int, heads: int, density: float) -> torch.Tensor:
    """bool [heads, tiles, tiles]: the diagonal and a fixed share of the tiles before it."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    tiles = n // TILE
    below = torch.ones(tiles, tiles, device="cuda", dtype=torch.bool).tril(-1)
    score = torch.rand(heads, tiles, tiles, device="cuda", generator=draw).masked_fill_(~below, -1)
    kept = (torch.arange(tiles, device="cuda") * density).ceil()
    rank = score.argsort(-1, descending=True).argsort(-1)
    return (rank < kept[None, :, None]) | torch.eye(tiles, dtype=torch.bool, device="cuda")


def ours(kernel: str) -> Callable[[Tensors, TileLists, torch.Tensor], Run]:
    """A provider that goes through `dispatch`."""

    def build(qkv: Tensors, lists: TileLists, mask: torch.Tensor) -> Run:
        return lambda: dispatch.block_sparse_attention(*qkv, lists, qkv[0].shape[2] ** -0.5, kernel=kernel)[0]

    return build


def fa4(sparse: bool) -> Callable[[Tensors, TileLists, torch.Tensor], Run]:
    """flash-attn-4, on its own block lists or dense."""

    def build(qkv: Tensors, lists: TileLists, mask: torch.Tensor) -> Run:
        from flash_attn.cute import interface
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        q, k, v = (t.transpose(0, 1)[None].contiguous() for t in qkv)
        if not sparse:
            return lambda: interface._flash_attn_fwd(q, k, v, causal=True)[0][0].transpose(0, 1)
        from fa4_masks import causal

        heads, tiles = mask.shape[:2]
        number = torch.arange(tiles, device="cuda", dtype=torch.int32)
        diagonal = number[None, None, :, None].expand(1, heads, tiles, 1).contiguous()
        one = torch.ones(1, heads, tiles, dtype=torch.int32, device="cuda")
        rest = mask & ~torch.eye(tiles, dtype=torch.bool, device="cuda")
        count = rest.sum(-1, dtype=torch.int32)[None].contiguous()
        index = torch.where(rest, number, tiles).sort(-1).values[..., : max(1, int(count.max()))]
        lists4 = BlockSparseTensorsTorch(
            one, diagonal, count, index.to(torch.int32)[None].contiguous(), block_size=(TILE, TILE)
        )
        keep = {"causal": False, "mask_mod": causal, "block_sparse_tensors": lists4, "pack_gqa": False}
        return lambda: interface._flash_attn_fwd(q, k, v, **keep)[0][0].transpose(0, 1)

    return build


def cudnn(qkv: Tensors, lists: TileLists, mask: torch.Tensor) -> Run:
    """PyTorch's cuDNN attention, dense."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (t[None] for t in qkv)

    def run() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]

    return run


PROVIDERS: dict[str, Callable[[Tensors, TileLists, torch.Tensor], Run]] = {
    "gluon": ours("gluon"), "triton": ours("triton"), "fa4-sparse": fa4(True), "fa4-dense": fa4(False),
    "cudnn-dense": cudnn,
}  # fmt: skip


def setting(n: int, dim: int, density: float, provider: str) -> tuple[Tensors, TileLists, torch.Tensor]:
    """Inputs of one measurement; a dense provider sees every tile."""
    mask = random_mask(n, HEADS[dim][0], 1.0 if provider.endswith("-dense") else density)
    cut = Tiling.of_segments([n])
    return tensors(n, dim), lists_from_mask(mask, cut, cut), mask


def check(provider: str, dim: int) -> None:
    """Raise unless the provider agrees with the reference on a short prompt."""
    qkv, lists, mask = setting(2048, dim, 0.3, provider)
    out = PROVIDERS[provider](qkv, lists, mask)().float()
    expected = reference(*(t.float() for t in qkv), lists, dim**-0.5)[0]
    worst = float(((out - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    if not worst < 0.02:
        raise SystemExit(f"{provider} is wrong at head dim {dim}: worst row's relative error {worst:.4f}")


def measure(case: str, provider: str) -> tuple[float, float, float]:
    """(p20, p50, p80) in TFLOP/s."""
    n, dim, density = case.split("/")
    qkv, lists, mask = setting(int(n), int(dim[1:]), float(density), provider)
    run = PROVIDERS[provider](qkv, lists, mask)
    run()
    times = do_bench(run, warmup=40, rep=200, quantiles=[0.8, 0.5, 0.2])
    work = 4.0 * int(dim[1:]) * TILE * TILE * float(lists.count.sum())
    if provider.endswith("-dense"):
        work = 4.0 * int(dim[1:]) * HEADS[int(dim[1:])][0] * int(n) ** 2 / 2
    low, mid, high = (work / ms / 1e9 for ms in times)
    return low, mid, high


def environment(command: str) -> dict[str, str]:
    """The columns that every row of a run shares."""
    import triton

    def said(*args: str) -> str:
        done = subprocess.run(args, capture_output=True, text=True, check=False)
        return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "none"

    return {
        "date": datetime.date.today().isoformat(),
        "commit": said("git", "rev-parse", "--short", "HEAD"),
        "command": command,
        "gpu": torch.cuda.get_device_name(),
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def append(path: Path, row: dict[str, Any]) -> None:
    """Add one row to a result table, with the header if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    """Check, time, print, append."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--case", nargs="*", default=CASES)
    ask.add_argument("--provider", nargs="*", default=list(PROVIDERS), choices=list(PROVIDERS))
    ask.add_argument("--csv", type=Path)
    asked = ask.parse_args()
    shared = environment(" ".join(["python", "scripts/gpu_kernels.py", *sys.argv[1:]]))
    checked: dict[tuple[str, int], str | None] = {}
    for case in asked.case:
        for provider in asked.provider:
            dim = int(case.split("/")[1][1:])
            if provider.endswith("-dense") and not math.isclose(float(case.split("/")[2]), 1.0):
                continue
            if (provider, dim) not in checked:
                try:
                    check(provider, dim)
                    checked[provider, dim] = None
                except (ImportError, RuntimeError, ValueError) as e:
                    checked[provider, dim] = f"{type(e).__name__}: {str(e)[:200]}"
                    print(f"{provider} at head dim {dim} is left out: {checked[provider, dim]}", flush=True)
            if checked[provider, dim] is None:
                low, mid, high = measure(case, provider)
                print(f"{case:18} {provider:12} {mid:6.0f} TFLOP/s  ({low:.0f}-{high:.0f})", flush=True)
                found = {"p20": f"{low:.1f}", "p50": f"{mid:.1f}", "p80": f"{high:.1f}"}
                if asked.csv:
                    what = {"case": case, "provider": provider, "metric": "tflops", "unit": "TFLOP/s"}
                    append(asked.csv, shared | what | found)


if __name__ == "__main__":
    main()
