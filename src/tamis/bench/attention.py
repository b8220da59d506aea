"""Speed of the attention kernels alone on random inputs: sparse ones at given densities, dense ones beside them.

A provider is timed only after it has agreed with the reference in float32 on this machine. TFLOP/s count what a kernel
has to compute: 4 * D * 128 * 128 for every listed tile, the one on the diagonal whole; for a dense provider
4 * D * T * T / 2 per head. Density is the share of the tiles below the diagonal that is listed, drawn at random.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from tamis.bench.machine import device_of, why_of
from tamis.bench.results import Row, quantiles
from tamis.core.errors import InvalidInput, Unavailable, UnknownName
from tamis.core.registry import unknown
from tamis.kernels import dispatch
from tamis.kernels.lists import TILE, TileLists, Tiling, lists_from_mask
from tamis.kernels.reference.block_sparse import block_sparse_attention as reference

GPU_CASES = (
    "65536/d128/0.2", "65536/d128/0.1", "65536/d128/1.0", "65536/d128/0.4", "16384/d128/0.1", "16384/d128/0.2",
    "32768/d64/0.2", "32768/d64/1.0",
)  # fmt: skip
CPU_CASES = ("2048/d64/0.2", "4096/d64/0.2", "4096/d64/1.0")
HEADS = {  # query and KV heads by head dim
    "cuda": {64: (14, 2), 96: (32, 8), 128: (32, 8)},
    "cpu": {64: (9, 3), 96: (9, 3), 128: (8, 2)},
}
CPU_RUNS = 5
GPU_WARMUP_MS, GPU_TIMED_MS = 40, 200
CHECK_TOKENS, CHECK_DENSITY = {"cuda": 2048, "cpu": 1024}, 0.3
LIMITS = {  # worst row's relative error, and the root mean square error over that of the result
    torch.bfloat16: (0.02, 0.005),
    torch.float32: (1e-4, 1e-5),
}

Run = Callable[[], torch.Tensor]
_CASE = re.compile(r"(\d+)/d(\d+)/(\d*\.?\d+)")


@dataclass(frozen=True)
class AttentionCase:
    """One length, head dim and density; written `65536/d128/0.2`."""

    tokens: int
    head_dim: int
    density: float

    @classmethod
    def parse(cls, text: str) -> AttentionCase:
        """Read the written form. Raises InvalidInput for anything else, or for values that cannot be measured."""
        found = _CASE.fullmatch(text.strip())
        if found is None:
            raise InvalidInput(f"case {text!r} cannot be read; write TOKENS/dHEAD_DIM/DENSITY, such as 65536/d128/0.2.")
        case = cls(int(found[1]), int(found[2]), float(found[3]))
        if case.tokens % TILE or not case.tokens:
            raise InvalidInput(f"case {text!r} has {case.tokens} tokens; give a multiple of {TILE}.")
        if case.head_dim not in HEADS["cuda"]:
            raise InvalidInput(f"case {text!r} has head dim {case.head_dim}; give one of 64, 96 and 128.")
        if not 0 < case.density <= 1:
            raise InvalidInput(f"case {text!r} has density {case.density}; give more than 0 and at most 1.")
        return case

    @property
    def dense(self) -> AttentionCase:
        """The same with every tile listed."""
        return AttentionCase(self.tokens, self.head_dim, 1.0)

    def __str__(self) -> str:
        return f"{self.tokens}/d{self.head_dim}/{self.density}"


@dataclass(frozen=True)
class Inputs:
    """q [Hq, T, D], k and v [Hkv, T, D], and the lists; a dense provider ignores these."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lists: TileLists

    @classmethod
    def of(cls, case: AttentionCase, device: torch.device) -> Inputs:
        """Random inputs, the same for every provider: bfloat16 on a GPU, float32 on a CPU."""
        draw = torch.Generator(device=device).manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        hq, hkv = HEADS[device.type][case.head_dim]
        q, k, v = (
            torch.randn(h, case.tokens, case.head_dim, device=device, generator=draw).to(dtype) for h in (hq, hkv, hkv)
        )
        cut = Tiling.of_segments([case.tokens])
        return cls(q, k, v, lists_from_mask(_random_mask(len(cut), hq, case.density, draw), cut, cut))

    @property
    def scale(self) -> float:
        """1 / sqrt(head dim)."""
        return float(self.q.shape[2] ** -0.5)


def _random_mask(tiles: int, heads: int, density: float, draw: torch.Generator) -> torch.Tensor:
    """bool [heads, tiles, tiles]: the diagonal and a fixed share of the tiles before it."""
    below = torch.ones(tiles, tiles, device=draw.device, dtype=torch.bool).tril(-1)
    score = torch.rand(heads, tiles, tiles, device=draw.device, generator=draw).masked_fill_(~below, -1)
    kept = (torch.arange(tiles, device=draw.device) * density).ceil()
    rank = score.argsort(-1, descending=True).argsort(-1)
    return (rank < kept[None, :, None]) | torch.eye(tiles, dtype=torch.bool, device=draw.device)


@dataclass(frozen=True)
class Provider:
    """Who computes attention: `build` makes the function that is timed, and raises what keeps it from running here.

    `home`: the kind of device on which it is measured unless asked for by name.
    """

    build: Callable[[Inputs], Run]
    home: str
    dense: bool = False


def _kernel(name: str) -> Callable[[Inputs], Run]:
    """One of our kernels, through `dispatch`."""

    def build(x: Inputs) -> Run:
        _needs(name)
        return lambda: dispatch.block_sparse_attention(
            x.q, x.k, x.v, x.lists, x.scale, kernel=name, need_lse=False
        )[0]  # fmt: skip

    return build


def _fa4_sparse(x: Inputs) -> Run:
    """flash-attn-4 as its makers mean it: tokens before heads, lists converted beforehand."""
    from tamis.kernels.fa4.block_sparse import attend, block_lists

    _needs("fa4")
    q, k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x.q, x.k, x.v))
    blocks, out = block_lists(x.lists, k.shape[1]), torch.empty_like(q)

    def run() -> torch.Tensor:
        attend(q, k, v, blocks, x.scale, out=out)
        return out

    return run


def _fa4_dense(x: Inputs) -> Run:
    """flash-attn-4 without lists."""
    _needs_gpu(x)
    from flash_attn.cute.interface import flash_attn_func

    q, k, v = (t.transpose(0, 1)[None].contiguous() for t in (x.q, x.k, x.v))

    def run() -> torch.Tensor:
        made = flash_attn_func(q, k, v, softmax_scale=x.scale, causal=True)
        out: torch.Tensor = made[0] if isinstance(made, tuple) else made
        return out[0].transpose(0, 1)

    return run


def _cudnn(x: Inputs) -> Run:
    """PyTorch's cuDNN attention."""
    _needs_gpu(x)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    plain = _torch(x)

    def run() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return plain()

    return run


def _torch(x: Inputs) -> Run:
    """PyTorch's own choice of attention."""
    q, k, v = (t[None] for t in (x.q, x.k, x.v))
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=x.scale, enable_gqa=True
    )[0]  # fmt: skip


def _needs(kernel: str) -> None:
    if (why := dispatch.available()[kernel]) is not None:
        raise Unavailable(why)


def _needs_gpu(x: Inputs) -> None:
    if x.q.device.type != "cuda":
        raise Unavailable(f"it needs an NVIDIA GPU and the tensors are on {x.q.device}")


PROVIDERS: dict[str, Provider] = {
    "gluon": Provider(_kernel("gluon"), "cuda"),
    "triton": Provider(_kernel("triton"), "cuda"),
    "fa4-sparse": Provider(_fa4_sparse, "cuda"),
    "fa4-dense": Provider(_fa4_dense, "cuda", dense=True),
    "cudnn-dense": Provider(_cudnn, "cuda", dense=True),
    "cpu": Provider(_kernel("cpu"), "cpu"),
    "torch-dense": Provider(_torch, "cpu", dense=True),
}


@dataclass(frozen=True)
class Measured:
    """One provider at one case. `seconds`: one number per timed call; `work`: floating-point operations of a call."""

    case: AttentionCase
    provider: str
    seconds: tuple[float, ...]
    work: float

    @property
    def tflops(self) -> list[float]:
        """TFLOP/s of every call."""
        return [self.work / s / 1e12 for s in self.seconds]

    def rows(self, base: Measured | None) -> list[Row]:
        """For results/attention.csv; the speed-up is over `base`, the best dense provider at this length."""
        case = str(self.case)
        rows = [Row.of(case, self.provider, "tflops", self.tflops, unit="TFLOP/s")]
        if base is not None:
            speedups = [median(base.seconds) / s for s in self.seconds]
            rows.append(Row.of(case, self.provider, "speedup", speedups, unit="1"))
        return rows

    def to_dict(self, base: Measured | None) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        own = median(self.seconds)
        return {
            "case": str(self.case),
            "provider": self.provider,
            "tflops": dict(zip(("p20", "p50", "p80"), quantiles(self.tflops), strict=True)),
            "ms": own * 1e3,
            "speedup": None if base is None else median(base.seconds) / own,
            "over": None if base is None else base.provider,
        }


class AttentionBench:
    """Measures on one device; `left_out` holds what did not run or was wrong, and why."""

    def __init__(self, device: torch.device, note: Callable[[str], None]) -> None:
        self.device, self.note = device, note
        self.left_out: dict[str, str] = {}
        self._fit: dict[tuple[str, int], bool] = {}

    def fits(self, name: str, head_dim: int) -> bool:
        """Whether the provider runs here and agrees with the reference; found out once for each head dim."""
        if (name, head_dim) not in self._fit:
            why = self._fault(name, head_dim)
            self._fit[name, head_dim] = why is None
            if why is not None:
                self._leave_out(f"{name}/d{head_dim}", why)
        return self._fit[name, head_dim]

    def measure(self, case: AttentionCase, names: Sequence[str]) -> list[Measured]:
        """Check and time providers at one case."""
        names = [name for name in names if self.fits(name, case.head_dim)]
        if not names:
            return []
        x, made = Inputs.of(case, self.device), []
        for name in names:
            work = 4.0 * case.head_dim * TILE * TILE * float(x.lists.count.sum())
            if PROVIDERS[name].dense:
                work = 4.0 * case.head_dim * x.q.shape[0] * case.tokens**2 / 2
            try:
                seconds = self._times(PROVIDERS[name].build(x))
            except torch.OutOfMemoryError as e:
                self._leave_out(f"{name}/{case}", why_of(e))
                continue
            made.append(Measured(case, name, tuple(seconds), work))
            self.note(f"{case} {name}: {quantiles(made[-1].tflops)[1]:.4g} TFLOP/s")
        return made

    def _fault(self, name: str, head_dim: int) -> str | None:
        """What keeps a provider from being timed."""
        x = Inputs.of(AttentionCase(CHECK_TOKENS[self.device.type], head_dim, CHECK_DENSITY), self.device)
        if PROVIDERS[name].dense:
            x = Inputs.of(AttentionCase(CHECK_TOKENS[self.device.type], head_dim, 1.0), self.device)
        try:
            out = PROVIDERS[name].build(x)().float()
        except Exception as e:  # whatever a foreign compiler raises is the reason that is reported
            return why_of(e)
        expected = reference(x.q.float(), x.k.float(), x.v.float(), x.lists, x.scale)[0]
        wrong = out - expected
        row = float((wrong.norm(dim=-1) / expected.norm(dim=-1)).max())
        rms = float((wrong.square().mean() / expected.square().mean()).sqrt())
        most_row, most_rms = LIMITS[x.q.dtype]
        if row < most_row and rms < most_rms:
            return None
        return (
            f"it disagrees with the reference: worst row's relative error {row:.2g} (allowed {most_row:g}), "
            f"RMS {rms:.2g} (allowed {most_rms:g})"
        )

    def _times(self, run: Run) -> list[float]:
        """Seconds of calls after a warm-up; on a GPU with a cold L2 cache."""
        run()
        if self.device.type == "cuda":
            from triton.testing import do_bench

            times = do_bench(run, warmup=GPU_WARMUP_MS, rep=GPU_TIMED_MS, return_mode="all")
            return [ms / 1e3 for ms in times]
        seconds = []
        for _ in range(CPU_RUNS):
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def _leave_out(self, what: str, why: str) -> None:
        self.left_out[what] = why
        self.note(f"{what} is left out: {why}")


def bench_attention(
    cases: Sequence[str] = (),
    providers: Sequence[str] = (),
    *,
    device: str | None = None,
    note: Callable[[str], None] = lambda _: None,
    keep: Callable[[list[Row]], Any] = lambda _: None,
) -> dict[str, Any]:
    """Check and time every provider at every case (none given: those for the device), dense ones once per length and
    head dim. Rows go to `keep` after each length.

    Returns {"device", "measured": one dictionary each, "left_out": {provider/case: reason}}. Raises InvalidInput for a
    case that cannot be read or measured, UnknownName for a provider that does not exist, Unavailable if none runs here.
    """
    where = device_of(device)
    given = cases or (GPU_CASES if where.type == "cuda" else CPU_CASES)
    asked = list(dict.fromkeys(AttentionCase.parse(text) for text in given))
    names = list(dict.fromkeys(providers)) or [n for n, p in PROVIDERS.items() if p.home == where.type]
    for name in names:
        if name not in PROVIDERS:
            raise UnknownName(unknown("attention provider", name, list(PROVIDERS)))
    bench = AttentionBench(where, note)
    summaries: list[dict[str, Any]] = []
    for shape in dict.fromkeys(case.dense for case in asked):
        made = bench.measure(shape, [n for n in names if PROVIDERS[n].dense])
        base = min(made, key=lambda m: median(m.seconds), default=None)
        for case in (c for c in asked if c.dense == shape):
            made += bench.measure(case, [n for n in names if not PROVIDERS[n].dense])
        keep([row for m in made for row in m.rows(base)])
        summaries += [m.to_dict(base) for m in made]
    if not summaries:
        reasons = "; ".join(f"{what}: {why}" for what, why in bench.left_out.items())
        raise Unavailable(f"no provider could be timed on {where}. {reasons}.")
    return {"device": str(where), "measured": summaries, "left_out": bench.left_out}
