"""Check, then time, the paged attention kernels on an NVIDIA GPU, and print what turning the query costs.

    python scripts/gpu_paged.py [--tune] [--rounds 30] [--requests 64]

32 query heads, 8 KV heads, head dim 128, bf16, pages of 128. Five documents of 4,096 tokens, each stored at positions
from 0 and placed behind a prefix of 128 tokens, so that all five are moved; then a question of 2,048 tokens (prefill),
or one row for each of 64 requests whose pages are their own copies, so that all of them are read (decode). "compiled
out" is the same kernel without rotation; "same runs" still stops between documents, "one run" does not. Times are of
one layer, from CUDA graphs replayed in turn, so that a change of clocks meets all alike: medians, and the median of
the overheads of single rounds with their quartiles.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

from interpreted_paged import decode as decode_errors
from interpreted_paged import prefill as prefill_errors
from paged_cases import make, within
from paged_shapes import GPU_DECODE, GPU_PREFILL

from tamis.kernels.decode_plan import DecodePlan, Room
from tamis.kernels.paged import ABSOLUTE, DOCUMENT, KeyTiles, PagedLists, Segment, paged_lists
from tamis.kernels.reference.paged import paged_attention as reference
from tamis.kernels.reference.paged import paged_decode as decode_reference
from tamis.kernels.triton import paged_decode as triton_decode
from tamis.kernels.triton import paged_prefill as triton_prefill

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 128
DOCUMENTS, TOKENS, PREFIX, QUESTION = 5, 4096, 128, 2048
SCALE = DIM**-0.5
BF16 = torch.bfloat16
BEST_BYTES = 4.3e12  # a second: full-attention decode at its best on this card
Run = Callable[[], object]


def angles(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of plain rotation with base 500,000."""
    frequencies = 5e5 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angle = offsets.double()[:, None] * frequencies
    return angle.cos().float(), angle.sin().float()


def prompt(first_page: int, own: int) -> tuple[KeyTiles, int]:
    """Tiles of a prefix, five documents and `own` tokens behind them, in pages from `first_page` on; pages used."""
    page, position, segments = first_page, 0, []
    for n, local in ((PREFIX, None), *[(TOKENS, 0)] * DOCUMENTS, (own, None)):
        count = -(-n // PAGE)
        segments.append(Segment(tuple(range(page, page + count)), n, position, local))
        page, position = page + count, position + n
    return KeyTiles.of(segments, angles, page=PAGE), page - first_page


def pools(n_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values of one layer."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    made = [torch.empty((n_pages, KV_HEADS, PAGE, DIM), dtype=BF16, device="cuda") for _ in range(2)]
    for pool in made:
        for part in torch.split(pool, 256):
            part.normal_(generator=draw)
    return made[0], made[1]


def check() -> None:
    """Raise unless the kernels agree with dense attention over re-rotated keys."""
    for kind, shapes, run in (("prefill", GPU_PREFILL, prefill_errors), ("decode", GPU_DECODE, decode_errors)):
        for name, shape in shapes.items():
            found = run(make(shape, "cuda"))
            if not within(found, shape.dtype):
                raise SystemExit(f"{kind} {name} is wrong: {found}")
    print(f"{len(GPU_PREFILL)} prefill and {len(GPU_DECODE)} decode cases agree with dense attention", flush=True)


def agree(what: str, made: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless every row is within bf16's rounding."""
    wrong = (made.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    print(f"{what}: worst row {float(wrong.max()):.4f} from the reference", flush=True)
    if not float(wrong.max()) < 0.02:
        raise SystemExit(f"{what} is wrong")


def times(runs: dict[str, Run], calls: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of one call of each, round by round, in turn."""
    graphs = {}
    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(calls):
                run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 3):
        order = list(graphs) if i % 2 else list(graphs)[::-1]
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if i >= 3:  # the first rounds warm up
                found[name].append(start.elapsed_time(end) * 1000 / calls)
    return found


def table(found: dict[str, list[float]], base: str, rate: Callable[[float], str]) -> None:
    """One line for each: microseconds, rate, and the overhead over `base`."""
    for name, us in found.items():
        over = sorted((a / b - 1) * 100 for a, b in zip(us, found[base], strict=True))
        low, mid, high = (over[int(len(over) * q)] for q in (0.25, 0.5, 0.75))
        us_mid = statistics.median(us)
        print(f"  {name:28} {us_mid:9.1f} us  {rate(us_mid):>22}  {mid:+6.2f} % [{low:+.2f}, {high:+.2f}]", flush=True)


def prefill(rounds: int, tune: bool) -> None:
    """The question over the documents."""
    tiles, n_pages = prompt(0, QUESTION)
    keys, values = pools(n_pages)
    q = torch.randn((HEADS, QUESTION, DIM), device="cuda").to(BF16)
    first = PREFIX + DOCUMENTS * TOKENS
    positions = torch.arange(first, first + QUESTION)
    lists = paged_lists(tiles, positions)
    plain = replace(tiles, table=tiles.table.clone(), cos=None, sin=None)
    plain.table[:, DOCUMENT] = ABSOLUTE
    one = paged_lists(plain, positions).to("cuda")
    tiles, lists, plain = tiles.to("cuda"), lists.to("cuda"), plain.to("cuda")
    group = HEADS // KV_HEADS
    made = triton_prefill.paged_attention(q, keys, values, tiles, lists, scale=SCALE)[0]
    agree("prefill", made[:group], reference(q[:group], keys[:, :1], values[:, :1], tiles, lists, scale=SCALE)[0])

    def call(tiles: KeyTiles, lists: PagedLists, cut: triton_prefill.Cut | None = None) -> Run:
        run = triton_prefill.paged_attention
        return functools.partial(run, q, keys, values, tiles, lists, scale=SCALE, out=torch.empty_like(q), cut=cut)

    flops = 4 * HEADS * DIM * (QUESTION * first + QUESTION * (QUESTION + 1) // 2)

    def measure(cut: triton_prefill.Cut | None) -> None:
        runs = {
            "compiled out, one run": call(plain, one, cut),
            "compiled out, same runs": call(plain, lists, cut),
            "turned": call(tiles, lists, cut),
        }
        table(times(runs, 10, rounds), "compiled out, one run", lambda us: f"{flops / us / 1e6:.0f} TFLOPS")

    print(f"prefill: {QUESTION} tokens over {DOCUMENTS} x {TOKENS}", flush=True)
    measure(None)
    for parts in [(64, 4, 2, True), (64, 4, 3, True), (64, 8, 2, True), (128, 8, 2, True), (64, 8, 3, False)]:
        if tune:
            cut = triton_prefill.Cut(128, *parts)
            try:
                print(f" {cut}", flush=True)
                measure(cut)
            except (RuntimeError, triton.CompilationError, triton.OutOfResources) as e:
                print(f"  {type(e).__name__} {str(e)[:90]}", flush=True)


def decode(requests: int, rounds: int, tune: bool) -> None:
    """One step of all requests, each over its own copy of the documents."""
    prompts, page = [], 0
    for _ in range(requests):
        tiles, used = prompt(page, 77)
        prompts.append(tiles)
        page += used
    keys, values = pools(page)
    q = torch.randn((requests, HEADS, 1, DIM), device="cuda").to(BF16)
    last = PREFIX + DOCUMENTS * TOKENS + 76
    count = sum(len(t.table) for t in prompts)
    room = Room(requests, count, count, DOCUMENTS * requests, page=PAGE, rotary_dims=DIM)
    plan = DecodePlan.reserve(room, "cuda")
    n_splits = plan.write(prompts, torch.full((requests, 1), last), kv_heads=KV_HEADS)
    fitted = DecodePlan.reserve(room._replace(splits=n_splits + 8), "cuda")
    fitted.write(prompts, torch.full((requests, 1), last), kv_heads=KV_HEADS)
    out = triton_decode.paged_decode(q, keys, values, fitted, scale=SCALE)[0]
    few = replace(fitted, ranges=fitted.ranges[:2], q_position=fitted.q_position[:2])
    group = HEADS // KV_HEADS
    agree("decode", out[:2, :group], decode_reference(q[:2, :group], keys[:, :1], values[:, :1], few, scale=SCALE)[0])
    total = sum(int(t.table[:, 1].sum()) for t in prompts) * KV_HEADS * DIM * 2 * 2

    def call(plan: DecodePlan, turned: bool, cut: triton_decode.Cut | None = None) -> Run:
        plan = plan if turned else replace(plan, tiles=replace(plan.tiles, cos=None, sin=None))
        run = triton_decode.paged_decode
        return functools.partial(run, q, keys, values, plan, scale=SCALE, out=torch.empty_like(q), cut=cut)

    def rate(us: float) -> str:
        return f"{total / us / 1e6:.2f} TB/s ({total / us * 1e6 / BEST_BYTES:.1%})"

    def measure(cut: triton_decode.Cut | None) -> None:
        runs = {"compiled out": call(fitted, False, cut), "turned": call(fitted, True, cut)}
        table(times(runs, 5, rounds), "compiled out", rate)

    print(f"decode: {requests} requests, {total / 1e9:.2f} GB, {n_splits} splits, share of {BEST_BYTES / 1e12} TB/s")
    runs = {
        "compiled out": call(fitted, False),
        "turned": call(fitted, True),
        "turned, room for all splits": call(plan, True),
    }
    table(times(runs, 5, rounds), "compiled out", rate)
    cuts = [
        (64, 4, 3, True),
        (64, 4, 4, True),
        (64, 4, 3, False),
        (64, 8, 4, True),
        (128, 4, 2, True),
        (32, 4, 5, True),
    ]
    for cut in [triton_decode.Cut(*c) for c in cuts] if tune else []:
        try:
            print(f" {cut}", flush=True)
            measure(cut)
        except (RuntimeError, triton.CompilationError, triton.OutOfResources) as e:
            print(f"  {type(e).__name__} {str(e)[:90]}", flush=True)


def main() -> None:
    """Check, time, print."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--tune", action="store_true")
    ask.add_argument("--rounds", type=int, default=30)
    ask.add_argument("--requests", type=int, default=64)
    asked = ask.parse_args()
    check()
    prefill(asked.rounds, asked.tune)
    decode(asked.requests, asked.rounds, asked.tune)


if __name__ == "__main__":
    main()
