"""A decode step over the self-indexed cache against full attention over bfloat16: attention alone, and a whole token.

Case "llama-3.1-8b/65536/b8": a batch of 8 sequences of 65,536 tokens each. Kernels are checked against the reference on
the very inputs before anything is timed. On a GPU everything runs in CUDA graphs, contenders in turn, each over so many
layers' caches that none of them stays in the device's own; the speed-up is against the fastest full attention of the
run. Without a GPU the paths of a CPU are timed, which says nothing about a GPU.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from tamis.bench import decode_check, decode_token
from tamis.bench.decode_clock import timed
from tamis.bench.decode_scene import Full, Scene, copied, copies_of, full_functions
from tamis.bench.decode_tune import module_of, tuned
from tamis.bench.dense import Heads, dense_functions
from tamis.bench.machine import device_of, why_of
from tamis.bench.results import Case, Row
from tamis.bench.shapes import Shape, shape_of
from tamis.core.errors import InvalidInput, TamisError
from tamis.kernels.selfindex import Layout
from tamis.kernels.selfindex_arena import Arena
from tamis.kernels.selfindex_dispatch import DECODE, ON_A_GPU, fit_sampled, selfindex_append, selfindex_decode
from tamis.kernels.selfindex_workspace import Workspace

MEASURES = ("attention", "token", "prefill")
CALLS = 10  # of a captured graph where one is short
MARGIN = 6 << 30  # bytes of a GPU that caches leave free
OURS = "selfindex"

Note = Callable[[str], None]
Keep = Callable[[list[Row]], Any]


@dataclass(frozen=True)
class DecodePlanned:
    """What `bench_decode` times; see the options of `tamis bench decode`."""

    shape: str = "llama-3.1-8b"
    tokens: Sequence[int] = (8192, 65536, 131072)
    batch: Sequence[int] = (1, 8)
    budget: float = 0.075
    measures: Sequence[str] = MEASURES
    rounds: int = 20
    tune: bool = False
    check_only: bool = False
    device: str | None = None
    kernel: str = "auto"

    def __post_init__(self) -> None:
        unknown = [m for m in self.measures if m not in MEASURES]
        if unknown or not self.measures or min(*self.batch, *self.tokens, self.rounds) < 1:
            raise InvalidInput(
                f"measures {list(self.measures)}, batch {list(self.batch)}, tokens {list(self.tokens)}; measures are "
                f"some of {', '.join(MEASURES)}, numbers 1 or more."
            )
        if self.kernel != "auto" and self.kernel not in DECODE:
            DECODE.get(self.kernel)  # raises, with the nearest name: or every case would be left out for it


@dataclass
class DecodeCase(Case):
    """One length and batch; errors against the reference, and the cuts that were timed."""

    errors: dict[str, float] = field(default_factory=dict)
    cut: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return super().to_dict() | {"errors": self.errors, "cut": self.cut}


@dataclass
class _Step:
    """Our step as it is timed: the workspace, and how launches are cut (None: the default, or no Triton)."""

    work: Workspace | None
    kernel: str
    cut: Any = None

    def run(self, scene: Scene, arena: Arena, q: torch.Tensor) -> torch.Tensor:
        if self.work is not None:
            step = module_of(self.kernel).selfindex_decode
            out: torch.Tensor = step(q, arena, self.work, scale=scene.scale, cut=self.cut)[0]
            return out
        return selfindex_decode(q, arena, count=scene.count, scale=scene.scale, kernel=self.kernel)[0]


def bench_decode(plan: DecodePlanned, note: Note = lambda _: None, keep: Keep = lambda _: None) -> dict[str, Any]:
    """Check and time every case; rows go to `keep` after each.

    Returns {"device", "cases": one dictionary each, "left_out": {case: reason}}. Raises InvalidInput for a plan that
    cannot be run and TamisError if no case could be.
    """
    shape, where = shape_of(plan.shape), device_of(plan.device)
    if plan.tune and where.type != "cuda":
        raise InvalidInput("tune is for the kernels of a GPU and the device is no GPU; leave it out.")
    if where.type != "cuda":
        note("no GPU is used: the paths of a CPU are timed, float32")
    cases: list[DecodeCase] = []
    left_out: dict[str, str] = {}
    for tokens in plan.tokens:
        for batch in plan.batch:
            case = DecodeCase(f"{plan.shape}/{tokens}/b{batch}")
            try:
                _measure(case, plan, shape, (tokens, batch), where, note)
            except InvalidInput:
                raise
            except Exception as e:  # whatever a compiler or a launch raises is the reason that is reported
                left_out[case.name] = why_of(e)
                note(f"{case.name} is left out: {left_out[case.name]}")
            if case.rows or case.errors:
                cases.append(case)
                keep(case.rows)
            _free(where)
    if "prefill" in plan.measures and not plan.check_only:
        for tokens in plan.tokens:
            case = DecodeCase(f"{plan.shape}/{tokens}/b1")
            try:
                _prefill(case, shape, tokens, plan.rounds, where)
            except Exception as e:  # as above
                left_out[f"{case.name}/prefill"] = why_of(e)
                note(f"{case.name}/prefill is left out: {why_of(e)}")
                continue
            cases.append(case)
            keep(case.rows)
            for row in case.rows:
                note(f"{case.name} {row.provider} {row.metric}: {row.p50:.4g} {row.unit}")
            _free(where)
    if not cases:
        raise TamisError(f"no case could be timed on {where}: {left_out}.")
    return {"device": str(where), "cases": [c.to_dict() for c in cases], "left_out": left_out}


def _measure(
    case: DecodeCase, plan: DecodePlanned, shape: Shape, size: tuple[int, int], where: torch.device, note: Note
) -> None:
    """Check, then time; raises TamisError where a kernel disagrees with the reference."""
    dtype = _dtype(where)
    scene = Scene.of(shape, *size, plan.budget, where, dtype)
    step = _fastest(case, scene, plan, note)
    if plan.check_only:
        return
    case.cut = {"kernel": step.kernel, "split": step.work.split if step.work else None, "cut": str(step.cut)}
    note(f"{case.name}: {case.cut}")
    work = 0 if step.work is None else step.work.nbytes
    layer = scene.arena.nbytes + work / shape.layers  # one workspace serves all layers
    whole = 4 * shape.head_dim * shape.kv_heads * size[0] * size[1]
    case.add(OURS, "kv_ratio", [whole / layer], "1")
    full, left_out = full_functions(scene)
    for name, why in left_out.items():
        case.notes.append(f"{name} is left out: {why}")
        note(case.notes[-1])
    _attention(case, scene, step, full, plan.rounds)
    full.pop("full-tamis", None)  # it reads pages of its own, not a layer's cache
    if "token" in plan.measures and not shape.experts and full:
        found = {row.provider: row.p50 for row in case.rows if row.metric == "attention_us"}
        fastest = min(full, key=lambda name: found[name])
        _token(case, scene, step, (fastest, full[fastest]), plan.rounds)
    for row in case.rows:
        note(f"{case.name} {row.provider} {row.metric}: {row.p50:.4g} {row.unit}")


def _fastest(case: DecodeCase, scene: Scene, plan: DecodePlanned, note: Note) -> _Step:
    """The fastest of our kernels that agree with the reference; raises TamisError if none does."""
    where = scene.q.device
    found: list[tuple[float, _Step]] = []
    kernels = ON_A_GPU if where.type == "cuda" else ("cpu",)
    for kernel in kernels if plan.kernel == "auto" else (plan.kernel,):
        try:
            work = None
            if kernel in ON_A_GPU:
                work = Workspace.reserve(scene.arena, scene.shape.heads, scene.count, dtype=scene.q.dtype)
            step = _Step(work, kernel)
            errors = decode_check.check(scene, kernel, work)
            if plan.tune and not plan.check_only:
                step = replace(step, **tuned(scene, kernel, note))
                errors = decode_check.check(scene, kernel, step.work, step.cut)
        except Exception as e:  # a kernel that is wrong, or does not run here, leaves the others
            case.notes.append(f"{kernel} is left out: {why_of(e)}")
            note(f"{case.name}: {case.notes[-1]}")
            continue
        case.errors |= {f"{kernel}: {name}": error for name, error in errors.items()}
        note(f"{case.name} {kernel} checked: {decode_check.summary(errors)}")
        took = 0.0
        if not plan.check_only:
            run = functools.partial(step.run, scene, scene.arena, scene.q)
            took = median(timed({kernel: run}, where, 5, calls=CALLS)[kernel])
            note(f"{case.name} {kernel}: {took * 1e6:.1f} us")
        found.append((took, step))
    if not found:
        raise TamisError("; ".join(case.notes))
    return min(found, key=lambda pair: pair[0])[1]


def _attention(case: DecodeCase, scene: Scene, step: _Step, full: dict[str, Full], rounds: int) -> None:
    """Times of a layer's attention."""
    where, q = scene.q.device, scene.q
    n_full = copies_of(scene.keys.nbytes * 2, where)
    caches = [(scene.keys, scene.values)] + [(scene.keys.clone(), scene.values.clone()) for _ in range(n_full - 1)]
    n_ours = copies_of(scene.arena.nbytes, where)
    arenas = [scene.arena] + [copied(scene.arena) for _ in range(n_ours - 1)]

    def ours() -> None:
        for arena in arenas:
            step.run(scene, arena, q)

    def of(run: Full) -> Callable[[], None]:
        def every() -> None:
            for k, v in caches:
                run(q, k, v)

        return every

    runs = {OURS: ours} | {name: of(run) for name, run in full.items()}
    layers = {name: n_ours if name == OURS else n_full for name in runs}
    found = {n: [s / layers[n] for s in t] for n, t in timed(runs, where, rounds, calls=CALLS).items()}
    for name, seconds in found.items():
        case.add(name, "attention_us", [s * 1e6 for s in seconds], "us")
    fastest = min(full, key=lambda n: median(found[n]))
    case.notes.append(f"fastest full attention: {fastest}")
    case.add(OURS, "attention_speedup", _ratios(found[fastest], found[OURS]), "1")
    if "full-fa2" in found:
        case.add(OURS, "attention_speedup_fa2", _ratios(found["full-fa2"], found[OURS]), "1")
    if step.work is not None:
        _parts(case, scene, step, arenas, rounds)


def _parts(case: DecodeCase, scene: Scene, step: _Step, arenas: list[Arena], rounds: int) -> None:
    """Time of each launch: of all up to it, less all before it."""
    assert step.work is not None
    module = module_of(step.kernel)
    out = torch.empty_like(scene.q)
    lse = torch.empty(scene.q.shape[:-1], device=scene.q.device)
    cut = step.cut or module.cut_for(scene.arena)
    made = [module.launches(scene.q, a, step.work, out, lse, scale=scene.scale, cut=cut) for a in arenas]
    names = list(made[0])

    def upto(n: int) -> Callable[[], None]:
        def run() -> None:
            for one in made:
                for name in names[:n]:
                    one[name]()

        return run

    found = timed({name: upto(i + 1) for i, name in enumerate(names)}, scene.q.device, rounds, calls=CALLS)
    totals = [median(found[name]) / len(arenas) * 1e6 for name in names]
    for name, now, before in zip(names, totals, [0.0, *totals], strict=False):
        case.add(OURS, f"{name}_us", [now - before], "us")


def _token(case: DecodeCase, scene: Scene, step: _Step, best: tuple[str, Full], rounds: int) -> None:
    """A whole decode step with full attention and with ours."""
    _free(scene.q.device)
    where, shape = scene.q.device, scene.shape
    name, run = best
    model = decode_token.Layers(shape, shape.layers, where, scene.q.dtype)
    x = torch.randn(scene.q.shape[0], shape.hidden, device=where, dtype=scene.q.dtype)
    at = torch.tensor([scene.tokens - 1], device=where)
    n_full, n_ours = (_layers(where, shape.layers, b) for b in (2 * scene.keys.nbytes, scene.arena.nbytes))
    caches = [(scene.keys, scene.values)] + [(scene.keys.clone(), scene.values.clone()) for _ in range(n_full - 1)]

    def full(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = caches[i % n_full]
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        return run(q, keys, values)

    found = timed({name: lambda: model.step(x, full)}, where, rounds)
    caches.clear()
    _free(where)
    arenas = [scene.arena] + [copied(scene.arena) for _ in range(n_ours - 1)]
    ends = scene.arena.open_end.clone()

    def ours(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        arena = arenas[i % n_ours]
        arena.open_end.copy_(ends)  # every step is timed at one length
        selfindex_append(arena, k, v)
        return step.run(scene, arena, q)

    found |= timed({OURS: lambda: model.step(x, ours)}, where, rounds)
    for who, layers in ((name, n_full), (OURS, n_ours)):
        told = who if layers == shape.layers else f"{who} ({layers} of {shape.layers} layers' caches)"
        case.add(told, "token_ms", [s * 1e3 for s in found[who]], "ms")
    case.add(OURS, "token_speedup", _ratios(found[name], found[OURS]), "1")


def _prefill(case: DecodeCase, shape: Shape, tokens: int, rounds: int, where: torch.device) -> None:
    """Fitting and compressing all layers, over a dense prefill of them: one layer's time times the layers."""
    dtype = _dtype(where)
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
    dense, left_out = dense_functions(where, dtype, heads)
    case.notes += [f"{name} is left out: {why}" for name, why in left_out.items()]
    layers = min(decode_token.FIT_LAYERS, shape.layers)
    draw = torch.randn(layers, shape.kv_heads, tokens, shape.head_dim, device=where, dtype=dtype)
    values = torch.randn_like(draw)
    layout = Layout(shape.head_dim)
    runs: dict[str, Callable[[], Any]] = {
        "compress": lambda: decode_token.fit_and_compress(draw, values, layout),
        "fit": lambda: fit_sampled(draw, values, layout),
    }
    if not shape.experts:
        model = decode_token.Layers(shape, 1, where, dtype)
        x = torch.randn(tokens, shape.hidden, device=where, dtype=dtype)
        for name, run in dense.items():
            runs[name] = lambda run=run: decode_token.dense_prefill_layer(model, x, run)  # type: ignore[misc]
    found = timed(runs, where, max(2, rounds // 5), calls=0)
    whole = shape.layers / layers
    for name in ("fit", "compress"):
        seconds = [s * whole for s in found[name]]
        case.add(OURS, f"{name}_ms", [s * 1e3 for s in seconds], "ms")
    if not shape.experts:
        best = min(dense, key=lambda n: median(found[n]))
        prefill = median(found[best]) * shape.layers
        case.add(best, "prefill_ms", [s * shape.layers * 1e3 for s in found[best]], "ms")
        case.add(OURS, "prefill_overhead", [s * whole / prefill for s in found["compress"]], "1")


def _layers(where: torch.device, layers: int, nbytes: int) -> int:
    """Layers that can have a cache of their own of so many bytes, one of which is there."""
    if where.type != "cuda":
        return min(layers, 2)
    free = torch.cuda.mem_get_info(where)[0] - MARGIN
    return max(1, min(layers, 1 + int(free // nbytes)))


def _dtype(where: torch.device) -> torch.dtype:
    return torch.bfloat16 if where.type == "cuda" else torch.float32


def _free(where: torch.device) -> None:
    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]
