"""Many selector variants on the same long prompts: one dense pass each, then every variant against it.

No answers are generated. Every result is a line of a log before the next begins, so a killed run goes on where it was.
Recall is the share of the dense pass's own attention that lies in the chosen tiles: one yardstick for all variants.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tamis.attention.policy import Policy
from tamis.core.errors import InvalidInput, StoreDamaged
from tamis.core.log import logger
from tamis.eval.demand import demand
from tamis.eval.metrics import Interval, bootstrap
from tamis.eval.questions import Question
from tamis.eval.tasks import document_tokens, filled
from tamis.eval.variants import Variant
from tamis.kernels import dispatch
from tamis.kernels.lists import TileLists, lists_from_mask, tile_areas
from tamis.select import on_device
from tamis.select.calibrate import Curves, calibrate
from tamis.select.oracle import true_mass
from tamis.select.rules import PerHead, Share
from tamis.select.scene import DocumentBits, Scene
from tamis.select.variants import RowSampled, mean_correction

if TYPE_CHECKING:
    from tamis.engine.llm import LLM
    from tamis.prompt.segments import Prompt

METRICS = ("density", "recall", "kl", "kl_rows", "agreement", "demand", "demand_keys")
log = logger("eval")
QUESTION_ROWS = 64  # last rows whose distributions are compared, at most
Note = Callable[[int, int], None]


@dataclass
class DensePass:
    """Dense attention that keeps the true mass of every tile, and an estimate of it where an estimator is given."""

    scene: Scene
    estimator: RowSampled | None = None
    truth: list[torch.Tensor] = field(default_factory=list)
    estimates: list[torch.Tensor] = field(default_factory=list)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `attention.hook.Job.attend`."""
        assert layer == len(self.truth), "layers run in order"
        out, lse = dispatch.causal_attention(q, k, v, scale)
        self.truth.append(true_mass(q, k, scale, self.scene, lse))
        if self.estimator is not None:
            self.estimates.append(self.estimator.estimate(q, k, scale, self.scene))
        return out, lse


@dataclass
class VariantPass:
    """Sparse attention by one variant that keeps the chosen tiles and how much of `truth` lies in them."""

    scene: Scene
    variant: Variant
    truth: Sequence[torch.Tensor]
    masks: list[torch.Tensor] = field(default_factory=list)
    areas: list[float] = field(default_factory=list)
    heads: list[torch.Tensor] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    _device: on_device.DeviceScene | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        # once a pass, not at every layer: a copy to the device is waited for
        tiling, device = self.scene.tiling, self.scene.document.device
        self._rows = torch.tensor(tiling.lengths, dtype=torch.float32, device=device)
        self._areas = tile_areas(tiling, tiling).to(device)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `attention.hook.Job.attend`."""
        assert layer == len(self.masks), "layers run in order"
        scene = self.scene
        mask, mass, lists = self._chosen(layer, q, k, scale)
        out, lse = dispatch.block_sparse_attention(q, k, v, lists, scale)
        if self.variant.corrected:
            assert mass is not None, "parse_variant checked it"
            out = mean_correction(out, mass / mass.sum(-1, keepdim=True), mask, v, scene)
        self.kept.append(((self.truth[layer] * mask).sum(-1) @ self._rows).mean() / self._rows.sum())
        self.masks.append(mask.clone())
        self.areas.append(lists.density)
        self.heads.append((mask * self._areas).sum((1, 2)) / self._areas.sum())
        return out, lse

    def _chosen(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor | None, TileLists]:
        """The mask, the estimate behind it where it is needed, and the lists; by the kernels that serve use, if any."""
        scene, selector = self.scene, self.variant.selector
        if q.is_cuda and not self.variant.corrected and on_device.why_not(selector, q, scene) is None:
            if self._device is None:
                self._device = on_device.DeviceScene.of(scene)
            lists = self._device.lists(selector, layer, q, k, scale)
            return on_device.mask_of(lists, scene), None, lists
        mass = None
        if isinstance(selector, RowSampled):
            mask, mass = selector.select_with_mass(layer, q, k, scale, scene)
        else:
            mask = selector.select(layer, q, k, scale, scene)
        return mask, mass, lists_from_mask(mask, scene.tiling, scene.tiling)


@dataclass(frozen=True)
class Study:
    """What is run. tokens: prompt length to fill with passages of other questions, None: the question's own passages.

    log         JSON-lines file, one result a line; results that stand there are not made again. None: keep nothing
    deadline_s  no variant is begun that would, by the longest one so far, end after that many seconds
    limit       only the first so many questions are asked; the others' passages still fill the prompts
    """

    case: str
    tokens: int | None = None
    log: Path | None = None
    deadline_s: float | None = None
    limit: int | None = None


def research(
    llm: LLM,
    questions: Sequence[Question],
    variants: Sequence[Variant],
    study: Study,
    note: Note = lambda done, total: None,
) -> list[dict[str, Any]]:
    """One result per question asked and variant, in the log's order, earlier runs' among them.

    A result has case, question, variant, tokens, documents, seconds, layers (density of each), heads (of each head of
    each layer) and `METRICS`: density,
    recall, agreement (1 or 0, of the first answer token) and the demand shares of 0..1; kl (first answer token) and
    kl_rows (mean over the question's last rows) in nats. Raises ContextOverflow if a prompt does not fit the model.
    """
    begin, longest = time.monotonic(), 0.0
    asked = questions[: study.limit]
    wanted = {question.id for question in asked}
    made_on = {"dtype": llm.dtype, "device": next(llm.runner.model.parameters()).device.type}
    results = [r for r in _read_log(study, made_on) if r["question"] in wanted]
    have = {(r["question"], r["variant"]) for r in results}
    total = len(asked) * len(variants)
    for i, question in enumerate(asked):
        todo = [v for v in variants if (question.id, v.spec) not in have]
        bench = None
        for n, variant in enumerate(todo):
            now = time.monotonic()
            note(i * len(variants) + len(variants) - len(todo) + n, total)
            if study.deadline_s is not None and now - begin + longest > study.deadline_s:
                return results
            if bench is None:
                bench = Bench.of(llm, long_prompt(llm, questions, i, study.tokens))
            result = {"case": study.case, "question": question.id, **made_on, **bench.run(variant)}
            longest = max(longest, time.monotonic() - now)
            results.append(result)
            _append_log(study, result)
    note(total, total)
    return results


@dataclass
class Bench:
    """One prompt with its dense pass."""

    llm: LLM
    prompt: Prompt
    dense: DensePass
    logits: torch.Tensor
    scenes: dict[tuple[tuple[str, Any], ...], Scene]

    @classmethod
    def of(cls, llm: LLM, prompt: Prompt, estimator: RowSampled | None = None) -> Bench:
        """Run the prompt dense."""
        llm.runner.check_fits(len(prompt.tokens))
        bare = scene_of(llm, prompt, None)
        dense = DensePass(bare, estimator)
        return cls(llm, prompt, dense, _logits(llm, prompt, dense), {})

    def run(self, variant: Variant) -> dict[str, Any]:
        """Run the prompt with one variant; a result without case and question."""
        scene = self.dense.scene
        if variant.selector.needs_records:
            key = tuple(sorted(variant.bits.items()))
            if key not in self.scenes:
                self.scenes[key] = scene_of(self.llm, self.prompt, variant.bits)
            scene = self.scenes[key]
        begin = time.perf_counter()
        job = VariantPass(scene, variant, self.dense.truth)
        logits = _logits(self.llm, self.prompt, job)
        kl = kl_rows(self.logits, logits)
        agreement = float(self.logits[-1].argmax() == logits[-1].argmax())
        pages = demand(job.masks, scene)
        return {
            "variant": variant.spec,
            "tokens": len(self.prompt.tokens),
            "documents": len(self.prompt.documents),
            "seconds": round(time.perf_counter() - begin, 3),
            "density": sum(job.areas) / len(job.areas),
            "recall": float(torch.stack(job.kept).mean()),
            "kl": float(kl[-1]),
            "kl_rows": float(kl.mean()),
            "agreement": agreement,
            "demand": sum(full for full, _ in pages) / len(pages),
            "demand_keys": sum(keys for _, keys in pages) / len(pages),
            "layers": [round(a, 5) for a in job.areas],
            "heads": [[round(d, 5) for d in layer] for layer in torch.stack(job.heads).tolist()],
        }


def calibrate_on(
    llm: LLM, questions: Sequence[Question], density: float, *, tokens: int | None = None, rows: int = 8,
    limit: int | None = None, note: Note = lambda done, total: None,
) -> PerHead:  # fmt: skip
    """Shares per (layer, head) for `density`, from dense passes of the first `limit` questions (a few are enough).

    rows  sampled rows per tile that the shares will be used with. Raises InvalidInput if the density is out of reach.
    """
    curves, n = Curves(), len(questions[:limit])
    for i in range(n):
        note(i, n)
        bench = Bench.of(llm, long_prompt(llm, questions, i, tokens), RowSampled(Share(), rows=rows))
        scene = scene_of(llm, bench.prompt, {})
        curves.add(scene, bench.dense.estimates, bench.dense.truth)
    note(n, n)
    return calibrate(curves, density)


def summarise(results: Iterable[dict[str, Any]]) -> dict[str, dict[str, Interval]]:
    """{variant: {metric: mean with its 95 % bootstrap interval}}, variants in the order of their first result."""
    values: dict[str, dict[str, list[float]]] = {}
    for result in results:
        own = values.setdefault(result["variant"], {m: [] for m in METRICS})
        for metric in METRICS:
            own[metric].append(float(result[metric]))
    return {spec: {m: bootstrap(v) for m, v in own.items()} for spec, own in values.items()}


def long_prompt(llm: LLM, questions: Sequence[Question], index: int, tokens: int | None) -> Prompt:
    """The prompt of one question with its own passages, or with those of `tasks.filled` up to `tokens` in all."""
    question = questions[index]
    docs = question.docs if tokens is None else filled(llm.template, questions, index, tokens)
    return llm.template.prompt(question.question, document_tokens(llm.template, docs))


def kl_rows(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """float64 [R]: KL divergence in nats of each row of logits [R, V] from the reference's."""
    log_p, log_q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    share = log_p.exp()
    return (share * (log_p - log_q)).masked_fill(share == 0, 0.0).sum(-1).clamp(min=0)  # 0 log 0 is 0


def scene_of(llm: LLM, prompt: Prompt, bits: dict[str, Any] | None) -> Scene:
    """The prompt's tiles; unless `bits` is None with stored bits, made with those thresholds and the policy's rest."""
    device = next(llm.runner.model.parameters()).device
    documents = [d.tokens for d in prompt.documents]
    found: list[DocumentBits | None] = [None] * len(documents)
    if bits is not None:
        indexer = llm._indexer(Policy.of(llm.policy, **bits))
        indexer.index(documents)
        found = [r.bits() if r is not None else None for r in indexer.records(documents)]
    return Scene.of(prompt, found, llm.policy.tile, device)


def _logits(llm: LLM, prompt: Prompt, job: DensePass | VariantPass) -> torch.Tensor:
    """[R, V]: logits of the question's last rows. The whole prompt goes through `job`, or it is an error."""
    keep = min(QUESTION_ROWS, len(prompt.segments[-1].tokens))
    model, n = llm.runner.model, len(prompt.tokens)
    ids = torch.tensor([prompt.tokens], device=next(model.parameters()).device)
    with torch.inference_mode(), llm.runner.switch.running(job, n):
        logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=keep).logits[0]
    done = job.truth if isinstance(job, DensePass) else job.masks
    if len(done) != llm.runner.geometry.n_layers:
        raise InvalidInput(f"{len(done)} of {llm.runner.geometry.n_layers} layers ran: {llm.runner.switch.refused}.")
    return logits


def _read_log(study: Study, made_on: dict[str, str]) -> list[dict[str, Any]]:
    """The results of this case, made in this dtype on this kind of device; others count as missing, and are logged.

    A line that a kill cut short is taken off the file.
    """
    if study.log is None or not study.log.exists():
        return []
    text = study.log.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        with study.log.open("r+b") as file:
            file.truncate(len(whole))
    found = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            result = json.loads(line)
            wanted = result["case"] == study.case
            missing = [m for m in ("question", "variant", *METRICS) if m not in result]
        except (ValueError, KeyError, TypeError) as e:
            raise StoreDamaged(f"{study.log}, line {number} is no result: {e}. Move the file away.") from e
        if missing:
            raise StoreDamaged(f"{study.log}, line {number} lacks {', '.join(missing)}. Move the file away.")
        found += [result] if wanted else []
    same = [r for r in found if all(r.get(name) == value for name, value in made_on.items())]
    if len(same) < len(found):
        log.warning(
            "%d results of %s in %s are not of %s and are made again.",
            len(found) - len(same), study.case, study.log, " on ".join(made_on.values()),
        )  # fmt: skip
    return same


def _append_log(study: Study, result: dict[str, Any]) -> None:
    if study.log is None:
        return
    study.log.parent.mkdir(parents=True, exist_ok=True)
    with study.log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
        file.flush()
        os.fsync(file.fileno())
