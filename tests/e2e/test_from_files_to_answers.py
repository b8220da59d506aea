"""What the README promises, from files to an answer: a folder, a question, the passages, the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tamis
from tamis.model.source import LoadedModel
from tiny_chat import tiny_tokenizer

FACTS = {
    "fog.md": "# Fog\n\nIn fog the keepers listen to radio channel 16. The horn sounds every two minutes.\n",
    "crane.html": "<html><title>Crane</title><body><h1>Crane</h1><p>The crane lifts 900 kilograms.</p></body></html>",
    "log.txt": "Monday. The supply boat came at noon. Tuesday. Rain all day, nobody landed.\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in FACTS.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def tiny(tiny_model: Callable[..., Any]) -> LoadedModel:
    return LoadedModel(tiny_model("qwen3"), tiny_tokenizer(), "tiny", "")


def test_the_readmes_first_example(tiny: LoadedModel, folder: Path, tmp_path: Path) -> None:
    question = "Which radio channel is used in fog?"
    texts = []
    for first in (True, False):  # the second time everything is there already
        with tamis.LLM(tiny, prefill="sift", min_tokens=0) as llm, llm.corpus(tmp_path / "kb.tamis") as kb:
            added = kb.add_files(folder)
            assert (len(added.files.read), added.indexed) == ((3, len(kb.corpus)) if first else (0, 0))
            hits = kb.search(question, k=8)
            answer = llm.generate(question, documents=hits, sampling=tamis.Sampling(max_new_tokens=8))
        assert "fog.md" in answer.sources[0].place and str(answer.report).startswith("TTFT")
        assert (answer.report.prefill.used, answer.report.prefill.indexed) == ("sift", 0)
        texts.append(answer.text)
    assert texts[0] == texts[1]


def test_the_readmes_second_example(tiny: LoadedModel) -> None:
    texts = list(FACTS.values())
    inputs = tiny.tokenizer("\n\n".join(texts) + "\n\nWhich channel?", return_tensors="pt")
    wanted = tiny.model.generate(inputs.input_ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    options = {"prefill": "sift", "min_tokens": 0, "selector": "all"}
    with tamis.attach(tiny.model, documents=texts, tokenizer=tiny.tokenizer, **options) as attached:
        found = tiny.model.generate(inputs.input_ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert attached.report is not None and attached.report.documents == 3 and not attached.report.fallbacks
    assert torch.equal(found, wanted)


def test_a_library_and_an_attached_model_agree(tiny: LoadedModel) -> None:
    """The same prompt through `LLM` and through `attach` chooses the same tiles and gives the same logits."""
    documents = [f"The boat {i} comes. " * 40 for i in range(3)]
    options = {"prefill": "sift", "min_tokens": 0, "selector": "sampled", "mass": 0.5}
    with tamis.LLM(tiny, **options) as llm:
        tokens = [llm.document_tokens(d) for d in documents]
        prompt = llm.template.prompt("Which boat?", tokens)
        made = llm.prefill(prompt)
        prefix = llm.template.prefix_tokens
    with tamis.attach(tiny.model, documents=tokens, prefix=prefix, **options) as attached, torch.inference_mode():
        logits = tiny.model(torch.tensor([prompt.tokens]), logits_to_keep=1).logits[0, -1]
    assert attached.report is not None
    assert made.report.density == attached.report.density < 1 and made.report.layers == attached.report.layers
    torch.testing.assert_close(logits, made.logits, rtol=1e-4, atol=1e-4)


def test_the_real_model_finds_the_channel(smollm2: LoadedModel, folder: Path) -> None:
    question = "Which radio channel do the keepers listen to in fog?"
    with tamis.LLM(smollm2, prefill="sift", min_tokens=0) as llm, llm.corpus() as kb:
        kb.add_files(folder)
        answer = llm.generate(question, kb.search(question, k=2), sampling=tamis.Sampling(max_new_tokens=16))
    assert answer.report.prefill.used == "sift" and "16" in answer.text
