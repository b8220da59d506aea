"""Rows of self-indexed requests by Triton's interpreter, against each request alone: JSON.

A program of its own, run with TRITON_INTERPRET=1: that must be set before Triton is first imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from interpreted import fix_interpreter
from test_cached_rows import MORE, NONE, SMALL, Scene

from tamis.cache.selfindex import sequence as sequences
from tamis.engine.llm import LLM
from tamis.model.source import LoadedModel
from tiny_chat import tiny_tokenizer


def tiny() -> Any:
    """A Llama of random weights."""
    import transformers as hf

    torch.manual_seed(1)
    config = hf.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.mul_(6)
    return model.eval()


def main() -> None:
    """Two requests with records, one of which settles, one without, and two that choose none and many."""
    fix_interpreter()
    torch.set_num_threads(1)
    sequences.Growth = lambda: SMALL  # type: ignore[assignment, misc]
    with LLM(LoadedModel(tiny(), tiny_tokenizer(), "tiny", "")) as llm:
        here = Scene(llm, together=True, kernel="triton", slots=2048)
        a, b, c = here.member(94), here.member(150, MORE), here.member(30)
        parts = a.cache.layers[0].sequence.n_compressed
        for members in ((a, b), (a, b), (c, a, b), (c, a)):
            here.step(*members)
        few, many = here.member(150, NONE), here.member(200, MORE)
        here.step(few)  # alone, it needs next to no room for what is chosen
        here.step(few, many)
        said = {
            "kernel": here.batch.seating.banks[0].kernel,
            "settled": a.cache.layers[0].sequence.n_compressed > parts + 64,
            "worst": max(here.worst.values()),
        }
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    sys.exit(main())
