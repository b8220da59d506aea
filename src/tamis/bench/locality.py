"""How much of what a decode step reads the step before has read: recorded from a real model, replayed for any shape.

Random weights are enough to time a step, but which blocks they choose means nothing. So a real model's choices at
tokens that follow each other in a real text are kept as shares, and a replay makes lists of blocks with the same ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tamis.cache.slots import SlotMap
from tamis.core.errors import InvalidInput, NothingFound
from tamis.core.files import write_whole
from tamis.forecast.recall import recall
from tamis.kernels.block_pool import NEVER
from tamis.kernels.blocks import BlockRule
from tamis.kernels.reference.blocks import block_numbers, block_scores, forced_blocks, select_blocks, sticking

if TYPE_CHECKING:  # replaying needs no model
    from tamis.attention.block_prefill import PooledChoice
    from tamis.forecast.heads import Forecast
    from tamis.model.source import LoadedModel

Chooser = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]  # see `PooledChoice`
SLOTS = (1.0, 1.5, 2.0, 3.0)  # of a pool, for each block that a token reads
POINTS = 21  # of a distribution, evenly spaced
DISTINCT = 2048  # walks of rows that are drawn; more rows share them
WARM = 16  # steps before misses are counted
STICK = "-stick"  # behind the name of what sticks


@dataclass(frozen=True)
class Locality:
    """Choices of one provider at `steps` tokens in a row of one text: "own" or "forecast", and either with "-stick"
    behind it by a rule that sticks (`BlockRule.stick`).

    kept    quantiles, evenly spaced, of the share of the blocks chosen by score that the step before chose too; one
            value for each layer, KV head and step
    misses  by slots for each block that a token reads: share of all blocks read that a pool has to fetch which gives
            the slot away that was wanted longest ago
    recall  share of a layer's own choice that the provider made
    """

    model: str
    data: str
    provider: str
    tokens: int
    steps: int
    rule: BlockRule
    kept: tuple[float, ...]
    misses: dict[str, float]
    recall: float

    @property
    def kept_mean(self) -> float:
        """The mean of the distribution, by its quantiles."""
        return sum((a + b) / 2 for a, b in zip(self.kept, self.kept[1:], strict=False)) / (len(self.kept) - 1)

    def returns(self, slots: float) -> float:
        """Share of the blocks new to a step that a pool of so many slots for each block read still holds."""
        known = {float(n): miss for n, miss in self.misses.items()}
        most = max((n for n in known if n <= slots), default=1.0)
        return 1 - known[most] / known[1.0] if known[1.0] else 0.0

    def note(self) -> str:
        """Where it comes from, in a word for a row."""
        return f"locality of {self.model}, {self.provider}, {self.tokens} tokens, blocks of {self.rule.block}"


@dataclass
class _Choices:
    """A job for `Switch.running`: dense attention, and beside it what providers would read at the last tokens."""

    choosers: dict[str, Chooser]
    positions: torch.Tensor
    found: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `attention.hook.Job`."""
        from tamis.attention.block_prefill import dense

        for name, choose in self.choosers.items():
            made = choose(layer, q[:, self.positions], k, self.positions, scale)
            self.found.setdefault(name, []).append(made.cpu())
        return dense(q, k, v, scale), None


@dataclass(frozen=True)
class _Sticking:
    """Chooses as `inner` does by a rule that sticks, one token after the other."""

    inner: PooledChoice
    rule: BlockRule

    def __call__(
        self, layer: int, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> torch.Tensor:
        from tamis.cache.pooled import Pooled

        rule, n_blocks, heads = self.rule, self.rule.n_blocks(keys.shape[1]), len(keys)
        cells = self.inner.cells(layer, q, Pooled.of(keys, rule), positions, scale)
        scores, block = block_scores(cells, rule, n_blocks), torch.arange(n_blocks, device=keys.device)
        last = torch.full((heads, n_blocks), NEVER, dtype=torch.int64, device=keys.device)
        made = []
        for i, at in enumerate(positions.tolist()):
            free = (block >= rule.first) & (block < at // rule.block - rule.local)
            values = sticking(scores[:, i], free.expand(heads, -1), last >= at - rule.recent, rule.stick)
            chosen = select_blocks(values[:, None], positions[i : i + 1], rule)[:, 0]
            last = last.masked_fill(chosen, at)
            made.append(chosen)
        return torch.stack(made, 1)


def record(
    loaded: LoadedModel, tokens: list[int], rule: BlockRule, steps: int, *, data: str, forecast: Forecast | None = None,
    stick: float = 0.0,
) -> list[Locality]:  # fmt: skip
    """Run a text once with full attention and look at its last `steps` tokens. Raises InvalidInput for a short one.

    stick: look also at what a rule that sticks so much would have had them read.
    """
    from tamis.attention.block_choices import ForecastChoice
    from tamis.attention.block_prefill import OwnChoice
    from tamis.attention.hook import install
    from tamis.attention.layer_inputs import watching
    from tamis.model.rope import Rotary

    first = len(tokens) - steps
    if steps <= 2 * WARM or first // rule.block < rule.top:
        raise InvalidInput(
            f"{len(tokens)} tokens, {steps} of them steps, blocks of {rule.block}, top {rule.top}; give more than "
            f"{2 * WARM} steps and {rule.top * rule.block + steps} tokens or more, or a smaller top."
        )
    switch, uninstall = install(loaded.model)
    positions = torch.arange(first, len(tokens), device=loaded.device)
    try:
        with watching(loaded.model, residual=False) as seen, torch.inference_mode():
            plain: dict[str, PooledChoice] = {"own": OwnChoice(rule)}
            if forecast is not None:
                plain["forecast"] = ForecastChoice(rule, forecast, seen, Rotary.of(loaded.model))
            choosers: dict[str, Chooser] = dict(plain)
            if stick:
                sticky = replace(rule, stick=stick)
                choosers |= {f"{name}{STICK}": _Sticking(choice, sticky) for name, choice in plain.items()}
            job = _Choices(choosers, positions)
            with switch.running(job, len(tokens)):
                loaded.model(torch.tensor([tokens], device=loaded.device), use_cache=False, logits_to_keep=1)
    finally:
        uninstall()
    at = positions.cpu()
    own = job.found["own"]
    made = []
    for name, choices in job.found.items():
        kept, misses = _kept(choices, at, rule), {f"{n:g}": _misses(choices, at, rule, n) for n in SLOTS}
        right = [recall(a, b, at, rule).mean() for a, b in zip(choices[1:], own[1:], strict=True)]
        share = float(torch.stack(right).mean())
        by = replace(rule, stick=stick) if name.endswith(STICK) else rule
        made.append(Locality(loaded.name, data, name, len(tokens), steps, by, kept, misses, share))
    return made


def _kept(choices: list[torch.Tensor], at: torch.Tensor, rule: BlockRule) -> tuple[float, ...]:
    """Quantiles over layers, heads and steps."""
    shares = []
    for chosen in choices:
        free = chosen & ~forced_blocks(at, rule, chosen.shape[-1])
        both = (free[:, 1:] & free[:, :-1]).sum(-1) / free[:, 1:].sum(-1).clamp(min=1)
        shares.append(both.flatten())
    values = torch.quantile(torch.cat(shares).double(), torch.linspace(0, 1, POINTS, dtype=torch.float64))
    return tuple(round(float(v), 4) for v in values)


def _misses(choices: list[torch.Tensor], at: torch.Tensor, rule: BlockRule, slots: float) -> float:
    width = max(1, rule.top - 1)
    missed = asked = 0
    for chosen in choices:
        own = torch.arange(chosen.shape[-1]) == (at // rule.block)[:, None]
        wanted = block_numbers(chosen & ~own, width)
        slot_map = SlotMap(chosen.shape[0], math.ceil(slots * width))
        for step in range(wanted.shape[1]):
            moves = slot_map.place(wanted[:, step])
            if step >= WARM:
                missed += int(moves.missing.sum())
                asked += int((wanted[:, step] >= 0).sum())
    return round(missed / asked, 5)


def save(found: list[Locality], path: str, *, how: str) -> None:
    """Write as JSON, by a temporary file, so that a crash leaves the old one."""
    text = json.dumps({"how": how, "recorded": [asdict(one) for one in found]}, indent=1)
    write_whole(Path(path), text + "\n")


def load(path: str, provider: str = "own") -> Locality:
    """What `save` wrote of one provider. Raises NothingFound where it is not there."""
    return _of(_recorded(path), provider, path)


def load_all(path: str) -> dict[str, Locality]:
    """By what chooses, "own" and "forecast": the latter as the former where a file has no forecast. With "-stick"
    behind them where the file has that."""
    found = _recorded(path)
    own = _of(found, "own", path)
    names = ("own", "forecast", f"own{STICK}", f"forecast{STICK}")
    return {"forecast": own} | {name: found[name] for name in names if name in found}


def _recorded(path: str) -> dict[str, Locality]:
    if not Path(path).is_file():
        raise NothingFound(f"{path} is not there; `tamis bench record-locality` makes one.")
    recorded = json.loads(Path(path).read_text(encoding="utf-8"))["recorded"]
    return {
        one["provider"]: Locality(**{**one, "kept": tuple(one["kept"]), "rule": BlockRule(**one["rule"])})
        for one in recorded
    }


def _of(found: dict[str, Locality], provider: str, path: str) -> Locality:
    if provider not in found:
        raise NothingFound(f"{path} has nothing of {provider!r}; record it with a forecast.")
    return found[provider]


def replay(
    locality: Locality, rule: BlockRule, rows: int, positions: list[int], n_blocks: int, *, slots: int,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """Blocks wanted at each of some steps, int32 [steps, rows, W], ascending, -1 behind the last, the own one left out.

    Forced blocks are the rule's. Of the others each row keeps a share drawn from the recorded distribution; of those
    new to the step as many as recorded lie among the `slots` blocks that it wanted last, if the pool has more than it
    reads, the rest lies elsewhere. Layers, heads and requests are drawn alike, and independently up to DISTINCT rows.
    """
    draw = torch.Generator(device=device).manual_seed(0)
    every, rows = rows, min(rows, DISTINCT)
    width = max(1, rule.top - 1)
    quantiles = torch.tensor(locality.kept, device=device)
    comes_back = locality.returns(slots / width)
    last = torch.full((rows, n_blocks), -1, dtype=torch.int32, device=device)  # step at which a block was wanted
    made = []
    for step, position in enumerate(positions):
        forced = forced_blocks(torch.tensor([position], device=device), rule, n_blocks)[0]
        own = position // rule.block
        free = ~forced & (torch.arange(n_blocks, device=device) < own)
        n_free = min(rule.chosen, int(free.sum()))
        at = torch.rand(rows, generator=draw, device=device) * (len(quantiles) - 1)
        low = at.long().clamp(max=len(quantiles) - 2)
        share = quantiles[low] + (quantiles[low + 1] - quantiles[low]) * (at - low)
        keep = (share * n_free + torch.rand(rows, generator=draw, device=device)).floor().clamp(max=n_free)
        back = ((n_free - keep) * comes_back + torch.rand(rows, generator=draw, device=device)).floor()
        before = (last == step - 1) & (last >= 0) & free
        held = (_rank(last.float()) < slots) & (last >= 0) & (last < step - 1) & free
        chance = torch.rand(rows, n_blocks, generator=draw, device=device)
        # what was kept comes first, then what comes back, then the rest; what is left of a kind comes last of all
        order = torch.where(free, 3 + chance, 9.0)
        for kind, count, place in ((before, keep, 0), (held, back, 1)):
            first = kind & (_rank(torch.where(kind, chance + 1, 0.0)) < count[:, None])
            order = torch.where(kind, torch.where(first, place + chance, 6 + chance), order)
        chosen = (_rank(-order) < n_free) & free | (forced & (torch.arange(n_blocks, device=device) != own))
        last = torch.where(chosen, step, last)
        made.append(block_numbers(chosen[:, None], width)[:, 0])
    lists = torch.stack(made)
    return lists.repeat(1, -(-every // rows), 1)[:, :every].contiguous()


def _rank(values: torch.Tensor) -> torch.Tensor:
    """Place of each value of a row, 0 for the largest; of equal ones the first comes first."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(values.shape[-1], device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)
