"""Check, then time, the kernels that select tiles on an NVIDIA GPU, and print one table.

    python scripts/gpu_selection.py [--tokens 32768 65536 131072] [--tune]

32 query heads, 8 KV heads, head dim 128, bf16, tiles of 128 tokens. Documents are 1,024 tokens each, or of random
lengths around 512, behind a prefix of 60 tokens and before a question of 200. Keys and queries are random with a few
heavy keys. Times are medians of CUDA graph replays, in ms, of one layer, beside the part that they are of the 60 ms
that dense attention takes at 64K (scaled with the square of the length); "all" is the whole selection of a layer.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from triton.testing import do_bench, do_bench_cudagraph

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

from selection_cases import Case, dense_lse, list_error, qk, scene_of, score_error, statistics_error

from tamis.kernels.lists import Tiling
from tamis.kernels.reference.tile_statistics import tile_statistics as reference
from tamis.kernels.selection import Bars, Choice
from tamis.kernels.statistics import tile_statistics
from tamis.kernels.triton.tile_lists import tile_lists
from tamis.kernels.triton.tile_scores import Cut, tile_scores
from tamis.select.every import AllTiles
from tamis.select.on_device import DeviceScene
from tamis.select.sampled import Sampled
from tamis.select.scene import Scene
from tamis.select.stored import Stored

HEADS = (32, 8)
DIM = 128
BF16 = torch.bfloat16
DENSE_64K_MS = 60.0


def case_of(tokens: int, kind: str) -> Case:
    """A prompt of about `tokens` tokens."""
    left, documents = tokens - 260, []
    draw = torch.Generator().manual_seed(3)
    while left > 0:
        n = 1024 if kind == "1024" else int(torch.randint(256, 769, (1,), generator=draw))
        documents.append(min(n, left))
        left -= documents[-1]
    return Case(tuple(documents), (60, 200), HEADS, DIM, 128, BF16, rows=8)


def median(run: Callable[[], object]) -> float:
    """Milliseconds of one call, from replays of a graph of several."""
    run()
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(do_bench_cudagraph(run, rep=30, return_mode="median"))


def check(case: Case) -> None:
    """Raise unless the kernels agree with PyTorch on this prompt."""
    scene = scene_of(case, "cuda")
    q, k = qk(case, scene, "cuda")
    error = score_error(case, q, k, scene, torch.float16)
    if not error < 0.01:
        raise SystemExit(f"tile_scores is wrong: {error:.4f}")
    q_, k_, cut = q[:, :3000], k[:, :3000], Tiling.of_segments([60, 1700, 1240])
    lse = dense_lse(q_, k_, case.scale)
    both = (t(q_, k_, lse, cut, cut, scale=case.scale, beta=0.01) for t in (tile_statistics, reference))
    found = statistics_error(*both)
    print(f"scores: {error:.4f}, statistics: {found}", flush=True)
    if not max(found["mass"], found["peak"], found["high"]) < 0.002:
        raise SystemExit(f"tile_statistics is wrong: {found}")
    for selector, allowed in ((Stored(), 0.0), (AllTiles(), 0.0), (Sampled(8, 0.9), 0.9)):
        found = list_error(selector, case, q, k, scene)
        print(f"{type(selector).__name__}: {found}", flush=True)
        near = abs(found["density"] - found["expected"]) < 0.01
        kept = abs(found.get("kept", 0) - found.get("should", 0)) < 0.01
        if found["differ"] > allowed or not near or not kept:
            raise SystemExit(f"lists of {type(selector).__name__} are wrong: {found}")


def tensors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random q and k, token-major, some keys drawing much attention."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    common = torch.randn(DIM, device="cuda", generator=draw)
    q, k = (torch.randn(n, h, DIM, device="cuda", generator=draw) for h in HEADS)
    k[torch.rand(n, device="cuda", generator=draw) < 0.02] += common
    k[0] += common
    return (q + 0.5 * common).to(BF16).transpose(0, 1), k.to(BF16).transpose(0, 1)


CUTS = [(128, 64, 8, 2, True), (128, 64, 8, 3, True), (128, 64, 4, 2, True), (128, 64, 8, 2, False)]
CUTS8 = [(128, 64, 8, 2, True), (128, 64, 8, 3, True)]


def tune(case: Case) -> None:
    """Time other cuts of the two kernels, and float8 products."""
    scene = scene_of(case, "cuda")
    q, k = tensors(scene.tiling.n_tokens)
    device = DeviceScene.of(scene)
    rest = (device.tiles, device.rows(8), device.places)
    sums = tile_scores(q, k, *rest, scale=DIM**-0.5)
    q8, k8 = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)
    for name, a, b, cuts in (("bf16", q, k, CUTS), ("fp8", q8, k8, CUTS8)):
        for cut in (Cut(*c) for c in cuts):
            run = functools.partial(tile_scores, a, b, *rest, scale=DIM**-0.5, cut=cut)
            try:
                ms = median(run)
                late = (run()[..., :400] - sums[..., :400])[:, 400:].abs().float().max()
                print(f"tune scores {name} {tuple(cut)}: {ms:.3f} ms, off by {float(late):.3f} bits", flush=True)
            except (RuntimeError, triton.CompilationError, triton.OutOfResources) as e:
                print(f"tune scores {name} {tuple(cut)}: {type(e).__name__} {str(e)[:90]}", flush=True)
    assert device.bits is not None, "the case has records"
    bits = device.bits.layer(0)
    for choice in (Choice.STORED, Choice.SAMPLED):
        for warps in (1, 2, 4):
            run = functools.partial(
                tile_lists, device.places, HEADS[0], choice, bits=bits, sums=sums, bars=Bars(0.9), warps=warps
            )
            print(f"tune lists {choice.name} {warps} warps: {median(run):.3f} ms", flush=True)


def timings(case: Case, scene: Scene) -> Iterator[tuple[str, float]]:
    """(what, ms) of one prompt."""
    q, k = tensors(scene.tiling.n_tokens)
    device = DeviceScene.of(scene)
    assert device.bits is not None, "the case has records"
    scale = DIM**-0.5
    for m in (8, 4):
        rest = (device.tiles, device.rows(m), device.places)
        yield f"scores, {m} rows", median(lambda r=rest: tile_scores(q, k, *r, scale=scale))
        yield f"sampled, {m} rows, all", median(lambda m=m: device.lists(Sampled(m, 0.9), 0, q, k, scale))
    yield "stored, all", median(lambda: device.lists(Stored(), 0, q, k, scale))
    n = q.shape[1]
    for length in (1024, 4096, n):
        cut = Tiling.of_segments([60, length - 60])
        lse = torch.full((HEADS[0], length), 10.0, device="cuda")
        a, b = q[:, :length], k[:, :length]
        run = functools.partial(tile_statistics, a, b, lse, cut, cut, scale=scale, beta=0.01)
        yield f"statistics of {length} tokens", float(do_bench(run, warmup=1, rep=1, return_mode="median"))


def main() -> None:
    """Check, time, print."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--tokens", nargs="*", type=int, default=[32768, 65536, 131072])
    ask.add_argument("--tune", action="store_true")
    asked = ask.parse_args()
    check(case_of(6000, "512"))
    check(case_of(6000, "1024"))
    if asked.tune:
        tune(case_of(65536, "1024"))
    for tokens in asked.tokens:
        for kind in ("1024", "512"):
            case = case_of(tokens, kind)
            scene = scene_of(case, "cuda")
            dense = DENSE_64K_MS * (tokens / 65536) ** 2
            for what, ms in timings(case, scene):
                print(
                    f"{tokens:7} {kind:>5} {len(scene):5} tiles  {what:26} {ms:8.3f} ms  {ms / dense:6.2%}", flush=True
                )


if __name__ == "__main__":
    main()
