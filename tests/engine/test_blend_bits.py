"""Tokens chosen by stored CA bits and sampled rows: what rows look at, which bits count, where records come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tamis.attention import blend_bits
from tamis.attention.blend_bits import ROWS, cross_mass, probed, sampled
from tamis.attention.policy import Policy
from tamis.attention.reuse import Session
from tamis.engine.llm import LLM
from tamis.index.encode import Bits
from tamis.prompt.segments import Prompt

PAGE_BYTES = 2 * 2 * 2 * 64 * 4 * 128
LENGTHS = (300, 90, 200)


@pytest.fixture
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm(cache_bytes=60 * PAGE_BYTES, accept_block_attention=True)


@pytest.fixture
def prompt() -> Prompt:
    draw = torch.Generator().manual_seed(5)
    parts = [("prefix", 37), *[("document", n) for n in LENGTHS], ("question", 20)]
    return Prompt.of([(kind, torch.randint(0, 512, (n,), generator=draw).tolist()) for kind, n in parts])


@pytest.fixture
def session(llm: LLM, prompt: Prompt) -> Any:
    policy = Policy.of(llm.policy, prefill="blend", blend="bits_attention")
    made = llm.reuse_engine().begin(prompt, policy, indexer=lambda: llm._indexer(policy))
    yield made
    made.close()


def test_sampled_rows_stand_in_their_pages(session: Session) -> None:
    found = sampled(session)
    assert len(found.rows) == ROWS * (3 + 1 + 2) == len(found.piece)
    assert bool((found.rows.diff() > 0).all()) and not bool(session.layout.fresh[found.rows].any())
    assert torch.equal(found.page[found.rows], torch.arange(6).repeat_interleave(ROWS))
    assert set(found.page[session.layout.fresh].tolist()) == {6}


@pytest.mark.parametrize("ca", [True, False])
def test_only_pages_whose_bit_is_set_count(llm: LLM, session: Session, ca: bool) -> None:
    bits = [Bits(torch.ones(2, 4, p, p, dtype=torch.bool).tril(), torch.full((2, 4, p), ca)) for p in (3, 1, 2)]
    session.bits = tuple(bits)
    mass, wrong = probed(session)
    assert mass.shape == (2, 647) and wrong.shape == (647,)
    assert not bool(wrong[:337].any()), "the first document has no other before it"
    later = wrong[337:627]
    assert bool((later > 0).all()) if ca else not bool(later.any())
    assert bool((wrong <= 1).all()) and not bool(wrong[627:].any())


def test_one_page_alone(llm: LLM, session: Session) -> None:
    """The bits of one page let through what rows give that page."""
    total = torch.zeros(647)
    for i in range(3):
        ca = torch.zeros(2, 4, 3, dtype=torch.bool)
        ca[:, :, i] = True
        none = [torch.zeros(2, 4, p, dtype=torch.bool) for p in (1, 2)]
        session.bits = tuple(
            Bits(torch.ones(2, 4, c.shape[2], c.shape[2], dtype=torch.bool).tril(), c) for c in (ca, *none)
        )
        total += probed(session)[1]
    session.bits = (None, session.bits[1], session.bits[2])  # nothing stored of it: all its pages count
    torch.testing.assert_close(probed(session)[1], total)


def test_the_first_layer_by_hand(llm: LLM, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sampled row of the last document gives the others is what a softmax over all before it says."""
    seen: list[tuple[Any, ...]] = []

    def spy(read: Any, layer: int, q: torch.Tensor, lse: torch.Tensor, scale: float, **more: Any) -> torch.Tensor:
        made = cross_mass(read, layer, q, lse, scale, **more)
        seen.append((layer, q, scale, made))
        return made

    monkeypatch.setattr(blend_bits, "cross_mass", spy)
    session.bits = (None, None, None)
    probed(session)
    layer, q, scale, made = seen[0]
    assert layer == 0
    keys: list[torch.Tensor] = []
    attention = llm.runner.model.model.layers[0].self_attn
    hook = attention.k_proj.register_forward_hook(lambda m, a, out: keys.append(out.detach()))
    with torch.inference_mode():
        llm.runner.model(session.tokens[None], use_cache=False)
        angles = llm.runner.model.model.rotary_emb(keys[0], torch.arange(647)[None])
    hook.remove()
    cos, sin = angles[0][0], angles[1][0]
    k = keys[0][0].view(647, -1, q.shape[2]).transpose(0, 1)
    half = q.shape[2] // 2
    k = k * cos + torch.cat([-k[..., half:], k[..., :half]], -1) * sin
    rows, at = sampled(session).rows, 23
    scores = torch.einsum("hd,hnd->hn", q[:, at].float(), k.repeat_interleave(q.shape[0] // k.shape[0], 0)) * scale
    share = scores[:, : int(rows[at]) + 1].softmax(-1)
    assert float(made[at]) == pytest.approx(float(share[:, 37 : 37 + 390].sum(1).mean()), abs=1e-4)


def test_records_are_made_only_where_they_are_needed(llm: LLM, prompt: Prompt) -> None:
    assert llm.prefill(prompt, prefill="blend", blend="attention").report.indexed == 0
    assert llm.prefill(prompt, prefill="blend", blend="bits_attention").report.indexed == 3
    assert llm.prefill(prompt, prefill="blend", blend="bits_attention").report.indexed == 0
    assert Policy(prefill="blend", blend="bits_attention").needs_records
    assert not Policy(prefill="blend").needs_records and not Policy(prefill="reuse").needs_records
    assert Policy(prefill="sift").needs_records and not Policy(prefill="sift", selector="none").needs_records
    assert not Policy().needs_records


@pytest.mark.parametrize("tile", [64, 128])
def test_tiles_of_the_bits_need_not_be_pages(llm: LLM, prompt: Prompt, tile: int) -> None:
    found = llm.prefill(prompt, prefill="blend", blend="bits_attention", tile=tile, recompute=0.2).report.reuse
    assert found is not None and found.recomputed_share == pytest.approx(0.2, abs=0.01)
