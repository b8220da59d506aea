"""Decode steps of a tiny model over blocks by Triton's interpreter, compared with those of plain PyTorch: JSON, one
line a case.

A program of its own, run with TRITON_INTERPRET=1: that must be set before Triton is first imported.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from typing import Any

import torch
from test_block_decode import RULE, forecast_of

from tamis.attention.block_choices import FusedChoice
from tamis.attention.block_decode import BlockDecoding, BlockState, Steps
from tamis.attention.block_prefill import OwnChoice
from tamis.attention.fused import FusedForecast
from tamis.attention.hook import install
from tamis.cache import block_layer
from tamis.cache.block_layer import BlockForm
from tamis.cache.formats import cache_argument, new_cache
from tamis.cache.offload import LayerBlocks
from tamis.cache.streams import Queues, Stream, run_all

FIRST, SECOND = 155, 24  # tokens of a prompt, and of the next one
TURN = 8  # steps behind each, in which a block ends


def tiny(layers: int = 3, heads: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    """A Llama of random weights whose attention is far from uniform."""
    import transformers as hf

    torch.manual_seed(1)
    config = hf.LlamaConfig(
        vocab_size=512, hidden_size=heads * 16, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.mul_(6)
    return model.eval()


class Talk:
    """Two turns over one cache: prompt, steps, prompt, steps. `logits` of all steps; `kernel` and report of the end."""

    def __init__(
        self, model: Any, who: str, *, batch: int = 1, host: bool = True, slots: int | None = None,
        how: dict[str, Any] | None = None, seed: int | None = None, stick: float = 0.0,
    ) -> None:  # fmt: skip
        rule = replace(RULE, stick=stick, recent=2)
        group = model.config.num_attention_heads // model.config.num_key_value_heads
        self.model, self.steps = model, Steps(group=group, **(how or {}))
        switch, uninstall = install(model)
        fused = FusedForecast(model, forecast_of(model, RULE)) if who == "forecast" else None
        choose = OwnChoice(rule) if fused is None else FusedChoice(rule, fused)
        self.cache = new_cache("blocks", model.config, BlockForm(rule, host=host, slots=slots))
        state, made = BlockState(), []
        if seed is not None:
            streams, chance = [Stream(name) for name in ("compute", "copy", "choose")], random.Random(seed)
            state.queues = Queues(streams[0], streams[1], lambda: run_all(streams, chance), streams[2])
        draw = torch.Generator().manual_seed(0)
        try:
            with torch.inference_mode():
                for n in (FIRST, SECOND):
                    self.decoding = BlockDecoding(self.cache, choose, how=self.steps, state=state)
                    with self.decoding.running(switch, step=False):
                        self._pass(torch.randint(0, 512, (batch, n), generator=draw).to(model.device))
                    for _ in range(TURN):
                        with self.decoding.running(switch, step=True):
                            made.append(self._pass(torch.randint(0, 512, (batch, 1), generator=draw).to(model.device)))
        finally:
            if fused is not None:
                fused.close()
            uninstall()
        self.logits = torch.stack(made)
        self.report = self.decoding.report()

    def _pass(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.model(ids, **{cache_argument(self.model): self.cache}, logits_to_keep=1).logits
        return made[:, -1]

    def moved(self) -> tuple[int, ...]:
        """Blocks copied and asked of each layer."""
        layers = [layer.blocks for layer in self.cache.layers if isinstance(layer.blocks, LayerBlocks)]
        return tuple(n for blocks in layers for n in (blocks.copied, blocks.asked))


WAYS: dict[str, dict[str, Any]] = {
    "resident": {"host": False},
    "evicted at every step, in any order": {"seed": 1, "how": {"forget": True}},
    "copied late, into many slots": {"slots": 9, "how": {"prefetch": False}},
}


def compared(model: Any, who: str, ways: tuple[str, ...] = tuple(WAYS), **given: Any) -> dict[str, Any]:
    """Kernels against PyTorch, and from the host in every way, which must be the same to the last bit."""
    plain = Talk(model, who, how={"kernels": False, "measure": True}, **given)
    kept = Talk(model, who, how={"measure": True}, **given)
    moved = [(sum(talk.moved()[::2]), sum(talk.moved()[1::2])) for talk in (kept, plain)]
    found: dict[str, Any] = {
        "error": float((kept.logits - plain.logits).norm() / plain.logits.norm()),
        "kernels": [kept.report.kernel, plain.report.kernel],
        "copied": [moved[0][0], moved[1][0]],
        "asked": [moved[0][1], moved[1][1]],
        "attended": [kept.report.attended, plain.report.attended],
        "recall": [talk.report.blocks.recall if talk.report.blocks else None for talk in (kept, plain)],
    }
    for name in ways:
        other = Talk(model, who, **given | WAYS[name])
        found[name] = bool(torch.equal(other.logits, kept.logits))
        if "evicted" in name:
            copied, asked = other.moved()[:2]
            found["all copied"] = copied == asked
    return found


def main() -> None:
    """All cases, then a step that forgets a copy."""
    from interpreted import fix_interpreter  # in the folder of the kernels' tests

    fix_interpreter()
    from tamis.kernels.triton import blocks, blocks_score, offload_attend

    torch.set_num_threads(1)
    block_layer.ROOM = 5  # so that memory grows in the middle of a turn
    blocks_score.SPLITS, offload_attend.PROGRAMS = 2, 4  # fewer programs, one after the other here

    def say(name: str, found: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps({"case": name, **found}) + "\n")
        sys.stdout.flush()

    say("own", compared(tiny(2), "own"))
    say("forecast", compared(tiny(), "forecast"))
    say("sticking", compared(tiny(2), "forecast", tuple(WAYS)[:2], stick=0.5))
    say("batch of 2, group of 3", compared(tiny(2, heads=6), "forecast", ("resident",), batch=2))
    right, fetch = Talk(tiny(2), "forecast").logits, blocks.fetch
    blocks.fetch = lambda pool: fetch(pool) if int(pool.count) != 1 else None
    say("a copy is left out", {"error": float((Talk(tiny(2), "forecast").logits - right).norm() / right.norm())})


if __name__ == "__main__":
    sys.exit(main())
