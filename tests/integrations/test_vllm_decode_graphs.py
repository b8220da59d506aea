"""What captured decode graphs read, written step by step: the same attention as a plan of the step's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tamis.integrations.vllm import rows as rows_module
from tamis.integrations.vllm.client import request
from tamis.integrations.vllm.decode_graphs import AHEAD, NARROW, WIDE, DecodeGraphs, Seats, splits_of
from tamis.integrations.vllm.request import Asked, parse
from tamis.integrations.vllm.reuse import plan_rows
from tamis.integrations.vllm.step import Row, Step
from tamis.kernels.decode_plan import DecodePlan
from tamis.kernels.paged_dispatch import paged_decode
from tamis.model.rope import Rotary

PAGE, HEADS, KV, DIM, MOST = 16, 4, 2, 32, 8
CPU = torch.device("cpu")
ROTARY = Rotary(1.0 / 10_000 ** (torch.arange(0, DIM, 2, dtype=torch.float64) / DIM), DIM)


def asked(*documents: int, question: int = 11) -> Asked:
    made = request(range(21), [range(100 * i, 100 * i + n) for i, n in enumerate(documents, 1)], range(question),
                   mode="reuse", block_size=PAGE)  # fmt: skip
    return parse(made["kv_transfer_params"]["tamis"], made["prompt"], block_size=PAGE)


@pytest.fixture
def seats() -> Seats:
    return Seats(MOST, ROTARY.angles, page=PAGE, kv_heads=KV, rotary_dims=DIM, device="cpu")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests of each plan that was written as a whole."""
    found: list[int] = []
    stock = DecodePlan.write

    def write(self: DecodePlan, requests: Any, *args: Any, **kwargs: Any) -> int:
        found.append(len(requests))
        return stock(self, requests, *args, **kwargs)

    monkeypatch.setattr(DecodePlan, "write", write)
    return found


def test_step_by_step_as_a_plan_of_its_own(seats: Seats, written: list[int]) -> None:
    """Requests cross pages, come and go, among rows that are vLLM's own; a seat too many."""
    told = [asked(70, 45), asked(16, 33, 5, question=40), asked(20)]
    count = [-(-(t.n_tokens + 150) // PAGE) for t in told]
    blocks = [b.tolist() for b in torch.randperm(sum(count)).split(count)]
    keys, values = (torch.randn(sum(count), KV, PAGE, DIM) for _ in range(2))
    for step in range(150):
        names = [0, None, 1] + [2, None] * (40 < step < 90)
        own = []
        for i in names:
            index = told[i].n_tokens + step if i is not None else 0
            own.append(None if i is None else Row(str(i), told[i], index, 1, tuple(blocks[i][: index // PAGE + 1])))
        ours = [(at, row) for at, row in enumerate(own) if row is not None]
        plan = seats.part(6, NARROW)
        before = len(written)
        seats.seat(plan, own)
        anew = len(written) - before
        q = torch.randn(6, HEADS, DIM)
        made = paged_decode(q[:, :, None], keys, values, plan, scale=DIM**-0.5)[0][:, :, 0]
        fresh = plan_rows(ours, ROTARY.angles, page=PAGE, kv_heads=KV, device=CPU)
        want = torch.empty_like(q)
        fresh.attend(q, keys, values, DIM**-0.5, want)
        at = [i for i, _ in ours]
        torch.testing.assert_close(made[at], want[at], atol=2e-6, rtol=2e-6, msg=f"step {step}, anew {anew}")
        assert seats.ours.tolist() == [i in at for i in range(MOST)]
        del written[before + anew :]
    assert len(written) <= 2 + 2 * (150 // (AHEAD * PAGE) + 1), (
        "at first, when a request comes or goes, at every 8th page"
    )


def test_what_does_not_go_on_is_written_anew(seats: Seats, written: list[int]) -> None:
    told = asked(70, 45)
    n = told.n_tokens - told.n_tokens % PAGE + 3 * PAGE + 2
    plan, blocks = seats.part(4, NARROW), tuple(range(40))
    first = Row("a", told, n, 1, blocks)
    seats.seat(plan, [first, None])
    seats.seat(plan, [Row("a", told, n + 1, 1, blocks), None])
    assert len(written) == 1, "it goes on"
    for other in (
        [Row("a", told, n + 3, 1, blocks), None],
        [Row("b", told, n + 4, 1, blocks), None],
        [Row("b", told, n + 5, 1, blocks[1:]), None],
        [None, Row("b", told, n + 6, 1, blocks[1:])],
        [None, Row("b", told, n + 7, 1, blocks[1:]), None],
    ):
        before = len(written)
        seats.seat(plan, other)
        assert len(written) == before + 1, other
    seats.seat(seats.part(4, WIDE), [None, Row("b", told, n + 8, 1, blocks[1:])])
    assert len(written) == 7, "another graph's plan"


def test_what_has_no_room_has_no_graph(seats: Seats) -> None:
    def row(told: Asked, computed: int) -> Row:
        return Row("r", told, computed, 1, tuple(range(computed // PAGE + 1)))

    few, many = asked(20), asked(*[3] * splits_of(1, NARROW))
    assert seats.width(1, [row(few, few.n_tokens)]) == NARROW
    assert seats.width(1, [row(many, many.n_tokens)]) == WIDE
    more = asked(*[3] * splits_of(1, WIDE))
    assert seats.width(1, [row(more, more.n_tokens)]) is None
    assert seats.width(MOST, [row(more, more.n_tokens)]) == WIDE, "others leave theirs"
    assert seats.width(1, [row(few, PAGE << 16)]) is None, "too many tiles"


class Manager:
    """As vLLM's: graphs of 1, 2, 4 requests."""

    def dispatch(self, requests: int, tokens: int, uniform: int, num_active_loras: int) -> Any:
        size = next((n for n in (1, 2, 4) if n >= requests), None)
        name = "NONE" if size is None else "FULL"
        return SimpleNamespace(cg_mode=SimpleNamespace(name=name), num_reqs=size)


def test_a_step_is_replayed_where_all_decode(seats: Seats) -> None:
    graphs = DecodeGraphs(seats, {NARROW: Manager(), WIDE: Manager()})
    told = asked(20)
    last = told.spans[-1].start
    row = Row("r", told, told.n_tokens, 1, tuple(range(20)))
    found = graphs.replay([row], 3)
    assert found is not None and found.descriptor.num_reqs == 4 and found.plan is seats.part(4, NARROW)
    assert graphs.replay([row], 5) is None, "no graph is as large"
    assert graphs.replay([Row("r", told, last - 1, 1, row.blocks)], 1) is None, "inside a document"
    many = asked(*[3] * splits_of(1, NARROW))
    wide = graphs.replay([Row("r", many, many.n_tokens, 1, tuple(range(500)))], 1)
    assert wide is not None and wide.manager is graphs.managers[WIDE]


def test_vllms_numbers_are_moved_and_put_back(seats: Seats) -> None:
    """Positions are a document's own; vLLM's kernel sees one key in rows that are not its own."""
    told = asked(20)
    worker = SimpleNamespace(graphs=DecodeGraphs(seats, {NARROW: Manager()}), finish=lambda names: None)
    row = Row("r", told, told.n_tokens + 4, 1, tuple(range(20)))
    step = rows_module.Running(worker, Step(rows=(row,)), lambda: ["other", "r"])
    assert step.replays(2, 3) is None, "two tokens of one"
    assert step.replays(2, 2) is not None
    positions, lengths = torch.tensor([7, told.n_tokens + 4]), torch.tensor([8, told.n_tokens + 5], dtype=torch.int32)
    common = SimpleNamespace(positions=positions, seq_lens=lengths)
    step.seat(common)
    assert positions.tolist() == [7, told.position(told.n_tokens + 4)] and lengths.tolist() == [8, 1]
    step.seat(common)  # for layers of another kind
    step.restore()
    assert positions.tolist() == [7, told.n_tokens + 4] and lengths.tolist() == [8, told.n_tokens + 5]
