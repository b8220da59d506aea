"""Adapters (LoRA, by peft) that a model was trained with: what they say of themselves, and merging them into it.

An adapter folder holds what peft's `save_pretrained` writes and `tamis_adapter.json`: {"kind": "block", "base": {…}},
base being `adapter_info.base_of` the model it was trained on. Merged weights have another fingerprint, so
that nothing stored by the base model is ever taken for the tuned one's.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from tamis.core.errors import InvalidInput, ModelNotFound, StoreMismatch, Unavailable
from tamis.core.files import write_whole

FILE = "tamis_adapter.json"
KINDS = ("block",)
CHECKED = ("architecture", "rotary", "tokenizer")  # and the weights


def write_adapter_card(folder: Path, base: dict[str, str], **more: Any) -> None:
    """Put `tamis_adapter.json`, whole, into a folder that peft saved to. `base`: see `adapter_info.base_of`."""
    card = {"kind": "block", "base": base, **more}
    write_whole(folder / FILE, json.dumps(card, indent=2, sort_keys=True) + "\n")


def adapter_card(folder: Path) -> dict[str, Any]:
    """What an adapter says of itself. Raises ModelNotFound or InvalidInput."""
    path = folder / FILE
    if not path.is_file():
        raise ModelNotFound(f"no adapter at {folder}: there is no {FILE}. `tamis train block-adapter` makes one.")
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise InvalidInput(f"{path} is not JSON ({e}); make the adapter again.") from e
    if not isinstance(card, dict) or card.get("kind") not in KINDS or not isinstance(card.get("base"), dict):
        raise InvalidInput(f"{path} has kind {card.get('kind') if isinstance(card, dict) else card!r}; allowed: block.")
    return card


def with_adapter(model: Any, tokenizer: Any, folder: Path) -> Any:
    """`model` with the adapter merged into its weights. Raises StoreMismatch if it was trained on another model,
    Unavailable without peft."""
    from tamis.model.adapter_info import ROUNDED, base_of

    base, here = adapter_card(folder)["base"], base_of(model, tokenizer)
    weights = ROUNDED if ROUNDED in base else "weights"
    different = [name for name in (*CHECKED, weights) if base.get(name) != here[name]]
    if different:
        raise StoreMismatch(
            f"the adapter {folder} was trained on another model: {', '.join(different)} differ. Load the model it was "
            "trained on, or train one for this model with `tamis train block-adapter`."
        )
    if importlib.util.find_spec("peft") is None:
        raise Unavailable('an adapter is merged by peft, which is not installed: pip install "tamis[train]".')
    from peft import PeftModel

    merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    return merged.eval()
