"""Many requests in one pass: each gets what it would get alone, whoever comes, goes or is parked meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from tamis.attention.policy import Policy
from tamis.cache.block_layer import BlockLayer
from tamis.core.errors import Busy, Cancelled, ContextOverflow, InvalidInput, PoolFull
from tamis.engine import cached as forms
from tamis.engine import products
from tamis.engine.cached_batch import CachedBatch
from tamis.engine.llm import LLM
from tamis.engine.request import End, Event, Failed, Piece, Request, Usage
from tamis.engine.sampling import Sampling
from tamis.engine.scheduler import Limits
from tamis.engine.service import Engine
from tamis.prompt.segments import Prompt
from tiny_forecast import save_forecast

PAGE_BYTES = 2 * 2 * 2 * 64 * 4 * 128  # of the tiny models
REUSE = Policy(prefill="reuse", accept_block_attention=True)


@dataclass
class Ear:
    """Listens to one request."""

    on: Callable[[Event], Any] | None = None
    pieces: list[Piece] = field(default_factory=list)
    last: Event | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Piece):
            self.pieces.append(event)
        else:
            assert self.last is None, "a request ends once"
            self.last = event
            self.done.set()
        if self.on is not None:
            self.on(event)

    @property
    def tokens(self) -> list[int]:
        return [piece.token for piece in self.pieces]

    def end(self) -> End:
        assert self.done.wait(60), "the request did not end"
        if isinstance(self.last, Failed):
            raise self.last.error
        assert isinstance(self.last, End)
        return self.last


@pytest.fixture
def serve(open_llm: Callable[..., LLM]) -> Iterator[Callable[..., Engine]]:
    """(pages, limits and engine options) to an engine on a tiny model; closed and its books checked after the test."""
    made: list[Engine] = []

    def close(engine: Engine) -> None:
        engine.close()
        engine.reuse.store.cache.check()
        assert engine.pool.allocator.n_owned == 0, "pages of requests that ended"
        engine.llm.close()

    def get(
        pages: int = 64, *, chunk_tokens: int | None = 128, choices: dict[str, Any] | None = None, **limits: Any
    ) -> Engine:
        while made:  # a model has one attention at a time
            close(made.pop())
        llm = open_llm("llama", cache_bytes=pages * PAGE_BYTES, **(choices or {}))
        llm.stop_tokens = frozenset()
        made.append(Engine(llm, Limits(**limits), chunk_tokens=chunk_tokens))
        return made[-1]

    yield get
    while made:
        close(made.pop())


@pytest.fixture(scope="module")
def tokens() -> Callable[[int], list[int]]:
    draw = torch.Generator().manual_seed(3)
    return lambda n: torch.randint(0, 512, (n,), generator=draw).tolist()


@pytest.fixture(scope="module")
def requests(tokens: Callable[[int], list[int]]) -> list[Request]:
    """Eight of all kinds and lengths."""
    a, b, c = tokens(70), tokens(129), tokens(300)

    def prompt(*documents: list[int], question: int = 20) -> Prompt:
        return Prompt.of(
            [("prefix", tokens(37)), *(("document", d) for d in documents), ("question", tokens(question))]
        )

    kinds = [
        (prompt(question=1), Policy()),
        (prompt(a, b, c), Policy()),
        (prompt(c, question=400), Policy()),
        (prompt(a, b), REUSE),
        (prompt(b, a, c, question=130), REUSE),
        (prompt(a, b, c), Policy(prefill="sift", min_tokens=0)),
        (prompt(a, c), Policy(prefill="blend", recompute=0.3)),
        (prompt(a, question=200), Policy(prefill="prefix")),
    ]
    new = (30, 5, 12, 40, 17, 9, 25, 33)
    return [Request(p, policy, Sampling(max_new_tokens=n)) for (p, policy), n in zip(kinds, new, strict=True)]


def alone(engine: Engine, request: Request) -> list[int]:
    """What the library's own loop gives."""
    llm = engine.llm
    with llm.runner.lock:
        choices = {name: getattr(request.policy, name) for name in Policy.__dataclass_fields__}
        start = llm.prefill(request.prompt, **choices)
        return list(llm.runner.decode(start, request.sampling, frozenset()))


class TestTokens:
    def test_as_alone_in_any_order_of_arrival_with_one_cancelled(
        self, serve: Callable[..., Engine], requests: list[Request]
    ) -> None:
        engine = serve(pages=128)
        wanted = [alone(engine, r) for r in requests]
        assert len({tuple(w) for w in wanted}) == len(wanted)
        extra = replace(requests[2], sampling=Sampling(max_new_tokens=200))
        for seed in range(2):
            order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(seed)).tolist()
            gone = Ear()
            number = engine.submit(extra, gone)
            gone.on = lambda event, gone=gone, number=number: len(gone.pieces) == 7 and engine.cancel(number)
            ears = {i: Ear() for i in order}
            for i in order:
                engine.submit(requests[i], ears[i])
            for i in order:
                assert ears[i].end().usage.new == len(wanted[i])
                assert ears[i].tokens == wanted[i], f"request {i} in order {order}"
            with pytest.raises(Cancelled):
                gone.end()
            assert 7 <= len(gone.pieces) < 200

    @pytest.mark.parametrize("least_packed", [1, products.LEAST_WEIGHTS], ids=["packed", "torch"])
    def test_logits_do_not_depend_on_the_others_at_all(
        self,
        serve: Callable[..., Engine],
        requests: list[Request],
        monkeypatch: pytest.MonkeyPatch,
        least_packed: int,
    ) -> None:
        monkeypatch.setattr(products, "LEAST_WEIGHTS", least_packed)
        monkeypatch.setattr(products, "_OF", WeakKeyDictionary())
        engine = serve(pages=128)
        one = replace(requests[1], sampling=Sampling(max_new_tokens=20), top=3)
        lone = Ear()
        engine.submit(one, lone)
        lone.end()
        ears = [Ear() for _ in requests]
        for request, ear in zip(requests[:4], ears, strict=False):
            engine.submit(request, ear)
        among = Ear()
        engine.submit(one, among)
        for request, ear in zip(requests[4:], ears[4:], strict=True):
            engine.submit(request, ear)
        among.end()
        assert [p.scored for p in among.pieces] == [p.scored for p in lone.pieces]
        for ear in ears:
            ear.end()

    def test_parked_and_resumed_in_a_small_pool(self, serve: Callable[..., Engine], requests: list[Request]) -> None:
        longer = [replace(r, sampling=Sampling(max_new_tokens=100), priority=i % 2) for i, r in enumerate(requests)]
        roomy = serve(pages=128)
        wanted = [alone(roomy, r) for r in longer]
        engine = serve(pages=16)
        ears = [Ear() for _ in longer]
        for request, ear in zip(longer, ears, strict=True):
            engine.submit(request, ear)
        for i, (ear, tokens) in enumerate(zip(ears, wanted, strict=True)):
            ear.end()
            assert ear.tokens == tokens, f"request {i}"
        assert engine.statistics().preemptions > 0

    def test_sampling_depends_on_the_seed_alone(self, serve: Callable[..., Engine], requests: list[Request]) -> None:
        engine = serve(pages=128)
        warm = Sampling(16, 0.9, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.3, seed=5)
        asked = [replace(r, sampling=warm) for r in requests[:3]]
        asked.append(replace(asked[0], sampling=replace(warm, seed=6)))
        ears = [Ear() for _ in asked]
        for request, ear in zip(asked, ears, strict=True):
            engine.submit(request, ear)
        for request, ear in zip(asked, ears, strict=True):
            ear.end()
            assert ear.tokens == alone(engine, request)
        assert ears[0].tokens != ears[3].tokens


class TestFormsOfTheirOwn:
    """Keys and values that are not in pages: such requests decode in one pass too, each over its own cache."""

    KINDS = (
        Policy(decode="selfindex", decode_least=16, decode_budget=0.1),
        Policy(kv="selfindex", prefill="sift", min_tokens=0),
        Policy(kv="bf16"),
        Policy(decode="blocks", decode_local=1),
        Policy(prefill="blocks", min_tokens=0),
        Policy(decode="blocks", decode_budget=0.1, decode_least=0, decode_local=1, offload="host"),
    )

    @pytest.fixture(scope="class")
    def own(self, tokens: Callable[[int], list[int]]) -> list[Request]:
        prompt = Prompt.of([("document", tokens(300)), ("document", tokens(170)), ("question", tokens(20))])
        return [Request(prompt, policy, Sampling(max_new_tokens=20)) for policy in self.KINDS]

    def test_as_alone_among_others(
        self, serve: Callable[..., Engine], requests: list[Request], own: list[Request]
    ) -> None:
        engine = serve(pages=128)
        mixed = [one for pair in zip(own, requests, strict=False) for one in pair]
        wanted = [alone(engine, self.in_parts(r)) for r in mixed]
        ears = [Ear() for _ in mixed]
        for request, ear in zip(mixed, ears, strict=True):
            engine.submit(request, ear)
        for i, (ear, tokens_) in enumerate(zip(ears, wanted, strict=True)):
            assert ear.end().usage.new == len(tokens_)
            assert ear.tokens == tokens_, f"request {i}: {mixed[i].policy}"
        # chunks end with tiles, which end with documents; blocks are counted from the prompt's start
        assert [ear.end().report.chunks for ear in ears[::2]] == [4 if r.policy.prefill == "blocks" else 5 for r in own]

    def test_logits_do_not_depend_on_the_others_at_all(
        self, serve: Callable[..., Engine], requests: list[Request], own: list[Request]
    ) -> None:
        engine, asked = serve(pages=128), [replace(r, top=3) for r in own]
        lone = [Ear() for _ in asked]
        for request, ear in zip(asked, lone, strict=True):
            engine.submit(request, ear)
            ear.end()
        among = [Ear() for _ in asked]
        for request, ear, other in zip(asked, among, requests, strict=False):
            engine.submit(request, ear)
            engine.submit(other, Ear())
        for a, b in zip(lone, among, strict=True):
            b.end()
            assert [p.scored for p in a.pieces] == [p.scored for p in b.pieces]

    def test_one_pass_for_all(
        self, serve: Callable[..., Engine], own: list[Request], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine, rows = serve(pages=128, chunk_tokens=512), []
        step = CachedBatch.step

        def counted(self: CachedBatch, members: list[Any]) -> Any:
            rows.append(len(members))
            return step(self, members)

        monkeypatch.setattr(CachedBatch, "step", counted)
        ears = [Ear() for _ in own]
        for request, ear in zip(own, ears, strict=True):
            engine.submit(request, ear)
        for ear in ears:
            ear.end()
        assert max(rows) == len(own) and sum(rows) == 19 * len(own)

    def test_one_that_finds_no_room_fails_alone(
        self, serve: Callable[..., Engine], own: list[Request], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = serve(pages=128)
        wanted = alone(engine, self.in_parts(own[0]))
        update = BlockLayer.update

        def full(self: BlockLayer, *args: Any, **kwargs: Any) -> Any:
            if self.get_seq_length() == 495 and self.form.host:
                raise PoolFull("no slot is free")
            return update(self, *args, **kwargs)

        monkeypatch.setattr(BlockLayer, "update", full)
        good, bad = Ear(), Ear()
        engine.submit(own[0], good)
        engine.submit(own[5], bad)
        with pytest.raises(PoolFull, match="no slot is free"):
            bad.end()
        good.end()
        assert good.tokens == wanted and 1 < len(bad.pieces) < 20

    def test_a_forecast(
        self,
        serve: Callable[..., Engine],
        own: list[Request],
        requests: list[Request],
        loaded: Callable[..., Any],
        tmp_path: Path,
    ) -> None:
        few = Policy(decode="forecast", decode_budget=0.1, decode_least=0, decode_local=1)
        by_it = replace(few, prefill="forecast", prefill_blocks=4, min_tokens=0)
        asked = [replace(own[0], policy=policy) for policy in (few, replace(few, offload="host"), by_it)]
        plain = serve(pages=128)
        with pytest.raises(InvalidInput, match="needs a forecast and none is loaded"):
            plain.submit(asked[0], Ear())
        engine = serve(pages=128, choices={"forecast": save_forecast(loaded("llama"), tmp_path)})
        mixed = [*asked, own[0], requests[0], asked[0]]
        wanted = [alone(engine, self.in_parts(r)) for r in mixed]
        ears = [Ear() for _ in mixed]
        for request, ear in zip(mixed, ears, strict=True):
            engine.submit(request, ear)
        for ear, tokens_ in zip(ears, wanted, strict=True):
            ear.end()
            assert ear.tokens == tokens_

    def test_parked_and_resumed(self, serve: Callable[..., Engine], requests: list[Request]) -> None:
        asked = [
            replace(requests[1], policy=self.KINDS[i % 2], sampling=Sampling(max_new_tokens=150), priority=i % 2)
            for i in range(4)
        ]
        engine = serve(pages=14)
        wanted = [alone(engine, self.in_parts(r)) for r in asked[:2]]
        ears = [Ear() for _ in asked]
        for request, ear in zip(asked, ears, strict=True):
            engine.submit(request, ear)
        for i, ear in enumerate(ears):
            ear.end()
            assert ear.tokens == wanted[i % 2]

    def in_parts(self, request: Request) -> Request:
        """The same for the library, in the parts that the engine makes of a prompt."""
        own = forms.cached(request.policy, torch.float32)
        return replace(request, policy=replace(request.policy, chunk_tokens=128)) if own else request


def test_parts_of_prompts_are_as_long_as_suits_the_device(serve: Callable[..., Engine]) -> None:
    assert serve(chunk_tokens=None).chunk_tokens == 512 and serve(chunk_tokens=64).chunk_tokens == 64


class TestReuse:
    def test_fifty_requests_for_one_missing_document_compute_it_once(
        self, serve: Callable[..., Engine], tokens: Callable[[int], list[int]]
    ) -> None:
        engine, document = serve(pages=128), tokens(300)
        ears = [Ear() for _ in range(50)]
        for ear in ears:
            prompt = Prompt.of([("prefix", tokens(5)), ("document", document), ("question", tokens(9))])
            engine.submit(Request(prompt, REUSE, Sampling(max_new_tokens=3)), ear)
        cached = [ear.end().usage.cached for ear in ears]
        assert cached == [0] + [300] * 49
        assert engine.reuse.store.passes == 1 and engine.reuse.store.cache.statistics().computed == 1

    def test_a_prefix_is_found_again_but_not_by_others(
        self, serve: Callable[..., Engine], tokens: Callable[[int], list[int]]
    ) -> None:
        engine, prompt = serve(), Prompt.of([("question", tokens(300))])
        found = []
        for namespace in ("", "", "b", "b"):
            ear, one = Ear(), Request(prompt, Policy(prefill="prefix"), Sampling(max_new_tokens=2), namespace=namespace)
            engine.submit(one, ear)
            found.append(ear.end().usage.cached)
        assert found == [0, 256, 0, 256]

    def test_documents_of_another_namespace_are_others(
        self, serve: Callable[..., Engine], tokens: Callable[[int], list[int]]
    ) -> None:
        engine, document = serve(), tokens(140)
        prompt = Prompt.of([("document", document), ("question", tokens(9))])
        for namespace, cached in (("a", 0), ("b", 0), ("a", 140)):
            ear = Ear()
            engine.submit(Request(prompt, REUSE, Sampling(max_new_tokens=2), namespace=namespace), ear)
            end = ear.end()
            assert end.usage == Usage(149, cached, 2)
            assert end.report.reuse is not None and end.report.reuse.approximate

    def test_documents_that_find_no_room_are_computed_in_place(
        self, serve: Callable[..., Engine], tokens: Callable[[int], list[int]]
    ) -> None:
        engine = serve(pages=24)
        prompts = [
            Prompt.of([("document", tokens(600)), ("document", tokens(500)), ("question", tokens(30))])
            for _ in range(5)
        ]
        ears = [Ear() for _ in prompts]
        for prompt, ear in zip(prompts, ears, strict=True):
            engine.submit(Request(prompt, REUSE, Sampling(max_new_tokens=40)), ear)
        for ear in ears:
            assert ear.end().usage.new == 40


class TestRefusals:
    def test_at_once(self, serve: Callable[..., Engine], tokens: Callable[[int], list[int]]) -> None:
        engine = serve(pages=6, max_waiting=1, max_running=1)

        def ask(n: int, new: int = 4, **policy: Any) -> Ear:
            ear = Ear()
            engine.submit(
                Request(Prompt.of([("question", tokens(n))]), Policy(**policy), Sampling(max_new_tokens=new)), ear
            )
            return ear

        with pytest.raises(ContextOverflow, match="takes 4096 in all"):
            ask(4000, 97)
        with pytest.raises(InvalidInput, match="may need 7 pages"):
            ask(800)
        with pytest.raises(InvalidInput, match="forecast"):
            ask(8, decode="forecast")
        with pytest.raises(InvalidInput, match="accept_block_attention"):
            ask(8, prefill="reuse")
        first = ask(300, 100)
        with pytest.raises(Busy):
            for _ in range(3):
                ask(300, 100)
        first.end()

    def test_a_drained_engine_hands_back_what_is_not_done(
        self, serve: Callable[..., Engine], tokens: Callable[[int], list[int]]
    ) -> None:
        engine = serve(max_running=1)
        ears = [Ear() for _ in range(3)]
        for ear in ears:
            engine.submit(Request(Prompt.of([("question", tokens(9))]), sampling=Sampling(max_new_tokens=3000)), ear)
        assert engine.drain(0.2) == 3
        for ear in ears:
            with pytest.raises(Cancelled, match="shutting down"):
                ear.end()
        with pytest.raises(Busy, match="shutting down"):
            engine.submit(Request(Prompt.of([("question", tokens(9))])), Ear())

    def test_a_listener_that_raises_hurts_nobody(
        self, serve: Callable[..., Engine], tokens: Callable[[int], list[int]]
    ) -> None:
        engine = serve()

        def bad(event: Event) -> None:
            raise ValueError("listener")

        request = Request(Prompt.of([("question", tokens(9))]), sampling=Sampling(max_new_tokens=5))
        engine.submit(request, bad)
        ear = Ear()
        engine.submit(request, ear)
        assert ear.end().usage.new == 5
        assert engine.call(lambda: 7).result(5) == 7
