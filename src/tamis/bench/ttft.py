"""Time to first token of whole models of real shapes, dense against sparse prefill, in one run on one GPU.

The sparse run executes its selection and list building in full, on the model's own queries and keys, and then attends
over lists of recorded densities (`bench.densities`): with random weights the selector's own choice means nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from tamis.attention.hook import Job, Switch, install
from tamis.attention.prefill import SparsePrefill
from tamis.bench.densities import Recorded, lists_of_density, load, nearest
from tamis.bench.energy import EnergyMeter
from tamis.bench.results import Row
from tamis.bench.shapes import fuse, random_model, to_fp8
from tamis.core.errors import Unavailable
from tamis.index.encode import Bits
from tamis.kernels import dispatch
from tamis.kernels.lists import TileLists, counted
from tamis.prompt.segments import Kind, Prompt
from tamis.select import SELECTORS
from tamis.select.sampled import Sampled
from tamis.select.scene import Scene, Selector
from tamis.select.variants import GlobalThreshold

PREFIX_TOKENS, QUESTION_TOKENS, DOCUMENT_TOKENS = 64, 128, 1024
LA_SHARE, CA_SHARE = 0.9, 0.5  # of the random stored bits that are set; only their number matters to the time


@dataclass
class Clock:
    """Device time of parts of a pass, read once at the end so that nothing waits in between."""

    cuda: bool
    spans: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is launched inside."""
        begin = self._mark()
        yield
        self.spans.setdefault(name, []).append((begin, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Total of each part."""
        if self.cuda:
            torch.cuda.synchronize()
            return {n: sum(a.elapsed_time(b) for a, b in s) / 1e3 for n, s in self.spans.items()}
        return {n: sum(b - a for a, b in s) for n, s in self.spans.items()}

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass
class Dense:
    """Dense attention by a function of q [Hq, T, D], k, v [Hkv, T, D] and the scale."""

    run: Callable[..., torch.Tensor]
    clock: Clock

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `Job.attend`."""
        with self.clock.part("attention"):
            return self.run(q, k, v, scale), None


@dataclass
class Replay:
    """Selects for real, then attends over the layer's prepared lists."""

    chosen: SparsePrefill
    lists: list[TileLists]
    clock: Clock

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `Job.attend`."""
        with self.clock.part("selection"):
            self.chosen.lists(layer, q, k, scale)
        with self.clock.part("attention"):
            return dispatch.block_sparse_attention(q, k, v, self.lists[layer], scale)[0], None


def dense_functions(device: torch.device) -> dict[str, Callable[..., torch.Tensor]]:
    """Every dense attention that runs here: flash-attn-4, cuDNN, and our kernel with every tile listed."""
    found: dict[str, Callable[..., torch.Tensor]] = {}
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from flash_attn.cute.interface import _flash_attn_fwd

            def fa4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
                q, k, v = (t.transpose(0, 1)[None].contiguous() for t in (q, k, v))
                out: torch.Tensor = _flash_attn_fwd(q, k, v, causal=True, softmax_scale=scale)[0]
                return out[0].transpose(0, 1)

            found["dense-fa4"] = fa4

        from torch.nn.attention import SDPBackend, sdpa_kernel

        def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return torch.nn.functional.scaled_dot_product_attention(
                    q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
                )[0]

        found["dense-cudnn"] = cudnn

    def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return dispatch.causal_attention(q, k, v, scale)[0]

    return found | {"dense-tamis": own}


def selector_of(variant: str) -> Selector:
    """The selector that a recorded variant names, in the form that has kernels: sampled (rows, mass) or stored."""
    name, _, rest = variant.partition(":")
    options = dict(part.split("=") for part in rest.split(",") if part)
    if name == "sampled":
        return Sampled(rows=int(options.get("rows", 8)), mass=float(options.get("mass", 0.9)))
    if name == "threshold":
        return GlobalThreshold(float(options.get("theta", 0.01)), 0.5, int(options.get("rows", 8)))
    selector: Selector = SELECTORS.get(name)()
    return selector


def bench_prompt(tokens: int, vocabulary: int) -> Prompt:
    """Random tokens: a prefix, documents of 1,024 tokens, a question; exactly `tokens` in all."""
    draw = torch.Generator().manual_seed(0)
    room = tokens - PREFIX_TOKENS - QUESTION_TOKENS
    if room < DOCUMENT_TOKENS:
        raise Unavailable(f"{tokens} tokens are too few; prefix, question and one document take 1,216.")
    lengths = [DOCUMENT_TOKENS] * (room // DOCUMENT_TOKENS) + (
        [room % DOCUMENT_TOKENS] if room % DOCUMENT_TOKENS else []
    )
    ids = torch.randint(0, vocabulary, (tokens,), generator=draw).tolist()
    parts: list[tuple[Kind, list[int]]] = [(Kind.PREFIX, ids[:PREFIX_TOKENS])]
    at = PREFIX_TOKENS
    for n in lengths:
        parts.append((Kind.DOCUMENT, ids[at : at + n]))
        at += n
    return Prompt.of([*parts, (Kind.QUESTION, ids[at:])])


def random_scene(prompt: Prompt, layers: int, heads: int, device: torch.device) -> Scene:
    """The prompt's tiles with random stored bits."""
    draw = torch.Generator().manual_seed(1)
    bits = []
    for document in prompt.documents:
        pages = -(-len(document.tokens) // 128)
        la = torch.rand(layers, heads, pages, pages, generator=draw) < LA_SHARE
        ca = torch.rand(layers, heads, pages, generator=draw) < CA_SHARE
        bits.append(Bits((la | torch.eye(pages, dtype=torch.bool)).tril(), ca))
    return Scene.of(prompt, bits, device=device)


@dataclass(frozen=True)
class Timed:
    """One provider at one length. Times in seconds, one per repetition; `parts` of the last one; joules per prefill."""

    provider: str
    tokens: int
    ttft_s: tuple[float, ...]
    parts: dict[str, float]
    density: float
    joules: float | None
    note: str = ""

    def rows(self, case: str, best_dense: Timed) -> list[Row]:
        """For results/ttft.csv; speed-ups and energy ratios against the best dense provider of the same run."""
        base, own = median(best_dense.ttft_s), median(self.ttft_s)
        rows = [
            Row.of(case, self.provider, "ttft_s", self.ttft_s, unit="s"),
            Row.of(case, self.provider, "speedup", [base / t for t in self.ttft_s], unit="1"),
            Row.of(case, self.provider, "density", [self.density], unit="1"),
        ]
        rows += [Row.of(case, self.provider, f"{n}_s", [s], unit="s") for n, s in self.parts.items()]
        if "selection" in self.parts:
            rows.append(Row.of(case, self.provider, "selection_share", [self.parts["selection"] / own], unit="1"))
        if self.joules and best_dense.joules:
            ratio = best_dense.joules * base / (self.joules * own)
            rows.append(Row.of(case, self.provider, "joules", [self.joules], unit="J"))
            rows.append(Row.of(case, self.provider, "edp_ratio", [ratio], unit="1"))
            rows.append(Row.of(case, self.provider, "ed2p_ratio", [ratio * base / own], unit="1"))
        return rows

    def summary(self, case: str, best_dense: Timed) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        own = median(self.ttft_s)
        return {
            "case": case,
            "provider": self.provider,
            "ttft_s": own,
            "speedup": median(best_dense.ttft_s) / own,
            "density": self.density,
            "parts": self.parts,
            "joules": self.joules,
            "note": self.note,
        }


class TtftBench:
    """A model of random weights on which providers are timed one after another."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.switch: Switch
        self.switch, self._uninstall = install(model)

    def close(self) -> None:
        """Put the stock attention back."""
        self._uninstall()

    def dense(self, name: str, prompt: Prompt, repeats: int) -> Timed:
        """Time one of `dense_functions`."""
        run = dense_functions(self.device)[name]
        return self._time(name, prompt, lambda clock: Dense(run, clock), 1.0, repeats)

    def sparse(self, name: str, selector: Selector, recorded: Recorded, prompt: Prompt, repeats: int) -> Timed:
        """Time `selector` with lists of the recorded densities."""
        config = self.model.config
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        scene = random_scene(prompt, layers, heads, self.device)
        draw = torch.Generator(device=self.device).manual_seed(2)
        lists = [lists_of_density(scene, recorded.of(i, layers, heads), draw) for i in range(layers)]
        density = sum(counted(x.area) for x in lists) / sum(x.causal_area for x in lists)
        chosen = SparsePrefill(scene, selector)
        note = f"densities of {recorded.model} at {recorded.tokens} tokens, KL {recorded.kl:.3f}"
        made = self._time(name, prompt, lambda clock: Replay(chosen, lists, clock), density, repeats)
        return Timed(made.provider, made.tokens, made.ttft_s, made.parts, made.density, made.joules, note)

    def _time(self, name: str, prompt: Prompt, job: Callable[[Clock], Job], density: float, repeats: int) -> Timed:
        cuda = self.device.type == "cuda"
        ids = torch.tensor([prompt.tokens], device=self.device)
        times, clock = [], Clock(cuda)
        meter = EnergyMeter(cuda)
        for i in range(repeats + 1):
            clock = Clock(cuda)
            if i == 1:
                meter.start()
            begin = time.perf_counter()
            with torch.inference_mode(), self.switch.running(job(clock), ids.shape[1]):
                self.model(ids, logits_to_keep=1).logits[0, -1].argmax().item()
            if i:
                times.append(time.perf_counter() - begin)
        joules = meter.stop()
        assert not self.switch.refused, f"the attention was not the one to be timed: {self.switch.refused}"
        parts = clock.seconds()
        parts["other"] = times[-1] - sum(parts.values())
        return Timed(name, ids.shape[1], tuple(times), parts, density, joules / repeats if joules else None)


@dataclass(frozen=True)
class Plan:
    """What `bench_ttft` times.

    shape      a name in `shapes.SHAPES`; `layers` of it, None for all
    lengths    prompt lengths in tokens
    dense      names in `dense_functions`, or "all" alone
    selectors  recorded variants, replayed from the file `densities`
    fp8        linear layers in float8, for dense and sparse alike
    """

    shape: str
    lengths: Sequence[int]
    dense: Sequence[str]
    selectors: Sequence[str]
    densities: str
    layers: int | None = None
    repeats: int = 3
    fp8: bool = False
    device: str | None = None


def bench_ttft(
    plan: Plan, note: Callable[[str], None] = lambda _: None, keep: Callable[[list[Row]], Any] = lambda _: None
) -> list[dict[str, Any]]:
    """Time every provider at every length; one dictionary each, and rows to `keep` after each length.

    Raises UnknownName for a dense provider that does not run here and NothingFound for a variant without a recording.
    """
    where = torch.device(plan.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    recordings = [(name, load(plan.densities)) for name in plan.selectors if name]
    model = random_model(plan.shape, device=str(where), dtype=dtype, layers=plan.layers)
    if plan.fp8:
        to_fp8(model)
    if where.type == "cuda":
        fuse(model)
    names = list(dense_functions(where)) if list(plan.dense) == ["all"] else list(plan.dense)
    precision = "fp8" if plan.fp8 else str(dtype).removeprefix("torch.").replace("bfloat16", "bf16")
    kind = f"{plan.shape}-{plan.layers}-layers/{precision}" if plan.layers else f"{plan.shape}/{precision}"
    bench = TtftBench(model)
    made: list[dict[str, Any]] = []
    try:
        for n in plan.lengths:
            prompt = bench_prompt(n, model.config.vocab_size)
            timed = [bench.dense(name, prompt, plan.repeats) for name in names]
            for name, recorded in recordings:
                fits = nearest(recorded, name, n)
                timed.append(bench.sparse(name, selector_of(name), fits, prompt, plan.repeats))
            base = min((t for t in timed if t.provider in names), key=lambda t: median(t.ttft_s))
            case = f"{kind}/{n}"
            for t in timed:
                keep(t.rows(case, base))
                made.append(t.summary(case, base))
                note(f"{case} {t.provider}: {median(t.ttft_s):.3f} s, {median(base.ttft_s) / median(t.ttft_s):.2f}x")
    finally:
        bench.close()
    return made
