"""Run the Triton kernel under Triton's interpreter and print its errors as JSON, one line a case.

A program of its own, run with TRITON_INTERPRET=1: that must be set before Triton is first imported.
"""

from __future__ import annotations

import json
import sys

import torch
from attention_cases import MUTATIONS, Shape, errors, make, mutate, truth

HALF = torch.float16
CASES = {
    "odd segments": Shape((1, 63, 33, 70), tile=32, dim=16),
    "odd segments, fp16": Shape((1, 63, 111), dtype=HALF),
    "needle": Shape((100, 63), tile=32, dim=32, needle=True),
    "needle, fp16": Shape((111, 63), dtype=HALF, needle=True),
    "MQA": Shape((96, 31), heads=(4, 1), tile=32, dim=32),
    "one head each": Shape((70,), heads=(3, 3), tile=16, dim=16),
    "chunk of a prompt": Shape((50, 100), tile=32, dim=32, offset=77),
    "token-major storage": Shape((90, 40), tile=32, dim=32, token_major=True),
    "head dim 24, padded": Shape((90,), tile=32, dim=24),
    "head dim 128": Shape((300,), heads=(2, 1), dim=128, dtype=HALF),
    "half a tile a step": Shape((300,), heads=(2, 1), dtype=HALF),
}


def fix_interpreter() -> None:
    """NumPy 2.4 no longer turns a one-element array into an int, which Triton 3.6's interpreter asks for."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def main() -> None:
    """All cases, then the mutations of the first."""
    fix_interpreter()
    from tamis.kernels import dispatch
    from tamis.kernels.triton.block_sparse import Blocks, block_sparse_attention

    torch.set_num_threads(1)
    for name, shape in CASES.items():
        q, k, v, lists = make(shape)
        expected = truth(q, k, v, lists, shape.scale)
        if name == "half a tile a step":
            made = block_sparse_attention(q, k, v, lists, shape.scale, cut=Blocks(64, 4, 1, False))
        else:
            made = dispatch.block_sparse_attention(q, k, v, lists, shape.scale, kernel="triton")
        sys.stdout.write(
            json.dumps({"case": name, "dtype": str(shape.dtype).removeprefix("torch."), **errors(made, expected)})
            + "\n"
        )
    shape = CASES["odd segments"]
    q, k, v, lists = make(shape)
    expected = truth(q, k, v, lists, shape.scale)
    for kind in MUTATIONS:
        made = dispatch.block_sparse_attention(*mutate(kind, q, k, v, lists), shape.scale, kernel="triton")
        sys.stdout.write(json.dumps({"case": kind, "dtype": "float32", **errors(made, expected)}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
