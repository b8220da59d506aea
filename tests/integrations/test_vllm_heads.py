"""Which stored bits a worker of a model in parts reads: those of its own query heads, nobody else's; no vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tamis.index.encode import Bits
from tamis.index.record import Record
from tamis.index.spec import Fingerprint, IndexSpec
from tamis.index.store import RecordStore
from tamis.integrations.vllm.records import Records, heads_of
from tamis.integrations.vllm.request import Asked, Span
from tamis.prompt.segments import document_id

HEADS, TOKENS = 4, list(range(3, 303))


@pytest.mark.parametrize(("rank", "size", "first"), [(0, 1, 0), (0, 2, 0), (1, 2, 2), (2, 2, 0), (3, 2, 2), (3, 4, 3)])
def test_each_worker_reads_its_own(tmp_path: Path, rank: int, size: int, first: int) -> None:
    """Ranks from `size` on are later stages of a pipeline: the same heads of other layers."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=size),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_attention_heads=HEADS)),
    )
    la = torch.eye(3, dtype=torch.bool).expand(2, HEADS, 3, 3).clone()
    ca = torch.zeros(2, HEADS, 3, dtype=torch.bool)
    for head in range(HEADS):
        ca[:, head] = torch.tensor([head & 1, head & 2, 1]) > 0
    spec = IndexSpec(Fingerprint("a", "w", "t", "r", "float32"), 2, HEADS, "")
    key = document_id(TOKENS)
    with RecordStore.open(tmp_path, spec) as store:
        store.put([Record.of(Bits(la, ca), document_id=key, spec=spec, n_tokens=len(TOKENS))])
    asked = Asked("sift", (Span(0, 300, "document", key.hex()), Span(300, 310, "question")), recorded=(key.hex(),))
    (bits,) = Records(tmp_path).bits(asked, heads_of(config))
    assert bits is not None
    assert torch.equal(bits.ca, ca[:, first : first + HEADS // size]) and bits.la.shape[1] == HEADS // size
