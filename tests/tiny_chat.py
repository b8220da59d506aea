"""A tokenizer of 512 byte-level tokens, made on the spot: any text can be written with it, nothing is unknown."""

from __future__ import annotations

from functools import cache
from typing import Any

VOCABULARY = 512
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    "The keeper of the station answers questions from passages that the user gives. Use only what they say, and say so "
    "if they do not hold the answer in one or two short sentences. Question: Answer: Passages: Where is the lamp? "
    "The boat comes on Monday when the wind is from the north and the crane lifts the stores. system user assistant "
)


def tiny_tokenizer(*, chat: bool = True) -> Any:
    """Byte-level BPE with the special tokens of ChatML; `chat` gives it the chat template too."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=_trained(), bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    if chat:
        made.chat_template = CHAT
    assert len(made) <= VOCABULARY, "the tiny models have no embedding for more"
    return made


@cache
def _trained() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        [WORDS],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer
