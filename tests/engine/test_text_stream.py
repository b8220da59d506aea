"""Tokens to text: nothing of a stop text leaks, no half character is shown, nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tamis.engine.sampling import TextStream
from tiny_chat import tiny_tokenizer

ALPHABET = "ab é€\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def run(tokenizer: Any, text: str, stop: tuple[str, ...], *, bytewise: bool = True) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stop)
    vocabulary = tokenizer.get_vocab()
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    if bytewise:  # the smallest tokens: one per byte
        pieces = "".join(tokenizer.convert_ids_to_tokens(ids))
        ids = [vocabulary[c] for c in pieces]
    given_out = []
    for token in ids:
        given_out.append(stream.push(token))
        if stream.stopped:
            break
    given_out.append(stream.finish())
    return given_out, stream


@given(text=st.text(ALPHABET, max_size=14), stop=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3))
def test_any_text_and_stops(text: str, stop: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    pieces, stream = run(tokenizer, text, tuple(stop))
    places = [i for s in stop if (i := text.find(s)) >= 0]
    # the stop that ends first wins: what follows it is never generated
    ends = [text.find(s) + len(s) for s in stop if s in text]
    seen = text[: min(ends)] if ends else text
    cut = min((i for s in stop if (i := seen.find(s)) >= 0), default=len(text))
    assert stream.text == text[:cut].strip() == "".join(pieces)
    assert stream.stopped is bool(places)


@pytest.mark.parametrize("bytewise", [True, False])
def test_a_character_over_several_tokens_comes_whole(tokenizer: Any, bytewise: bool) -> None:
    pieces, stream = run(tokenizer, "lamp 😀 €", (), bytewise=bytewise)
    assert "".join(pieces) == stream.text == "lamp 😀 €"
    assert not any("\ufffd" in p for p in pieces)


def test_a_stop_that_goes_on_in_a_half_character(tokenizer: Any) -> None:
    pieces, stream = run(tokenizer, "xaé", ("aé",))
    assert pieces and "".join(pieces) == "x" and stream.stopped


def test_half_a_character_at_the_end_is_shown_at_last(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, ())
    first = tokenizer.convert_ids_to_tokens(tokenizer("é", add_special_tokens=False).input_ids)[0][0]
    assert stream.push(tokenizer.get_vocab()[first]) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_not_text(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, ())
    assert stream.push(tokenizer.eos_token_id) == "" and stream.finish() == ""
