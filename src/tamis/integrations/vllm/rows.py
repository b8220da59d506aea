"""The engine step under way in this process: which rows of its batch are Tamis's, and how each layer computes them.

One step runs at a time. What changes with the layer is given by the backend; the requests' order in the batch comes
from vLLM's model runner, their blocks and tokens from the scheduler, so nothing is read back from a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tamis.core.errors import BrokenInvariant
from tamis.core.log import logger
from tamis.integrations.vllm import compat
from tamis.integrations.vllm.config import Settings, policy_of
from tamis.integrations.vllm.decode_graphs import NARROW, WIDE, DecodeGraphs, Replay, Seats
from tamis.integrations.vllm.request import Asked
from tamis.integrations.vllm.reuse import Decodes, ReuseRows, plan_rows
from tamis.integrations.vllm.sift import SiftJob, SiftReport
from tamis.integrations.vllm.step import Counters, Row, Step
from tamis.kernels.paged import sent
from tamis.model.rope import Rotary
from tamis.select.scene import DocumentBits

KEPT_REPORTS = 256
log = logger("vllm")


@dataclass
class Worker:
    """What a worker keeps between steps. `reports`: of the last prompts that were prefilled sparsely; `bits`: gives the
    stored bits of a request's documents."""

    settings: Settings
    block: int
    kv_heads: int
    rotary: Rotary | None = None
    bits: Callable[[Asked], Sequence[DocumentBits | None]] | None = None
    jobs: dict[str, SiftJob] = field(default_factory=dict)
    decodes: Decodes = field(default_factory=Decodes)
    graphs: DecodeGraphs | None = None
    reports: deque[SiftReport] = field(default_factory=lambda: deque(maxlen=KEPT_REPORTS))
    counters: Counters = field(default_factory=Counters)
    _counting: deque[tuple[SiftJob, torch.Tensor, Any]] = field(default_factory=deque)

    def job(self, row: Row, device: torch.device) -> SiftJob:
        """The prompt's job, begun anew where its first tokens are computed again."""
        found = self.jobs.get(row.request)
        if found is None:
            policy = policy_of(row.asked.selector or self.settings.selector, self.settings)
            bits: Sequence[DocumentBits | None] = ()
            if policy.needs_records and self.bits is not None:
                bits = self.bits(row.asked)
                self.counters.sift_unrecorded += sum(b is None for b in bits)
            found = SiftJob(row.request, row.asked, policy, device, first=row.computed, bits=bits)
            self.jobs[row.request] = found
        return found

    def finish(self, requests: Sequence[str]) -> None:
        """Forget these requests, and report of those whose numbers have come from the device, without waiting."""
        for name in requests:
            job = self.jobs.pop(name, None)
            area = None if job is None else job.area()
            if job is not None and area is not None:
                self._counting.append((job, area, _mark(job.job.scene.document.device)))
        while self._counting and (self._counting[0][2] is None or self._counting[0][2].query()):
            job, area, _ = self._counting.popleft()
            self._report(job.report(int(area)))

    def _report(self, report: SiftReport) -> None:
        self.reports.append(report)
        unit = report.tile * report.tile
        self.counters.sift_tiles += report.causal_area / unit
        self.counters.sift_tiles_computed += report.area / unit
        self.counters.sift_tokens += report.n_tokens - report.cached
        log.info(
            "request %s: %d prompt tokens, density %.3f, kernel %s",
            report.request, report.n_tokens, report.density, report.kernel,
        )  # fmt: skip


def _mark(device: torch.device) -> Any:
    """An event behind what was launched so far; None where nothing is launched."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True)
class SiftRows:
    """A chunk of one prompt: rows [at, at + row.scheduled) of the batch; blocks int64 on the device."""

    at: int
    row: Row
    job: SiftJob
    blocks: torch.Tensor


@dataclass(frozen=True)
class StockRows:
    """What goes to vLLM's own kernel: its metadata, and the batch rows int64, None where there are none."""

    metadata: Any
    index: torch.Tensor


@dataclass(frozen=True)
class Plan:
    """How the rows of one step are computed in every layer."""

    stock: StockRows | None
    sift: tuple[SiftRows, ...]
    reuse: ReuseRows | None
    used: torch.Tensor | None  # int64: on a CPU the blocks that reuse rows read, gathered in this order

    def run(
        self,
        stock: Callable[..., Any],
        layer: Any,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        scale: float,
    ) -> None:
        """One layer: tensors are query [T, Hq, D], key and value [T, Hkv, D] and the cache; writes output [T, Hq, D].

        `stock` is the stock implementation's forward.
        """
        query, key, value, cache = tensors
        dim = query.shape[-1]
        if self.stock is not None:
            index = self.stock.index
            out = torch.empty_like(output[: len(index)])
            stock(layer, query[index], key[index], value[index], cache, self.stock.metadata, out)
            output[index] = out
        for rows in self.sift:
            row, own = rows.row, slice(rows.at, rows.at + rows.row.scheduled)
            if row.computed == 0:
                k, v = key[own].transpose(0, 1), value[own].transpose(0, 1)
            else:
                k, v = compat.gathered(cache, dim, rows.blocks, row.end)
            number = compat.layer_number(layer.layer_name)
            made = rows.job.attend(number, query[own].transpose(0, 1), k, v, scale, row.computed)
            output[own] = made.transpose(0, 1)
        if self.reuse is not None:
            keys, values = compat.pages(cache, dim)
            if self.used is not None:
                keys, values = keys[self.used].contiguous(), values[self.used].contiguous()
            self.reuse.attend(query, keys, values, scale, output)


class Running:
    """The step under way. `order` gives the requests of the batch in order, once the runner has decided on it."""

    def __init__(self, worker: Worker, step: Step, order: Callable[[], Sequence[str]]) -> None:
        self.worker, self.step, self.order = worker, step, order
        self.rows = {row.request: row for row in step.rows}
        self.replayed: Replay | None = None
        self._moved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def replays(self, requests: int, tokens: int, loras: int = 0) -> Any:
        """vLLM's name of the graph of the whole model that computes this step's rows; None: there is none."""
        graphs = self.worker.graphs if requests == tokens else None
        self.replayed = None if graphs is None else graphs.replay(self.step.rows, requests, loras)
        return None if self.replayed is None else self.replayed.descriptor

    def seat(self, common: Any) -> None:
        """Instead of `plan`, before vLLM makes its own metadata: let the graph that is replayed compute these rows.

        vLLM's kernel is told that they have one key each: what it makes of them is not looked at.
        """
        assert self.replayed is not None and self.worker.graphs is not None, "no graph is replayed"
        if self._moved:  # vLLM makes metadata for each kind of layer
            return
        seats = [self.rows.get(name) for name in self.order()]
        self.worker.graphs.seats.seat(self.replayed.plan, seats)
        own = [(at, row) for at, row in enumerate(seats) if row is not None]
        if len(own) != len(self.rows):
            raise BrokenInvariant(f"{len(self.rows)} requests of Tamis were scheduled, {len(own)} are in the batch.")
        both = torch.tensor([[at for at, _ in own], [row.asked.position(row.computed) for _, row in own]])
        rows, places = sent(both, common.seq_lens.device)
        self._move(common.positions, rows, places)
        self._move(common.seq_lens, rows, torch.ones_like(rows))

    def _move(self, kept: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        self._moved.append((kept, rows, kept[rows]))
        kept.index_copy_(0, rows, values.to(kept.dtype))

    def plan(self, common: Any, build: Callable[[Any], Any]) -> Plan:
        """For vLLM's metadata of the batch; `build` makes stock metadata from that of some of its requests.

        Moves the positions of reuse rows, which the model reads after this.
        """
        names = list(self.order())
        starts = common.query_start_loc_cpu.tolist()
        device = common.query_start_loc.device
        mine = [(starts[i], self.rows[n]) for i, n in enumerate(names) if n in self.rows]
        kept = [i for i, n in enumerate(names) if n not in self.rows]
        for i, name in enumerate(names):
            row = self.rows.get(name)
            if row is not None and starts[i + 1] - starts[i] != row.scheduled:
                raise BrokenInvariant(
                    f"request {name} has {starts[i + 1] - starts[i]} rows, {row.scheduled} were meant."
                )
        if len(mine) != len(self.rows):
            raise BrokenInvariant(f"{len(self.rows)} requests of Tamis were scheduled, {len(mine)} are in the batch.")
        sift = tuple(self._sift(at, row, device) for at, row in mine if row.asked.mode == "sift")
        reuse, used = self._reuse([(at, row) for at, row in mine if row.asked.mode == "reuse"], common, device)
        stock = None
        if kept:
            own, index = compat.rows_of(common, kept)
            stock = StockRows(build(own), index)
        return Plan(stock, sift, reuse, used)

    def _sift(self, at: int, row: Row, device: torch.device) -> SiftRows:
        n = -(-row.end // self.worker.block)
        blocks = torch.tensor(row.blocks[:n], dtype=torch.int64).to(device, non_blocking=True)
        return SiftRows(at, row, self.worker.job(row, device), blocks)

    def _reuse(
        self, mine: list[tuple[int, Row]], common: Any, device: torch.device
    ) -> tuple[ReuseRows | None, torch.Tensor | None]:
        if not mine:
            return None, None
        rotary, used = self.worker.rotary, None
        if rotary is None:
            raise BrokenInvariant("a reuse request reached a worker whose rotary geometry was not checked.")
        if device.type == "cpu":  # its pages cannot be read in place: keys lie dim by dim
            numbers = sorted({b for _, row in mine for b in row.blocks[: -(-row.end // self.worker.block)]})
            place = {b: i for i, b in enumerate(numbers)}
            used = torch.tensor(numbers)
            mine = [
                (at, Row(r.request, r.asked, r.computed, r.scheduled, tuple(place.get(b, 0) for b in r.blocks)))
                for at, r in mine
            ]
        plan = plan_rows(
            mine, rotary.angles, page=self.worker.block, kv_heads=self.worker.kv_heads, device=device,
            kept=self.worker.decodes,
        )  # fmt: skip
        rows, positions = plan.moved
        if common.positions is None or common.positions.dim() != 1:
            raise BrokenInvariant("vLLM gave no positions, which reuse has to move.")
        if not self._moved:
            self._move(common.positions, rows, positions)
        return plan, used

    def restore(self) -> None:
        """Put vLLM's own positions back: what comes after the model counts tokens by them."""
        for kept, rows, before in self._moved:
            kept.index_copy_(0, rows, before)


running: Running | None = None
capturing: DecodeGraphs | None = None


def capture(worker: Worker, runner: Any) -> int:
    """Capture graphs of decode steps with rows of Tamis beside a V2 model runner's own, as far as it has such; bytes
    that they took."""
    global capturing  # noqa: PLW0603 - the metadata's builder is called by vLLM
    rotary, most = worker.rotary, runner.max_num_reqs
    managers = [] if rotary is None else compat.decode_managers(runner, 2)
    if rotary is None or not managers:
        return 0
    seats = Seats(most, rotary.angles, page=worker.block, kv_heads=worker.kv_heads, rotary_dims=rotary.dims,
                  device=runner.device)  # fmt: skip
    graphs = DecodeGraphs(seats, dict(zip((NARROW, WIDE), managers, strict=True)))
    capturing = graphs
    try:
        taken = graphs.capture(runner)
    finally:
        capturing = None
    worker.graphs = graphs
    log.info("captured CUDA graphs of decode steps with documents, %.2f GiB", taken / (1 << 30))
    return taken


def begin(worker: Worker, step: Step, order: Callable[[], Sequence[str]]) -> None:
    """A step's forward pass begins; `end` must follow."""
    global running  # noqa: PLW0603 - one step runs at a time in a worker's process, and vLLM hands no context through
    worker.finish(step.finished)
    running = Running(worker, step, order) if step.rows else None


def end() -> None:
    """The forward pass is over."""
    global running
    done, running = running, None
    if done is not None:
        done.restore()
