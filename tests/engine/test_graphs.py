"""Recorded steps give what eager ones give, whoever joins and leaves; where nothing can be recorded it is said why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tamis.attention.policy import Policy
from tamis.engine.batch import Batch, grown_room
from tamis.engine.graphs import StepGraphs
from tamis.engine.llm import LLM
from tamis.engine.member import Member
from tamis.engine.request import Request
from tamis.engine.sampling import Sampling
from tamis.kernels.decode_plan import Room
from tamis.model.source import LoadedModel
from tamis.prompt.segments import Prompt
from tiny_chat import tiny_tokenizer

REUSE = Policy(prefill="reuse", accept_block_attention=True)


class TestWithoutGpu:
    def test_steps_run_as_they_are_and_say_why(self, tiny_model: Callable[..., Any]) -> None:
        graphs = StepGraphs(tiny_model(), torch.device("cpu"))
        assert not graphs.used and "cpu" in graphs.reason
        assert graphs.run("any", 4, lambda: torch.ones(1)) == 1 and graphs.eager == 1
        assert "off" in StepGraphs(tiny_model(), torch.device("cuda"), use=False).reason

    def test_what_cannot_be_recorded_is_not_tried(self, tiny_model: Callable[..., Any]) -> None:
        model, device = tiny_model(), torch.device("cuda")
        assert StepGraphs(model, device).used
        model.config.num_experts = 8
        assert "experts" in StepGraphs(model, device).reason

    def test_rooms_come_in_few_sizes(self) -> None:
        room = grown_room(Room(8, 70, 75, 5, 1, 128, 64), 16, even=True)
        assert (room.tiles, room.documents, room.splits) == (128, 16, 144)
        assert grown_room(Room(8, 70, 70, 0, 1, 128), 16, even=False).tiles == 86


@pytest.fixture
def gpu_llm(tiny_model: Callable[..., Any]) -> Iterator[Callable[[torch.dtype], LLM]]:
    """(dtype) to an LLM on the GPU, closed after the test."""
    opened: list[LLM] = []

    def get(dtype: torch.dtype) -> LLM:
        model = tiny_model("llama", num_hidden_layers=4).to(device="cuda", dtype=dtype)
        opened.append(LLM(LoadedModel(model, tiny_tokenizer(), "tiny", ""), cache_bytes=64 << 20))
        return opened[-1]

    yield get
    for llm in opened:
        llm.close()


def _members(llm: LLM, count: int) -> list[Member]:
    """Prefilled, of many lengths, some with stored documents."""
    draw, made = torch.Generator().manual_seed(7), []

    def tokens(n: int) -> list[int]:
        return torch.randint(0, 512, (n,), generator=draw).tolist()

    documents = [tokens(200), tokens(90)]
    for i in range(count):
        parts = [("document", d) for d in documents] if i % 3 == 2 else []
        prompt = Prompt.of([*parts, ("question", tokens(5 + 61 * i))])
        policy = REUSE if i % 3 == 2 else Policy()
        request = Request(prompt, policy, Sampling(max_new_tokens=200))
        member = Member(request, llm.reuse_engine(), lambda: None, chunk_tokens=512)  # type: ignore[arg-type, return-value]
        assert member.take(member.placing.needs()["start_pages"] + 3)
        while (logits := member.run_part()) is None:
            pass
        member.new.append(int(logits.argmax()))
        made.append(member)
    return made


def _run(llm: LLM, *, graphs: bool, count: int = 9, forced: list[list[int]] | None = None) -> tuple[Any, Batch]:
    """Logits of steps in which requests join and leave; `forced`: tokens to go on with instead of the likeliest."""
    members, batch, out = _members(llm, count), Batch(llm.reuse_engine(), graphs=graphs), []
    try:
        for step in range(30):
            # one, then more and more, then fewer; stays long enough in each for graphs to be recorded and replayed
            here = members[: max(1, min(count, 1 + step // 3))] if step < 24 else members[4:7]
            logits = batch.step(here).float().cpu().clone()
            out.append(logits)
            for i, (member, row) in enumerate(zip(here, logits, strict=True)):
                member.new.append(int(row.argmax()) if forced is None else forced[step][i])
        return out, batch
    finally:
        batch.close()
        for member in members:
            member.close()


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_replays_equal_eager_steps_while_requests_join_and_leave(
        self, gpu_llm: Callable[[torch.dtype], LLM], dtype: torch.dtype
    ) -> None:
        llm = gpu_llm(dtype)
        eager, plain = _run(llm, graphs=False)
        tokens = [logits.argmax(-1).tolist() for logits in eager]
        replayed, batch = _run(llm, graphs=True, forced=tokens)
        assert not batch.graphs.reason, batch.graphs.reason
        assert plain.graphs.replays == 0 and batch.graphs.replays >= 10
        for step, (a, b) in enumerate(zip(replayed, eager, strict=True)):
            # a plan with more room may cut a request's pages into other splits, whose sums are merged in another order
            torch.testing.assert_close(
                a, b, rtol=0, atol=(1e-3 if dtype == torch.float32 else 0.06) * float(b.abs().max()), msg=f"step {step}"
            )

    def test_greedy_tokens_of_one_alone_and_among_others(self, gpu_llm: Callable[[torch.dtype], LLM]) -> None:
        """In bfloat16 a row's products may be rounded otherwise in larger batches: a token may only change where the
        two likeliest ones are closer than that."""
        llm = gpu_llm(torch.bfloat16)
        alone = []
        (member,) = _members(llm, 1)
        lone = Batch(llm.reuse_engine())
        for _ in range(20):
            logits = lone.step([member])[0].float().cpu()
            alone.append(logits)
            member.new.append(int(logits.argmax()))
        lone.close()
        member.close()
        members, batch = _members(llm, 8), Batch(llm.reuse_engine())
        for step, wanted in enumerate(alone):
            logits = batch.step(members).float().cpu()
            gap = float((logits[0] - wanted).abs().max())
            assert gap <= 0.06 * float(wanted.abs().max()), f"step {step}"
            top = wanted.topk(2).values
            if float(top[0] - top[1]) > 2 * gap:
                assert int(logits[0].argmax()) == int(wanted.argmax()), f"step {step}"
            for i, row in enumerate(logits):
                members[i].new.append(int((wanted if i == 0 else row).argmax()))
        batch.close()
        for one in members:
            one.close()

    def test_a_step_that_cannot_be_recorded_is_computed_all_the_same(self, tiny_model: Callable[..., Any]) -> None:
        device = torch.device("cuda")
        graphs, x = StepGraphs(tiny_model(), device), torch.ones(3, device=device)

        def waits() -> torch.Tensor:
            return x * float(x.sum())

        for _ in range(3):
            assert graphs.run("a", 1, waits).tolist() == [3.0, 3.0, 3.0]
        assert "could not be recorded" in graphs.reason and graphs.replays == 0
        assert torch.randn(2, device=device).isfinite().all()
