"""What one timed prefill does in place of a model's attention: dense, or a real selection and lists of known density.

With random weights a selector's own choice means nothing. So it works in full on the model's queries and keys, and
then the attention runs over prepared lists (`bench.densities`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tamis.attention.prefill import SparsePrefill
from tamis.bench.clock import Clock
from tamis.core.errors import InvalidInput
from tamis.index.encode import Bits
from tamis.kernels import dispatch
from tamis.kernels.lists import TILE, TileLists
from tamis.kernels.packed import MOST_KEYS
from tamis.prompt.segments import Kind, Prompt
from tamis.select import on_device
from tamis.select.parse import parse_variant
from tamis.select.rules import Share, Threshold
from tamis.select.sampled import Sampled
from tamis.select.scene import Scene, Selector
from tamis.select.variants import GlobalThreshold, RowSampled

PREFIX_TOKENS, QUESTION_TOKENS, DOCUMENT_TOKENS = 64, 128, 1024
LA_SHARE, CA_SHARE = 0.9, 0.5  # of the random stored bits that are set; only their number matters to the time


@dataclass
class Dense:
    """Dense attention by a function of q [Hq, T, D], k, v [Hkv, T, D] and the scale."""

    run: Callable[..., torch.Tensor]
    clock: Clock

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `Job.attend`."""
        with self.clock.part("attention"):
            return self.run(q, k, v, scale), None


@dataclass(frozen=True)
class Question:
    """A prompt and its documents' random stored bits, from which every prefill makes its own scene."""

    prompt: Prompt
    bits: tuple[Bits, ...]
    device: torch.device

    def scene(self) -> Scene:
        """The prompt's tiles."""
        return Scene.of(self.prompt, self.bits, device=self.device)


class Replay:
    """Selects for real, then attends over the layer's prepared lists. Made anew for every prefill, as in use."""

    def __init__(self, question: Question, selector: Selector, lists: list[TileLists], clock: Clock) -> None:
        self.lists, self.clock = lists, clock
        with clock.part("selection"):
            self.chosen = SparsePrefill(question.scene(), selector)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        """See `Job.attend`."""
        with self.clock.part("selection"):
            self.chosen.lists(layer, q, k, scale)
        with self.clock.part("attention"):
            out = q.new_empty(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)  # as the output product reads it
            lists = self.lists[layer]
            return dispatch.block_sparse_attention(q, k, v, lists, scale, out=out, need_lse=False)[0], None


def selector_of(variant: str) -> tuple[Selector, str]:
    """The selector that a recorded variant names, in the form that has kernels if it has one, and what then differs.

    Raises InvalidInput for a variant that does not exist.
    """
    selector, note = parse_variant(variant).selector, ""
    plain = isinstance(selector, RowSampled) and (selector.spread, selector.reduce) == ("even", "mean")
    if isinstance(selector, RowSampled) and plain and selector.rows and not selector.question:
        rule, local = selector.rule, selector.local
        if isinstance(rule, Share) and not selector.paired:
            note = f"local={local} timed as stored" if local != "stored" else ""
            selector = Sampled(rows=selector.rows, mass=rule.mass)
        elif isinstance(rule, Threshold) and local in ("stored", "sampled"):
            selector = GlobalThreshold(rule.theta, rule.floor, selector.rows, local, rule.power, selector.paired)
    if type(selector) not in on_device.CHOICES:
        note = "selected by PyTorch's operators: there is no kernel for it"
    return selector, note


def bench_prompt(tokens: int, vocabulary: int) -> Prompt:
    """Random tokens: a prefix, documents of 1,024 tokens, a question; exactly `tokens` in all."""
    draw = torch.Generator().manual_seed(0)
    room = tokens - PREFIX_TOKENS - QUESTION_TOKENS
    if room < DOCUMENT_TOKENS:
        least = PREFIX_TOKENS + QUESTION_TOKENS + DOCUMENT_TOKENS
        raise InvalidInput(f"{tokens} tokens are too few: prefix, question and one document take {least:,}.")
    if tokens > MOST_KEYS:
        raise InvalidInput(f"{tokens} tokens are too many: tile lists address at most {MOST_KEYS:,}.")
    lengths = [DOCUMENT_TOKENS] * (room // DOCUMENT_TOKENS) + (
        [room % DOCUMENT_TOKENS] if room % DOCUMENT_TOKENS else []
    )
    ids = torch.randint(0, vocabulary, (tokens,), generator=draw).tolist()
    parts: list[tuple[Kind, list[int]]] = [(Kind.PREFIX, ids[:PREFIX_TOKENS])]
    at = PREFIX_TOKENS
    for n in lengths:
        parts.append((Kind.DOCUMENT, ids[at : at + n]))
        at += n
    return Prompt.of([*parts, (Kind.QUESTION, ids[at:])])


def random_question(prompt: Prompt, layers: int, heads: int, device: torch.device) -> Question:
    """The prompt with random stored bits for a model of so many layers and query heads."""
    draw = torch.Generator().manual_seed(1)
    bits = []
    for document in prompt.documents:
        pages = -(-len(document.tokens) // TILE)
        la = torch.rand(layers, heads, pages, pages, generator=draw) < LA_SHARE
        ca = torch.rand(layers, heads, pages, generator=draw) < CA_SHARE
        bits.append(Bits((la | torch.eye(pages, dtype=torch.bool)).tril(), ca))
    return Question(prompt, tuple(bits), device)
