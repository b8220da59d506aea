"""Adapters merged into a model: what is refused, and what changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.core.errors import InvalidInput, ModelNotFound, StoreMismatch, Unavailable
from tamis.model import adapter
from tamis.model.adapter import FILE, adapter_card, write_adapter_card
from tamis.model.adapter_info import base_of
from tamis.model.fingerprint import fingerprint
from tamis.model.source import load_model
from tiny_chat import tiny_tokenizer

IDS = torch.tensor([[5, 17, 99, 4]])


@pytest.fixture
def base(tiny_model: Callable[..., Any], tmp_path: Path) -> Path:
    """A folder with a tiny model and its tokenizer."""
    folder = tmp_path / "base"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def tuned(base: Path, tmp_path: Path) -> Path:
    """An adapter of it that changes something."""
    peft = pytest.importorskip("peft", reason="adapters need peft")
    loaded = load_model(str(base), device="cpu")
    card = base_of(loaded.model, loaded.tokenizer)
    model = peft.get_peft_model(loaded.model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    folder = tmp_path / "tuned"
    model.save_pretrained(folder)
    write_adapter_card(folder, card)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits[0]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_merged_and_changes_the_fingerprint(base: Path, tuned: Path, dtype: str) -> None:
    stock = load_model(str(base), device="cpu", dtype=dtype)
    made = load_model(str(base), device="cpu", dtype=dtype, adapter=tuned)
    assert made.block_tuned and not stock.block_tuned and made.name.endswith("+tuned")
    assert type(made.model) is type(stock.model), "nothing of peft stays around the model"
    assert float((logits(made.model) - logits(stock.model)).abs().max()) > 0.01
    assert fingerprint(made.model, None).weights != fingerprint(stock.model, None).weights


def test_an_adapter_of_another_model_is_refused(tuned: Path, tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_model("llama", seed=2).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    with pytest.raises(StoreMismatch, match=r"weights_bfloat16 differ.*train block-adapter"):
        load_model(str(other), device="cpu", adapter=tuned)


def test_without_peft_it_says_what_to_install(base: Path, tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"tamis\[train\]"):
        load_model(str(base), device="cpu", adapter=tuned)


def test_a_folder_without_a_card_is_no_adapter(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"no {FILE}"):
        load_model(str(base), device="cpu", adapter=tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"kind": "other", "base": {}}), json.dumps({"kind": "block"})])
def test_a_broken_card_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput):
        adapter_card(tmp_path)
