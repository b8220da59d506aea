"""The steps of `kernels.reference.offload` by Triton kernels, under the same names."""

from __future__ import annotations

from tamis.kernels.triton.blocks_prefill import prefill_attend
from tamis.kernels.triton.blocks_score import prefill_scores, scores
from tamis.kernels.triton.blocks_select import prefill_select, select
from tamis.kernels.triton.offload_attend import attend
from tamis.kernels.triton.offload_move import append, copy_blocks, fetch, place

__all__ = [
    "append",
    "attend",
    "copy_blocks",
    "fetch",
    "place",
    "prefill_attend",
    "prefill_scores",
    "prefill_select",
    "scores",
    "select",
]
