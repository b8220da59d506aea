"""What is written to pages comes back, and nothing else is ever read."""

from __future__ import annotations

import pytest
import torch
from cache_kit import PAGE, SPEC, pool

from tamis.cache.document import Payload
from tamis.cache.formats import stored_dtype
from tamis.cache.pool import PagePool
from tamis.cache.spec import KVSpec
from tamis.core.errors import InvalidInput, NotCached, PoolFull
from tamis.model.family import Geometry

LLAMA_8B = Geometry("llama", 32, 32, 8, 128, "llama3", 131072)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 24])
def test_round_trip_by_layer_and_whole(n: int) -> None:
    pages = pool(6)
    k, v = torch.randn(2, *SPEC.shape(n)).unbind(0)
    held = pages.fill(k, v)
    assert len(held) == pages.pages_for(n) == -(-n // PAGE)
    whole = pages.read_tokens(held, n)
    assert torch.equal(whole[0], k) and torch.equal(whole[1], v) and whole[0].is_contiguous()
    for layer in range(2):
        other = pages.allocator.allocate(len(held))[::-1]
        pages.write(layer, other, k[layer], v[layer])
        got = pages.read(layer, other, n)
        assert torch.equal(got[0], k[layer]) and torch.equal(got[1], v[layer]) and got[1].is_contiguous()
        pages.allocator.release(other)


def test_slots_behind_the_length_stay_poisoned() -> None:
    pages = pool(2)
    held = pages.fill(*torch.randn(2, *SPEC.shape(11)).unbind(0))
    assert pages.keys[:, held[1], :, 3:].isnan().all() and not pages.keys[:, held[1], :, :3].isnan().any()
    pages.write_tokens(held, *torch.ones(2, *SPEC.shape(3)).unbind(0), start=11)
    assert pages.keys[:, held[1], :, 6:].isnan().all() and (pages.keys[:, held[1], :, 3:6] == 1).all()


def test_a_failed_fill_takes_nothing() -> None:
    pages = pool(2)
    with pytest.raises(PoolFull):
        pages.fill(*torch.randn(2, *SPEC.shape(17)).unbind(0))
    with pytest.raises(InvalidInput, match="this pool takes"):
        pages.fill(torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4))
    with pytest.raises(InvalidInput, match="floating"):
        pages.fill(torch.ones(SPEC.shape(4), dtype=torch.int32), torch.ones(SPEC.shape(4), dtype=torch.int32))
    pages.allocator.check([])


def test_shapes_and_ranges_are_refused() -> None:
    pages = pool(2)
    with pytest.raises(InvalidInput, match="do not fit 1 pages"):
        pages.write(0, (0,), torch.randn(2, 9, 4), torch.randn(2, 9, 4))
    for n in (0, 9):
        with pytest.raises(InvalidInput, match="allowed are 1"):
            pages.read(0, (0,), n)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_budget_is_never_exceeded(extra: int) -> None:
    small = Geometry("llama", 2, 4, 2, 64, "default", 4096)
    page_bytes = 2 * 2 * 2 * 64 * 16 * 2
    made = PagePool.of(small, torch.bfloat16, byte_budget=3 * page_bytes + extra, page=16)
    assert made.page_bytes == page_bytes
    assert made.allocator.n_pages == (2 if extra < 0 else 3)
    assert made.n_bytes == made.keys.nbytes + made.values.nbytes == made.allocator.n_pages * page_bytes
    assert PagePool.of(small, "float32", n_pages=5, page=16).n_bytes == 5 * 2 * page_bytes


def test_bytes_of_a_real_model() -> None:
    assert KVSpec.of(LLAMA_8B, torch.bfloat16).token_bytes == 131072
    assert KVSpec.of(LLAMA_8B, "float16").page_bytes() == 131072 * 128


def test_bad_pools_and_specs() -> None:
    for arguments in ({}, {"n_pages": 1, "byte_budget": 10**9}):
        with pytest.raises(InvalidInput, match="exactly one"):
            PagePool.of(LLAMA_8B, "bfloat16", **arguments)
    with pytest.raises(InvalidInput, match="one page takes"):
        PagePool.of(LLAMA_8B, "bfloat16", byte_budget=1000)
    with pytest.raises(InvalidInput, match=r"dtype.*'int8'.*bfloat16"):
        KVSpec(1, 1, 1, "int8")
    with pytest.raises(InvalidInput, match="n_layers"):
        KVSpec(0, 1, 1, "float32")


def test_dtypes_of_formats() -> None:
    assert stored_dtype("auto", torch.float16) == torch.float16
    assert stored_dtype("bf16", torch.float32) == torch.bfloat16
    with pytest.raises(InvalidInput, match="auto, bf16"):
        stored_dtype("int4", torch.float32)


def test_payloads_say_what_is_wrong() -> None:
    with pytest.raises(InvalidInput, match="expected two of"):
        Payload.of(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 2, 4))
    with pytest.raises(InvalidInput, match="must agree"):
        Payload(4, ((torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)),))
    with pytest.raises(NotCached, match="only counts"):
        _ = Payload(4).keys
    with pytest.raises(InvalidInput):
        Payload(0)
