"""Blocks that come from the host as they are wanted give, to the last bit, what blocks that never left give."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.cache.offload import LayerBlocks, PoolShape, Prefetcher
from tamis.cache.slots import SlotMap
from tamis.cache.streams import Event, Stream, run_all
from tamis.core.errors import BrokenInvariant, InvalidInput, PoolFull

SHAPE = PoolShape(n_layers=2, n_kv_heads=2, head_dim=8, n_slots=3, block=4)
SCALE = 8**-0.5


@dataclass
class Scene:
    """Two layers of a sequence that grows by a token a step, and two streams."""

    seed: int
    steps: int
    shape: PoolShape = SHAPE
    made: Callable[[list[LayerBlocks], Stream, Stream], Prefetcher] = Prefetcher

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.draw = torch.Generator().manual_seed(self.seed)
        capacity = 20 + self.steps
        self.layers = [LayerBlocks(self.shape, capacity, dtype=torch.float32) for _ in range(self.shape.n_layers)]
        self.resident = [LayerBlocks(self.shape, capacity, dtype=torch.float32) for _ in range(self.shape.n_layers)]
        self.streams = [Stream("compute"), Stream("copy")]
        self.prefetcher = self.made(self.layers, *self.streams)
        for pair in zip(self.layers, self.resident, strict=True):
            k, v = self.random(2, 18, 8), self.random(2, 18, 8)
            for layer in pair:
                layer.append(k, v)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.draw)

    def wanted(self, n_tokens: int) -> torch.Tensor:
        """Blocks for the token at `n_tokens`: mostly those that are near, some far, some places empty."""
        full = n_tokens // self.shape.block
        rows = []
        for _ in range(self.shape.n_kv_heads):
            near = list(range(max(0, full - 5), full))
            some = self.chance.sample(near, min(len(near), self.chance.randint(0, self.shape.n_slots)))
            if some and self.chance.random() < 0.3:
                some[0] = self.chance.choice([b for b in range(full) if b not in some[1:]])
            rows.append((some + [-1] * self.shape.n_slots)[: self.shape.n_slots])
        return torch.tensor(rows)

    def run(self, *, forget: bool) -> None:
        """All steps; compares every layer's output of every step."""
        pre, compute = self.prefetcher, self.streams[0]
        out: list[torch.Tensor] = []
        truth: list[torch.Tensor] = []
        for _ in range(self.steps):
            n = self.resident[0].n_tokens
            wants = [self.wanted(n) for _ in self.layers]
            pre.want(0, wants[0], forget=forget)
            for number, layer in enumerate(self.layers):
                k, v, q = self.random(2, 1, 8), self.random(2, 1, 8), self.random(4, 8)
                if number + 1 < len(self.layers):
                    pre.want(number + 1, wants[number + 1], forget=forget)
                compute.run(lambda layer=layer, k=k, v=v: layer.append(k, v))  # type: ignore[misc]
                pre.attend(number, q, out, scale=SCALE)
                self.resident[number].append(k, v)
                truth.append(self.resident[number].attend_resident(q, wants[number], scale=SCALE))
            if self.chance.random() < 0.3:
                run_all(self.streams, self.chance)
        run_all(self.streams, self.chance)
        assert len(out) == len(truth) == self.steps * len(self.layers)
        for step, (found, wanted) in enumerate(zip(out, truth, strict=True)):
            assert torch.isfinite(wanted).all() and torch.equal(found, wanted), f"step {step // len(self.layers)}"
        for layer in self.layers:
            layer.map.check()


@pytest.mark.parametrize("forget", [False, True], ids=["slots kept", "all evicted at every step"])
def test_a_thousand_random_steps(forget: bool) -> None:
    scene = Scene(1, 1000)
    scene.run(forget=forget)
    copied, asked = (sum(getattr(layer, name) for layer in scene.layers) for name in ("copied", "asked"))
    assert (copied == asked) if forget else 0.1 * asked < copied < 0.9 * asked


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slots", [1, 7])
def test_other_orders_and_sizes(seed: int, slots: int) -> None:
    Scene(seed, 60, PoolShape(3, 2, 8, n_slots=slots, block=4)).run(forget=bool(seed % 2))


class Hasty(Prefetcher):
    """Attends without waiting for the copy."""

    def attend(self, layer: int, q: torch.Tensor, out: list[torch.Tensor], *, scale: float) -> None:
        event = Event(done=True)
        self._arrived[layer] = event
        super().attend(layer, q, out, scale=scale)


class Greedy(Prefetcher):
    """Copies without waiting for what the compute stream still reads or has to write."""

    def want(self, layer: int, wanted: torch.Tensor, *, forget: bool = False) -> None:
        self._moves[layer] = self.layers[layer].place(wanted, forget=forget)
        moves = self._moves[layer]
        self.copy.run(lambda: self.layers[layer].fetch(wanted, moves))
        self._arrived[layer] = self.copy.record()


@pytest.mark.parametrize("wrong", [Hasty, Greedy])
def test_a_wait_that_is_left_out_is_seen(wrong: type[Prefetcher]) -> None:
    with pytest.raises((AssertionError, InvalidInput)):
        Scene(3, 60, made=wrong).run(forget=True)


def test_streams_that_wait_for_each_other_are_said() -> None:
    a, b = Stream("a"), Stream("b")
    a.wait(Event())
    b.run(lambda: None)
    with pytest.raises(BrokenInvariant, match="the streams a wait"):
        run_all([a, b])


def test_slots_are_kept_and_the_oldest_goes_first() -> None:
    slots = SlotMap(1, 3)
    first = slots.place(torch.tensor([[4, 7, -1]]))
    assert first.slot.tolist() == [[0, 1, -1]] and first.missing.tolist() == [[True, True, False]]
    assert first.hit_rate == 0.0
    again = slots.place(torch.tensor([[7, 9, -1]]))
    assert again.slot.tolist() == [[1, 2, -1]] and again.missing.tolist() == [[False, True, False]]
    assert again.hit_rate == 0.5 and slots.held.tolist() == [[4, 7, 9]]
    third = slots.place(torch.tensor([[1, -1, -1]]))
    assert third.slot.tolist() == [[0, -1, -1]] and slots.held.tolist() == [[1, 7, 9]], "4 was wanted longest ago"
    gone = slots.place(torch.tensor([[9, 1, -1]]), forget=True)
    assert gone.missing.tolist() == [[True, True, False]]
    assert slots.place(torch.tensor([[-1, -1, -1]])).hit_rate == 1.0
    with pytest.raises(PoolFull, match="4 blocks are wanted"):
        slots.place(torch.zeros((1, 4)))


@given(data=st.data(), slots=st.integers(1, 6), heads=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_every_wanted_block_has_a_slot_of_its_own(data: st.DataObject, slots: int, heads: int) -> None:
    table = SlotMap(heads, slots)
    for _ in range(8):
        rows = [
            data.draw(st.lists(st.integers(0, 9), unique=True, max_size=slots).map(lambda x: x + [-1] * slots))[:slots]
            for _ in range(heads)
        ]
        before, wanted = table.held.clone(), torch.tensor(rows)
        moves = table.place(wanted)
        table.check()
        for head in range(heads):
            for block, slot, missing in zip(rows[head], moves.slot[head], moves.missing[head], strict=True):
                if block < 0:
                    assert slot == -1 and not missing
                    continue
                assert table.held[head, slot] == block
                assert missing == (block not in before[head].tolist())
                assert missing or before[head, slot] == block, "a block that is there does not move"


def test_a_block_that_is_twice_in_a_head_is_seen() -> None:
    table = SlotMap(1, 3)
    table.held = torch.tensor([[2, -1, 2]])
    with pytest.raises(BrokenInvariant, match="two slots"):
        table.check()


def test_sizes_and_limits() -> None:
    shape = PoolShape(32, 2, 128, n_slots=95)
    assert shape.block_bytes() == 32 * 1024 and shape.device_bytes() == 192 * 2**20, "as published for MiniCPM4.1-8B"
    layer = LayerBlocks(SHAPE, 8, dtype=torch.float32)
    layer.append(torch.zeros(2, 6, 8), torch.zeros(2, 6, 8))
    with pytest.raises(InvalidInput, match="1 are full"):
        layer.place(torch.tensor([[1], [0]]))
    with pytest.raises(InvalidInput, match="made for 8"):
        layer.append(torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))
    with pytest.raises(InvalidInput, match="n_slots is 0"):
        PoolShape(1, 1, 8, n_slots=0)
