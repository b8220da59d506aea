"""How many of the blocks that each layer wants are known one layer ahead: forecasts beside what they compete with.

Knows a model's queries, keys and hidden states while one sequence runs; not texts or files. Recall is judged in one
forward pass with full attention, so that all providers see the same layers; quality in a pass for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tamis.attention.block_choices import ForecastChoice, StaleChoice
from tamis.attention.block_decode import BlockDecoding, Steps
from tamis.attention.block_prefill import BlockPrefill, OwnChoice, PooledChoice, dense, row_chunks
from tamis.attention.hook import Job, Switch, install
from tamis.attention.layer_inputs import LayerInputs, decoder_layers, watching
from tamis.cache.block_layer import BlockForm
from tamis.cache.formats import cache_argument, new_cache
from tamis.core.errors import InvalidInput
from tamis.forecast.heads import Forecast
from tamis.forecast.recall import contested, recall
from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference.blocks import block_mass, select_blocks
from tamis.model.rope import Rotary
from tamis.model.source import LoadedModel

PROVIDERS = ("forecast", "infinigen", "own")
METRICS = ("recall", "recall_attention", "mass")
QUALITY = {"kl": "nat", "agreement": "1", "density": "1"}
UNFETCHED = "forecast-unfetched"  # chooses one layer ahead, but copies only when the layer runs
OFFLOADED = (*PROVIDERS, UNFETCHED)  # "own" is sparse offload without prefetch
MOVES = {"kl": "nat", "agreement": "1", "attended": "1", "hit_rate": "1", "late": "1", "moved_bytes": "B"}
LAST = 32  # predictions that are compared where the model generated nothing


@dataclass(frozen=True)
class Plan:
    """rule       the selection that is forecast
    rows       rows of a text that are judged, spread over those that have blocks to choose from
    generated  tokens that the model then makes itself, all of which are judged as decode rows; 0 for none
    quality    also run the text with each provider's blocks only, and what was generated with blocks from host memory
    """

    rule: BlockRule
    rows: int = 128
    generated: int = 32
    quality: bool = True

    def __post_init__(self) -> None:
        if self.rows < 1 or self.generated < 0:
            raise InvalidInput(f"rows is {self.rows}, generated {self.generated}; give at least 1 and 0.")


@dataclass
class Found:
    """Values by (rows, provider, layer, metric), one a text; layer -1 is the mean of those that look ahead.

    recall            share of the layer's own choice that the provider made too, forced blocks left out
    recall_attention  the same share of the blocks with the most exact attention
    mass              exact attention that the provider's blocks get, forced ones included
    Layer 0 chooses for itself: for it "forecast" is that projection and "infinigen" the layer's own choice.
    quality: by (provider, metric) of a prefill whose tokens read the provider's blocks only, against dense: "kl" and
    "agreement" of the last predictions, "density" of the attention.
    moves: by (provider, metric) of decode steps over the generated tokens whose keys and values lie in host memory:
    "kl" and "agreement" against dense, "attended" share of the tokens, "hit_rate" of the slots, the share of wanted
    blocks that came "late", and the "moved_bytes" of a step.
    """

    values: dict[tuple[str, str, int, str], list[float]] = field(default_factory=dict)
    quality: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    moves: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    n_layers: int = 0
    texts: int = 0

    def mean(self, rows: str, provider: str, metric: str, layer: int = -1) -> float:
        """The mean over texts. Raises KeyError for what was not measured."""
        values = self.values[rows, provider, layer, metric]
        return sum(values) / len(values)

    def rows(self) -> list[tuple[str, str, str, list[float], str]]:
        """(case, provider, metric, values, unit): each layer and their mean, and the quality; a value for each text."""
        made = [
            (f"{rows}/{'mean' if layer < 0 else f'layer-{layer}'}", provider, metric, values, "1")
            for (rows, provider, layer, metric), values in sorted(self.values.items())
        ]
        for case, kept, units in (("quality", self.quality, QUALITY), ("offload", self.moves, MOVES)):
            made += [(case, provider, metric, values, units[metric]) for (provider, metric), values in kept.items()]
        return made

    def summary(self) -> dict[str, Any]:
        """Means over texts: {rows: {provider: {metric: mean of layers, "recall_by_layer": […]}}}, and "quality" and
        "offload"."""
        made: dict[str, Any] = {}
        for rows, provider, layer, metric in self.values:
            place = made.setdefault(rows, {}).setdefault(provider, {})
            if layer < 0:
                place[metric] = self.mean(rows, provider, metric)
                place[f"{metric}_by_layer"] = [
                    self.mean(rows, provider, metric, number) for number in range(self.n_layers)
                ]
        for case, kept in (("quality", self.quality), ("offload", self.moves)):
            for (provider, metric), values in kept.items():
                made.setdefault(case, {}).setdefault(provider, {})[metric] = sum(values) / len(values)
        return made


def eval_forecast(
    loaded: LoadedModel,
    forecast: Forecast,
    texts: Sequence[Sequence[int]],
    plan: Plan,
    *,
    note: Callable[[int, int], None] = lambda done, total: None,
) -> Found:
    """Judge all providers on sequences of tokens. Raises InvalidInput where a text has no more blocks than are read."""
    model, found = loaded.model, Found(n_layers=forecast.n_layers)
    short = [len(text) for text in texts if plan.rule.n_blocks(len(text)) <= plan.rule.top]
    if short or not texts:
        raise InvalidInput(
            f"texts have {short[:3]} tokens; all of up to {plan.rule.top * plan.rule.block} are read. Give longer "
            "texts, or a rule with a smaller top."
        )
    layers, rotary = decoder_layers(model), Rotary.of(model)
    for number, text in enumerate(texts):
        note(number, len(texts))
        tokens = _continued(loaded, list(text), plan.generated)
        switch, uninstall = install(model)
        try:
            with watching(model, residual=True) as seen:
                choosers: dict[str, PooledChoice] = {
                    "forecast": ForecastChoice(plan.rule, forecast, seen, rotary),
                    "infinigen": StaleChoice(plan.rule, layers, seen, rotary),
                    "own": OwnChoice(plan.rule),
                }
                judge = _Judge(plan, choosers, len(text), len(tokens), loaded.device)
                truth = _predictions(loaded, switch, judge, tokens, plan)
                _add(found, judge)
                for name, choose in choosers.items() if plan.quality else ():
                    job = BlockPrefill.of(replace(plan.rule, dense_tokens=0), choose)
                    made = _predictions(loaded, switch, job, tokens, plan)
                    density = sum(job.density.values()) / len(job.density)
                    _compare(found.quality, name, truth, made, density=density)
                for name in OFFLOADED if plan.quality and plan.generated else ():
                    choose = choosers["forecast" if name == UNFETCHED else name]
                    steps = _Stepped(loaded, choose, seen, plan.rule, name != UNFETCHED)
                    made, moved = steps.run(switch, tokens, len(text))
                    _compare(found.moves, name, truth, made, **moved)
        finally:
            uninstall()
    note(len(texts), len(texts))
    found.texts = len(texts)
    return found


def _predictions(loaded: LoadedModel, switch: Switch, job: Job, tokens: list[int], plan: Plan) -> torch.Tensor:
    """Log probabilities [rows, vocabulary] behind the last tokens."""
    ids = torch.tensor([tokens], device=loaded.device)
    with torch.no_grad(), switch.running(job, len(tokens)):
        made = loaded.model(ids, use_cache=False, logits_to_keep=plan.generated or LAST)
    return torch.log_softmax(made.logits[0].float(), -1)


def _compare(
    into: dict[tuple[str, str], list[float]], name: str, truth: torch.Tensor, other: torch.Tensor, **more: float
) -> None:
    kl = (truth.exp() * (truth - other)).sum(-1).mean()
    agreement = (truth.argmax(-1) == other.argmax(-1)).float().mean()
    for metric, value in {"kl": float(kl), "agreement": float(agreement), **more}.items():
        into.setdefault((name, metric), []).append(value)


@dataclass
class _Stepped:
    """Decode steps over given tokens, whose keys and values lie in host memory."""

    loaded: LoadedModel
    choose: PooledChoice
    seen: LayerInputs
    rule: BlockRule
    prefetch: bool

    def run(self, switch: Switch, tokens: list[int], n_text: int) -> tuple[torch.Tensor, dict[str, float]]:
        """Log probabilities [steps, vocabulary] behind each of tokens[n_text:], and what was read and moved."""
        model, name = self.loaded.model, cache_argument(self.loaded.model)
        n_steps = len(tokens) - n_text
        cache = new_cache("blocks", model.config, BlockForm(self.rule, host=True, room=n_steps))
        decoding = BlockDecoding(cache, self.choose, seen=self.seen, how=Steps(prefetch=self.prefetch))
        made = []
        with torch.no_grad():
            for first, end in [(0, n_text), *((i, i + 1) for i in range(n_text, len(tokens)))]:
                ids = torch.tensor([tokens[first:end]], device=self.loaded.device)
                with decoding.running(switch, step=first > 0):
                    made.append(model(ids, **{name: cache}, logits_to_keep=1).logits[0, -1].float())
        report = decoding.report()
        blocks = report.blocks
        assert blocks is not None and blocks.hit_rate is not None and blocks.late is not None, "it was offloaded"
        moved = {"attended": report.attended, "hit_rate": blocks.hit_rate, "late": blocks.late}
        return torch.log_softmax(torch.stack(made[1:]), -1), moved | {"moved_bytes": blocks.moved_bytes / n_steps}


def _continued(loaded: LoadedModel, tokens: list[int], more: int) -> list[int]:
    """The tokens and those that the model makes greedily behind them."""
    if not more:
        return tokens
    ids = torch.tensor([tokens], device=loaded.device)
    with torch.inference_mode():
        made = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=more, min_new_tokens=more, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    return [int(t) for t in made[0]]


@dataclass
class _Judge:
    """A job for `Switch.running`: dense attention, and beside it what each provider would have read."""

    plan: Plan
    choosers: dict[str, PooledChoice]
    n_text: int
    n_tokens: int
    device: torch.device
    values: dict[tuple[str, str, int, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        every = torch.arange(self.n_tokens, device=self.device)
        text = every[: self.n_text][contested(every[: self.n_text], self.plan.rule)]
        step = max(1, len(text) // self.plan.rows)
        self.positions = {"prefill": text[::step][: self.plan.rows], "decode": every[self.n_text :]}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `attention.hook.Job`."""
        for name, positions in self.positions.items():
            parts: dict[tuple[str, str], list[torch.Tensor]] = {}
            for rows in row_chunks(len(positions), q.shape[0] * k.shape[1]):
                for key, values in self._judged(layer, q, k, positions[rows], scale).items():
                    parts.setdefault(key, []).append(values)
            for (provider, metric), found in parts.items():
                self.values[name, provider, layer, metric] = float(torch.cat(found, -1).mean())
        return dense(q, k, v, scale), None

    def _judged(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, at: torch.Tensor, scale: float
    ) -> dict[tuple[str, str], torch.Tensor]:
        rule = self.plan.rule
        choices = {name: choose(layer, q[:, at], k, at, scale) for name, choose in self.choosers.items()}
        mass = block_mass(q[:, at], k, at, rule, scale=scale)
        best = select_blocks(mass, at, rule)
        made = {}
        for name, choice in choices.items():
            made[name, "recall"] = recall(choice, choices["own"], at, rule)
            made[name, "recall_attention"] = recall(choice, best, at, rule)
            made[name, "mass"] = (mass * choice).sum(-1)
        return made


def _add(found: Found, job: _Judge) -> None:
    for key, value in job.values.items():
        found.values.setdefault(key, []).append(value)
    ahead = range(1, found.n_layers) if found.n_layers > 1 else range(1)
    for rows, provider, metric in {(r, p, m) for r, p, _, m in job.values}:
        mean = sum(job.values[rows, provider, layer, metric] for layer in ahead) / len(ahead)
        found.values.setdefault((rows, provider, -1, metric), []).append(mean)
