"""One prompt, prefilled once with exact attention, and continued by several ways of attending at the same time.

All budgets of all methods are rows of one forward pass, so that a step costs one pass of the model. Knows tokens and
logits, not text. The model's attention must be Tamis's (`attention.hook.install`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tamis.attention.hook import Job, Switch, attention_layers, packed_pass
from tamis.eval.decoders.base import LayerPrompt, LayerState, Method
from tamis.model.rope import Rotary, rotary_module


class Session:
    """`tokens` in the model, ready to be continued from by `methods`, any number of times (`begin`).

    model, switch  a model whose attention has that switch; nobody else may use it meanwhile
    """

    def __init__(self, model: Any, switch: Switch, tokens: Sequence[int], methods: Sequence[Method]) -> None:
        self.model, self.switch, self.methods = model, switch, list(methods)
        self.n_prompt = len(tokens)
        self.rows = sum(len(m.budgets) for m in methods)
        self.device = next(model.parameters()).device
        layers = attention_layers(model)
        job = Prefill(self.methods, Rotary.of(model), layers)
        ids = torch.tensor([list(tokens)], device=self.device)
        with _calls(model, layers, job) if any(m.wants_module for m in methods) else _nothing():
            self._pass(job, ids, None, keep=1)
        self._prompt = job.states
        self.begin()

    def begin(self) -> None:
        """Go back to the end of the prompt."""
        self.n_tokens = self.n_prompt
        self._states = [[state.branch() for state in layer] for layer in self._prompt]

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Continue each row by its own R tokens: ids int64 [rows, R] on the model's device → logits [rows, R, V].

        Every token attends for itself, as if it were alone; what a method compresses or forgets, it does before them.
        """
        rows, n = ids.shape
        at = torch.arange(self.n_tokens, self.n_tokens + n, device=self.device).repeat(rows)
        logits = self._pass(Step(self._states, rows), ids.reshape(1, -1), at[None], keep=0)
        self.n_tokens += n
        return logits.view(rows, n, -1)

    def _pass(self, job: Job, ids: torch.Tensor, positions: torch.Tensor | None, *, keep: int) -> torch.Tensor:
        n, before = ids.shape[1], sum(self.switch.refused.values())
        with torch.inference_mode(), self.switch.running(job, n), packed_pass(n):
            options = {} if positions is None else {"position_ids": positions}
            logits: torch.Tensor = self.model(ids, use_cache=False, logits_to_keep=keep, **options).logits[0]
        assert sum(self.switch.refused.values()) == before, f"layers did not reach the job: {self.switch.refused}"
        return logits


@dataclass
class Prefill:
    """The pass over the prompt: exact attention, and each method takes what it holds of a layer."""

    methods: list[Method]
    rotary: Rotary
    layers: Sequence[Any]
    call: dict[str, Any] | None = None
    states: list[list[LayerState]] = field(default_factory=list)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `attention.hook.Job`."""
        of = LayerPrompt(layer, len(self.layers), q, k, v, scale, self.rotary, self.layers[layer], self.call)
        self.states.append([m.prefill(of) for m in self.methods])
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0], None


@dataclass
class Step:
    """A pass over `rows` rows of as many new tokens each, row after row. states: of each layer and method."""

    states: list[list[LayerState]]
    rows: int

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `attention.hook.Job`: q [Hq, rows * R, D], and k and v of these tokens alone."""
        by_row = [torch.unflatten(t, 1, (self.rows, -1)).transpose(0, 1) for t in (q, k, v)]
        out, begin = [], 0
        for state in self.states[layer]:
            end = begin + state.batch
            out.append(state.attend(*(t[begin:end] for t in by_row)))
            begin = end
        return torch.cat(out).transpose(0, 1).flatten(1, 2).to(q.dtype), None


@contextmanager
def _calls(model: Any, layers: Sequence[Any], job: Prefill) -> Iterator[None]:
    """Inside, the job knows what each attention module was called with when its layer comes.

    Modules have the model's rotary module as `rotary_emb`, where they had it in earlier versions of transformers.
    """

    def hook_of(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        job.call = kwargs | ({"hidden_states": args[0]} if args else {})

    hook: Callable[..., None] = hook_of
    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    lent = [layer for layer in layers if not hasattr(layer, "rotary_emb")]
    for layer in lent:
        layer.rotary_emb = rotary_module(model)
    try:
        yield
    finally:
        for layer in lent:
            del layer.rotary_emb
        for handle in handles:
            handle.remove()


@contextmanager
def _nothing() -> Iterator[None]:
    yield
