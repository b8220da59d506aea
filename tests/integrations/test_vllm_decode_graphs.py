"""What captured decode graphs read, written step by step: the same attention as a plan of the step's own."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tamis.integrations.vllm import compat
from tamis.integrations.vllm import rows as rows_module
from tamis.integrations.vllm.client import request
from tamis.integrations.vllm.decode_graphs import AHEAD, NARROW, WIDE, DecodeGraphs, Layer, Seats, splits_of
from tamis.integrations.vllm.request import Asked, Span, parse
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


@pytest.mark.parametrize("question", [PAGE - 1, PAGE, 2 * PAGE - 1])
@pytest.mark.parametrize("documents", [(), (20,), (PAGE, 5)])
def test_a_full_page_goes_on_in_the_next_one(
    seats: Seats, written: list[int], documents: tuple[int, ...], question: int
) -> None:
    """Written where a step's token is the last one of its page, and other pages of the same split are not full."""
    told, plan = asked(*documents, question=question), seats.part(2, NARROW)
    start = told.n_tokens + -(told.n_tokens + 1) % PAGE
    keys, values = (torch.randn(40, KV, PAGE, DIM) for _ in range(2))
    for index in range(start, start + 3 * PAGE):
        row = Row("r", told, index, 1, tuple(range(index // PAGE + 1)))
        before = len(written)
        seats.seat(plan, [None, row])
        assert len(written) == before or index == start or not index % PAGE, "only where a page is begun"
        q = torch.randn(2, HEADS, DIM)
        made = paged_decode(q[:, :, None], keys, values, plan, scale=DIM**-0.5)[0][:, :, 0]
        want = torch.zeros_like(q)
        fresh = plan_rows([(1, row)], ROTARY.angles, page=PAGE, kv_heads=KV, device=CPU)
        fresh.attend(q, keys, values, DIM**-0.5, want)
        torch.testing.assert_close(made[1], want[1], atol=2e-6, rtol=2e-6, msg=f"token {index - start}")


class Life:
    """Requests that come, go, swap places, lose their blocks and get others, among rows that are vLLM's."""

    def __init__(self, seed: int) -> None:
        self.chance, self.page = Random(seed), [16, 32, 64][seed % 3]
        self.free = self.chance.sample(range(600), 600)
        self.batch: list[str | None] = []
        self.told: dict[str, Asked] = {}
        self.at: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}

    def text(self) -> Asked:
        """Anything that a prompt may be."""
        pick, spans, at = self.chance, list[Span](), 0
        kinds = ["prefix"] * pick.randrange(2) + pick.choices(["document", "history"], k=pick.randrange(5))
        for kind in [*kinds, pick.choice(["question", "document", "history"])]:
            if kind == "document" and at % self.page:
                spans.append(Span(at, at := at + -at % self.page, "pad"))
            n = pick.choice([1, 7, self.page - 1, self.page, self.page + 1, 3 * self.page])
            spans.append(Span(at, at := at + n, kind, "k" if kind == "document" else ""))
        return Asked("reuse", tuple(spans))

    def leave(self, name: str) -> None:
        self.free += self.blocks.pop(name, [])
        self.chance.shuffle(self.free)

    def step(self) -> list[Row | None]:
        """What happens, and then the batch."""
        pick = self.chance
        if pick.random() < 0.1 and len(self.batch) < 6:
            name = f"r{pick.randrange(4)}"
            if name not in self.batch:
                told = self.told[name] = self.told.get("r0") or self.text() if pick.random() < 0.3 else self.text()
                self.at[name] = pick.randrange(told.spans[-1].start, told.n_tokens + 1)
                self.batch.append(name)
        if pick.random() < 0.1 and len(self.batch) < 6:
            self.batch.append(None)
        if pick.random() < 0.1 and self.batch and (gone := self.batch.pop(pick.randrange(len(self.batch)))):
            self.leave(gone)
        named = [name for name in self.batch if name]
        if pick.random() < 0.1 and named:  # put off, and back: perhaps earlier than it was
            back = pick.choice(named)
            if pick.random() < 0.7:  # else it gets the same blocks again
                self.leave(back)
            self.at[back] = pick.randrange(self.told[back].spans[-1].start, self.at[back] + 1)
        if pick.random() < 0.1:
            pick.shuffle(self.batch)
        rows: list[Row | None] = []
        for name in self.batch:
            if name is None:
                rows.append(None)
                continue
            own = self.blocks.setdefault(name, [])
            while len(own) * self.page <= self.at[name] + pick.choice([0, 0, self.page]):
                own.append(self.free.pop())
            rows.append(Row(name, self.told[name], self.at[name], 1, tuple(own)))
            self.at[name] += 1
        return rows


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_and_goes(seed: int) -> None:
    life = Life(seed)
    page = life.page
    seats = Seats(MOST, ROTARY.angles, page=page, kv_heads=KV, rotary_dims=DIM, device="cpu")
    keys, values = (torch.randn(600, KV, page, DIM) for _ in range(2))
    for step in range(80):
        batch = life.step()
        ours = [(at, row) for at, row in enumerate(batch) if row is not None]
        if not ours or life.chance.random() < 0.05:
            continue  # a step that seats do not see
        size = next(n for n in (1, 2, 4, 8) if n >= len(batch))
        each = seats.width(size, [row for _, row in ours])
        assert each is not None
        plan = seats.part(size, each)
        seats.seat(plan, batch)
        q = torch.randn(size, HEADS, DIM)
        made = paged_decode(q[:, :, None], keys, values, plan, scale=DIM**-0.5)[0][:, :, 0]
        want = torch.zeros_like(q)
        plan_rows(ours, ROTARY.angles, page=page, kv_heads=KV, device=CPU).attend(q, keys, values, DIM**-0.5, want)
        at = [i for i, _ in ours]
        torch.testing.assert_close(made[at], want[at], atol=5e-6, rtol=5e-6, msg=f"step {step}")
        assert plan.q_position[at, 0].tolist() == [row.asked.position(row.computed) for _, row in ours]


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


def test_a_request_that_begins_anew_in_the_same_blocks(seats: Seats) -> None:
    told, blocks = asked(20), tuple(range(12))
    keys, values = (torch.randn(12, KV, PAGE, DIM) for _ in range(2))
    for index in (told.n_tokens + 2 * PAGE, told.n_tokens + 2 * PAGE + 5, told.n_tokens + 1, told.n_tokens + PAGE):
        row, q = Row("r", told, index, 1, blocks), torch.randn(1, HEADS, DIM)
        seats.seat(seats.part(1, NARROW), [row])
        made = paged_decode(q[:, :, None], keys, values, seats.part(1, NARROW), scale=DIM**-0.5)[0][:, :, 0]
        want = torch.empty_like(q)
        plan_rows([(0, row)], ROTARY.angles, page=PAGE, kv_heads=KV, device=CPU).attend(
            q, keys, values, DIM**-0.5, want
        )
        torch.testing.assert_close(made, want, atol=2e-6, rtol=2e-6)


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


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "pages", lambda cache, dim: (cache[..., :dim], cache[..., dim:]))


def test_a_captured_layer_gives_each_row_its_own(seats: Seats, as_on_a_gpu: None) -> None:
    """vLLM's rows what vLLM makes of them, the others attention over their documents; a wrong KV head, page or
    choice between the two shows."""
    told = asked(70, 45)
    rows = [None, Row("r", told, told.n_tokens + 3, 1, tuple(range(20))), None]
    seats.seat(seats.part(4, NARROW), rows)
    cache = torch.randn(20, KV, PAGE, 2 * DIM)
    q, theirs = torch.randn(4, HEADS, DIM), torch.randn(4, HEADS, DIM)
    asked_of: list[Any] = []

    def stock(layer: Any, query: Any, key: Any, value: Any, kept: Any, metadata: Any, output: Any) -> None:
        asked_of.append((layer, metadata))
        output.copy_(theirs)

    output = torch.full((4, HEADS, DIM), float("nan"))
    layer = Layer("metadata", seats.part(4, NARROW), seats.ours)
    layer.run(stock, "layer", (q, q, q, cache), output, DIM**-0.5)
    want = theirs.clone()
    plan = plan_rows([(1, rows[1])], ROTARY.angles, page=PAGE, kv_heads=KV, device=CPU)
    plan.attend(q, cache[..., :DIM], cache[..., DIM:], DIM**-0.5, want)
    torch.testing.assert_close(output, want, atol=2e-6, rtol=2e-6)
    assert torch.equal(output[[0, 2, 3]], theirs[[0, 2, 3]]) and asked_of == [("layer", "metadata")]
    turned = cache.flip(1)
    layer.run(stock, "layer", (q, q, q, turned), output, DIM**-0.5)
    assert not torch.allclose(output[1], want[1], atol=1e-2), "the other KV heads would be noticed"


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_are_captured_by_width_and_the_capture_ends(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    worker = SimpleNamespace(rotary=ROTARY, block=PAGE, kv_heads=KV, graphs=None)
    runner = SimpleNamespace(max_num_reqs=4, device="cpu")
    captured: list[tuple[Any, int]] = []

    def capture(runner: Any, manager: Any) -> int:
        if fails and captured:
            raise RuntimeError("no memory")
        assert rows_module.capturing is not None
        layer = rows_module.capturing.layer("metadata", 2)
        captured.append((manager, len(layer.plan.splits)))
        return 7

    monkeypatch.setattr(compat, "decode_managers", lambda runner, count: ["one", "two"])
    monkeypatch.setattr(compat, "capture_decodes", capture)
    if fails:
        with pytest.raises(RuntimeError, match="no memory"):
            rows_module.capture(worker, runner)
        assert worker.graphs is None
    else:
        assert rows_module.capture(worker, runner) == 14
        assert captured == [("one", splits_of(2, NARROW)), ("two", splits_of(2, WIDE))] and worker.graphs is not None
    assert rows_module.capturing is None
    worker.rotary = None
    assert rows_module.capture(worker, runner) == 0, "nothing is reused here"
