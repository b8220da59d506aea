"""Run the Triton kernel on packed prompts under Triton's interpreter and print its differences from separate calls.

A program of its own, run with TRITON_INTERPRET=1: that must be set before Triton is first imported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from attention_cases import Shape, errors
from interpreted import fix_interpreter
from packed_cases import joined, prompts

BASE = Shape((), tile=16, dim=16)
CASES = {
    "odd lengths": ([1, 63, 16, 33], BASE, 0),
    "fp16": ([40, 1, 17], replace(BASE, dtype=torch.float16), 0),
    "MQA": ([50, 20], replace(BASE, heads=(4, 1)), 0),
    "a chunk first": ([20, 31], BASE, 37),
    "one prompt": ([45], BASE, 0),
}


def main() -> None:
    """All cases, then the first with entries of the second prompt left where they were."""
    fix_interpreter()
    from tamis.kernels import dispatch

    torch.set_num_threads(1)

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dispatch.block_sparse_attention(*inputs, BASE.scale, kernel="triton")

    for name, (lengths, base, offset) in CASES.items():
        parts, packed = prompts(lengths, base, first_offset=offset)
        expected = joined([run(*part) for part in parts])
        row = {"case": name, "dtype": str(base.dtype).removeprefix("torch."), **errors(run(*packed), expected)}
        sys.stdout.write(json.dumps(row) + "\n")
    parts, (q, k, v, lists) = prompts([48, 48], BASE)
    entries = torch.cat([part[3].entries for part in parts], 1)
    made = run(q, k, v, replace(lists, entries=entries))
    row = {"case": "entries not moved", **errors(made, joined([run(*part) for part in parts]))}
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
