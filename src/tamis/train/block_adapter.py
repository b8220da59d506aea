"""A LoRA adapter that teaches a stock model documents encoded alone: distillation from the model reading in full.

The student is the model with the adapter and a block-diagonal mask (Block-Attention, arXiv 2409.15355, trains such
models on answers); the teacher is the same model without the adapter and with full attention. No labels are needed.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from tamis.core.errors import InvalidInput
from tamis.core.log import logger
from tamis.engine.template import Template
from tamis.model.adapter import FILE
from tamis.model.adapter_info import AdapterInfo, base_of, import_peft
from tamis.model.source import LoadedModel
from tamis.train.curve import write_curve
from tamis.train.layouts import Example, Layout, Layouts
from tamis.train.loop import Note, make_steps, take_step
from tamis.train.losses import compare, student_logits, teacher_logits
from tamis.train.settings import TrainSettings
from tamis.train.state import FILE as STATE_FILE
from tamis.train.state import Point, State, load_state, save_state
from tamis.train.teacher import Answers

log = logger("train")


@dataclass(frozen=True)
class TrainingData:
    """Questions to train on, questions to check on, and what the adapter says of them (`AdapterInfo.data`)."""

    examples: Sequence[Example]
    checks: Sequence[Example]
    names: tuple[str, ...]
    holdout: float

    @property
    def digest(self) -> str:
        """32 hex digits of all that is asked, and of how it was split."""
        parts = [[asdict(e) for e in self.examples], [asdict(e) for e in self.checks], self.names, self.holdout]
        return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Trained:
    """What came out: the adapter's description, the loss curve, and whether the time ended before the steps."""

    folder: str
    info: AdapterInfo
    history: tuple[Point, ...] = ()
    out_of_time: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {"out": self.folder, "steps": self.info.steps, "out_of_time": self.out_of_time, **self.info.result}


def train_block_adapter(
    loaded: LoadedModel,
    data: TrainingData,
    settings: TrainSettings,
    out: str | Path,
    *,
    minutes: float | None = None,
    note: Note = lambda done, total, what: None,
) -> Trained:
    """Train, and save the adapter into `out`; the model itself is left as it was.

    A run that was killed goes on from its last saved step when called again with the same arguments; one that has
    finished is returned as it is. minutes: stop in time, with what has been learnt so far. Raises StoreMismatch if
    `out` holds another run, Unavailable without peft.
    """
    peft, folder = import_peft(), Path(out)
    if loaded.model.dtype not in (torch.float32, torch.bfloat16):
        raise InvalidInput(f"the model is {loaded.model.dtype}; load it in bfloat16 or float32 to train an adapter.")
    base = base_of(loaded.model, loaded.tokenizer)
    key = blake2b(json.dumps([base, settings.to_dict(), data.digest]).encode(), digest_size=16).hexdigest()
    if (folder / FILE).exists():
        return _finished(folder, key)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    with ExitStack() as undo:
        run = _Run(loaded, data, settings, folder, peft, undo)
        state = load_state(folder, key, run.named, run.optimiser)
        if not state.before:
            note(0, settings.steps, "held-out questions")
            state.before = run.check()
        out_of_time = run.steps(state, end, note)
        note(state.step, settings.steps, "held-out questions")
        after = run.check()
        result = {"before": state.before, "after": after, "seconds": round(state.elapsed_s, 1)}
        saved = settings.to_dict() | {"key": key}
        info = AdapterInfo("block", base, loaded.name, state.step, data.names, data.holdout, saved, result)
        run.write(state, info)
    return Trained(str(folder), info, tuple(state.history), out_of_time)


def _finished(folder: Path, key: str) -> Trained:
    info = AdapterInfo.read(folder)
    if info.settings.get("key") != key:
        raise InvalidInput(
            f"{folder} holds an adapter that was trained with other settings, questions or another model. "
            "Give another --out, or remove the folder."
        )
    return Trained(str(folder), info)


@dataclass
class _Run:
    """The model with an adapter in it, until `undo` closes."""

    loaded: LoadedModel
    data: TrainingData
    settings: TrainSettings
    folder: Path
    peft: Any
    undo: ExitStack
    named: list[tuple[str, torch.nn.Parameter]] = field(init=False)
    check_s: float = 0.0

    def __post_init__(self) -> None:
        s, model = self.settings, self.loaded.model
        self.layouts = self._layouts(self.data.examples)
        self.checks = self._layouts(self.data.checks) if self.data.checks else None
        self.answers = Answers(self.loaded, self.folder, s.answers)
        frozen = {name: p.requires_grad for name, p in model.named_parameters()}
        gpus = [self.loaded.device] if self.loaded.device.type == "cuda" else []
        with torch.random.fork_rng(gpus):
            torch.manual_seed(s.seed)
            config = self.peft.LoraConfig(
                r=s.rank, lora_alpha=s.alpha, target_modules=list(s.modules), bias="none", task_type="CAUSAL_LM"
            )
            with _old_names():
                self.model = self.peft.get_peft_model(model, config)
        self.undo.callback(_restore, self.model, frozen)
        self.model.peft_config["default"].base_model_name_or_path = self.loaded.name
        if s.checkpointing if s.checkpointing is not None else self.loaded.device.type == "cuda":
            with _old_names():
                self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.undo.callback(_keep_activations, model)
        self.named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW([p for _, p in self.named], lr=s.lr, weight_decay=0.0)

    def steps(self, state: State, end: float | None, note: Note) -> bool:
        """Optimiser steps until all are made (False) or the next would end too late (True). Saves on the way."""
        if end is not None and not self.check_s:  # a run that goes on has not checked yet
            self.check()
        self.model.train()
        try:
            return make_steps(self, state, end=end, check_s=self.check_s, note=note)
        finally:
            self.model.eval()

    def save(self, state: State) -> None:
        """Keep where the run stands."""
        save_state(self.folder, state, self.named, self.optimiser)

    def step(self, state: State, lr: float) -> None:
        """One optimiser step over `accumulate` layouts."""
        s, began = self.settings, time.monotonic()
        losses, kls = [], []
        for micro in range(s.accumulate):
            number, chance = self.layouts.draw(state.step * s.accumulate + micro)
            layout = self._layout(self.layouts, number, chance)
            teacher = teacher_logits(self.model, layout, self.model.disable_adapter())
            with self._mixed():
                student = student_logits(self.model, layout)
            found = compare(teacher, student, layout)
            loss = found.loss(s.question_weight, s.ce)
            (loss / s.accumulate).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            kls.append(found.answer.detach())
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        taken = take_step(self.optimiser, [p for _, p in self.named], s.clip)
        state.step += 1
        mean_loss, mean_kl = (float(torch.stack(values).mean()) for values in (losses, kls))
        state.history.append(Point(state.step, mean_loss, mean_kl, lr, time.monotonic() - began, skipped=not taken))

    def check(self) -> dict[str, float]:
        """KL and agreement on the check questions, always the same layouts: of the first answer token, as evaluation
        measures it, and of all answer rows."""
        if self.checks is None:
            return {"questions": 0.0}
        self.model.eval()
        began = time.monotonic()
        first, rows, agree = [], [], []
        with torch.no_grad():
            for number in range(len(self.checks.examples)):
                layout = self._layout(self.checks, number, random.Random(f"check:{number}"), gold=True)
                teacher = teacher_logits(self.model, layout, self.model.disable_adapter())
                with self._mixed():
                    found = compare(teacher, student_logits(self.model, layout), layout)
                first.append(float(found.first))
                rows.append(float(found.answer))
                agree.append(float(found.agreement))
        self.check_s, n = time.monotonic() - began, len(first)
        return {"kl": sum(first) / n, "kl_answer": sum(rows) / n, "agreement": sum(agree) / n, "questions": float(n)}

    def write(self, state: State, info: AdapterInfo) -> None:
        """The adapter's files, its description last: a folder that has it is whole. The state is no longer needed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=self.folder, prefix=".adapter-"))
        try:
            self.model.save_pretrained(scratch, save_embedding_layers=False)  # else it looks for the base on the hub
            for name in ("adapter_model.safetensors", "adapter_config.json"):
                (scratch / name).replace(self.folder / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        write_curve(self.folder, state.history)
        info.write(self.folder)
        for name in (STATE_FILE, self.answers.path.name):
            (self.folder / name).unlink(missing_ok=True)

    def _layouts(self, examples: Sequence[Example]) -> Layouts:
        s = self.settings
        return Layouts(Template(self.loaded.tokenizer), examples, tokens=s.tokens, documents=s.documents, seed=s.seed)

    def _layout(self, layouts: Layouts, number: int, chance: random.Random, *, gold: bool = False) -> Layout:
        example = layouts.examples[number]
        with self.model.disable_adapter():
            answer = example.answers[0] if gold else self.answers.draw(layouts, number, chance)
        return layouts.make(number, chance, answer)

    def _mixed(self) -> AbstractContextManager[Any]:
        """The adapter's float32 weights compute in the model's own 16-bit type where it has one."""
        dtype = self.loaded.model.dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.loaded.device.type, dtype)


@contextmanager
def _old_names() -> Iterator[None]:
    """transformers 5.24 warns about names that 5.17 has no others for; peft uses them too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _keep_activations(model: Any) -> None:
    with _old_names():
        model.gradient_checkpointing_disable()


def _restore(peft_model: Any, frozen: dict[str, bool]) -> None:
    """Take the adapter out of the model again."""
    model = peft_model.unload()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen[name])
    if hasattr(model, "peft_config"):
        del model.peft_config
    model.eval()
