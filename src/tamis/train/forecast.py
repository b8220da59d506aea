"""Training of a forecast: the model is frozen, and every layer's projection learns from that layer alone.

Layer by layer within one forward pass: the loss of a projection is made and its gradient taken where the layer's own
queries and keys are at hand (arXiv 2606.04511). No graph leads through the model, so memory does not grow with depth.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from tamis.attention.block_prefill import OwnChoice, dense, row_chunks
from tamis.attention.hook import install
from tamis.attention.layer_inputs import decoder_layers, watching
from tamis.core.errors import InvalidInput
from tamis.forecast.heads import FILE, Forecast, ForecastInfo, first_weights, project
from tamis.forecast.recall import contested, recall
from tamis.forecast.teacher import divergence, own_cells, teacher_cells
from tamis.forecast.texts import Sequences, Texts
from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference.blocks import attend_blocks, block_scores, pool_keys, raw_scores, select_blocks, visible
from tamis.model.adapter_info import base_of
from tamis.model.family import geometry
from tamis.model.rope import Rotary
from tamis.model.source import LoadedModel
from tamis.train.curve import write_curve
from tamis.train.loop import Note, make_steps, take_step
from tamis.train.settings import ForecastSettings
from tamis.train.state import FILE as STATE_FILE
from tamis.train.state import Point, State, load_state, save_state

CHECK_ROWS = 256  # of a held-out sequence
LABEL = "KL from the teacher's blocks, mean of layers (nats)"


@dataclass(frozen=True)
class TrainedForecast:
    """What came out: the forecast's description, the loss curve, and whether the time ended before the steps."""

    folder: str
    info: ForecastInfo
    parameters: int
    history: tuple[Point, ...] = ()
    out_of_time: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        said = {"out": self.folder, "steps": self.info.steps, "parameters": self.parameters}
        return said | {"out_of_time": self.out_of_time, **self.info.result}


def train_forecast(
    loaded: LoadedModel,
    texts: Texts,
    settings: ForecastSettings,
    out: str | Path,
    *,
    checks: int = 4,
    minutes: float | None = None,
    note: Note = lambda done, total, what: None,
) -> TrainedForecast:
    """Train, and save the forecast into `out`; the model itself is left as it was.

    checks: held-out sequences that are measured before and after, as far as there are so many. A run that was killed
    goes on from its last saved step when called again with the same arguments; one that has finished is returned as it
    is. minutes: stop in time, with what has been learnt so far. Raises StoreMismatch if `out` holds another run's
    state, InvalidInput if it holds another forecast, NothingFound where the texts do not fill a sequence.
    """
    folder = Path(out)
    base = base_of(loaded.model, loaded.tokenizer)
    key = blake2b(json.dumps([base, settings.to_dict(), texts.digest, checks]).encode(), digest_size=16).hexdigest()
    if (folder / FILE).exists():
        return _finished(folder, key)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    with ExitStack() as undo:
        run = _Run(loaded, texts, settings, folder, checks, undo)
        state = load_state(folder, key, run.named, run.optimiser)
        if not state.before:
            note(0, settings.steps, "held-out texts")
            state.before = run.check()
        elif end is not None:
            run.check()  # a run that goes on has to learn how long it takes
        out_of_time = make_steps(run, state, end=end, check_s=run.check_s, note=note)
        note(state.step, settings.steps, "held-out texts")
        result = {"before": state.before, "after": run.check(), "seconds": round(state.elapsed_s, 1)}
        info = ForecastInfo(
            base, loaded.name, settings.rule, state.step, texts.names, texts.holdout, settings.to_dict() | {"key": key},
            result,
        )  # fmt: skip
        made = run.forecast(info)
    folder.mkdir(parents=True, exist_ok=True)
    write_curve(folder, state.history, LABEL)
    made.save(folder)
    (folder / STATE_FILE).unlink(missing_ok=True)
    return TrainedForecast(str(folder), info, made.parameters, tuple(state.history), out_of_time)


def _finished(folder: Path, key: str) -> TrainedForecast:
    made = Forecast.read(folder)
    if made.info.settings.get("key") != key:
        raise InvalidInput(
            f"{folder} holds a forecast that was trained with other settings, texts or another model. "
            "Give another --out, or remove the folder."
        )
    return TrainedForecast(str(folder), made.info, made.parameters)


@dataclass
class _Run:
    """A model whose layers are watched until `undo` closes, and the projections that learn from them."""

    loaded: LoadedModel
    texts: Texts
    settings: ForecastSettings
    folder: Path
    checks: int
    undo: ExitStack
    check_s: float = 0.0

    def __post_init__(self) -> None:
        s, model = self.settings, self.loaded.model
        shape = geometry(model.config)
        if s.tokens > shape.context_tokens:
            raise InvalidInput(
                f"sequences have {s.tokens} tokens and {self.loaded.name} was made for {shape.context_tokens}; give "
                "shorter ones."
            )
        self.taught = Sequences(self.loaded.tokenizer, self.texts.taught, s.tokens, seed=s.seed)
        try:
            self.kept = Sequences(self.loaded.tokenizer, self.texts.kept, s.tokens) if self.checks else None
        except LookupError:
            self.kept = None
        self.rotary, self.n_kv_heads = Rotary.of(model), shape.n_kv_heads
        weight, bias = first_weights(
            decoder_layers(model), shape.n_kv_heads, shape.head_dim, start=s.start, seed=s.seed
        )
        device = self.loaded.device
        self.weights = [torch.nn.Parameter(w.to(device)) for w in weight]
        self.biases = [] if bias is None else [torch.nn.Parameter(b.to(device)) for b in bias]
        self.named = [(f"weight.{i}", p) for i, p in enumerate(self.weights)]
        self.named += [(f"bias.{i}", p) for i, p in enumerate(self.biases)]
        self.optimiser = torch.optim.AdamW(
            [p for _, p in self.named], lr=s.lr, betas=s.betas, eps=s.eps, weight_decay=s.weight_decay
        )
        self.switch, uninstall = install(model)
        self.undo.callback(uninstall)
        self.seen = self.undo.enter_context(watching(model))

    def step(self, state: State, lr: float) -> None:
        """One optimiser step over `accumulate` sequences."""
        s, began = self.settings, time.monotonic()
        kls = []
        for micro in range(s.accumulate):
            number = state.step * s.accumulate + micro
            job = self._job(s.rows, f"{s.seed}:{number}", weight=1 / s.accumulate)
            self._pass(job, self.taught.get(number))
            kls.append(torch.stack(job.kl))
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        taken = take_step(self.optimiser, [p for _, p in self.named], s.clip)
        layers = torch.stack(kls).mean(0)
        state.step += 1
        loss, kl = float(layers.sum()), float(layers.mean())
        state.history.append(Point(state.step, loss, kl, lr, time.monotonic() - began, skipped=not taken))

    def check(self) -> dict[str, float]:
        """KL and recall of the layers' own selections on held-out sequences, always the same rows; means of layers."""
        began = time.monotonic()
        if self.kept is None:
            return {"sequences": 0.0}
        n = min(self.checks, len(self.kept))
        kls, recalls = [], []
        for number in range(n):
            job = self._job(CHECK_ROWS, f"check:{number}", weight=None)
            self._pass(job, self.kept.get(number))
            kls += job.kl
            recalls += job.recall
        self.check_s = time.monotonic() - began
        made = {"kl": float(torch.stack(kls).mean()), "sequences": float(n)}
        return made | ({"recall": float(torch.stack(recalls).mean())} if recalls else {})

    def save(self, state: State) -> None:
        """Keep where the run stands."""
        save_state(self.folder, state, self.named, self.optimiser)

    def forecast(self, info: ForecastInfo) -> Forecast:
        """The projections as they are now, on the CPU."""
        weight = torch.stack([p.detach().cpu() for p in self.weights])
        bias = torch.stack([p.detach().cpu() for p in self.biases]) if self.biases else None
        return Forecast(weight, bias, self.n_kv_heads, info)

    def _job(self, rows: int | None, draw: str, weight: float | None) -> _Lesson:
        n = self.settings.tokens
        positions = torch.arange(n)
        if rows is not None and rows < n:
            seed = int.from_bytes(blake2b(draw.encode(), digest_size=6).digest(), "big")
            positions = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:rows].sort().values
        return _Lesson(self, positions.to(self.loaded.device), weight)

    def _pass(self, job: _Lesson, tokens: list[int]) -> None:
        ids = torch.tensor([tokens], device=self.loaded.device)
        with torch.no_grad(), self.switch.running(job, len(tokens)):
            self.loaded.model(ids, use_cache=False, logits_to_keep=1)


@dataclass
class _Lesson:
    """A job for `Switch.running`: the layer's attention as the route says, and its projection's loss beside it.

    weight: of the sequence in the gradient; None takes no gradient and measures recall.
    """

    run: _Run
    positions: torch.Tensor
    weight: float | None
    kl: list[torch.Tensor] = field(default_factory=list)
    recall: list[torch.Tensor] = field(default_factory=list)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `attention.hook.Job`."""
        rule = self.run.settings.rule
        pooled = pool_keys(k, rule.window, rule.stride)
        x = self.run.seen.normed[Forecast.source(layer)]
        total = torch.zeros((), device=q.device)
        for rows in row_chunks(len(self.positions), q.shape[0] * k.shape[1]):
            at = self.positions[rows]
            target = self._target(q[:, at], k, pooled, at, scale)
            with torch.set_grad_enabled(self.weight is not None):
                student = self._student(layer, x[at], pooled, at) * scale
                each = divergence(target, student, at, rule, k.shape[1], apart=self.run.settings.outcomes)
                loss = each.sum() / (k.shape[0] * len(self.positions))
                if self.weight is not None:
                    (loss * self.weight).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            if self.weight is None:
                self._judge(layer, q[:, at], k, student, at, scale)
        self.kl.append(total)
        return self._attention(q, k, v, scale), None

    def _target(
        self, q: torch.Tensor, k: torch.Tensor, pooled: torch.Tensor, at: torch.Tensor, scale: float
    ) -> torch.Tensor:
        s = self.run.settings
        if s.teacher == "own":
            return own_cells(q, pooled, at, s.rule, scale=scale)
        return teacher_cells(q, k, at, s.rule, scale=scale)

    def _student(self, layer: int, x: torch.Tensor, pooled: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        run = self.run
        bias = run.biases[layer] if run.biases else None
        f = project(run.weights[layer], bias, x, at, rotary=run.rotary, n_kv_heads=run.n_kv_heads)
        return raw_scores(f, pooled, at, run.settings.rule)

    def _judge(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, student: torch.Tensor, at: torch.Tensor, scale: float
    ) -> None:
        rule = self.run.settings.rule
        use = contested(at, rule)
        if not bool(use.any()):
            return
        at, n_blocks = at[use], rule.n_blocks(k.shape[1])
        wanted = OwnChoice(rule)(layer, q[:, use], k, at, scale)
        found = select_blocks(block_scores(student[:, use], rule, n_blocks), at, rule)
        self.recall.append(recall(found, wanted, at, rule).mean())

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        rule, n = self.run.settings.rule, k.shape[1]
        if self.run.settings.route == "dense" or n <= max(rule.dense_tokens, rule.top * rule.block):
            return dense(q, k, v, scale)
        parts = []
        for rows in row_chunks(n, q.shape[0] * n):
            at = torch.arange(n, device=q.device)[rows]
            chosen = teacher_blocks(q[:, rows], k, at, rule, scale)
            parts.append(attend_blocks(q[:, rows], k, v, chosen, at, block=rule.block, scale=scale))
        return torch.cat(parts, 1)


def teacher_blocks(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, rule: BlockRule, scale: float
) -> torch.Tensor:
    """The blocks that the teacher's fine windows choose, forced ones among them: bool [Hkv, Q, N]."""
    cells = teacher_cells(q, k, positions, rule, scale=scale)
    unseen = ~visible(positions, cells.shape[-1], rule.window, rule.stride)
    scores = block_scores(cells.masked_fill(unseen, float("-inf")), rule, rule.n_blocks(k.shape[1]))
    return select_blocks(scores, positions, rule)
