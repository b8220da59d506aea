"""Decode from host memory: a whole step of every provider, the copies alone, and what choosing costs a prefill.

Case "minicpm4.1-8b/131072/b16/2x/smollm2/host-16gb": 16 sequences of 131,072 tokens, two slots for each block that a
token reads, choices as in the recording smollm2, 16 GB of host memory shared by all requests. Weights are random and of
real size, as are the layers' number and the tokens; which blocks are wanted is replayed from a recorded run
(`bench.locality`). Where host memory holds fewer than all requests' blocks they share it: as many blocks are copied
from as far apart, but the same ones serve several requests; notes say how many. Keys and values on the device may take
what a card of 80 GB leaves; a cell that takes more is left out. Steps are checked against the reference first.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tamis.bench import offload_copy, offload_dense, offload_select
from tamis.bench.locality import Locality, load_all
from tamis.bench.machine import device_of, why_of
from tamis.bench.offload_cell import Cell, CellPlan, Timed
from tamis.bench.offload_check import check
from tamis.bench.offload_step import PROVIDERS, Weights
from tamis.bench.results import Case, Row
from tamis.bench.shapes import shape_of
from tamis.core.errors import InvalidInput, TamisError
from tamis.core.files import write_whole
from tamis.kernels.block_pool import PoolRoom
from tamis.kernels.blocks import BlockRule
from tamis.kernels.blocks_dispatch import block_steps

MEASURES = ("copy", "resident", "cells", "dense-offload", "selection")
HOST_GB = {"cuda": 16.0, "cpu": 0.5}  # a CPU shows only that it runs, and has the caches in the same memory
CARD, MARGIN = 80e9, 4e9  # bytes of the card whose room for keys and values is the cap, and of what else it holds
RULES = {"tiny": BlockRule(top=6, first=1, local=2, block=16, window=8, stride=4, dense_tokens=0)}

Note = Callable[[str], None]
Keep = Callable[[list[Row]], Any]


@dataclass(frozen=True)
class OffloadPlan:
    """What `bench_offload` times; see the options of `tamis bench offload`."""

    shape: str = "minicpm4.1-8b"
    tokens: Sequence[int] = (131072,)
    batch: Sequence[int] = (4, 16, 64)
    slots: Sequence[float] = (2.0,)
    providers: Sequence[str] = tuple(p for p in PROVIDERS if p != "sparse-resident")
    measures: Sequence[str] = MEASURES
    locality: str = "results/locality/smollm2-stick.json"
    layers: int | None = None
    rounds: int = 20
    programs: int = 8
    warps: int = 8
    host_gb: float | None = None
    kv_cap_gb: float | None = None
    timeline: str | None = None
    check_only: bool = False
    device: str | None = None
    kernel: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("measures", MEASURES), ("providers", tuple(PROVIDERS))):
            unknown = [word for word in getattr(self, name) if word not in known]
            if unknown or not getattr(self, name):
                raise InvalidInput(f"{name} is {','.join(getattr(self, name))}; give some of {', '.join(known)}.")
        if (
            min(*self.batch, *self.tokens, self.rounds, self.programs, self.warps) < 1
            or min(self.slots) < 1
            or (self.host_gb is not None and self.host_gb <= 0)
        ):
            raise InvalidInput(
                f"batch {list(self.batch)}, tokens {list(self.tokens)}, slots {list(self.slots)}, "
                f"host-gb {self.host_gb}; numbers are 1 or more, bytes more than 0."
            )
        if min(self.tokens) < BlockRule.block:
            raise InvalidInput(f"tokens are {list(self.tokens)}; give {BlockRule.block}, a block, or more.")


class _Bench:
    """One run: what all cases share, and what was left out for which reason."""

    def __init__(self, plan: OffloadPlan, note: Note, keep: Keep) -> None:
        self.note, self._keep = note, keep
        self.shape, self.device = shape_of(plan.shape), device_of(plan.device)
        if self.shape.experts:
            raise InvalidInput(f"{plan.shape} has experts; whole steps are timed on shapes without.")
        self.rule = RULES.get(plan.shape, BlockRule())
        self.cuda = self.device.type == "cuda"
        self.host_gb = plan.host_gb or HOST_GB["cuda" if self.cuda else "cpu"]
        self.plan = replace(plan, host_gb=self.host_gb)
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.cases: list[Case] = []
        self.left_out: dict[str, str] = {}
        self.resident: dict[int, dict[str, float]] = {}  # tokens/s by tokens and provider
        like = torch.empty(0, self.shape.head_dim, dtype=self.dtype, device=self.device)
        self.ops = block_steps(like, self.shape.heads // self.shape.kv_heads, kernel=plan.kernel)
        self.layers = self.shape.layers if plan.layers is None else min(plan.layers, self.shape.layers)
        self.whole = self.shape.layers / self.layers  # what a number of those that are built is taken times for all

    @functools.cached_property
    def host(self) -> torch.Tensor:
        """Flat int32 host memory, of random numbers of the dtype."""
        n = int(self.host_gb * 1e9) // 4 // 4096 * 4096
        flat = torch.empty(n, dtype=torch.int32, pin_memory=self.cuda)
        part = torch.randn(min(n, 1 << 24) * 4 // self.dtype.itemsize, device=self.device).to(self.dtype)
        words = part.view(torch.int32)
        for i in range(0, n, len(words)):
            flat[i : i + len(words)].copy_(words[: n - i], non_blocking=True)
        if self.cuda:
            torch.cuda.synchronize()
        return flat

    @functools.cached_property
    def weights(self) -> Weights:
        """Of the layers that are built."""
        return Weights(self.shape, self.layers, self.device, self.dtype)

    @property
    def cap(self) -> float:
        """Bytes that keys and values may take on the device."""
        if self.plan.kv_cap_gb is not None:
            return self.plan.kv_cap_gb * 1e9
        if not self.cuda:
            return self.host_gb * 1e9
        return CARD - MARGIN - self.weights.nbytes * self.whole

    def tried(self, name: str, measure: Callable[[Case], None]) -> None:
        """Measure a case; whatever it raises is the reason why it is left out, but for what the plan has wrong."""
        case = Case(name)
        try:
            measure(case)
        except InvalidInput:
            raise
        except Exception as e:  # of a compiler, a launch, an allocation
            self.left_out[name] = why_of(e)
            self.note(f"{name} is left out: {why_of(e)}")
        if case.rows or case.notes:
            self.cases.append(case)
            self._keep(case.rows)
            for row in case.rows:
                self.note(f"{row.case} {row.provider} {row.metric}: {row.p50:.4g} {row.unit}")
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def copy(self, case: Case) -> None:
        """Copies alone."""
        case.rows += offload_copy.rows(offload_copy.measure(self.host, self.device, note=self.note))

    def dense_resident(self, tokens: int, case: Case) -> None:
        """Full attention at the largest batch that fits, and block-sparse attention at its own largest."""
        each = 4 * self.shape.kv_heads * self.shape.head_dim * tokens * self.dtype.itemsize // 2 * self.shape.layers
        batch = int(self.cap // each)
        if not batch:
            case.notes.append(f"no sequence of {each / 1e9:.1f} GB fits {self.cap / 1e9:.1f} GB")
            return
        name, run = offload_dense.best_full(self.weights, batch, tokens, self.note)
        seconds, n = offload_dense.resident(self.weights, run, batch, tokens, self.plan.rounds)
        self._scaled(case, "dense-resident", seconds, batch)
        case.add("dense-resident", "batch", [float(batch)], "1")
        case.notes.append(f"dense-resident: {name}, batch {batch}, {n} layers' own caches")
        self.resident.setdefault(tokens, {})["dense"] = batch / median(seconds) / self.whole

    def sparse_resident(self, tokens: int, locality: dict[str, Locality], case: Case) -> None:
        """The same selection over blocks that all lie on the device, at the largest batch that fits."""
        plan = self._cell(tokens, 1, 1.0)
        whole = PoolRoom(self.shape.layers, 1, self.shape.kv_heads, self.shape.head_dim, plan.n_blocks,
                         max(plan.n_blocks, self.rule.top), self.rule, wide=True)  # fmt: skip
        batch = int(self.cap // whole.device_bytes(self.dtype.itemsize))
        if not batch:
            case.notes.append("no sequence fits")
            return
        cell = Cell(replace(plan, batch=batch, slots=self.rule.top), self.weights, self.ops, locality, self.host,
                    wide=True)  # fmt: skip
        size = (cell.room.rows, plan.n_blocks, 2, self.rule.block, self.shape.head_dim)
        slots = [torch.empty(size, dtype=self.dtype, device=self.device).normal_() for _ in range(self.layers)]
        made = cell.run("sparse-resident", resident=slots)
        self._scaled(case, "sparse-resident", made.seconds, batch)
        case.add("sparse-resident", "batch", [float(batch)], "1")
        self.resident.setdefault(tokens, {})["sparse"] = batch / median(made.seconds) / self.whole

    def named(self, tokens: int, batch: int, slots: float) -> str:
        """The name of a cell, with all that its times depend on."""
        plan = self._cell(tokens, batch, slots)
        room = PoolRoom(self.layers, batch, self.shape.kv_heads, self.shape.head_dim, plan.n_blocks, plan.slots,
                        self.rule)  # fmt: skip
        words = [self.plan.shape, str(tokens), f"b{batch}", f"{slots:g}x", Path(self.plan.locality).stem]
        if room.host_bytes(self.dtype.itemsize) > self.host_gb * 1e9:
            words.append(f"host-{self.host_gb:g}gb")
        if (self.plan.programs, self.plan.warps) != (8, 8):
            words.append(f"{self.plan.programs}x{self.plan.warps}-warps")
        if self.layers < self.shape.layers:
            words.append(f"{self.layers}-layers")
        return "/".join(words)

    def cell(self, tokens: int, batch: int, slots: float, locality: dict[str, Locality], case: Case) -> None:
        """All providers of one length and batch."""
        plan = self._cell(tokens, batch, slots)
        wide = any(PROVIDERS[p].ahead != "forecast" for p in self.plan.providers)
        needed = PoolRoom(self.shape.layers, batch, self.shape.kv_heads, self.shape.head_dim, plan.n_blocks,
                          plan.slots, self.rule, wide=wide).device_bytes(self.dtype.itemsize)  # fmt: skip
        if needed > self.cap:
            raise TamisError(f"slots and pooled keys take {needed / 1e9:.1f} GB of {self.cap / 1e9:.1f} GB")
        cell = Cell(plan, self.weights, self.ops, locality, self.host, wide=wide)
        case.notes += [
            *dict.fromkeys(one.note() for one in locality.values()),
            f"device memory of the cache {needed / 1e9:.1f} GB",
        ]
        if cell.shared > 1:
            case.notes.append(f"host memory of {self.host_gb:g} GB: {cell.shared:.1f} rows share a region")
        if self.layers < self.shape.layers:
            case.notes.append(f"{self.layers} of {self.shape.layers} layers, times are scaled")
        found: dict[str, Timed] = {}
        for name in self.plan.providers:
            try:
                found[name] = cell.run(name)
            except Exception as e:  # one provider's failure leaves the others
                self.left_out[f"{case.name}/{name}"] = why_of(e)
                self.note(f"{case.name}/{name} is left out: {why_of(e)}")
                continue
            self._told(case, found[name], batch, tokens)
        base = found.get("sparse-offload")
        for name, made in found.items() if base else ():
            assert base is not None
            ratios = [median(base.seconds) / s for s in made.seconds]
            case.add(name, "speedup_vs_sparse_offload", ratios, "1")
        if self.plan.timeline and "forecast" in found and self.cuda:
            self._timeline(cell, case)

    def _told(self, case: Case, made: Timed, batch: int, tokens: int) -> None:
        self._scaled(case, made.provider, made.seconds, batch)
        case.add(made.provider, "bytes_moved", [float(n) * self.whole for n in made.moved], "B")
        case.add(made.provider, "hit_rate", [made.hit_rate], "1")
        if PROVIDERS[made.provider].prefetch:
            case.add(made.provider, "copy_hidden_share", made.hidden, "1")
            case.add(made.provider, "copy_ms", [made.copies * self.whole * 1e3], "ms")
            case.add(made.provider, "step_without_copies_ms", [s * self.whole * 1e3 for s in made.found_all], "ms")
            if made.copies > 0:
                case.add(made.provider, "copy_gb_per_s", [median(made.moved) / made.copies / 1e9], "GB/s")
        for name, rate in self.resident.get(tokens, {}).items():
            metric = "throughput_vs_resident" if name == "dense" else "throughput_vs_sparse_resident"
            rates = [batch / s / self.whole / rate for s in made.seconds]
            case.add(made.provider, metric, rates, "1")

    def dense_offload(self, tokens: int, batch: int, case: Case) -> None:
        """Full attention whose keys and values all cross to the device in every step."""
        _, run = offload_dense.best_full(self.weights, batch, tokens, self.note)
        args = (self.weights, run, self.host, batch, tokens, self.plan.rounds)
        seconds, n = offload_dense.from_host(*args)
        self._scaled(case, "dense-offload", seconds, batch)
        case.notes.append(f"dense-offload: {n} of {self.shape.layers} layers, scaled; host memory read again and again")

    def selection(self, tokens: int, case: Case) -> None:
        """Choosing blocks for a prompt."""
        rounds = max(2, self.plan.rounds // 5)
        made = offload_select.measure(self.plan.shape, self.shape, tokens, self.rule, self.ops, self.device,
                                      rounds=rounds)  # fmt: skip
        case.rows += made.rows()

    def _scaled(self, case: Case, provider: str, seconds: list[float], batch: int) -> None:
        whole = [s * self.whole for s in seconds]
        case.add(provider, "tokens_per_s", [batch / s for s in whole], "1/s")
        case.add(provider, "step_ms", [s * 1e3 for s in whole], "ms")

    def _cell(self, tokens: int, batch: int, slots: float) -> CellPlan:
        width = max(1, self.rule.top - 1)
        return CellPlan(tokens, batch, int(slots * width), self.rule, self.plan.rounds, self.plan.programs,
                        self.plan.warps)  # fmt: skip

    def _timeline(self, cell: Cell, case: Case) -> None:
        from tamis.kernels.triton.step_pieces import stamp

        assert self.plan.timeline is not None
        path = Path(self.plan.timeline)
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        known[case.name] = {"layers": cell.timeline(stamp), "notes": case.notes}
        write_whole(path, json.dumps(known) + "\n")


def bench_offload(plan: OffloadPlan, note: Note = lambda _: None, keep: Keep = lambda _: None) -> dict[str, Any]:
    """Check and time everything; rows go to `keep` after each case.

    Returns {"device", "errors", "cases": one dictionary each, "left_out": {case: reason}, "plan"}. Raises InvalidInput
    for a plan that cannot be run, TamisError if the steps disagree with the reference or nothing could be timed.
    """
    bench = _Bench(plan, note, keep)
    locality = load_all(plan.locality) if {"cells", "resident"} & set(plan.measures) and not plan.check_only else None
    if {"cells", "resident", "dense-offload"} & set(plan.measures) and not plan.check_only:
        Weights.check(bench.shape, bench.layers, bench.device, bench.dtype)  # before anything takes minutes
    if not bench.cuda:
        note("no GPU is used: the reference runs on a CPU, float32, and says nothing about a GPU")
    errors = check(bench.shape, bench.rule, bench.ops, bench.device, bench.dtype)
    note("checked: " + ", ".join(f"{name} {error:.2g}" for name, error in errors.items()))
    if not plan.check_only:
        with torch.inference_mode():
            _every(bench, locality)
        if not bench.cases:
            raise TamisError(f"no case could be timed on {bench.device}: {bench.left_out}.")
    return {
        "device": str(bench.device), "errors": errors, "cases": [c.to_dict() for c in bench.cases],
        "left_out": bench.left_out, "plan": asdict(bench.plan),
    }  # fmt: skip


def _every(bench: _Bench, locality: dict[str, Locality] | None) -> None:
    plan, name = bench.plan, bench.plan.shape
    if "copy" in plan.measures:
        bench.tried("copy", bench.copy)
    for tokens in plan.tokens:
        if "selection" in plan.measures:
            bench.tried(f"{name}/{tokens}/selection", functools.partial(bench.selection, tokens))
        if "resident" in plan.measures:
            assert locality is not None
            bench.tried(f"{name}/{tokens}/resident", functools.partial(bench.dense_resident, tokens))
            bench.tried(f"{name}/{tokens}/resident", functools.partial(bench.sparse_resident, tokens, locality))
        for slots, batch in itertools.product(plan.slots, plan.batch) if "cells" in plan.measures else ():
            assert locality is not None
            measure = functools.partial(bench.cell, tokens, batch, slots, locality)
            bench.tried(bench.named(tokens, batch, slots), measure)
        for batch in plan.batch if "dense-offload" in plan.measures else ():
            bench.tried(f"{name}/{tokens}/b{batch}", functools.partial(bench.dense_offload, tokens, batch))
