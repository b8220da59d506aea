"""Time to first token of whole models of real shapes, dense against sparse prefill, in one run on one GPU.

Knows models of random weights and jobs to time on them; which densities are replayed is `bench.densities`' matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from tamis.attention.block_prefill import BlockPrefill
from tamis.attention.hook import Job, Switch, install
from tamis.bench.clock import Clock
from tamis.bench.dense import Attention, Heads, dense_functions
from tamis.bench.densities import EVERY_TILE, Recorded, lists_of_density, load, nearest
from tamis.bench.energy import EnergyMeter
from tamis.bench.fp8 import WITH_EXPERTS, Fp8Linear, to_fp8
from tamis.bench.fuse import fuse
from tamis.bench.machine import device_of
from tamis.bench.peer import PeerTime, load_peers, nearest_peers
from tamis.bench.replay import Dense, Question, Replay, bench_prompt, random_question, selector_of
from tamis.bench.replay_blocks import BlockVariant
from tamis.bench.results import Row
from tamis.bench.shapes import check_layers, choose_experts, experts_of, random_model, shape_of
from tamis.bench.ttft_report import Comparison, Timed, TtftResult, compare
from tamis.core.dtypes import name_of
from tamis.core.errors import InvalidInput
from tamis.kernels.lists import counted

LEAST_ENERGY_S = 1.0  # the counter moves in steps of up to a tenth of a second
Note = Callable[[str], None]


class TtftBench:
    """A model of random weights on which providers are timed one after another."""

    def __init__(self, model: Any, layers: int | None = None) -> None:
        """layers: of the whole model that `model` is a slice of; None: it is whole."""
        self.model = model
        self.device = next(model.parameters()).device
        built = model.config.num_hidden_layers
        self.whole = (layers or built) / built
        self.switch: Switch
        self.switch, self._uninstall = install(model)

    def close(self) -> None:
        """Put the stock attention back."""
        self._uninstall()

    def dense(self, name: str, run: Attention, question: Question, repeats: int) -> Timed:
        """Time a dense attention."""
        return self._time(name, question, lambda clock: Dense(run, clock), repeats)

    def sparse(self, name: str, recorded: Recorded, question: Question, repeats: int) -> Timed:
        """Time the selector that the variant `name` names, with lists of the recorded densities."""
        config, scene = self.model.config, question.scene()
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        draw = torch.Generator(device=self.device).manual_seed(2)
        lists = [lists_of_density(scene, recorded.of(i, layers, heads), draw) for i in range(layers)]
        density = sum(counted(x.area) for x in lists) / sum(x.causal_area for x in lists)
        selector, differs = selector_of(name)
        made = self._time(name, question, lambda clock: Replay(question, selector, lists, clock), repeats)
        if recorded is EVERY_TILE:
            return replace(made, density=density, note=differs)
        note = "; ".join(filter(None, [recorded.note(made.tokens), differs]))
        return replace(made, density=density, recorded=(recorded.tokens, recorded.kl), note=note)

    def blocks(self, name: str, variant: BlockVariant, question: Question, repeats: int) -> Timed:
        """Time a prefill over blocks."""
        jobs: list[BlockPrefill] = []

        def job(clock: Clock) -> BlockPrefill:
            jobs.append(variant.job(self.model.config.num_key_value_heads, clock))
            return jobs[-1]

        made = self._time(name, question, job, repeats)
        density = jobs[-1].density
        return replace(made, density=sum(density.values()) / len(density), note=variant.note)

    def _time(self, name: str, question: Question, job: Callable[[Clock], Job], repeats: int) -> Timed:
        ids = torch.tensor([question.prompt.tokens], device=self.device)
        meter = EnergyMeter(self.device.type == "cuda")
        self._pass(ids, job, split=False)  # compiles and warms up
        meter.start()
        begin = time.perf_counter()
        passes = [self._pass(ids, job, split=False) for _ in range(repeats)]
        more = 0
        while meter.works and time.perf_counter() - begin < LEAST_ENERGY_S:
            self._pass(ids, job, split=False)
            more += 1
        joules = meter.stop()
        total, parts = self._pass(ids, job, split=True)
        parts["other"] = total - sum(parts.values())
        assert not self.switch.refused, f"the attention was not the one to be timed: {self.switch.refused}"
        return Timed(
            name,
            ids.shape[1],
            tuple(t for t, _ in passes),
            tuple(spans["layers"] for _, spans in passes),
            parts,
            joules=joules / (repeats + more) if joules else None,
            whole=self.whole,
        )

    def _pass(self, ids: torch.Tensor, job: Callable[[Clock], Job], *, split: bool) -> tuple[float, dict[str, float]]:
        """Seconds of one prefill, and its parts: linear, attention and selection, or the layers as a whole."""
        clock = Clock(self.device.type == "cuda", split)
        layers = self.model.model.layers
        pairs = [(m, m) for m in self._products()] if split else [(layers[0], layers[-1])]
        with clock.watching("linear" if split else "layers", pairs), torch.inference_mode():
            begin = time.perf_counter()
            with self.switch.running(job(clock), ids.shape[1]):
                self.model(ids, logits_to_keep=1).logits[0, -1].argmax().item()
            took = time.perf_counter() - begin
        return took, clock.seconds()

    def _products(self) -> list[torch.nn.Module]:
        linear = [m for m in self.model.modules() if isinstance(m, torch.nn.Linear | Fp8Linear)]
        return [*linear, *experts_of(self.model)]


@dataclass(frozen=True)
class Plan:
    """What `bench_ttft` times.

    shape      a name in `shapes.SHAPES`; `layers` of it, None for all
    lengths    prompt lengths in tokens
    dense      names in `dense.MAKERS`, or "all" alone
    selectors  recorded variants, replayed from the file `densities`, and `replay_blocks.BlockVariant`s
    fp8        linear layers in float8, for dense and sparse alike
    peer       file with another engine's times, see `peer.load_peers`
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
    peer: str | None = None

    def case(self, dtype: torch.dtype) -> str:
        """Such as `llama-3.1-8b/bf16`, or `qwen3-235b-a22b-4-of-94-layers/bf16` for a slice; a length follows."""
        whole = shape_of(self.shape).layers
        part = f"-{self.layers}-of-{whole}-layers" if self.is_slice else ""
        precision = "fp8" if self.fp8 else name_of(dtype).replace("bfloat16", "bf16")
        return f"{self.shape}{part}/{precision}"

    @property
    def is_slice(self) -> bool:
        """Whether only some of the model's layers are built."""
        return self.layers is not None and self.layers != shape_of(self.shape).layers


def bench_ttft(
    plan: Plan, note: Note = lambda _: None, keep: Callable[[list[Row]], Any] = lambda _: None
) -> TtftResult:
    """Time every provider at every length; rows go to `keep` after each length.

    Everything that can be wrong is found before a model is built: raises InvalidInput or NothingFound for a shape, a
    provider, a variant, a length or a file that does not fit, and Unavailable for a dense provider that was asked for
    by name and does not run here.
    """
    where = device_of(plan.device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    shape, peers = shape_of(plan.shape), load_peers(plan.peer) if plan.peer else []
    if peers and plan.is_slice:
        raise InvalidInput(f"a peer runs whole models; {plan.case(dtype)} is a slice. Leave --peer or --layers out.")
    check_layers(plan.shape, plan.layers)
    if plan.fp8 and shape.experts:
        raise InvalidInput(WITH_EXPERTS)
    variants = list(dict.fromkeys(name for name in plan.selectors if name))
    blocks = {name: found for name in variants if (found := BlockVariant.parse(name)) is not None}
    tiles = [name for name in variants if name not in blocks]
    recorded = load(plan.densities) if any(name != "all" for name in tiles) else []
    fits = {(v, n): EVERY_TILE if v == "all" else nearest(recorded, v, n) for v in tiles for n in plan.lengths}
    for name in tiles:
        selector_of(name)
    prompts = {n: bench_prompt(n, shape.vocabulary) for n in plan.lengths}
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
    dense, left_out = dense_functions(where, dtype, heads, plan.dense)
    for name, why in left_out.items():
        note(f"{name} is left out: {why}")
    model, experts = _build(plan, where, dtype)
    bench, result = TtftBench(model, shape.layers), TtftResult([], left_out, [], experts)
    try:
        for n, prompt in prompts.items():
            if where.type == "cuda":
                torch.compiler.reset()  # it keeps a function for a few lengths only, then runs it uncompiled
            question = random_question(prompt, model.config.num_hidden_layers, shape.heads, where)
            full = [bench.dense(name, run, question, plan.repeats) for name, run in dense.items()]
            sparse = [
                bench.blocks(name, blocks[name], question, plan.repeats)
                if name in blocks
                else bench.sparse(name, fits[name, n], question, plan.repeats)
                for name in variants
            ]
            made, compared, rows = _report(f"{plan.case(dtype)}/{n}", full, sparse, nearest_peers(peers, n))
            keep(rows)
            result.results.extend(made)
            result.peers.extend(compared)
            for m in made:
                note(f"{m['case']} {m['provider']}: {m['ttft_s']:.3f} s, {m['speedup']:.2f}x")
            if peers and not compared:
                note(f"the peer's file has no time within 1 % of {n} tokens")
    finally:
        bench.close()
    return result


def _build(plan: Plan, where: torch.device, dtype: torch.dtype) -> tuple[Any, str]:
    """The model, ready to be timed, and which product of experts it uses ("" without experts)."""
    model = random_model(plan.shape, device=str(where), dtype=dtype, layers=plan.layers, context=max(plan.lengths))
    experts = choose_experts(model) if experts_of(model) else ""
    fuse(model, _compile if where.type == "cuda" else None)
    if plan.fp8:
        to_fp8(model)
    return model, experts


def _compile(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


def _report(
    case: str, full: list[Timed], sparse: list[Timed], peers: list[PeerTime]
) -> tuple[list[dict[str, Any]], list[Comparison], list[Row]]:
    base = min(full, key=lambda t: median(t.ttft_s))
    made = [t.summary(case, base) for t in (*full, *sparse)]
    rows = [row for t in (*full, *sparse) for row in t.rows(case, base)]
    compared = []
    for peer in peers:
        comparison, theirs = compare(case, peer, base, sparse)
        compared.append(comparison)
        rows += theirs
    return made, compared, rows
