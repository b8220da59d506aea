"""A real model inside vLLM and in Tamis's own engine: the same tiles, density and greedy answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import BLOCK, SETTINGS, Engines, Peer

from tamis.integrations.vllm.client import request

TEXTS = Path(__file__).parents[2] / "examples" / "documents"
THETA = 0.05


@pytest.fixture(scope="module")
def real(smollm2: Any, engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engines, Peer]]:
    """SmolLM2 in both."""
    from tamis.engine.llm import LLM

    engines.close()
    path = tmp_path_factory.mktemp("smollm2")
    smollm2.model.save_pretrained(path)
    made = Engines(path)
    with LLM(smollm2) as llm:
        yield made, Peer(llm)
    made.close()


@pytest.fixture(scope="module")
def parts(smollm2: Any) -> list[tuple[str, list[int]]]:
    """A prompt of three documents, two to four tiles each."""
    encode = smollm2.tokenizer.encode
    texts = [path.read_text() for path in sorted(TEXTS.rglob("*.md"))[:3]]
    documents = [("document", encode(text)[: 280 + 70 * i]) for i, text in enumerate(texts)]
    prefix = encode("<|im_start|>system\nAnswer from the passages.<|im_end|>\n<|im_start|>user\n")
    question = encode("\nWhat are these passages about?<|im_end|>\n<|im_start|>assistant\n")
    return [("prefix", prefix), *documents, ("question", question)]


def asked(parts: list[tuple[str, list[int]]], mode: str, **choices: Any) -> dict[str, Any]:
    documents = [ids for kind, ids in parts if kind == "document"]
    return request(parts[0][1], documents, parts[-1][1], mode=mode, block_size=BLOCK, **choices)


def test_sift_is_the_same(real: tuple[Engines, Peer], parts: list[tuple[str, list[int]]]) -> None:
    engines, peer = real
    engine = engines.get(SETTINGS | {"selector": f"threshold:local=sampled,theta={THETA}"})
    made = engine.run(asked(parts, "sift"), n=16)[0]
    mine = engine.worker.state.reports[-1]
    choices = {"selector": "threshold", "local": "sampled", "theta": THETA, "min_tokens": 0}
    tokens, report = peer.run(parts, n=16, prefill="sift", **choices)
    assert made.tokens == tokens
    assert report.density < 0.99 and mine.density == pytest.approx(report.density, abs=1e-3)


def test_reuse_is_the_same_in_any_order(real: tuple[Engines, Peer], parts: list[tuple[str, list[int]]]) -> None:
    engines, peer = real
    engine = engines.get(SETTINGS | {"selector": f"threshold:local=sampled,theta={THETA}"})
    swapped = [parts[0], *reversed(parts[1:-1]), parts[-1]]
    for i, order in enumerate((parts, swapped)):
        made = engine.run(asked(order, "reuse"), n=16)[0]
        assert made.tokens == peer.run(order, n=16, prefill="reuse", accept_block_attention=True)[0]
        assert (made.cached > 900) == bool(i)
