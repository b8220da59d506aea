"""Texts of a wanted length for a server's load, and a tokenizer of such texts for models with random weights.

The load's process knows no tokenizer: a text is made of common words, each one token behind a blank for tokenizers of
English, so that lengths are right within a few tokens. The same seed gives the same text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tamis.core.errors import InvalidInput

if TYPE_CHECKING:
    from tamis.model.source import LoadedModel

_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "kid body information back parent face others level office door health person art war history party result "
    "change morning reason research girl guy moment air teacher force education "
)
WORDS = tuple(_COMMON.split())
SHAPE = "shape:"
_CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\n\n{% endfor %}assistant "


def words(seed: int, n_tokens: int) -> str:
    """A text of about `n_tokens` tokens that no other seed gives."""
    drawn = np.random.default_rng(seed).integers(0, len(WORDS), n_tokens)
    return " ".join(WORDS[i] for i in drawn)


def shape_with_words(name: str) -> LoadedModel:
    """A model of a published shape with random weights whose tokens are words: every token has a text.

    Raises InvalidInput for an unknown shape.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tamis.bench.reuse_real import shape_model
    from tamis.bench.shapes import shape_of

    vocabulary = shape_of(name.removeprefix(SHAPE)).vocabulary
    if vocabulary <= len(WORDS):
        raise InvalidInput(f"{name} has a vocabulary of {vocabulary}; texts here take more than {len(WORDS)}.")
    loaded = shape_model(name.removeprefix(SHAPE))
    ids = {word: i for i, word in enumerate((*WORDS, *(f"w{i}" for i in range(len(WORDS), vocabulary - 1)), "<unk>"))}
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    tokenizer.chat_template = _CHAT
    return replace(loaded, tokenizer=tokenizer)
