"""What a trained adapter says of itself: which model it belongs to, and which questions it has seen."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tamis.core.errors import InvalidInput, StoreMismatch, Unavailable
from tamis.model.adapter import adapter_card, write_adapter_card

FORMAT = 1
SAMPLES = 1024  # evenly spaced elements of each weight that name the base model
ROUNDED = "weights_bfloat16"  # the hash of the weights that does not depend on the dtype they are loaded in


@dataclass(frozen=True)
class AdapterInfo:
    """What is known of an adapter besides its weights; `tamis_adapter.json`.

    kind     "block": documents are encoded alone, as `prefill="reuse"` does
    base     `base_of` the model it was trained on; `base_name` only for people
    steps    optimiser steps made
    data     names of the question sets used
    holdout  share of the questions kept out of training, see `held_out`
    settings, result   how it was trained, and what the held-out questions said before and after
    """

    kind: str
    base: dict[str, str]
    base_name: str
    steps: int
    data: tuple[str, ...]
    holdout: float
    settings: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def read(cls, folder: str | Path) -> AdapterInfo:
        """What `folder` says. Raises ModelNotFound without the file, InvalidInput if it is of another format."""
        values = adapter_card(Path(folder).expanduser())
        if set(values) != {f.name for f in fields(cls)} or values["format"] != FORMAT:
            raise InvalidInput(
                f"{folder} holds an adapter without the fields of format {FORMAT}. Train it again with this version."
            )
        return cls(**values | {"data": tuple(values["data"])})

    def write(self, folder: str | Path) -> None:
        """Put the file into `folder`, whole or not at all."""
        values = asdict(self)
        write_adapter_card(Path(folder), values.pop("base"), **values)

    def check(self, model: Any, tokenizer: Any) -> None:
        """Raises StoreMismatch, which names what differs, unless the adapter was trained on this very model, in
        whatever dtype it is loaded."""
        here = base_of(model, tokenizer)
        names = ("architecture", "tokenizer", "rotary", ROUNDED)
        differ = [name for name in names if here[name] != self.base.get(name)]
        if differ:
            raise StoreMismatch(
                f"the adapter was trained on {self.base_name}; the {', '.join(differ)} of this model differ. "
                "Load the model it names, or train an adapter for this one."
            )

    def has_seen(self, question: str) -> bool:
        """Whether a question, or one worded alike, may have been trained on."""
        return not held_out(question, self.holdout)


def base_of(model: Any, tokenizer: Any) -> dict[str, str]:
    """The model's fingerprint, and a hash of its weights rounded to bfloat16: an adapter may be trained in one dtype
    and used in another. Call it before an adapter is put in."""
    import torch

    from tamis.model.fingerprint import fingerprint

    digest = hashlib.blake2b(digest_size=16)
    for name, p in sorted(model.named_parameters()):
        flat = p.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLES)].to(torch.bfloat16).view(torch.int16)
        digest.update(f"{name}{tuple(p.shape)}".encode())
        digest.update(some.cpu().numpy().astype("<i2").tobytes())
    return asdict(fingerprint(model, tokenizer)) | {ROUNDED: digest.hexdigest()}


def held_out(question: str, share: float) -> bool:
    """Whether a question belongs to the `share` (0..1) that is never trained on.

    Goes by the question's words, not by its id: the same question stands in several sets under several ids.
    """
    if not 0 <= share <= 1:
        raise InvalidInput(f"holdout is {share}; give a share from 0 to 1.")
    words = "".join(c.lower() if c.isalnum() else " " for c in question).split()
    number = int.from_bytes(hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest(), "big")
    return number < share * 2**64


def import_peft() -> Any:
    """The peft package. Raises Unavailable with what to install."""
    try:
        import peft
    except ImportError as e:
        raise Unavailable(f'adapters need peft ({e}): pip install "tamis[train]".') from e
    return peft
