"""How far a student that reads documents encoded alone is from its teacher, the same model reading them in full."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from tamis.train.layouts import Layout

# Added to the scores of keys that a row does not see. Not -inf: a kernel meets whole blocks of such keys before the
# first one that a row does see, and -inf minus -inf is no number. Nor the dtype's least: kernels multiply it by log2(e)
# in float32, where bfloat16's least becomes -inf again. exp of this is 0, and float16 holds it.
HIDDEN = -30000.0


@dataclass(frozen=True)
class Divergence:
    """Of one layout, in nats: `rows` float32 [n] is KL(teacher || student) of each compared row, the question's first.

    ce       mean cross entropy of the student on the answer's tokens
    agreement whether both would begin the answer with the same token
    """

    rows: torch.Tensor
    question_rows: int
    ce: torch.Tensor
    agreement: bool

    @property
    def answer(self) -> torch.Tensor:
        """Mean over the rows that predict the answer."""
        return self.rows[self.question_rows :].mean()

    @property
    def first(self) -> torch.Tensor:
        """The row that predicts the answer's first token."""
        return self.rows[self.question_rows]

    def loss(self, question_weight: float, ce_weight: float) -> torch.Tensor:
        """What is minimised: the answer's rows, and with their weights the question's rows and the cross entropy."""
        total = self.answer + ce_weight * self.ce
        if self.question_rows and question_weight:
            total = total + question_weight * self.rows[: self.question_rows].mean()
        return total


def teacher_logits(model: Any, layout: Layout, off: AbstractContextManager[Any]) -> torch.Tensor:
    """The model's logits [rows, V] with the adapter `off`, every row seeing all before it. No gradient."""
    device = next(model.parameters()).device
    with torch.no_grad(), off:
        ids = torch.tensor([layout.tokens], device=device)
        logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=layout.rows).logits[0]
    return logits


def student_logits(model: Any, layout: Layout) -> torch.Tensor:
    """The model's logits [rows, V], each document seeing only itself: what `prefill="reuse"` computes."""
    device = next(model.parameters()).device
    ids = torch.tensor([layout.tokens], device=device)
    hidden = torch.zeros((), dtype=model.dtype, device=device).masked_fill(~layout.mask(device), HIDDEN)
    made = model(ids, attention_mask=hidden, use_cache=False, logits_to_keep=layout.rows)
    logits: torch.Tensor = made.logits[0]
    return logits


def compare(teacher: torch.Tensor, student: torch.Tensor, layout: Layout) -> Divergence:
    """Both logits are [rows, V]; computed in float32, differentiable in the student's."""
    truth, guess = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    rows = (truth.exp() * (truth - guess)).sum(-1)
    at = layout.question_rows
    labels = torch.tensor(layout.answer, device=student.device)
    ce = torch.nn.functional.nll_loss(guess[at:], labels)
    return Divergence(rows, at, ce, bool(truth[at].argmax() == guess[at].argmax()))
