"""The Gluon kernel compiled for Hopper on a machine that has no GPU, and its machine code looked at."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
from sass import Op, disassemble, unset_addresses


def triton_is_3_6() -> bool:
    found = importlib.util.find_spec("triton") is not None
    return found and importlib.metadata.version("triton").startswith("3.6.")


def compiled(dim: int, dtype: str):
    """The kernel at one head dim and dtype."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from tamis.kernels.gluon.block_sparse import _tile_layout, kernel

    padded, stages = (64, 4) if dim <= 64 else (128, 2)
    signature = dict.fromkeys(kernel.arg_names, "i32") | {"out": f"*{dtype}", "lse": "*fp32", "scale": "fp32"}
    signature |= dict.fromkeys(("entries", "count", "n_masked", "q_start", "q_len", "counter"), "*i32")
    for name, rows in (("q_desc", 64), ("k_desc", 128), ("v_desc", 128), ("o_desc", 64)):
        signature[name] = f"tensordesc<{dtype}[1, {rows}, {padded}],{_tile_layout()!r}>"
    constants = {"D": dim, "DP": padded, "ST": stages, "LOG": stages.bit_length() - 1}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [n for n, kind in signature.items() if kind.startswith("*") or n in ("o_head", "o_row")]
    hints = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = GluonASTSource(kernel, signature, constants, hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


@pytest.mark.skipif(not triton_is_3_6(), reason="Triton 3.6 is not installed")
@pytest.mark.parametrize(("dim", "dtype"), [(128, "bf16"), (64, "bf16"), (96, "fp16")])
def test_compiles_for_hopper(dim, dtype, tmp_path):
    made = compiled(dim, dtype)
    assert made.metadata.shared <= 227 << 10
    code = disassemble(made.asm["cubin"], tmp_path)
    assert sum(op.name.startswith("HGMMA") for op in code) > 40
    assert unset_addresses(code) == []


def test_an_address_set_on_one_way_only_is_found():
    code = [
        Op(0x0, "", "S2R", " R0, SR_TID.X "),
        Op(0x10, "@!P0 ", "BRA", " 0x30 "),
        Op(0x20, "", "UMOV", " UR4, 0x1 "),
        Op(0x30, "", "UMOV", " UR6, 0x1 "),
        Op(0x40, "", "UIADD3.64", " UR6, UR8, 0x2, URZ "),
        Op(0x50, "", "UMOV", " UR5, 0x1 "),
        Op(0x60, "", "HGMMA.64x128x16.F32.BF16", " R24, gdesc[UR4], R24 "),
        Op(0x70, "", "EXIT", " "),
    ]
    assert unset_addresses(code) == ["UR4 at 0x60"]
