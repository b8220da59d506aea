"""The paged Triton kernels compiled for GPUs that this machine may not have, and their machine code looked at."""

from __future__ import annotations

import importlib.util

import pytest
from sass import Op, disassemble, unset_addresses

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

INTS = ("entries", "runs", "run_count", "q_start", "q_len", "q_position", "table", "splits")
FLOATS = ("lse", "cos", "sin", "slopes", "part", "part_lse")


def compiled(kernel, constants: dict[str, object], *, warps: int, cc: int = 90, dtype: str = "bf16"):
    """A kernel with these constants; strides and pointers are multiples of 16, as they are in use."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(kernel.arg_names, "i32") | {"scale": "fp32", "holes": "*u8"}
    signature |= {n: "*i32" for n in INTS if n in signature} | {n: "*fp32" for n in FLOATS if n in signature}
    signature |= {n: f"*{dtype}" for n in ("q", "k", "v", "out") if n in signature}
    box = f"tensordesc<{dtype}[{constants['BN']}, {constants['DP']}]>" if constants["TMA"] else f"*{dtype}"
    signature |= {"k_desc": box, "v_desc": box} | dict.fromkeys(constants, "constexpr")
    strides = [n for n in kernel.arg_names if n[:2] in ("q_", "k_", "v_", "o_") and signature[n] == "i32"]
    aligned = [n for n, kind in signature.items() if kind.startswith("*")] + strides
    hints = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel, signature, constants, hints)
    stages = constants["STAGES"]
    return triton.compile(source, target=GPUTarget("cuda", cc, 32), options={"num_warps": warps, "num_stages": stages})


def constants_of(**changes: object) -> dict[str, object]:
    """What both kernels are specialised for."""
    values = {"D": 128, "DP": 128, "RH": 64, "BM": 128, "BN": 64, "PAGE": 128, "STAGES": 2, "PRECISION": "tf32"}
    return values | {"HOLES": False, "ALIBI": False, "TMA": True} | changes


def prefill(*, warps: int = 4, cc: int = 90, **changes: object):
    from tamis.kernels.triton.paged_prefill import kernel

    return compiled(kernel, constants_of(**changes), warps=warps, cc=cc)


def decode(*, cc: int = 90, **changes: object):
    from tamis.kernels.triton.paged_decode import split_kernel

    return compiled(split_kernel, constants_of(G=4, TQ=1, BM=16, STAGES=3) | changes, warps=4, cc=cc)


def loops(code: list[Op], product: str) -> list[list[Op]]:
    """Innermost loops that hold a matrix product, in order."""
    found: list[list[Op]] = []
    spans = []
    for op in code:
        target = op.operands.strip().split(" ")[-1].rstrip(";") if op.name.startswith("BRA") else ""
        if target.startswith("0x") and int(target, 16) < op.at:
            spans.append((int(target, 16), op.at))
    for low, high in sorted(spans):
        inner = any(low <= a and b <= high and (a, b) != (low, high) for a, b in spans)
        body = [op for op in code if low <= op.at <= high]
        if not inner and any(op.name.startswith(product) for op in body):
            found.append(body)
    return found


def test_a_decode_step_of_turned_queries_is_as_long(tmp_path):
    turned, plain = (loops(disassemble(decode(RH=rh).asm["cubin"], tmp_path), "HMMA") for rh in (64, 0))
    assert len(turned) == len(plain) >= 1
    assert len(turned[0]) == len(plain[0])
    assert not [op.name for op in turned[0] if op.name.startswith(("STL", "LDL"))]


@pytest.mark.parametrize("turned", [64, 32, 0])
def test_prefill_reads_the_query_from_shared_memory(turned, tmp_path):
    made = prefill(RH=turned)
    lines = [line for line in made.asm["ttgir"].splitlines() if "warp_group_dot %" in line]
    scores = [line for line in lines if "tensor<128x64xf32" in line]
    assert len(scores) == 2  # the loop with the element mask, and the one without
    for line in scores:
        operands = line.split(" : ")[-1].split(" -> ")[0].split(" * ")
        assert operands[0].startswith("!ttg.memdesc<128x128xbf16"), operands
    assert unset_addresses(disassemble(made.asm["cubin"], tmp_path)) == []


@pytest.mark.parametrize(
    ("cc", "changes"),
    [
        (90, {"D": 64, "DP": 64, "RH": 32, "STAGES": 3}),
        (90, {"D": 96, "RH": 48, "HOLES": True}),
        (80, {"TMA": False}),
        (80, {"TMA": False, "RH": 0, "ALIBI": True}),
    ],
)
def test_compiles(cc, changes):
    assert prefill(cc=cc, warps=8 if cc == 80 else 4, **changes).metadata.shared <= 160 << 10
    assert decode(cc=cc, **changes).metadata.shared <= 100 << 10
