"""Rows of "reuse" requests over vLLM's packed pages, against attention computed plainly; needs no vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tamis.integrations.vllm import compat
from tamis.integrations.vllm.client import request
from tamis.integrations.vllm.request import Asked, parse
from tamis.integrations.vllm.reuse import Decodes, plan_rows
from tamis.integrations.vllm.sift import dense_rows
from tamis.integrations.vllm.step import Row
from tamis.kernels.lists import Tiling
from tamis.model.rope import Rotary

PAGE, HEADS, KV, DIM = 16, 4, 2, 32
ROTARY = Rotary(1.0 / 10_000 ** (torch.arange(0, DIM, 2, dtype=torch.float64) / DIM), DIM)


def asked(*documents: int, question: int = 11) -> Asked:
    made = request(range(21), [range(100 * i, 100 * i + n) for i, n in enumerate(documents, 1)], range(question),
                   mode="reuse", block_size=PAGE)  # fmt: skip
    return parse(made["kv_transfer_params"]["tamis"], made["prompt"], block_size=PAGE)


def plain(told: Asked, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, k, v [heads, T, D] unrotated, of all tokens → [Hq, T, D]: documents see themselves, the rest sees all."""
    n = q.shape[1]
    pads = torch.tensor([i < told.n_tokens and told.spans[told.number(i)].kind == "pad" for i in range(n)])
    position = torch.tensor([told.position(i) for i in range(n)])
    unit = torch.full((n,), -1)
    for i, u in enumerate(told.units):
        unit[u.start : u.end] = i
    seen = torch.ones(n, n, dtype=torch.bool).tril() & ~pads[None]
    seen &= (unit[:, None] < 0) | (unit[:, None] == unit[None])
    q, k = ROTARY.rotate(q, position), ROTARY.rotate(k, position)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen | pads[:, None], enable_gqa=True)
    return out.masked_fill(pads[:, None], 0)


def cache_of(told: Asked, k: torch.Tensor, v: torch.Tensor, blocks: list[int], *, nhd: bool) -> Any:
    """Packed pages as vLLM's on CUDA, keys turned where the plan says."""
    n, count = k.shape[1], max(blocks) + 1
    shape = (count, PAGE, KV, 2 * DIM) if nhd else (count, KV, PAGE, 2 * DIM)
    packed = torch.full(shape, float("nan"))
    cache = packed.transpose(1, 2) if nhd else packed
    whole = Row("r", told, 0, n, tuple(blocks))
    rows, places = plan_rows([(0, whole)], ROTARY.angles, page=PAGE, kv_heads=KV, device=torch.device("cpu")).moved
    where = torch.arange(n)
    where[rows] = places
    turned = ROTARY.rotate(k, where)
    at = torch.arange(n)
    page, slot = torch.tensor(blocks)[at // PAGE], at % PAGE
    cache[page, :, slot, :DIM] = turned.transpose(0, 1)
    cache[page, :, slot, DIM:] = v.transpose(0, 1)
    return cache, where


@pytest.mark.parametrize("nhd", [True, False], ids=["nhd", "hnd"])
@pytest.mark.parametrize("more", [0, 5], ids=["prompt", "generated"])
def test_any_chunk_is_what_plain_attention_gives(nhd: bool, more: int) -> None:
    """Two requests whose blocks lie between each other's, whole, cut anywhere, and token by token."""
    told = [asked(70, 45), asked(16, 33, 5, question=40)]
    sizes = [t.n_tokens + more for t in told]
    qkv = [[torch.randn(h, n, DIM) for h in (HEADS, KV, KV)] for n in sizes]
    want = [plain(t, *x) for t, x in zip(told, qkv, strict=True)]
    count = sum(-(-n // PAGE) for n in sizes)
    order = torch.randperm(count).tolist()
    first = -(-sizes[0] // PAGE)
    blocks = [order[:first], order[first:]]
    made = [cache_of(t, x[1], x[2], b, nhd=nhd) for t, x, b in zip(told, qkv, blocks, strict=True)]
    cache = torch.full((count, *made[0][0].shape[1:]), float("nan"))
    for (own, _), numbers in zip(made, blocks, strict=True):
        cache[numbers] = own[numbers]
    keys, values = cache[..., :DIM], cache[..., DIM:]
    for starts in ((0, 0), (40, 7), (sizes[0] - 1, 100), (sizes[0] - 1, sizes[1] - 1)):
        rows, queries, at = [], [], 0
        for i, start in enumerate(starts):
            end = sizes[i]
            rows.append((at, Row(str(i), told[i], start, end - start, tuple(blocks[i]))))
            queries.append(ROTARY.rotate(qkv[i][0], made[i][1])[:, start:end].transpose(0, 1))
            at += end - start
        plan = plan_rows(rows, ROTARY.angles, page=PAGE, kv_heads=KV, device=torch.device("cpu"))
        out = torch.full((at, HEADS, DIM), float("nan"))
        plan.attend(torch.cat(queries), keys, values, DIM**-0.5, out)
        expected = torch.cat([want[i][:, s:].transpose(0, 1) for i, s in enumerate(starts)])
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_a_documents_keys_are_the_same_bits_wherever_it_stands() -> None:
    made = []
    for documents in ((70, 45), (45, 70)):
        told = asked(*documents)
        rows, places = plan_rows(
            [(0, Row("r", told, 0, told.n_tokens, tuple(range(20))))],
            ROTARY.angles, page=PAGE, kv_heads=KV, device=torch.device("cpu"),
        ).moved  # fmt: skip
        unit = next(u for u in told.units if u.end - u.start == 70)
        inside = (rows >= unit.start) & (rows < unit.end)
        made.append(places[inside])
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], torch.arange(70))


def test_dense_rows_see_everything() -> None:
    tiling = Tiling.of_segments([21, 300, 40])
    n = tiling.n_tokens + 7
    q, k, v = (torch.randn(h, n, DIM) for h in (HEADS, KV, KV))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for start, end in ((150, 200), (321, 361), (359, n), (n - 1, n)):
        made = dense_rows(q[:, start:end], k[:, :end], v[:, :end], DIM**-0.5, tiling)
        torch.testing.assert_close(made, want[:, start:end], atol=1e-5, rtol=1e-5)


def test_cpu_pages_read_and_written() -> None:
    cache = torch.zeros(6, KV, PAGE, 2 * DIM)
    keys, values = torch.randn(KV, 20, DIM), torch.randn(KV, 20, DIM)
    at = torch.arange(20)
    blocks = torch.tensor([4, 1])
    compat.put(cache, keys, values, (blocks[at // PAGE], at % PAGE))
    found = compat.gathered(cache, DIM, blocks, 20)
    assert torch.equal(found[0], keys) and torch.equal(found[1], values)
    stored = cache.view(6, KV, 2, PAGE * DIM)[4, 0, 0].view(DIM, PAGE)
    assert torch.equal(stored[:, 3], keys[0, 3]), "keys lie dim by dim, as vLLM's CPU kernels keep them"


def test_a_kept_decode_plan_is_the_one_that_would_be_made_anew() -> None:
    """Token by token, as requests cross pages, come and go: the same bits, and mostly nothing is made."""
    told, device = [asked(70, 45), asked(16, 33, 5, question=40), asked(20)], torch.device("cpu")
    sizes = [t.n_tokens + 40 for t in told]
    count = [-(-n // PAGE) for n in sizes]
    blocks = torch.randperm(sum(count)).split(count)
    keys, values = (torch.randn(sum(count), KV, PAGE, DIM) for _ in range(2))
    kept, anew, plans = Decodes(), 0, []
    for step in range(40):
        names = [i for i in range(3) if i < 2 or 20 < step < 30]
        rows = []
        for at, i in enumerate(names):
            index = told[i].n_tokens + step
            rows.append((at, Row(str(i), told[i], index, 1, tuple(blocks[i].tolist()[: index // PAGE + 1]))))
        made, fresh = (
            plan_rows(rows, ROTARY.angles, page=PAGE, kv_heads=KV, device=device, kept=k) for k in (kept, None)
        )
        q = torch.randn(len(rows), HEADS, DIM)
        out = [torch.empty_like(q) for _ in range(2)]
        for plan, to in ((made, out[0]), (fresh, out[1])):
            plan.attend(q, keys, values, DIM**-0.5, to)
        assert torch.equal(*out), step
        assert torch.equal(made.moved[1], fresh.moved[1])
        anew += not any(made.plan is p for p in plans)
        plans.append(made.plan)
    assert anew <= 16, "when a page begins or is full, and when the third request comes or goes"


@pytest.mark.parametrize("change", ["computed", "blocks", "asked", "request"])
def test_a_decode_plan_of_something_else_is_not_kept(change: str) -> None:
    told, device, kept = asked(70, 45), torch.device("cpu"), Decodes()
    n = told.n_tokens - told.n_tokens % PAGE + PAGE + 3
    first = Row("a", told, n, 1, tuple(range(20)))
    new = {"computed": n + 2, "blocks": tuple(range(1, 21)), "asked": asked(71, 45), "request": "b"}
    plan_rows([(0, first)], ROTARY.angles, page=PAGE, kv_heads=KV, device=device, kept=kept)
    before = kept.plan
    row = replace(first, **{"computed": n + 1, change: new[change]})
    made = plan_rows([(0, row)], ROTARY.angles, page=PAGE, kv_heads=KV, device=device, kept=kept)
    assert made.plan is not before and kept.plan is made.plan
    row = replace(row, computed=row.computed + 1)
    again = plan_rows([(0, row)], ROTARY.angles, page=PAGE, kv_heads=KV, device=device, kept=kept)
    assert again.plan is made.plan, "the new one is kept"
