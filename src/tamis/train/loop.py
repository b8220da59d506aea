"""The loop of optimiser steps: in time, saved on the way, and going on where a killed run stood."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tamis.core.errors import Diverged
from tamis.core.log import logger
from tamis.train.state import State

SAVE_S = 60.0  # seconds after which the state is saved, whatever the step
SAVING_S = 5.0  # kept free for writing what was learnt
CAUTION = 1.3  # the last check may take so much longer than the first
MOST_SKIPPED = 5  # steps in a row without a finite gradient after which a run is given up
Note = Callable[[int, int, str], None]
log = logger("train")


class Rates(Protocol):
    """How many steps a run has, how often it is saved, and its learning rate."""

    @property
    def steps(self) -> int: ...
    @property
    def save_every(self) -> int: ...
    def rate(self, done: float) -> float: ...


class Learner(Protocol):
    """What is trained."""

    @property
    def settings(self) -> Rates: ...
    def step(self, state: State, lr: float) -> None:
        """One optimiser step; counts it in `state` and appends its point."""

    def save(self, state: State) -> None:
        """Keep where the run stands."""


def take_step(optimiser: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter], clip: float) -> bool:
    """Clip the gradients' norm and step. False, and nothing is changed, where a gradient is not finite: one bad batch
    must not turn every parameter into NaN."""
    finite = bool(torch.isfinite(torch.nn.utils.clip_grad_norm_(parameters, clip)))
    if finite:
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return finite


def _check_goes_on(state: State, steps: int) -> None:
    last = state.history[-1:]
    if last and last[0].skipped:
        log.warning("step %d had no finite gradient (loss %g) and was left out.", last[0].step, last[0].loss)
    recent = state.history[-MOST_SKIPPED:]
    # a run of fewer steps, all of them left out, has learnt nothing either
    if (len(recent) == MOST_SKIPPED or state.step == steps) and all(point.skipped for point in recent):
        raise Diverged(
            f"{len(recent)} steps in a row, up to step {state.step}, had no finite gradient; what was learnt before "
            "them is kept. Lower --lr, give --dtype float32, or fewer --tokens, and another --out."
        )


def make_steps(learner: Learner, state: State, *, end: float | None, check_s: float, note: Note) -> bool:
    """Optimiser steps until all are made (False) or the next would end too late (True).

    end: when everything must be over, in `time.monotonic()`; check_s: what the check after the last step takes.
    Raises Diverged after `MOST_SKIPPED` steps in a row without a finite gradient, or where not one of fewer had one.
    """
    s, before_s = learner.settings, state.elapsed_s
    begin = saved = time.monotonic()
    longest = 0.0
    try:
        while state.step < s.steps:
            now = time.monotonic()
            if end is not None and now + longest + CAUTION * check_s + SAVING_S > end:
                return True
            spent = 0.0 if end is None else (before_s + now - begin) / (before_s + end - begin)
            learner.step(state, s.rate(max(state.step / s.steps, spent)))
            _check_goes_on(state, s.steps)
            longest = max(longest, time.monotonic() - now)
            state.elapsed_s = before_s + time.monotonic() - begin
            if state.step % s.save_every == 0 or time.monotonic() - saved > SAVE_S:
                learner.save(state)
                saved = time.monotonic()
            note(state.step, s.steps, f"KL {state.history[-1].kl:.3f}")
        return False
    finally:
        if state.step and (not state.history or state.history[-1].step == state.step):
            learner.save(state)
