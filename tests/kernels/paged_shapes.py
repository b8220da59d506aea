"""The prompts that every paged kernel is tried on."""

from __future__ import annotations

from dataclasses import replace

import torch
from paged_cases import Prompt, Shape

# three documents in any order, one twice at different offsets, short pages, own keys before, between and behind;
# query rows with gaps
MIXED = Prompt(
    (("own", 5, 0), ("b", 40, 5), ("a", 64, 45), ("own", 3, 109), ("b", 40, 112), ("c", 7, 152), ("own", 40, 159)),
    (*range(159, 180), 185, 190, 191, 198),
)
FAR = Prompt((("a", 70, 131_072), ("b", 33, 1_000_000), ("own", 20, 1_000_033)), tuple(range(1_000_033, 1_000_053)))
FIRST = Prompt((("a", 40, 0), ("own", 9, 40)), tuple(range(40, 49)))
INSIDE = Prompt((("own", 30, 0), ("a", 50, 30)), (0, 7, 31, 32, 45, 79))  # rows between the keys of a document
BLIND = Prompt((("a", 20, 50),), (10, 49, 50, 60))  # rows before every key
STEP = (
    Prompt((("own", 5, 0), ("b", 40, 5), ("a", 96, 45), ("own", 33, 141)), (173,)),
    Prompt((("a", 96, 70_000), ("own", 1, 70_096)), (70_096,)),
    Prompt((("c", 64, 3), ("a", 96, 67), ("c", 64, 163), ("own", 3, 227)), (229,)),
)
MANY = tuple(replace(p, positions=tuple(range(p.positions[0] - 2, p.positions[0] + 1))) for p in (STEP[0], STEP[2]))
HALF = torch.float16

PREFILL = {
    "mixed": Shape((MIXED,), rows=16),
    "mixed, head dim 128, fp16": Shape((MIXED,), dim=128, dtype=HALF),
    "far": Shape((FAR,), (2, 1)),
    "far, MQA, partial rotary": Shape((FAR,), (4, 1), rotary=32),
    "first at offset 0": Shape((FIRST,), (3, 3), 32),
    "rows inside a document": Shape((INSIDE,), rows=16),
    "rows that see nothing": Shape((BLIND,), (2, 1), 32),
    "holes": Shape((MIXED,), holes=True),
    "holes, fp16": Shape((MIXED,), holes=True, dtype=HALF),
    "needle": Shape((MIXED,), needle=True, rows=16),
    "needle, fp16": Shape((MIXED,), dim=128, needle=True, rows=16, dtype=HALF),
    "head dim 96": Shape((MIXED,), (2, 1), 96),
    "head dim 24, rotary 8": Shape((MIXED,), (2, 1), 24, rotary=8),
    "ALiBi": Shape((MIXED,), alibi=True),
    "pages of 16": Shape((MIXED,), (2, 1), 32, page=16, rows=16),
}
DECODE = {
    "step": Shape(STEP),
    "step, fp16, head dim 128": Shape(STEP, (8, 2), 128, dtype=HALF),
    "step, MQA": Shape(STEP, (6, 1)),
    "step, one head each": Shape(STEP, (2, 2), 32),
    "step, holes": Shape(STEP, holes=True),
    "step, needle": Shape(STEP, needle=True),
    "step, needle, fp16": Shape(STEP, (8, 2), 128, needle=True, dtype=HALF),
    "step, partial rotary": Shape(STEP, (4, 2), 64, rotary=32),
    "step, head dim 96": Shape(STEP, (2, 1), 96),
    "step, ALiBi": Shape(STEP, alibi=True),
    "three rows each": Shape(MANY, (4, 2), holes=True),
}

# requests of one call: they share a document at different offsets, and one has no document and no angles
PACKED = Shape(
    (
        Prompt(STEP[0].parts, tuple(range(150, 174))),
        Prompt((("own", 9, 0),), tuple(range(9))),
        Prompt(STEP[1].parts, (70_096,)),
        Prompt(STEP[2].parts, tuple(range(200, 230))),
    ),
    rows=16,
)

# what a GPU is given besides
BF16 = torch.bfloat16
LONG = Prompt(
    (("own", 60, 0), ("a", 1000, 60), ("b", 512, 1060), ("c", 129, 1572), ("a", 1000, 1701), ("own", 300, 2701)),
    tuple(range(2701, 3001)),
)
LATE = Prompt((("a", 1000, 700_000), ("b", 512, 701_000), ("own", 77, 701_512)), (701_588,))
WIDE = {"page": 128, "rows": 128, "dtype": BF16}
GPU_PREFILL = {
    "bf16": Shape((LONG,), (8, 2), 128, **WIDE),
    "bf16, holes": Shape((LONG,), (8, 2), 128, holes=True, **WIDE),
    "bf16, needle": Shape((LONG,), (8, 2), 128, needle=True, **WIDE),
    "fp16, d64, MQA": Shape((LONG,), (4, 1), 64, page=128, rows=128, dtype=HALF),
    "fp32": Shape((LONG,), (4, 2), 64, page=128, rows=128),
    "d96": Shape((LONG,), (3, 3), 96, **WIDE),
    "d256, partial rotary": Shape((LONG,), (2, 1), 256, rotary=64, **WIDE),
    "partial rotary": Shape((LONG,), (4, 2), 128, rotary=64, **WIDE),
    "ALiBi": Shape((LONG,), (4, 2), 64, alibi=True, **WIDE),
    "small": replace(PREFILL["mixed"], dtype=BF16),
}
STEPS = (replace(LONG, positions=(3000,)), LATE, replace(LONG, positions=(3000,)))
GPU_DECODE = {
    "bf16": Shape(STEPS, (8, 2), 128, **WIDE),
    "bf16, holes": Shape(STEPS, (8, 2), 128, holes=True, **WIDE),
    "bf16, needle": Shape(STEPS, (8, 2), 128, needle=True, **WIDE),
    "fp16, d64, MQA": Shape(STEPS, (14, 1), 64, page=128, rows=128, dtype=HALF),
    "fp32": Shape(STEPS, (4, 2), 64, page=128, rows=128),
    "d96": Shape(STEPS, (3, 3), 96, **WIDE),
    "d256, partial rotary": Shape(STEPS, (2, 1), 256, rotary=64, **WIDE),
    "ALiBi": Shape(STEPS, (4, 2), 64, alibi=True, **WIDE),
    "small, three rows": replace(DECODE["three rows each"], dtype=BF16),
}
