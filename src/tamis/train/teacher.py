"""The answers that are forced in training: the ones a question set gives, or what the model itself says."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from tamis.core.errors import InvalidInput
from tamis.core.files import write_whole
from tamis.engine.sampling import TextStream, stop_tokens
from tamis.model.source import LoadedModel
from tamis.train.layouts import Layouts

FILE = "teacher_answers.json"
MOST_TOKENS = 24
SAVE_EVERY = 20


class Answers:
    """One answer for each draw. The model's own is made once per question, with documents of its own draw, and kept.

    kind: "gold", "teacher" or "both". The file in `folder` lets a resumed run force the same texts.
    """

    def __init__(self, loaded: LoadedModel, folder: Path, kind: str) -> None:
        self.kind, self.path = kind, folder / FILE
        self._loaded = loaded
        self._stop = sorted(stop_tokens(loaded.model, loaded.tokenizer))
        self._made: dict[str, str] = {}
        if kind != "gold" and self.path.exists():
            try:
                self._made = dict(json.loads(self.path.read_text(encoding="utf-8")))
            except ValueError as e:
                raise InvalidInput(f"{self.path} is not JSON ({e}). Remove it; the answers are made again.") from e

    def draw(self, layouts: Layouts, number: int, chance: random.Random) -> str:
        """The answer to force for example `number`. Call it while the adapter is off."""
        example = layouts.examples[number]
        gold = chance.choice(example.answers)
        if self.kind == "gold" or (self.kind == "both" and chance.random() < 0.5):
            return gold
        if example.question not in self._made:
            self._made[example.question] = self._greedy(layouts, number) or gold
            if len(self._made) % SAVE_EVERY == 1:
                write_whole(self.path, json.dumps(self._made))
        return self._made[example.question]

    def _greedy(self, layouts: Layouts, number: int) -> str:
        """The first line of the model's answer, reading in full."""
        prompt = layouts.make(number, random.Random(f"teacher:{number}"), "").prompt
        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        ids = torch.tensor([prompt.tokens], device=self._loaded.device)
        training = model.training
        model.eval()
        with torch.no_grad():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MOST_TOKENS,
                do_sample=False,
                eos_token_id=self._stop or None,
                pad_token_id=self._stop[0] if self._stop else 0,
            )
        model.train(training)
        stream = TextStream(tokenizer, ("\n",))
        for token in made[0, ids.shape[1] :].tolist():
            if token in self._stop or stream.stopped:
                break
            stream.push(token)
        stream.finish()
        return stream.text
