"""What reading documents at any offset costs in the paged attention kernels: the same work with and without turning.

Documents stored at positions from 0 stand behind a prefix, so that all of them are moved; behind them a question
("prefill/5x4096/2048": five documents of 4,096 tokens, 2,048 query rows of one request), or 77 tokens of each of
several requests that take a decode step ("decode/5x4096/b64": 64 requests, each over its own copy of the documents,
so that all of it is read). One layer. A provider is timed only after it has agreed, on the inputs that are timed, with
dense float64 attention over keys turned into place; on a GPU from CUDA graphs. "Without" is the same kernel with the
rotation compiled out, on tiles of one run. A round times all sides in turn and once more backwards, so that clocks that
drift meet all alike; on a GPU rounds go on until the median of what turning costs is known to `PRECISION`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from tamis.bench.clock import graphed, launched
from tamis.bench.machine import device_of, why_of
from tamis.bench.results import Row, quantiles
from tamis.core.errors import InvalidInput, Unavailable
from tamis.kernels import paged_dispatch
from tamis.kernels.decode_plan import DecodePlan, Room
from tamis.kernels.paged import ABSOLUTE, DOCUMENT, LENGTH, POSITION, KeyTiles, Segment, paged_lists

GPU_CASES = ("prefill/5x4096/2048", "decode/5x4096/b64")
CPU_CASES = ("prefill/3x512/256", "decode/3x512/b4")
PREFIX, OWN, PAGE, BASE = 128, 77, 128, 5e5
GPU_CALLS = 10  # of a captured graph
WARMUP, MOST_ROUNDS = 3, 10  # rounds, and how many times those asked for
PRECISION = 0.003  # half the interval of the median overhead, of the time without turning
LIMITS = {torch.bfloat16: (0.02, 0.005), torch.float32: (1e-4, 1e-5)}  # as `bench.attention` has them
CUTS = {  # what --tune tries: `Cut` of the Triton kernels
    "prefill": ((128, 64, 4, 2, True), (128, 64, 4, 3, True), (128, 64, 8, 2, True), (128, 128, 8, 2, True),
                (128, 64, 8, 3, False)),
    "decode": ((64, 4, 3, True), (64, 4, 4, True), (64, 4, 3, False), (64, 8, 4, True), (128, 4, 2, True),
               (32, 4, 5, True)),
}  # fmt: skip
PLAIN, TURNED = "without", "turned"
PROVIDERS = {"prefill": ("gluon", "triton"), "decode": ("triton",)}  # on a GPU

Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]
Cut = Sequence[Any] | None
_CASE = re.compile(r"(prefill|decode)/(\d+)x(\d+)/(b?)(\d+)")


class Heads(NamedTuple):
    """Query and KV heads, head dim, dtype."""

    query: int
    kv: int
    dim: int
    dtype: torch.dtype

    @classmethod
    def on(cls, device: torch.device) -> Heads:
        """Those of an 8B model in bfloat16 on a GPU, of a small one in float32 on a CPU."""
        return cls(32, 8, 128, torch.bfloat16) if device.type == "cuda" else cls(8, 2, 64, torch.float32)


@dataclass(frozen=True)
class PagedCase:
    """Documents of `tokens` each, and `n` query rows (prefill) or requests (decode)."""

    phase: str
    documents: int
    tokens: int
    n: int

    @classmethod
    def parse(cls, text: str) -> PagedCase:
        """Read the written form. Raises InvalidInput for anything else."""
        found = _CASE.fullmatch(text.strip())
        if found is None or (found[1] == "decode") != bool(found[4]) or not all(int(found[i]) for i in (2, 3, 5)):
            raise InvalidInput(
                f"case {text!r} cannot be read; write prefill/DOCUMENTSxTOKENS/ROWS or decode/DOCUMENTSxTOKENS/"
                "bREQUESTS with numbers of 1 or more, such as prefill/5x4096/2048 or decode/5x4096/b64."
            )
        return cls(found[1], int(found[2]), int(found[3]), int(found[5]))

    @property
    def before(self) -> int:
        """Tokens before a request's own."""
        return PREFIX + self.documents * self.tokens

    def __str__(self) -> str:
        return f"{self.phase}/{self.documents}x{self.tokens}/{'b' * (self.phase == 'decode')}{self.n}"


def frequencies(dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """float64 [dim / 2], radians a position."""
    return BASE ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


def angles(offsets: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, float32 [offsets, dim / 2]."""
    angle = offsets.double()[:, None] * frequencies(dim)
    return angle.cos().float(), angle.sin().float()


@dataclass
class Inputs:
    """Random queries and pools of one layer, and the requests' tiles on the CPU.

    q [requests, Hq, rows, D]; keys, values [pages, Hkv, page, D], NaN where no key lies; positions int64 [requests,
    rows].
    """

    case: PagedCase
    heads: Heads
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tiles: list[KeyTiles]
    positions: torch.Tensor

    @classmethod
    def of(cls, case: PagedCase, device: torch.device) -> Inputs:
        """The same for every run."""
        heads, decode = Heads.on(device), case.phase == "decode"
        requests, own, rows = (case.n, OWN, 1) if decode else (1, case.n, case.n)
        page, tiles, last = 0, [], []
        for _ in range(requests):
            segments, position = [], 0
            for n, local in ((PREFIX, None), *[(case.tokens, 0)] * case.documents, (own, None)):
                count = -(-n // PAGE)
                segments.append(Segment(tuple(range(page, page + count)), n, position, local))
                last.append((page + count - 1, n - (count - 1) * PAGE))
                page, position = page + count, position + n
            tiles.append(KeyTiles.of(segments, functools.partial(angles, dim=heads.dim), page=PAGE))
        draw = torch.Generator(device=device).manual_seed(0)
        keys, values = (
            torch.empty((page, heads.kv, PAGE, heads.dim), dtype=heads.dtype, device=device) for _ in range(2)
        )
        for pool in (keys, values):
            for part in torch.split(pool, 256):
                part.normal_(generator=draw)
            for number, n in last:
                pool[number, :, n:] = torch.nan
        q = torch.randn((requests, heads.query, rows, heads.dim), device=device, generator=draw).to(heads.dtype)
        first = case.before + own - rows
        return cls(case, heads, q, keys, values, tiles, torch.arange(first, first + rows).expand(requests, rows))

    @property
    def scale(self) -> float:
        """1 / sqrt(head dim)."""
        return float(self.heads.dim**-0.5)

    @property
    def work(self) -> float:
        """Floating-point operations of a prompt, or bytes that a decode step reads."""
        case, heads = self.case, self.heads
        if case.phase == "decode":
            keys = sum(int(t.table[:, LENGTH].sum()) for t in self.tiles)
            return 2.0 * keys * heads.kv * heads.dim * heads.dtype.itemsize
        return 4.0 * heads.query * heads.dim * (case.n * case.before + case.n * (case.n + 1) / 2)

    def exact(self, request: int, head: int) -> torch.Tensor:
        """float64 [rows, D]: dense attention of a query head over all keys turned to their absolute positions."""
        device, tiles = self.q.device, self.tiles[request]
        table = tiles.table.to(device)
        kept = tiles.to(device).readable()
        where = (table[:, POSITION, None] + torch.arange(PAGE, device=device))[kept]
        # documents are numbered in the order of their offsets
        offset = torch.where(table[:, DOCUMENT] < 0, 0, PREFIX + table[:, DOCUMENT] * self.case.tokens)
        offset = offset[:, None].expand(-1, PAGE)[kept]
        kv = head * self.heads.kv // self.heads.query
        k, v = (pool[table[:, 0].long(), kv][kept].double() for pool in (self.keys, self.values))
        half = self.heads.dim // 2
        z = torch.complex(k[:, :half], k[:, half:])
        z = z * torch.polar(
            torch.ones((), dtype=torch.float64, device=device), offset.double()[:, None] * frequencies(2 * half, device)
        )
        scores = self.q[request, head].double() @ torch.cat([z.real, z.imag], 1).T * self.scale
        scores.masked_fill_(where > self.positions[request].to(device)[:, None], -torch.inf)
        return scores.softmax(-1) @ v


def runs_of(x: Inputs, kernel: str, cut: Cut = None) -> dict[str, Run]:
    """What is timed: `TURNED` against `PLAIN`, and what lies between. Cuts are of the Triton kernel."""
    return _decode_runs(x, kernel, cut) if x.case.phase == "decode" else _prefill_runs(x, kernel, cut)


def _prefill_runs(x: Inputs, kernel: str, cut: Cut) -> dict[str, Run]:
    device, tiles = x.q.device, x.tiles[0]
    plain = replace(tiles, table=tiles.table.clone(), cos=None, sin=None)
    plain.table[:, DOCUMENT] = ABSOLUTE
    lists, one = (paged_lists(t, x.positions[0]).to(device) for t in (tiles, plain))
    tiles, plain = tiles.to(device), plain.to(device)
    attend: Callable[..., Any] = functools.partial(paged_dispatch.paged_attention, kernel=kernel)
    if cut is not None:
        from tamis.kernels.triton import paged_prefill

        attend = functools.partial(paged_prefill.paged_attention, cut=paged_prefill.Cut(*cut))
    run = functools.partial(attend, x.q[0], x.keys, x.values, scale=x.scale, out=torch.empty_like(x.q[0]))
    return {
        PLAIN: functools.partial(run, tiles=plain, lists=one),
        "without, a run for each document": functools.partial(run, tiles=plain, lists=lists),
        TURNED: functools.partial(run, tiles=tiles, lists=lists),
    }


def _decode_runs(x: Inputs, kernel: str, cut: Cut) -> dict[str, Run]:
    count, requests = sum(len(t.table) for t in x.tiles), len(x.tiles)
    room = Room(requests, count, count, requests * x.case.documents, page=PAGE, rotary_dims=x.heads.dim)
    roomy = DecodePlan.reserve(room, x.q.device)
    splits = roomy.write(x.tiles, x.positions, kv_heads=x.heads.kv)
    fitted = DecodePlan.reserve(room._replace(splits=splits), x.q.device)
    fitted.write(x.tiles, x.positions, kv_heads=x.heads.kv)
    attend: Callable[..., Any] = functools.partial(paged_dispatch.paged_decode, kernel=kernel)
    if cut is not None:
        from tamis.kernels.triton import paged_decode

        attend = functools.partial(paged_decode.paged_decode, cut=paged_decode.Cut(*cut))
    run = functools.partial(attend, x.q, x.keys, x.values, scale=x.scale, out=torch.empty_like(x.q))
    plain = replace(fitted, tiles=replace(fitted.tiles, cos=None, sin=None), scratch={})
    return {
        PLAIN: functools.partial(run, plan=plain),
        TURNED: functools.partial(run, plan=fitted),
        "turned, room for a split a page": functools.partial(run, plan=roomy),
    }


def fault(x: Inputs, run: Run) -> str | None:
    """What is wrong with the results for the heads of the first and the last KV head, of the outermost requests."""
    made = run()[0].view(x.q.shape)
    group, last = x.heads.query // x.heads.kv, len(x.tiles) - 1
    heads = sorted({*range(group), *range(x.heads.query - group, x.heads.query)})
    worst = square = total = 0.0
    for b, h in ((b, h) for b in sorted({0, last}) for h in heads):
        expected = x.exact(b, h)
        wrong = made[b, h].double() - expected
        row = float((wrong.norm(dim=-1) / expected.norm(dim=-1)).max())
        worst = max(worst, row) if row == row else row
        square, total = square + float(wrong.square().sum()), total + float(expected.square().sum())
    rms = (square / total) ** 0.5
    most_row, most_rms = LIMITS[x.heads.dtype]
    if worst < most_row and rms < most_rms:
        return None
    return (
        f"it disagrees with dense attention: worst row's relative error {worst:.2g} (allowed {most_row:g}), "
        f"RMS {rms:.2g} (allowed {most_rms:g})"
    )


def times(runs: dict[str, Run], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of one call of each, round by round; on a GPU more rounds while the overhead is not known well enough."""
    gpu = device.type == "cuda"
    timers = {name: _on_gpu(run) if gpu else _on_cpu(run) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(1 - WARMUP, (rounds * MOST_ROUNDS if gpu else rounds) + 1):
        order = list(timers) if i % 2 else list(timers)[::-1]
        made = [(name, next(timers[name])) for name in (*order, *reversed(order))]
        if i > 0:
            for name, own in found.items():
                own.append(sum(s for n, s in made if n == name) / 2)
        if i >= rounds and i % 10 == 0:
            low, high = interval(found[TURNED], found[PLAIN])
            if high - low <= 2 * PRECISION:
                break
    return found


def interval(seconds: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Where the median of the overhead lies: 95 % of those of 2,000 samples of the rounds, drawn with replacement."""
    drawn = np.random.default_rng(0).choice(np.asarray(seconds) / np.asarray(others) - 1, (2000, len(seconds)))
    low, high = np.quantile(np.median(drawn, 1), (0.025, 0.975)).tolist()
    return low, high


def _on_cpu(run: Run) -> Iterator[float]:
    while True:
        yield launched(run, cuda=False)()


def _on_gpu(run: Run) -> Iterator[float]:
    replay = graphed(run, calls=GPU_CALLS)
    while True:
        yield launched(replay, cuda=True)() / GPU_CALLS


@dataclass(frozen=True)
class Measured:
    """One provider at one case; `seconds` of each run, one number a round; `work` see `Inputs.work`."""

    case: PagedCase
    provider: str
    seconds: dict[str, list[float]]
    work: float
    cut: Cut = None
    unit: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", "tb_per_s" if self.case.phase == "decode" else "tflops")

    def overhead(self, name: str = TURNED) -> list[float]:
        """Time over that without rotation, less 1, of every round."""
        return [a / b - 1 for a, b in zip(self.seconds[name], self.seconds[PLAIN], strict=True)]

    def rows(self) -> list[Row]:
        """For results/paged.csv: of the run that turns."""
        case, own = str(self.case), self.seconds[TURNED]
        unit = "TB/s" if self.unit == "tb_per_s" else "TFLOP/s"
        return [
            Row.of(case, self.provider, "overhead", self.overhead(), unit="1"),
            Row.of(case, self.provider, "ms", [s * 1e3 for s in own], unit="ms"),
            Row.of(case, self.provider, self.unit, [self.work / s / 1e12 for s in own], unit=unit),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        runs = {
            name: {
                "ms": median(own) * 1e3,
                self.unit: self.work / median(own) / 1e12,
                "overhead": dict(zip(("p20", "p50", "p80"), quantiles(self.overhead(name)), strict=True)),
                "interval": interval(own, self.seconds[PLAIN]),
            }
            for name, own in self.seconds.items()
        }
        cut, rounds = None if self.cut is None else list(self.cut), len(self.seconds[TURNED])
        return {"case": str(self.case), "provider": self.provider, "cut": cut, "rounds": rounds, "runs": runs}


def bench_paged(
    cases: Sequence[str] = (),
    *,
    rounds: int = 30,
    tune: bool = False,
    device: str | None = None,
    note: Callable[[str], None] = lambda _: None,
    keep: Callable[[list[Row]], Any] = lambda _: None,
) -> dict[str, Any]:
    """Check and time the paged kernels of a device at every case (none given: those for it): `PROVIDERS` on a GPU, else
    the path of a CPU. `tune` also times other cuts of the Triton kernels. Rows go to `keep` after each case.

    Returns {"device", "measured" and "tuned": one dictionary each, "left_out": {case/provider: reason}}. Raises
    InvalidInput for a case that cannot be read or cuts on a CPU, Unavailable if nothing could be timed.
    """
    where = device_of(device)
    asked = [PagedCase.parse(text) for text in cases or (GPU_CASES if where.type == "cuda" else CPU_CASES)]
    if where.type == "cpu":
        if tune:
            raise InvalidInput("tune is for the Triton kernels and the device is cpu; leave it out, or use a GPU.")
        note(f"no GPU is used: the path of a CPU is timed, float32, on {', '.join(map(str, asked))}")
    measured: list[Measured] = []
    tuned: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for case in asked:
        providers = PROVIDERS[case.phase] if where.type == "cuda" else ("cpu",)
        cuts = [("triton", cut) for cut in CUTS[case.phase]] if tune else []
        for provider, cut in [*((p, None) for p in providers), *cuts]:
            name = f"{case}/{provider}" if cut is None else f"{case}/{provider}/{','.join(map(str, cut))}"
            made = _measure(case, where, provider, cut, rounds)
            if isinstance(made, str):
                left_out[name] = made
                note(f"{name} is left out: {made}")
                continue
            low, high = interval(made.seconds[TURNED], made.seconds[PLAIN])
            note(f"{name}: {median(made.overhead()):+.2%} [{low:+.2%}, {high:+.2%}] from turning")
            if cut is not None:
                tuned.append(made.to_dict())
                continue
            measured.append(made)
            keep(made.rows())
    if not measured:
        reasons = "; ".join(f"{what}: {why}" for what, why in left_out.items())
        raise Unavailable(f"no paged kernel could be timed on {where}. {reasons}.")
    return {"device": str(where), "measured": [m.to_dict() for m in measured], "tuned": tuned, "left_out": left_out}


def _measure(case: PagedCase, device: torch.device, provider: str, cut: Cut, rounds: int) -> Measured | str:
    """What was measured, or why nothing was."""
    try:
        x = Inputs.of(case, device)
        runs = runs_of(x, provider, cut)
        wrong = fault(x, runs[TURNED])
        return wrong or Measured(case, provider, times(runs, rounds, device), x.work, cut)
    except InvalidInput:
        raise
    except Exception as e:  # whatever a compiler or a launch raises is the reason that is reported
        return why_of(e)
